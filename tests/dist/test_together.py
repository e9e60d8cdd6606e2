"""Tensor parallel degrees measured with their sums: ranks run in lockstep, and what happens when one fails."""

import json
import os
import signal

import pytest
import torch
import torch.distributed as dist
from ranks import environment, free_port, results, run_ranks
from tiny_llava import write_model_dir

import dflop
import warm
from dflop.models.sequence import all_rows, own_rows
from dflop.models.sums import Sums
from dflop.models.tensor import add_collectives
from dflop.profiling import exchange, model, profile_model, session, team
from dflop.profiling.cases import Gradients
from dflop.profiling.curves import Built, build_curves
from dflop.profiling.families import llava_onevision, load_pieces
from dflop.profiling.pieces import PieceSettings
from dflop.profiling.request import Request
from dflop.profiling.workbench import Workbench

GUARD_S = 200.0
SIZES = {
    "max_encoder_tokens": 81,
    "max_encoder_segment_tokens": 81,
    "max_llm_tokens": 24,
    "max_segment_tokens": 12,
    "max_label_tokens": 2,
}


@pytest.fixture(autouse=True)
def _one_thread():
    torch.set_num_threads(1)


def request_for(directory, **changes):
    model_dir = write_model_dir(directory / "model")
    # What it imports is imported once, for all forked ranks.
    load_pieces(model_dir)[0].build(PieceSettings(torch.device("cpu"), torch.float32))
    return {
        "model_dir": str(model_dir),
        "budget_s": 0.3,
        "recompute": ["none"],
        "tensor_parallel_degrees": [1, 2],
        "partial": str(directory / "partial.jsonl"),
        **SIZES,
        **changes,
    }


def play(rank, num_ranks, store, work):
    """Runs `work` as a rank that torchrun would have started."""
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(num_ranks), "LOCAL_WORLD_SIZE": str(num_ranks)}
    exchange._QUICK_LARGEST_BYTES = 1 << 12
    # How often a case runs decides how exact a time is, and no test asks for that.
    session.MIN_REPEATS = session.MIN_REPEATS_OTHER = 2
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=num_ranks)
    return work(rank)


def only(*names):
    """Has this process measure these pieces alone, to be quick."""
    model.load_pieces = lambda path: [piece for piece in load_pieces(path) if piece.name in names]


def fail_in_layers(fails):
    """Has the forward of cut LLM layers call `fails(tokens)` first."""
    plain = llava_onevision._LlmLayer.prepare

    def prepare(self, module, segments, settings):
        prepared = plain(self, module, segments, settings)
        if settings.tensor_parallel_degree == 1:
            return prepared

        def forward():
            fails(sum(segments))
            return prepared.forward()

        return type(prepared)(forward, prepared.inputs)

    llava_onevision._LlmLayer.prepare = prepare


def watch_cases(seen):
    """Notes each case that this rank runs under the clock, and how."""
    plain = Workbench.run

    def run(self, name, size, way):
        seen.append((name, size, way))
        return plain(self, name, size, way)

    Workbench.run = run


@pytest.mark.more
def test_two_ranks_measure_cut_layers_with_their_sums_in_lockstep(tmp_path):
    """The same cases in the same order on both ranks; the profile says so, and a second run measures nothing."""
    request = request_for(tmp_path, recompute=["none", "selective", "full"])

    def work(rank):
        seen = []
        watch_cases(seen)
        first = profile_model(request)
        runs = len(seen)
        text = (tmp_path / "partial.jsonl").read_text()
        again = profile_model(request)
        assert (tmp_path / "partial.jsonl").read_text() == text
        assert len(seen) == runs
        return first, again, [one for one in seen if "collectives" in one[0]]

    ranks = results(run_ranks(2, lambda r: play(r, 2, tmp_path / "store", work), tmp_path / "ranks"))
    (profile, again, cases), (of_other, _, others_cases) = ranks
    # What one rank has of the other came as JSON.
    assert json.loads(json.dumps(profile)) == of_other
    assert again == profile
    assert len(cases) > 20
    assert cases == others_cases
    (variant,) = profile["variants"]
    assert (variant["tensor_parallel_degree"], variant["has_collectives"]) == (2, True)
    assert set(variant["modules"]) == {"encoder_layer", "llm_embedding", "llm_layer", "llm_head"}
    whole = profile["modules"]["llm_layer"]
    assert 0.45 < variant["modules"]["llm_layer"]["num_parameters"] / whole["num_parameters"] < 0.55
    assert variant["modules"]["llm_layer"]["linear"]["points"][-1]["size"] == 24
    assert list(variant["modules"]["llm_layer"]["recompute"]) == ["selective", "full"]
    # Without the other rank it is another variant: the records with sums are not taken for it.
    alone = profile_model({**request, "budget_s": 0.1})
    assert [one["has_collectives"] for one in alone["variants"]] == [False]
    names = {json.loads(line)["case"] for line in (tmp_path / "partial.jsonl").read_text().splitlines()}
    assert any(name.startswith("tp2 lora0 collectives llm_layer linear") for name in names)
    assert any(name.startswith("tp2 lora0 llm_layer linear") for name in names)


@pytest.mark.more
def test_memory_that_is_short_on_one_rank_ends_the_curve_on_both(tmp_path):
    """Rank 1 alone cannot run more than 10 tokens: nobody hangs, and the size is a recorded fact."""
    request = request_for(tmp_path)

    def short(tokens):
        if tokens > 10:
            message = "DefaultCPUAllocator: can't allocate memory"
            raise RuntimeError(message)

    def work(rank):
        seen = []
        watch_cases(seen)
        only("llm_layer")
        if rank == 1:
            fail_in_layers(short)
        return profile_model(request), [one for one in seen if "collectives" in one[0]]

    (profile, cases), (_, others_cases) = results(
        run_ranks(2, lambda r: play(r, 2, tmp_path / "store", work), tmp_path / "ranks")
    )
    assert cases == others_cases
    assert max(size for name, size, _ in cases if name.endswith("linear")) <= 10
    linear = profile["variants"][0]["modules"]["llm_layer"]["linear"]
    assert linear["out_of_memory_at"] == 11
    assert linear["points"][-1]["size"] <= 10
    facts = [json.loads(line) for line in (tmp_path / "partial.jsonl").read_text().splitlines()]
    named = [fact["case"] for fact in facts if "out_of_memory" in fact["case"]]
    assert named[-1] == "tp2 lora0 collectives llm_layer linear out_of_memory 11"
    assert "out_of_memory_at" not in profile["modules"]["llm_layer"]["linear"]


def failing(directory, fails, num_ranks=2):
    """How ranks end of which rank 1 fails in a forward of a cut layer: none waits for the time limit of a team."""
    request = request_for(directory)

    def work(rank):
        only("llm_layer")
        if rank == 1:
            fail_in_layers(fails)
        try:
            return profile_model(request)
        except dflop.ProfileError as error:
            return f"ProfileError: {error}"
        except team.LeaderStoppedError as error:
            return f"LeaderStoppedError: {error}"

    assert GUARD_S < team.TIMEOUT_S
    return run_ranks(
        num_ranks, lambda r: play(r, num_ranks, directory / "store", work), directory / "ranks", GUARD_S
    )


def test_a_rank_that_fails_alone_is_named_by_all(tmp_path):
    """An error that is not about memory, before any rank waits for it; a third rank has no part in it."""

    def wrong(_):
        message = "no such kernel"
        raise RuntimeError(message)

    ended = failing(tmp_path, wrong, num_ranks=3)
    leader, follower, beyond = results(ended)
    text = "[tp 1/2] `tp2 lora0 collectives llm_layer linear` of size 8: RuntimeError: no such kernel"
    assert leader == f"ProfileError: {text}"
    assert follower == beyond == f"LeaderStoppedError: ProfileError: {text}"


def test_ranks_that_differ_are_refused_by_what_differs(tmp_path):
    request = request_for(tmp_path)

    def work(rank):
        with pytest.raises((dflop.ProfileError, team.LeaderStoppedError)) as raised:
            profile_model({**request, "max_llm_tokens": 24 + rank, "dtype": ("float32", "bfloat16")[rank]})
        return str(raised.value)

    texts = results(run_ranks(2, lambda r: play(r, 2, tmp_path / "store", work), tmp_path / "ranks"))
    for text in texts:
        assert "rank 1: `dtype` is bfloat16, on rank 0 float32" in text
        assert "rank 1: `max_llm_tokens` is 25, on rank 0 24" in text
    assert not (tmp_path / "partial.jsonl").exists()


@pytest.mark.more
@pytest.mark.parametrize("is_killed", [False, True])
def test_a_rank_that_fails_while_the_other_waits_for_it_is_named(tmp_path, is_killed):
    """It leaves word of why, or is killed without one; the other sees the connection close, and does not hang."""

    def fails_later(_):
        def add(self, *_):
            if not self.is_silent:
                # This rank has no part in the sum, for which rank 0 waits.
                if is_killed:
                    os.kill(os.getpid(), signal.SIGKILL)
                message = "broken"
                raise RuntimeError(message)

        Sums.add = add

    ended = failing(tmp_path, fails_later)
    what = "`tp2 lora0 collectives llm_layer linear` of size "
    assert ended[0].status == 0, ended[0].stderr
    leader = ended[0].result
    if is_killed:
        assert ended[1].status == -signal.SIGKILL
        assert leader.startswith(f"ProfileError: [tp 1/2] {what}")
        assert "ended or does not answer" in leader
    else:
        assert leader.startswith(f"ProfileError: [tp 1/2] {what}")
        assert leader.endswith("RuntimeError: broken")
        assert ended[1].result == leader


def test_an_interruption_between_two_runs_ends_both_ranks_and_loses_none(tmp_path):
    """Ctrl-C reaches rank 0 inside a run with sums: the run is finished, recorded, and the last one."""
    request = request_for(tmp_path)

    def work(rank):
        only("llm_layer")
        plain = Workbench.run

        def run(self, name, size, way):
            timing = plain(self, name, size, way)
            if "collectives" in name:
                seen.append(list(timing.phases_ns))
                if len(seen) == 7:
                    # On all ranks, as torchrun passes it on.
                    os.kill(os.getpid(), signal.SIGINT)
            return timing

        seen = []
        Workbench.run = run
        with pytest.raises(KeyboardInterrupt):
            profile_model(request)
        return seen

    first, second = results(run_ranks(2, lambda r: play(r, 2, tmp_path / "store", work), tmp_path / "ranks"))
    lines = [json.loads(line) for line in (tmp_path / "partial.jsonl").read_text().splitlines()]
    timed = [line["phases_ns"] for line in lines if "phases_ns" in line and "collectives" in line["case"]]
    # Of each phase, the time of the slower rank.
    slower = [[max(phases) for phases in zip(*both, strict=True)] for both in zip(first, second, strict=True)]
    assert len(timed) == 7
    assert timed == slower


class CountedSums(Sums):
    """All-gathers and reduce-scatters of two ranks that no other rank takes part in, counted."""

    def __init__(self, rank=0):
        super().__init__(None, 2)
        self.rank, self.is_silent, self.count = rank, False, 0

    def gather(self, own_RD):
        self.count += 0 if self.is_silent else 1
        with self.silent():
            return super().gather(own_RD)

    def scatter(self, summand_SD):
        self.count += 0 if self.is_silent else 1
        with self.silent():
            return super().scatter(summand_SD)


@pytest.mark.parametrize(("way", "again"), [("joint", 2), ("split", 2), ("selective", 2), ("full", 3)])
def test_a_layer_sums_as_often_as_its_way_says(tmp_path, way, again):
    """A gather and a scatter around each block, forward and backward.

    Each block's input is gathered again. Where all of a layer runs again, attention is summed again too, and the MLP not, as
    nothing needs that.
    """
    request = Request.parse(request_for(tmp_path, recompute=["none", "selective", "full"]))
    settings = PieceSettings(torch.device("cpu"), torch.float32, tensor_parallel_degree=2)
    built = [Built(p, settings, "") for p in load_pieces(request.model_dir) if p.name == "llm_layer"]
    sums = CountedSums()
    num_layers = add_collectives(built[0].module, sums)
    linear = build_curves(built, request, Gradients())[1]
    case = linear.case(12, with_recompute=True)
    assert way in case.ways
    case.run_untimed(way)
    assert sums.count == num_layers * (8 + again)
    with sums.silent():
        case.run_untimed(way)
    assert sums.count == num_layers * (8 + again)


def test_layers_with_adapters_sum_as_layers_without(tmp_path):
    """On a rank above the first, which adds no bias: maps with adapters may have none to begin with."""
    request_for(tmp_path)
    settings = PieceSettings(torch.device("cpu"), torch.float32, tensor_parallel_degree=2, lora_rank=4)
    piece = next(p for p in load_pieces(tmp_path / "model") if p.name == "llm_layer")
    module, sums = piece.build(settings), CountedSums(rank=1)
    num_layers = add_collectives(module, sums)
    piece.prepare(module, [12], settings).forward().sum().backward()
    assert sums.count == num_layers * (8 + 2)


def compare_vocabulary(name, rank, directory):
    """(largest difference, largest value) of what the cut piece gives and of the gradients, to the whole's."""
    piece = next(p for p in load_pieces(directory / "model") if p.name == name)
    cpu = torch.device("cpu")
    whole = piece.build(PieceSettings(cpu, torch.float32))
    cut = piece.build(PieceSettings(cpu, torch.float32, tensor_parallel_degree=2))
    weights = {"llm_embedding": "model.language_model.embed_tokens", "llm_head": "lm_head"}[name]
    rows = whole.get_submodule(weights).weight.detach().mul_(50.0)
    owner = cut.get_submodule(weights)
    own = owner.weight
    # A piece is the first rank's part, wherever it is timed.
    owner.first_row = rank * len(own)
    with torch.no_grad():
        own.copy_(rows.chunk(2)[rank])
    sums = Sums(dist.group.WORLD)
    add_collectives(cut, sums)
    if name == "llm_head":
        cut.register_forward_pre_hook(lambda _, args: (args[0], own_rows(args[1], sums)))
    else:
        cut.register_forward_hook(lambda _, args, rows: all_rows(rows, args[0].input_ids_T.shape[0], sums))
    # The whole's own inputs: ids of both halves.
    settings = PieceSettings(cpu, torch.float32)
    wanted, found = (piece.prepare(module, [40], settings).forward() for module in (whole, cut))
    generator = torch.Generator().manual_seed(1)
    incoming = torch.randn(wanted.shape, generator=generator)
    (wanted * incoming).sum().backward()
    (found * incoming).sum().backward()
    of_whole = whole.get_submodule(weights).weight.grad.chunk(2)[rank]
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(own.grad, of_whole, rtol=1e-4, atol=1e-5 * float(of_whole.abs().max()))
    return float(of_whole.abs().max())


def test_cut_embedding_and_head_of_llava_onevision_are_the_whole(tmp_path):
    request_for(tmp_path)

    def work(rank):
        return [compare_vocabulary(name, rank, tmp_path) for name in ("llm_embedding", "llm_head")]

    ranks = results(run_ranks(2, lambda r: play(r, 2, tmp_path / "store", work), tmp_path / "ranks"))
    assert all(largest > 0 for rank in ranks for largest in rank)


IN_PLACE = """
import logging, os, sys
from dflop.__main__ import main
from dflop.profiling import launch, worker


def run_child(command, environment, what):
    os.environ.update(environment)
    sys.argv = command[2:]
    return worker.main(), None


launch.run_child = run_child
# Those of pytest: what is logged belongs on stderr.
logging.getLogger().handlers.clear()
sys.argv[0] = "dflop"
sys.exit(main())
"""
"""The command, which measures in its own process: a new one would import torch for seconds. `test_child.py` starts one."""


@pytest.mark.more
def test_the_command_under_torchrun_measures_what_its_ranks_allow(tmp_path):
    """The whole command: one profile, with the sums of two ranks; what cannot be cut is refused by name."""

    def run(*command):
        """What it printed."""
        return warm.run(["-m", *command], cwd=tmp_path, check=True)

    run("dflop", "demo-data", "demo", "--samples", "6")
    path = tmp_path / "demo/dflop.yaml"
    text = path.read_text().replace("video_max_frames: 32", "video_max_frames: 1")
    path.write_text(text.replace("global_batch_size: 64", "global_batch_size: 2"))
    path = tmp_path / "demo/model/config.json"
    config = json.loads(path.read_text())
    for part in ("text_config", "vision_config"):
        config[part] |= {"num_hidden_layers": 1, "hidden_size": 32, "intermediate_size": 32}
    path.write_text(json.dumps(config))
    run("dflop", "profile", "data", "-c", "demo/dflop.yaml")
    command = ["-c", IN_PLACE, "profile", "model", "-c", "demo/dflop.yaml", "--tensor-parallel", "2,3"]
    command += ["--budget-seconds", "0.2", "--recompute", "none"]
    port = free_port()
    ranks = [(command, os.environ | environment(rank, 2, port)) for rank in range(2)]
    done = warm.run_all(ranks, cwd=tmp_path, check=True)
    stdout, stderr = ("".join(getattr(one, name) for one in done) for name in ("stdout", "stderr"))
    assert stdout.count("tensor parallel degree 2, LoRA rank 0: measured with the sums of its ranks") == 1
    assert stderr.count("wrote demo/model_profile.json") == 1
    assert "not measured: tensor parallel degree 3, LoRA rank 0: " in stderr
    assert "must be a multiple of the tensor parallel degree 3" in stderr
    shown = run("dflop", "show", "demo/model_profile.json").stdout
    assert "tensor parallel 2, with their collectives" in shown
    # A rank above 0 writes nothing.
    names = sorted(path.name for path in (tmp_path / "demo").glob("model_profile*"))
    assert names == ["model_profile.json", "model_profile.partial.jsonl"]
