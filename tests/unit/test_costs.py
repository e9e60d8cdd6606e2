"""`dflop.costs` and `dflop costs`: nanoseconds by a model profile, the catalogue or a function."""

from __future__ import annotations

import csv
import io
import json
import re
import shutil
import subprocess
import sys
import warnings

import pytest
from pyarrow import parquet

import dflop
from dflop import BalancedBatchSampler
from dflop._native import Dataset, run_cli
from dflop._native.testing import CostModel


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A demo with its data profile and no model profile."""
    folder = tmp_path_factory.mktemp("costs") / "demo"
    assert run_cli(["dflop", "demo-data", str(folder), "--samples", "48"]) == (0, None)
    assert run_cli(["dflop", "profile", "data", "-c", str(folder / "dflop.yaml")]) == (0, None)
    return folder


@pytest.fixture(scope="module")
def measured(folder, tmp_path_factory):
    """A copy of it with a model profile beside the data profile."""
    copy = tmp_path_factory.mktemp("measured") / "demo"
    shutil.copytree(folder, copy)
    arguments = ["--estimate", "--hardware", "a100", "-c", str(copy / "dflop.yaml")]
    assert run_cli(["dflop", "profile", "model", *arguments]) == (0, None)
    return copy


def test_costs_add_up_to_those_of_a_packed_microbatch(measured):
    """Samples of each kind, and all of them packed: equal but for what the launches of a microbatch take."""
    found = dflop.costs(measured / "data_profile.parquet", batch_size=48)
    model = CostModel.read(str(measured / "model_profile.json"))
    rows = parquet.read_table(measured / "data_profile.parquet").to_pylist()
    segments = [(s["count"], s["tokens"]) for row in rows for s in row["segments"]]
    layers = json.loads((measured / "model_profile.json").read_text())["modules"]["llm_layer"]["count"]
    labels = sum(row["label_tokens"] for row in rows)
    forward, backward, _ = model.encoder(segments)
    assert 0.9 * (forward + backward) < sum(found.encoder_ns) < 1.01 * (forward + backward)
    tokens = [row["llm_tokens"] for row in rows]
    forward, backward, _ = model.llm_stage(tokens, labels, layers, True, True)
    assert 0.9 * (forward + backward) < sum(found.llm_ns) < 1.01 * (forward + backward)
    assert list(found.tokens) == tokens
    assert [ns > 0 for ns in found.encoder_ns] == [bool(row["segments"]) for row in rows]
    assert min(found.bytes) > 0


def test_a_path_alone_takes_the_model_profile_beside_it(folder, measured):
    """Nanoseconds instead of token counts; without one, and by its own path, as before."""
    by_tokens = dflop.costs(folder / "data_profile.parquet")
    beside = dflop.costs(measured / "data_profile.parquet")
    named = dflop.costs(folder / "data_profile.parquet", measured / "model_profile.json")
    assert list(beside.llm_ns) == list(named.llm_ns)
    # Tokens lose the squares of attention: the ratio of two samples is another one.
    assert list(beside.llm_ns) != list(by_tokens.llm_ns)
    assert list(beside.tokens) == list(by_tokens.tokens)
    path = measured / "data_profile.parquet"
    sampler = BalancedBatchSampler(path, 6, num_replicas=2)
    assert list(sampler) == list(BalancedBatchSampler(dflop.costs(path, batch_size=6), 6, num_replicas=2))
    # Giants are named by tokens, whatever the costs are.
    limit = sorted(beside.tokens)[-3]
    assert BalancedBatchSampler(path, 6, giant_llm_cost=limit).state_dict()["num_giants"] == 2


def test_costs_of_a_larger_model_of_the_same_family_are_told(folder, measured, tmp_path):
    """Shapes do not say how large the LLM is: the data profile does, in layers and width; equal sizes say nothing."""
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        dflop.costs(measured / "data_profile.parquet")
    assert not [one for one in told if "of width" in str(one.message)]
    profile = json.loads((measured / "model_profile.json").read_text())
    profile["hidden_bytes"] *= 2
    path = tmp_path / "model_profile.json"
    path.write_text(json.dumps(profile))
    size = "`llava_onevision` with {} layers of width {}, the costs are of `llava_onevision` with {} layers of width {}"
    config = json.loads((folder / "model/config.json").read_text())["text_config"]
    layers, width = config["num_hidden_layers"], config["hidden_size"]
    with pytest.warns(UserWarning, match=size.format(layers, width, layers, 2 * width)):
        dflop.costs(folder / "data_profile.parquet", path)
    # Of the catalogue by name, too.
    with pytest.warns(UserWarning, match=size.format(layers, width, 28, 3584)):
        dflop.costs(folder / "data_profile.parquet", model="llava-onevision-qwen2-7b", device="h100")


def test_samples_beyond_what_was_measured_are_counted(folder, measured, tmp_path):
    """The count is that of samples whose LLM tokens are more than the largest size of the profile, and no other."""
    profile = json.loads((measured / "model_profile.json").read_text())
    found = dflop.costs(measured / "data_profile.parquet")
    limit = sorted(found.tokens)[len(found) // 2]
    for name, module in profile["modules"].items():
        for curve in (module["linear"], module["attention"]) if name == "llm_layer" else ():
            curve["points"] = [point for point in curve["points"] if point["size"] <= limit]
    largest = max(point["size"] for point in profile["modules"]["llm_layer"]["linear"]["points"])
    path = tmp_path / "model_profile.json"
    path.write_text(json.dumps(profile))
    beyond = sum(tokens > largest for tokens in found.tokens)
    assert beyond > 0
    message = f"{beyond} of {len(found)} samples are outside of what the model profile measured"
    with pytest.warns(UserWarning, match=message) as told:
        assert dflop.costs(measured / "data_profile.parquet", path).num_extrapolated == beyond
    # The line that is shown is the user's, here and below a sampler.
    (tmp_path / "data_profile.parquet").write_bytes((measured / "data_profile.parquet").read_bytes())
    with pytest.warns(UserWarning, match=message) as told_by_sampler:
        BalancedBatchSampler(tmp_path / "data_profile.parquet", 6)
    assert {one.filename for one in (*told, *told_by_sampler)} == {__file__}


def test_the_catalogue_needs_no_profile_of_the_model(folder):
    """A model and a device by name; a faster device takes less time."""
    path = folder / "data_profile.parquet"
    with pytest.warns(
        UserWarning, match="data profile is of `llava_onevision`, the costs are of `qwen2_5_vl`"
    ):
        h100 = dflop.costs(path, model="qwen2.5-vl-7b", device="h100")
    a100 = dflop.costs(path, model="qwen2.5-vl-7b", device="a100")
    assert sum(h100.llm_ns) < sum(a100.llm_ns)
    assert list(h100.tokens) == list(a100.tokens)
    for options, message in [
        ({"model": "qwen2.5-vl-7b"}, "`device` is None, both are needed"),
        ({"device": "h100"}, "`model` is None and `device` is 'h100', both are needed"),
        ({"model": "gpt-9", "device": "h100"}, "gpt-9"),
        ({"model": "qwen2.5-vl-7b", "device": "abacus"}, "abacus"),
        (
            {"model": "qwen2.5-vl-7b", "device": "h100", "cost": len},
            "costs come from one of .*given are: model, cost",
        ),
    ]:
        with pytest.raises(ValueError, match=message):
            dflop.costs(path, **options)
    with pytest.raises(ValueError, match="`model` needs the path of a data profile"):
        dflop.costs([(1, 2)], model="qwen2.5-vl-7b", device="h100")
    with pytest.raises(FileNotFoundError, match="nothing.parquet"):
        dflop.costs(folder / "nothing.parquet", model="qwen2.5-vl-7b", device="h100")
    with pytest.raises(FileNotFoundError, match="nothing.json"):
        dflop.costs(path, folder / "nothing.json")


def test_what_is_frozen_costs_less(folder, measured):
    """A frozen encoder has no backward; with adapters the LLM has hardly any gradients of weights."""
    path = measured / "data_profile.parquet"
    # Microbatches of thousands of tokens: of a few, launches take the time, and adapters have more of them.
    named = {"model": "llava-onevision-qwen2-7b", "device": "h100", "batch_size": 512}
    with pytest.warns(UserWarning, match="of width"):
        full, frozen, lora = (
            dflop.costs(path, **named, recipe=recipe) for recipe in ("full", "frozen-encoder", "lora")
        )
    assert list(frozen.llm_ns) == list(full.llm_ns)
    # Forward alone: a third of the products, and the projector trains on.
    assert 0.3 < sum(frozen.encoder_ns) / sum(full.encoder_ns) < 0.45
    assert list(lora.encoder_ns) == list(frozen.encoder_ns)
    # No gradients of weights, a third of the products; adapters add small ones.
    assert 0.65 < sum(lora.llm_ns) / sum(full.llm_ns) < 0.97
    assert sum(lora.bytes) < sum(full.bytes)
    with pytest.warns(UserWarning, match="of width"):
        larger = dflop.costs(path, **named, recipe="lora", lora_rank=256)
    assert sum(larger.llm_ns) > sum(lora.llm_ns)
    with pytest.raises(dflop.ProfileError, match="LoRA|adapters"):
        dflop.costs(path, recipe="lora", lora_rank=8)
    with pytest.raises(ValueError, match="recipe `half`, must be one of: full, projector"):
        dflop.costs(path, recipe="half")
    for source in (folder / "data_profile.parquet", [(1, 2)]):
        with pytest.raises(ValueError, match="`recipe` is 'lora', which needs costs by a model profile"):
            dflop.costs(source, recipe="lora")


def test_the_llm_alone_keeps_places_and_sizes(folder, tmp_path):
    """Encoder costs of 0, all else as it was, also where bad samples leave gaps in the positions."""
    copy = tmp_path / "demo"
    shutil.copytree(folder, copy)
    (source,) = (copy / "data").glob("*.jsonl")
    lines = source.read_text().splitlines()
    lines[3] = "{}"
    source.write_text("\n".join(lines) + "\n")
    config = (copy / "dflop.yaml").read_text()
    (copy / "dflop.yaml").write_text(re.sub(r"on_bad_sample: \w+", "on_bad_sample: skip", config))
    (copy / "data_profile.parquet").unlink()
    assert run_cli(["dflop", "profile", "data", "-c", str(copy / "dflop.yaml")]) == (0, None)
    found = dflop.costs(copy / "data_profile.parquet", model="llava-onevision-qwen2-7b", device="h100")
    alone = found.llm_alone()
    assert found.num_bad == alone.num_bad == 1
    (bad,) = set(range(48)) - set(found.positions)
    assert list(alone.positions) == list(found.positions)
    assert max(found.encoder_ns) > 0
    assert set(alone.encoder_ns) == {0}
    for column in ("llm_ns", "tokens", "bytes"):
        assert list(getattr(alone, column)) == list(getattr(found, column)), column
    # Two ranks share the LLM's work: what each does of it is half as much beside the encoder's.
    shared = found.of_groups(2)
    assert list(shared.encoder_ns) == [2 * encoder for encoder in found.encoder_ns]
    for column in ("positions", "llm_ns", "tokens", "bytes"):
        assert list(getattr(shared, column)) == list(getattr(found, column)), column
    with pytest.warns(UserWarning, match="`costs`: 1 of 48 samples is bad and never comes"):
        sampler = BalancedBatchSampler(alone, 4)
    sampled = {index for batch in sampler for index in batch}
    assert sampled == set(range(48)) - {bad}


def test_a_function_gives_the_costs_of_entries_and_profiles(folder):
    """Called with each entry, or with the tokens of each row."""
    rows = parquet.read_table(folder / "data_profile.parquet").to_pylist()
    found = dflop.costs(folder / "data_profile.parquet", cost=lambda tokens: (tokens[0], tokens[1] ** 2))
    assert list(found.encoder_ns) == [row["encoder_tokens"] for row in rows]
    assert list(found.llm_ns) == [row["llm_tokens"] ** 2 for row in rows]
    assert list(found.tokens) == [row["llm_tokens"] for row in rows]
    texts = ["a", "bcd", "ef"]
    assert list(dflop.costs(texts, cost=lambda text: (0, len(text))).llm_ns) == [1, 3, 2]
    with pytest.raises(ValueError, match="`cost` gives costs to samples, these have theirs already"):
        dflop.costs(dflop.costs([(1, 2)]), cost=len)


def test_the_command_prints_what_schedule_reads(measured, capfd, tmp_path):
    """A line a sample, in the order of the dataset, with the numbers of `dflop.costs`."""
    path = measured / "data_profile.parquet"
    assert run_cli(["dflop", "costs", str(path)]) == (0, None)
    said = capfd.readouterr()
    lines = list(csv.DictReader(io.StringIO(said.out)))
    found = dflop.costs(path)
    assert [int(line["sample"]) for line in lines] == list(range(48))
    for name in ("encoder_ns", "llm_ns", "tokens", "bytes"):
        assert [int(line[name]) for line in lines] == list(getattr(found, name))
    assert "48 samples by" in said.err
    assert "estimated, not measured" in said.err
    (tmp_path / "costs.csv").write_text(said.out)
    assert run_cli(["dflop", "schedule", "--costs", str(tmp_path / "costs.csv"), "--buckets", "4"]) == (
        0,
        None,
    )
    assert "48 samples in 4 buckets" in capfd.readouterr().out
    catalogue = ["--model", "qwen2.5-vl-7b", "--hardware", "h100"]
    assert run_cli(["dflop", "costs", str(path), *catalogue]) == (0, None)
    of_catalogue = list(csv.DictReader(io.StringIO(capfd.readouterr().out)))
    expected = dflop.costs(path, model="qwen2.5-vl-7b", device="h100")
    assert [int(line["llm_ns"]) for line in of_catalogue] == list(expected.llm_ns)
    assert run_cli(["dflop", "costs", str(measured / "none.parquet")])[0] == 2
    assert "none.parquet" in capfd.readouterr().err


def test_costs_are_written_as_schedule_and_advise_read_them(measured, capfd, tmp_path):
    path = measured / "data_profile.parquet"
    costs, table = dflop.costs(path, batch_size=4), tmp_path / "costs.csv"
    costs.write_csv(table)
    rows = list(csv.DictReader(table.open()))
    assert [int(row["llm_ns"]) for row in rows] == list(costs.llm_ns)
    assert [int(row["bytes"]) for row in rows] == list(costs.bytes)
    answers = []
    for further in (["--costs", str(table)], []):
        assert run_cli(["dflop", "advise", str(path), "--num-ranks", "2", "--json", *further]) == (0, None)
        answers.append(json.loads(capfd.readouterr().out)["ways"])
    assert answers[0] == answers[1]
    dflop.costs([(3, 4), (0, 5)]).write_csv(table)
    assert table.read_text().split() == ["sample,encoder_ns,llm_ns", "0,3,4", "1,0,5"]


def test_a_dataset_of_hugging_face_is_profiled(folder):
    """The real `datasets`: sizes are those that `dflop profile data` gives, in the dataset's own order."""
    datasets = pytest.importorskip("datasets")
    lines = [json.loads(line) for line in (folder / "data/images.jsonl").read_text().splitlines()]
    lines = [line for line in lines if isinstance(line.get("image", ""), str)]
    media = folder / "data/media"
    rows = [line | {"image": str(media / line["image"]) if "image" in line else None} for line in lines]
    dataset = datasets.Dataset.from_list(rows).cast_column("image", datasets.Image())
    dataset = dataset.select(range(len(lines) - 1, -1, -1))
    found = dflop.costs(dataset, model_dir=folder / "model")
    native = Dataset(str(folder / "dflop.yaml"), str(folder / "data_profile.parquet"))
    sizes = {native.encode(i).id: native.shape(i)[1] for i in range(len(native))}
    assert list(found.tokens) == [sizes[line["id"]] for line in reversed(lines)]
    with pytest.raises(ValueError, match="`model_dir` is None, must be the directory of a model"):
        dflop.costs(dataset)
    with pytest.raises(dflop.ProfileError, match="the dataset cannot be profiled: error: "):
        dflop.costs(dataset, model_dir=folder / "data")


def test_a_dataset_in_files_is_read_where_they_lie(folder, tmp_path, monkeypatch):
    """Shuffled and filtered too; rows of two files; what is not in files whole is copied. No row is another's."""
    datasets = pytest.importorskip("datasets")
    datasets.disable_progress_bars()
    words = [2, 9, 4, 30, 1, 17, 12, 6]
    parts = []
    for index, some in enumerate((words[:3], words[3:])):
        lines = [json.dumps({"prompt": "a " * count, "completion": "b"}) for count in some]
        (tmp_path / f"{index}.jsonl").write_text("\n".join(lines))
        file = str(tmp_path / f"{index}.jsonl")
        parts.append(
            datasets.load_dataset("json", data_files=file, split="train", cache_dir=str(tmp_path / "cache"))
        )
    whole = datasets.concatenate_datasets(parts)
    copied, save = [], datasets.Dataset.save_to_disk
    monkeypatch.setattr(datasets.Dataset, "save_to_disk", lambda *given: [copied.append(1), save(*given)])

    def sizes(dataset):
        copied.clear()
        found = dflop.costs(dataset, model_dir=folder / "model")
        return [(tokens, cost) for tokens, cost in zip(found.tokens, found.llm_ns, strict=True)]

    expected = sizes(datasets.Dataset.from_list(whole.to_list()))
    assert copied
    assert len(set(expected)) == len(words)
    for dataset, order in (
        (whole, range(8)),
        (whole.select([5, 0, 7]), [5, 0, 7]),
        (whole.shuffle(seed=1), whole.add_column("at", range(8)).shuffle(seed=1)["at"]),
    ):
        assert sizes(dataset) == [expected[at] for at in order]
        assert not copied
    # A slice of the first file, and as many rows in memory as it leaves out: the file has as many rows, but others.
    one = datasets.Dataset.from_list([{"prompt": "a " * 50, "completion": "b"}] * 4)
    sliced = datasets.concatenate_datasets([parts[1].select(range(1)), one])
    assert len(sliced) == len(parts[1])
    first, *others = [tokens for tokens, _ in sizes(sliced)]
    assert first == expected[3][0]
    assert {*others} == {others[0]} != {expected[4][0]}
    assert copied


def tiny_dataset(**columns):
    """Three samples of text, with further columns."""
    datasets = pytest.importorskip("datasets")
    datasets.disable_progress_bars()
    turns = [{"role": "user", "content": "What?"}, {"role": "assistant", "content": "That."}]
    return datasets.Dataset.from_dict({"messages": [turns] * 3, **columns})


def test_what_a_dataset_has_and_nobody_reads_is_a_warning(folder):
    with pytest.warns(UserWarning, match=r"the dataset, not read: `source` \(3 records\)"):
        dflop.costs(tiny_dataset(source=["web"] * 3), model_dir=folder / "model")


def test_hints_for_a_dataset_can_be_followed(folder, tmp_path):
    """They name no file that is gone, and no configuration: there is none."""
    dataset, model = tiny_dataset(), folder / "model"
    bad = dataset.map(lambda row, i: row if i else {"messages": []}, with_indices=True)
    with pytest.raises(dflop.ProfileError, match="sample 0: `messages` is empty") as error:
        dflop.costs(bad, model_dir=model)
    assert "dflop-" not in str(error.value)
    assert "`dataset.select`" in error.value.__notes__[0]
    with pytest.raises(dflop.ProfileError) as error:
        dflop.costs(dataset, model_dir=tmp_path)
    assert "set `model_dir` to a directory" in error.value.__notes__[0]
    splits = {"train": dataset, "test": dataset}
    import datasets

    with pytest.raises(ValueError, match="has 2 splits, one is needed: `train`, `test`"):
        dflop.costs(datasets.DatasetDict(splits), model_dir=model)
    with pytest.raises(ValueError, match="there are no samples"):
        dflop.costs(dataset.select([]), model_dir=model)
    with pytest.raises(ValueError, match="the source is of type IterableDataset: make a data profile"):
        dflop.costs(dataset.to_iterable_dataset(), model_dir=model)


def test_arguments_without_effect_and_long_records_are_refused_in_short(folder):
    path = folder / "data_profile.parquet"
    with pytest.raises(ValueError, match="the source is of type PosixPath"):
        dflop.costs(path, model_dir=folder / "model")
    with pytest.raises(ValueError, match="`batch_size` is 0, must be at least 1"):
        dflop.costs(path, batch_size=0)
    with pytest.raises(ValueError, match="sample 0 is {.*}, must be a pair") as error:
        dflop.costs([{"image": bytes(1 << 20)}])
    assert len(str(error.value)) < 300


def test_importing_dflop_leaves_torch_alone():
    """`BalancedStream` is a dataset of torch, and imported when it is named."""
    code = (
        "import sys, dflop; assert 'torch' not in sys.modules\n"
        "assert issubclass(dflop.BalancedStream, sys.modules['torch'].utils.data.IterableDataset)\n"
        "try: dflop.nothing\n"
        "except AttributeError as error: assert 'no attribute `nothing`' in str(error)\n"
        "else: raise SystemExit(1)\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=300)
