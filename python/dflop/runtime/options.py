"""What a training run is asked to do: the request of the command line, read once."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dflop.runtime.rates import COMPONENTS, Rates

if TYPE_CHECKING:
    from collections.abc import Mapping

FIRST_TIMEOUT_S = 1800.0
"""Default of `first_timeout_s`. Long, since kernels are loaded and ranks do not start at the same moment."""
Arm = str
"""A way to schedule, as in `blind` or `aware-ahead`; the command line has checked the name."""


@dataclass(frozen=True)
class Evaluated:
    """What is evaluated between steps."""

    profile_path: str
    """Data profile of the samples that are held out."""
    every: int
    """Steps from one evaluation to the next."""
    samples: int | None
    """How many of these samples, drawn once for the whole run; none: all."""


@dataclass(frozen=True)
class Options:
    """One training run."""

    config_path: str
    plan_path: str
    data_profile_path: str
    model_profile_path: str
    out: Path
    """Directory of everything the run writes."""
    steps: int
    """Global batches to train (and to record, in a comparison)."""
    compare: tuple[Arm, ...]
    """Arms of a comparison: every global batch is trained once with each. None: no comparison."""
    warmup_pairs: int
    """Global batches of a comparison that are trained first and not recorded."""
    replay: Path | None
    """Log of an earlier run whose schedules are used, instead of computing any."""
    made_from: dict[str, str]
    """Hashes of plan and data profile, for the log of this run."""
    model_dir: Path
    dtype: str
    """What forward and backward compute in: `float32` or `bfloat16`."""
    compile: str
    """`none` or `layers`: what `torch.compile` compiles; see `models/compiled.py`."""
    device: str
    init: str
    """`pretrained`: the parameters are read from `model_dir`; `random`: they are drawn with `seed`."""
    recipe: str
    """What trains, as in `full`; see `models/recipes.py`."""
    rates: Rates
    """Learning rates over the steps."""
    model: dict[str, Any]
    """What an export of a checkpoint has to know: `dir`, `chat_template` (absolute paths), `dtype`, `recipe`,
    `lora_rank`, `lora_alpha`."""
    lora_rank: int
    """Rank of the LoRA adapters; used by the recipe `lora` only."""
    lora_alpha: float
    """The product of the two adapter matrices is multiplied by `lora_alpha / lora_rank`."""
    weight_decay: float
    """AdamW's weight decay, of all parameters but norms and biases."""
    max_grad_norm: float | None
    seed: int
    arm: Arm
    """How the schedules are made, in a run that is not a comparison."""
    giants: str
    """`alone`, `defer` or `refuse`: what becomes of samples far larger than the others."""
    giant_llm_tokens: int | None
    """Samples with more LLM tokens than this are giants; None: there are no giants."""
    giant_steps_max: int
    """The most steps that a deferred giant may be late."""
    correction: str
    """`auto`, `on` or `off`: whether measured times correct the costs that schedules are made with."""
    prefetch_depth: int
    """Schedules computed ahead, that of the step to come included; at least 1. Ignored in a comparison, where
    each arm computes its next one while it trains."""
    cache_bytes: int
    """Bytes of decoded media that a rank keeps."""
    measure_memory_step: int | None
    """The step whose memory is counted, at least 1; none: no step's."""
    ranks_per_node: int
    """Ranks of each node, which are numbered node by node; in a rehearsal those of the cluster rehearsed."""
    memory_budget_bytes: int | None
    """Memory that a rank may use; schedules keep to it. None: no limit."""
    bucket_tokens_max: int | None
    """LLM tokens a bucket (microbatch on one LLM replica) may hold; schedules keep to it. None: no limit."""
    profile_device: str | None
    """Name of the device that the model profile was measured on; None: any will do."""
    request_path: Path | None
    """File that holds this request, where one command started the ranks; later the run's `request.json`."""
    timeout_s: float
    """A rank that waits longer than this for another gives up; from the second step on."""
    first_timeout_s: float
    """The same limit until the first step has ended; at least `timeout_s`."""
    resume: str | None
    """`auto`, or a checkpoint or run to go on from; none: from the beginning."""
    may_overwrite: bool
    """Whether an earlier run in `out` may be overwritten, or is gone on with."""
    checkpoint_every: int | None
    """Steps from one checkpoint to the next; none: only when the run ends, or is ended."""
    checkpoint_keep: int
    """Checkpoints to keep, the newest; at least 1."""
    skipped_steps_max: int
    """Steps in a row that may be skipped because their gradient is no finite number."""
    on_bad_sample: str
    """`fail`, `skip` or `substitute`: what becomes of a sample that cannot be decoded."""
    bad_samples_max_percent: float | None
    """The run ends where more than this percentage of the samples seen so far is bad; None: 5, or four."""
    workers: int
    """Worker processes that decode media for a rank; 0: threads of the rank decode."""
    ahead_bytes: int
    """The most bytes of media that a rank decodes before they are needed."""
    evaluation: Evaluated | None
    """What is evaluated between steps; none: nothing."""
    wandb_project: str | None
    """Project of Weights & Biases; none: nothing is sent there."""

    def kept_files(self) -> dict[str, bytes]:
        """Plan and model profile as they are now, by the names that a run keeps copies of them under.

        Returns:
            The bytes of each file.

        Raises:
            OSError: One cannot be read.
        """
        # Without the name of the hash before it.
        mark = self.made_from["plan"].rpartition(":")[2].replace(" ", "-")[:12]
        paths = {"plan": self.plan_path, "model_profile": self.model_profile_path}
        return {f"{name}.{mark}.json": Path(path).read_bytes() for name, path in paths.items()}

    @staticmethod
    def of_request(request: Mapping[str, Any]) -> Options:
        """The options of a request, whose `config` is a checked configuration.

        Args:
            request: As the command line makes it.

        Returns:
            The options.

        Raises:
            KeyError: A field is missing.
        """
        config = request["config"]
        train = config["train"]
        return Options(
            config_path=str(request["config_path"]),
            plan_path=str(request["plan"]),
            data_profile_path=str(request["data_profile"]),
            model_profile_path=str(request["model_profile"]),
            out=Path(request["out"]),
            steps=int(request["steps"]),
            compare=tuple(request["arms"]) if request["compare"] else (),
            warmup_pairs=int(request["warmup_pairs"]) if request["compare"] else 0,
            replay=Path(replay) if (replay := request.get("replay")) else None,
            made_from=dict(request["made_from"]),
            model_dir=Path(config["model"]["dir"]),
            dtype=config["model"]["dtype"],
            compile=train["compile"],
            device=config["cluster"]["device"],
            init=train["init"],
            recipe=train["recipe"],
            model=_model(config),
            rates=_rates(train, int(request["steps"])),
            lora_rank=int(train["lora_rank"]),
            lora_alpha=float(train["lora_alpha"]),
            weight_decay=float(train["weight_decay"]),
            max_grad_norm=None if train["max_grad_norm"] is None else float(train["max_grad_norm"]),
            seed=int(train["seed"]),
            arm=train["schedule"],
            giants=train["giants"],
            giant_llm_tokens=train["giant_llm_tokens"],
            giant_steps_max=int(train["giant_steps_max"]),
            correction=train["correction"],
            prefetch_depth=int(train["prefetch_depth"]),
            cache_bytes=int(config["data"]["cache_bytes"]),
            measure_memory_step=request.get("measure_memory_step"),
            ranks_per_node=_ranks_per_node(request),
            memory_budget_bytes=config["cluster"]["memory_budget_bytes"],
            bucket_tokens_max=train["bucket_tokens_max"],
            profile_device=request.get("profile_device"),
            request_path=Path(path) if (path := request.get("request_path")) else None,
            timeout_s=(timeout_s := float(request.get("timeout_s", train["timeout_seconds"]))),
            first_timeout_s=float(request.get("first_timeout_s", _first_timeout_s(train, timeout_s))),
            resume=request.get("resume"),
            may_overwrite=bool(request.get("may_overwrite", True)),
            checkpoint_every=config["checkpoint"]["every"],
            checkpoint_keep=int(config["checkpoint"]["keep"]),
            skipped_steps_max=int(train["skipped_steps_max"]),
            on_bad_sample=config["data"]["on_bad_sample"],
            bad_samples_max_percent=config["data"]["bad_samples_max_percent"],
            workers=int(train["workers"]),
            ahead_bytes=int(config["data"]["ahead_bytes"]),
            evaluation=_evaluated(config, request.get("evaluation_profile")),
            wandb_project=train["wandb_project"],
        )


def _first_timeout_s(train: Mapping[str, Any], timeout_s: float) -> float:
    first = train["first_timeout_seconds"]
    return max(timeout_s, FIRST_TIMEOUT_S) if first is None else float(first)


def _ranks_per_node(request: Mapping[str, Any]) -> int:
    configured = int(request["config"]["cluster"]["ranks_per_node"])
    # One machine rehearses many nodes; torchrun knows the nodes that train.
    return configured if "rehearsal" in request else int(os.environ.get("LOCAL_WORLD_SIZE", configured))


def _evaluated(config: Mapping[str, Any], profile: str | None) -> Evaluated | None:
    """What is evaluated, from `evaluation` of a checked configuration."""
    section = config["evaluation"]
    if profile is None:
        return None
    return Evaluated(profile, int(section["every"]), section["samples"])


def _rates(train: Mapping[str, Any], num_steps: int) -> Rates:
    """Learning rates, from `train` of a checked configuration."""
    own = {component: train[f"{component}_learning_rate"] for component in COMPONENTS}
    rate = train["learning_rate"]
    decay_steps = train["decay_steps"]
    return Rates(
        peak={component: float(rate if peak is None else peak) for component, peak in own.items()},
        schedule=train["learning_rate_schedule"],
        num_steps=num_steps,
        warmup_steps=int(train["warmup_steps"]),
        decay_steps=max(1, num_steps // 10) if decay_steps is None else int(decay_steps),
    )


def _model(config: Mapping[str, Any]) -> dict[str, Any]:
    """`Options.model` of a checked configuration."""
    template = config["data"]["chat_template"]
    return {
        "dir": str(Path(config["model"]["dir"]).absolute()),
        "chat_template": None if template is None else str(Path(template).absolute()),
        "dtype": config["model"]["dtype"],
        **{name: config["train"][name] for name in ("recipe", "lora_rank", "lora_alpha")},
    }
