"""The native module: everything that is not tensor math, in Rust."""

from collections.abc import Iterable, Mapping, Sequence, Set
from os import PathLike
from typing import Any, Literal, Protocol, final

from typing_extensions import Self

from dflop._native import testing as testing

class Error(Exception): ...
class ProfileError(Error): ...
class PlanError(Error): ...
class ScheduleError(Error): ...
class ArtifactError(Error): ...

__version__: str

def run_cli(arguments: Sequence[str], family: object = None) -> tuple[int, dict[str, Any] | None]:
    """Runs the command line.

    Returns the exit status. For `train` and `profile model` it also returns a request that Python
    carries out. For `profile data` of a configuration with `model.family` the request asks to be called
    again with that function as `family`.
    """

def write_text(path: str | PathLike[str], kind: str, text: str) -> None:
    """Writes `text`, an artifact of this kind, to `path` or to the file that a link there leads to.

    The file is replaced as a whole or not at all. ArtifactError if it cannot be written, or if `path` is a
    directory, a device or a file of another kind.
    """

def serve_chat_templates() -> None:
    """Renders chat templates for the process at the other end of standard input and output, until that ends.

    A template is a program that somebody else wrote, and may crash its process. So this module starts a
    Python for each thread that renders, with a limit on memory, and calls this function in it.
    """

def families() -> dict[str, dict[str, bool]]:
    """What dflop can do with each model family, by the `model_type` of its `config.json`.

    `data`: its shapes are known; `estimate`: its work can be counted without a device; `measure`: its pieces
    can be measured; `train`: it can be trained; `share`: `balance_encoder` shares its encoder's work out.
    """

class _Array(Protocol):
    """An array or tensor: of integers and one dimension."""

    def tolist(self) -> Any: ...

_Meets = Literal["step", "phase", "pipeline"]

@final
class Balance:
    """An assignment of samples to buckets."""

    assignment: list[int]
    """Bucket of each sample: `b` is microbatch `b // num_ranks` of rank `b % num_ranks`."""
    encoder_load_ns: list[int]
    llm_load_ns: list[int]
    max_load_ns: int
    """What ranks wait for, by `meets`."""
    lower_bound_ns: int
    """No assignment makes them wait less."""
    gap: float
    """(`max_load_ns` - `lower_bound_ns`) / `lower_bound_ns`."""
    proven_optimal: bool

def balance(
    encoder_ns: Sequence[int] | _Array,
    llm_ns: Sequence[int] | _Array,
    num_buckets: int | None,
    *,
    meets: _Meets = "step",
    num_microbatches: int = 1,
    seed: int = 0,
    exact: bool = False,
    bytes: Sequence[int] | _Array | None = None,
    bucket_bytes_max: int | None = None,
    tokens: Sequence[int] | _Array | None = None,
    bucket_tokens_max: int | None = None,
) -> Balance:
    """Puts samples into buckets so that ranks wait for each other as little as possible.

    `meets` says for what. `step` (DDP, ZeRO-1, ZeRO-2): the largest sum of encoder and LLM work that
    a rank has in a step. `phase` (ZeRO-3, FSDP): the largest encoder load and the largest LLM load of each
    microbatch. `pipeline`: the largest load of a bucket on either component. A rank takes
    `num_microbatches` buckets in a step; `num_buckets` counts the buckets of all ranks. If it is None, the
    answer has the smallest multiple of `num_microbatches` for which a packing under the caps is found.

    `exact` adds an exact search where few samples share a bucket; it takes about a second at most. Batches
    of up to 48 samples get a short exact search without it. The caps are hard. A cap on bytes needs
    `bytes`, a cap on tokens needs `tokens`. Raises ScheduleError if the caps cannot be kept or the input is
    not valid, for example a number out of its range, and TypeError for an entry that is not an integer. Each
    error says which entry. Ctrl-C ends the search with KeyboardInterrupt.
    """

@final
class Media:
    """One image or video of a sample."""

    @property
    def path(self) -> str:
        """The file; where `is_local` is false, a name for messages."""
    @property
    def is_local(self) -> bool:
        """Whether it is a whole file of this machine; else its bytes come from `read`."""
    @property
    def held_bytes(self) -> int:
        """Bytes of it in memory: those that came with its record, as the cell of a table."""
    def read(self) -> bytes:
        """All its bytes, from wherever they are; ProfileError if they cannot be read."""
    kind: str
    frame_indices: list[int]
    num_tiles: int
    height: int
    width: int
    num_features: int
    parts: list[tuple[int, int, int]]
    """How many parts of equal size in a row, tiles and features of each; group after group."""
    patches: tuple[int, int] | None
    """Rows and columns of patches of a tile, where pictures keep their own resolution; beside
    such pictures, of a window of sound, how many rows it is to the encoder, and 1."""
    first_patches: tuple[int, int] | None
    """The same of the first tile, where it may differ: the whole before slices of one size."""
    last_patches: tuple[int, int] | None
    """The same of the last tile, where it may differ: a thumbnail behind tiles of one size."""
    last_segment_tokens: int
    """Encoder tokens of its last segment; the last window of a sound may be shorter than the others."""
    sampled_fps: float | None
    """Frames read a second of video; None for images and sounds, or where the file does not tell."""

@final
class EncodedSample:
    """A sample as tokens; features take the places where `feature_mask` is true."""

    id: str
    input_ids: list[int]
    feature_mask: list[bool]
    labels: list[int]
    """The id at each position that carries loss, -100 elsewhere; not shifted."""
    media: list[Media]
    notice: str | None
    """A sentence for people if its media changed, or may have changed, after they were profiled."""

@final
class Dataset:
    """The samples of a data profile, read again from the files it was made from."""

    def __new__(
        cls, config_path: str, data_profile_path: str, family: object = None, *, evaluation: bool = False
    ) -> Self:
        """`family` is a function that gives shapes (`dflop.data.family`), by default `model.family`.

        With `evaluation` the profile is that of `evaluation.mixture`.
        """
    def __len__(self) -> int: ...
    def encode(self, sample: int) -> EncodedSample:
        """ProfileError if it is not as profiled; its `is_of_sample` is true if the sample is bad now."""
    def messages(self, sample: int) -> str:
        """What the chat template takes, as JSON: `[{"role", "content"}]`, or `{"messages", "tools"}`."""
    def kind(self, sample: int) -> Literal["text", "image", "multi_image", "video", "audio"]: ...
    def source(self, sample: int) -> str:
        """Name of the source in the mixture that it comes from."""
    def shape(self, sample: int) -> tuple[int, int, int]:
        """(encoder tokens, LLM tokens, label tokens) as profiled."""
    def giants(self, llm_tokens_max: int) -> list[int]:
        """Samples with more LLM tokens than that, in order."""
    def digest(self, samples: Sequence[int]) -> str:
        """SHA-256 over (index, LLM tokens, label tokens, segments) of the samples: equal on all ranks."""

@final
class ModelFlops:
    """Floating point operations that training a model takes, as `torch.utils.flop_counter` counts them."""

    def __new__(cls, config: str, recipe: str, lora_rank: int) -> Self:
        """`config` is the text of `config.json`; ProfileError if the operations of its family are not known.

        `recipe` is a value of `train.recipe`: frozen parts take fewer operations. `lora_rank` is that
        of the adapters under `lora`; other recipes have none.
        """
    def of(self, dataset: Dataset, samples: Sequence[int]) -> int:
        """Forward and backward of the samples, encoder and projector included; nothing is recomputed."""

def peak_gflops(device: str, dtype: str) -> int | None:
    """What a device could do at most in a second, in 10^9 operations, by its vendor.

    `device` is the name that its driver gives, as `torch.cuda.get_device_name`; None for one that the table
    of `dflop models` lacks. `dtype`: `bfloat16` or `float32`.
    """

def profile_shapes(data_profile_path: str) -> tuple[list[tuple[int, int, int]], int]:
    """(index, encoder tokens, LLM tokens) of each good sample of a data profile, in order; how many are bad.

    The index counts all records, bad ones too, source after source. Raises FileNotFoundError if there is no
    profile, and ArtifactError if the profile leaves out records of the dataset.
    """

@final
class SampleCosts:
    """What the samples of a dataset cost, frozen; `dflop.costs` makes it.

    Chunks are the bytes of whole rows, in the machine's order; the code is a letter of `struct`: `d`, `f`,
    or an integer. A cut is (buckets, microbatches of a rank, `meets`, most bytes, most tokens, seed,
    whether rows are padded).
    ScheduleError for an entry that is not a number, is negative, or is larger than the search can add up.
    """

    num_bad: int
    digest: str
    """SHA-256 over all columns."""
    @staticmethod
    def of_rows(chunks: Iterable[bytes], code: str) -> SampleCosts:
        """Of rows (encoder cost, LLM cost): integers as they are, other numbers with nine digits."""
    @staticmethod
    def of_list(entries: Iterable[object]) -> SampleCosts:
        """Of pairs, likewise."""
    @staticmethod
    def of_token_rows(chunks: Iterable[bytes], code: str) -> SampleCosts:
        """Of rows (encoder tokens, LLM tokens): both weigh the same over the dataset."""
    @staticmethod
    def of_profile(data_profile_path: str) -> SampleCosts:
        """Of the tokens of a data profile; errors as for `profile_shapes`."""
    @staticmethod
    def of_model(
        data_profile_path: str,
        model_profile_path: str | None,
        estimated: tuple[str, str, str] | None,
        recipe: str,
        lora_rank: int,
        batch_size: int,
    ) -> tuple[SampleCosts, int, str | None]:
        """Costs by a model profile or (model, device, dtype) of the catalogue; `recipe`: what trains.

        Also num_extrapolated, and a note.
        """
    @staticmethod
    def of_state(columns: Sequence[bytes | None], unit: float | None, num_bad: int) -> SampleCosts:
        """What was pickled."""
    def with_costs(self, entries: Iterable[object]) -> SampleCosts:
        """The same samples with the costs in a list of pairs; tokens and positions stay."""
    def with_sizes(
        self,
        *,
        tokens: tuple[Iterable[bytes], str] | None = None,
        bytes: tuple[Iterable[bytes], str] | None = None,
    ) -> SampleCosts:
        """The same with the tokens or bytes of each sample."""
    def __len__(self) -> int: ...
    def column(self, name: str) -> bytes | None:
        """`encoder_ns`, `llm_ns`, `bytes`, `tokens` or `positions`, eight bytes each; None: there is none."""
    def giants(self, llm_cost_max: float) -> list[int]:
        """Samples above that LLM cost in the unit that was given; in tokens, where those were."""
    def check(self, cut: _Cut, num_samples: int) -> None:
        """Nothing, or ScheduleError where a global batch of so many samples could not be cut."""
    def buckets(self, samples: Sequence[int], cut: _Cut) -> list[list[int]]:
        """Positions in the dataset of the samples in each bucket; empty only with too few samples."""
    def fitting(self, samples: Sequence[int], cut: _Cut) -> int:
        """How many of the first of `samples` fit one global batch under its caps."""

_Cut = tuple[int, int, str, int | None, int | None, int, bool]

@final
class GlobalBatches:
    """Which samples form the global batch of each step: each sample once an epoch.

    Of each `giant_steps_max + 1` global batches in a row, `giants` stand at the end. Without `shuffle`
    samples come in the order of the data; with `drop_last` an epoch has no smaller last batch, and PlanError
    where it has no other.
    """

    def __new__(
        cls,
        num_samples: int,
        global_batch_size: int,
        seed: int,
        giants: Sequence[int] = ...,
        giant_steps_max: int = 0,
        *,
        shuffle: bool = True,
        drop_last: bool = False,
    ) -> Self: ...
    def batch(self, step: int) -> list[int]: ...
    def samples(self, epoch: int, first: int, count: int) -> list[int]:
        """At most `count` samples of an epoch, from position `first` of its order on; fewer at its end."""
    def deferred(self, step: int) -> list[tuple[int, int]]:
        """Samples that stand in the batch of `step` instead of an earlier one, with the steps they waited."""
    def epoch(self, step: int) -> int: ...
    steps_per_epoch: int

@final
class Action:
    """One cell of a step, frozen: what a rank does with a microbatch. `str` gives its name."""

    @staticmethod
    def parse(text: str) -> Action:
        """The action of that name, for example `2F0`; ScheduleError if there is none."""
    @property
    def name(self) -> str:
        """Stage, letter and microbatch, for example `2F0`."""
    @property
    def stage(self) -> int:
        """0 is the encoder, LLM stages count from 1."""
    @property
    def letter(self) -> Literal["F", "B", "I", "W"]:
        """F: forward. B: backward. I and W: its two halves, the gradients of the input and of the weights."""
    @property
    def microbatch(self) -> int: ...
    @property
    def takes_gradient(self) -> bool:
        """Whether it waits for the gradient of what left the stage, and gives that of what came in (B, I)."""
    def __eq__(self, other: object, /) -> bool: ...
    def __hash__(self) -> int: ...

@final
class Plan:
    """A plan, frozen."""

    @staticmethod
    def read(path: str) -> Plan: ...
    encoder_replicas: int
    llm_replicas: int
    encoder_stages: int
    llm_stages: int
    num_stages: int
    """Of both components: those of the encoder come first, from 0."""
    num_ranks: int
    num_microbatches: int
    global_batch_size: int
    placement: Literal["disaggregated", "colocated"]
    """`colocated`: every rank holds both components. `encoder_replicas` equals `llm_replicas`, or is
    `encoders_per_group` times as many where each rank of a tensor group holds a whole encoder."""
    zero: int
    """What is cut over replicas: 1 optimizer states, 2 also gradients, 3 also parameters; 0 nothing."""
    shard_ranks: int | None
    """Over how many consecutive replicas that is cut; None: over all replicas of a component."""
    expert_parallel_degree: int
    """Consecutive ranks among which the experts of each layer are dealt out: an expert group; 1 where
    every rank holds all experts."""
    meets_in_layers: bool
    """Whether ranks wait for each other within layers: they gather parameters there (`zero` 3), or
    exchange rows with the experts of other ranks."""
    encoder_recompute: str
    """What the encoder's layers recompute at most: `none`, `selective`, `full`, `selective:K` or `full:K`, K
    layers of a stage. A schedule may ask for less in a microbatch (`Schedule.recompute`)."""
    llm_recompute: str
    """What the LLM backbone's layers recompute in the backward, as `encoder_recompute`."""
    def coordinates(self, rank: int) -> tuple[Literal["encoder", "llm", "both"], int, int]:
        """(component, replica, stage of the whole step): the encoder's stages come first.

        In a colocated layout the component is `both`, the replica is that of the LLM, and the stage is 0.
        """
    encoder_tensor: int
    """Ranks of the encoder's tensor groups: those that share its layers."""
    llm_tensor: int
    encoders_per_group: int
    """Encoder replicas in each tensor group of a colocated layout: as many as ranks where each holds a whole
    encoder, else 1."""
    num_groups: int
    """Tensor groups of the whole layout."""
    def expert_group(self, rank: int) -> int:
        """The number of a rank's expert group: `rank // expert_parallel_degree`."""
    def rank(self, replica: int, stage: int, tensor: int = 0) -> int:
        """The rank at position `tensor` of the tensor group that holds `stage` of `replica`."""
    def encoder_replica(self, rank: int) -> int | None:
        """The encoder replica that `rank` holds, or holds a part of; none where it holds none."""
    def tensor(self, rank: int) -> int:
        """Position of `rank` in its tensor group, from 0."""
    def group(self, rank: int) -> int:
        """The number of the tensor group of `rank`; schedules and action lists use this number."""
    def stages(self, rank: int) -> list[int]:
        """The stages that `rank` holds, in the order of the forward: both in a colocated layout, else one."""
    def llm_layers(self, stage: int, num_layers: int) -> tuple[int, int]:
        """(first layer, number of layers) of `stage` of the whole step, one of the LLM's."""
    def encoder_layers(self, stage: int, num_layers: int) -> tuple[int, int]:
        """(first layer, number of layers) of `stage` of the whole step, one of the encoder's."""
    def actions(self, rank: int) -> list[Action]:
        """The action list of `rank`: the very list the simulator times."""
    def openings(self, schedule: Schedule, rank: int) -> list[dict[int, tuple[int, int]]]:
        """For each action of `rank` in `schedule`, when its receives open.

        By the tensor group of the sender: how many of the rank's own actions come before the receive opens,
        and when the action starts that gives the message: receives open in this order, of equals those of
        the lower group first. Empty for an action without inputs from other ranks, or if colocated ranks
        exchange them. By one timeline of all ranks, in which a receive opens when that action starts. So no
        ranks wait for each other, even if a device waits for every message that is under way. ScheduleError
        if the lists make ranks wait in a circle, or do not fit the layout.
        """

@final
class Schedule:
    """A schedule, frozen; it can be pickled, so that ranks can send it to each other."""

    @staticmethod
    def from_json(text: str) -> Schedule:
        """The schedule in a line of a log; ScheduleError if it is none."""
    def to_json(self) -> str:
        """The schedule as a line of a log."""
    @staticmethod
    def from_record(record: dict[str, Any]) -> Schedule:
        """The schedule in a record that was read from a log; ScheduleError if it is none."""
    def record(self) -> dict[str, Any]:
        """The schedule for a record of a log."""
    def replaced(self, instead: Mapping[int, int | None], encoded: Set[int], label_tokens: int) -> Schedule:
        """The same microbatches and actions with other samples.

        `instead`: sample to be taken out -> what comes into its place; none: nothing. `encoded`: those that
        come and have media. They are encoded whole, where the first part of the other was to be encoded.
        `label_tokens`: of the batch after that.
        """
    step: int
    num_microbatches: int
    label_tokens: int
    predicted_makespan_ns: int
    giants: list[int]
    """Samples around which the pipeline runs empty, for lack of memory."""
    was_stopped: bool
    """Whether a wall limit ended the search."""
    def llm(self, microbatch: int, replica: int) -> list[int]: ...
    def encoder(self, microbatch: int, replica: int) -> list[tuple[int, tuple[int, int] | None]]:
        """(sample, parts) of each share; parts are (first, count), None: all of the sample."""
    def actions(self, group: int) -> list[Action] | None:
        """The actions of a tensor group (`Plan.group`); None: those of the plan's pipeline order."""
    def recompute(self, microbatch: int, replica: int) -> tuple[str, str] | None:
        """What encoder and LLM backbone recompute in a microbatch of a colocated layout; None: what the plan
        says."""
    def digest(self) -> str: ...

@final
class SlowShapes:
    """Samples that a rehearsal makes slower than predicted, frozen."""

    tokens_min: int
    """The fewest LLM tokens of a slow sample."""
    tokens_max: int
    """The most."""
    num_samples: int
    """Samples of the data profile in this range."""
    forward_ns: int
    """What a slow sample adds to a forward of the LLM, in nanoseconds."""
    backward_ns: int
    """What it adds to a backward."""

@final
class StepScheduler:
    """Computes schedules in a Rust thread while Python trains."""

    def __new__(
        cls,
        plan_path: str,
        data_profile_path: str,
        model_profile_path: str,
        seed: int,
        memory_budget_bytes: int | None = None,
        ranks_per_node: int | None = None,
        schedule_seconds_max: float = 10.0,
        *,
        giants: str = "alone",
        bucket_tokens_max: int | None = None,
    ) -> Self:
        """After `schedule_seconds_max` the search ends, and the best schedule so far is taken.

        With `giants` `refuse`, a sample that fits a rank alone but not beside others is a ScheduleError.
        No bucket (a microbatch on one LLM replica) has more than `bucket_tokens_max` LLM tokens; PlanError
        where a sample of the data profile alone has more.
        """
    def submit(
        self,
        step: int,
        samples: Sequence[int],
        arm: str,
        *,
        corrected: bool = False,
        compared: bool = False,
    ) -> None:
        """Queues the global batch of `step`; returns at once.

        If `corrected`, the schedule is made with times that the steps observed up to now have corrected. If
        `compared`, the batch is also scheduled without, and both are simulated with corrected times.
        """
    def take(
        self, step: int, arm: str
    ) -> tuple[Schedule, int, dict[str, Any] | None, tuple[int, int] | None]:
        """(schedule, ns waited for it, correction, makespans); blocks without the GIL; Ctrl-C ends the wait.

        The correction is as a log keeps it, or None if nothing was corrected. Makespans are there if
        `compared`: in ns, by corrected times, without and with the correction. ScheduleError if no schedule
        can be made.
        """
    def schedule(
        self, step: int, samples: Sequence[int], arm: str, adjustment: dict[str, Any] | None = None
    ) -> Schedule:
        """The schedule of a global batch, made at once, with the correction that `take` gave or a log keeps.

        ScheduleError if `adjustment` is not valid, or is of another layout.
        """
    def predict_makespan_ns(self, schedule: Schedule) -> int:
        """Makespan in ns that the simulator gives from the model profile, optimizer included."""
    def predicted_spans(
        self, schedule: Schedule, slow_shapes: SlowShapes | None = None
    ) -> tuple[list[tuple[int, str, int, int]], list[int], int]:
        """(rank, action, start, end) of all ranks as simulated, each rank's tail, and how
        long an output takes to reach another rank; in ns. With `slow_shapes` these samples take longer."""
    def slow_shapes(self, usual: Schedule, share: float, times: float, seed: int) -> SlowShapes:
        """About `share` of the samples, of neighbouring sizes that the seed draws, each of which adds `times`
        the mean time of an action on the slowest stage of `usual` to every LLM action that holds it."""
    def predict_corrected_ns(self, schedule: Schedule) -> int:
        """The same, corrected by what observed steps took, by shape and by rank and kind of action."""
    def observe(
        self,
        schedule: Schedule,
        spans: Sequence[tuple[int, str, int, int]],
        makespan_ns: int,
        *,
        fitted: bool = True,
    ) -> None:
        """Learns from a measured step; spans as for `idle_by_cause`. Not `fitted`: of ranks only."""
    def alarms(self, loader_wait: float, network_wait: float) -> list[tuple[str, str, str, float]]:
        """Alarms that the last observed step raised: (cause, words, what to do, size).

        Causes are `rank`, `clock`, `data`, `loader` and `network`. The waits are the mean times that ranks
        waited for samples and for messages, as fractions of the step. Call it once a step.
        """
    def watched(self) -> dict[str, Any]:
        """What `alarms` remembers, for a checkpoint."""
    def watch_from(self, record: dict[str, Any]) -> None:
        """Goes on from what `watched` gave, of the same plan.

        Raises ScheduleError where it is something else.
        """
    def adjustment(self) -> dict[str, Any] | None:
        """What would correct a schedule now, as a log keeps it; None: nothing."""
    def correction(
        self,
    ) -> tuple[
        list[tuple[list[tuple[int, str, int, int, float]], int, int | None]],
        list[list[list[tuple[float, float, list[tuple[int, int]]]]]],
    ]:
        """All that `observe` remembers, for a checkpoint: the last steps, oldest first; packs by component.

        A step is its sums (row: a rank, or a component of one that holds both; letter of the action;
        predicted ns; measured ns; median of measured over predicted), the ns from its last action to its
        end, and those beyond the tails that are predicted of its components (None: not known). Packs stand
        by component and step. A pack is measured over predicted time less 1, its predicted time over the
        mean pack's, and its sizes with their tokens.
        """
    def correct_by(
        self,
        steps: Sequence[tuple[Sequence[tuple[int, str, int, int, float]], int, int | None]],
        packs: Sequence[Sequence[Sequence[tuple[float, float, Sequence[tuple[int, int]]]]]],
    ) -> None:
        """Replaces what is remembered by this; ScheduleError for a letter that no action has.

        The packs of a component are left out where a number of theirs is none.
        """
    def memory(self, schedule: Schedule) -> list[tuple[list[tuple[str, int]], int, int, str]]:
        """The predicted peak of each rank: bytes by part, bytes of tensors, all bytes, and when it is.

        The moment is an action, for example `1F3`, or `optimizer`.
        """
    def traffic(self, schedule: Schedule) -> tuple[int, int, int, int]:
        """What crosses the boundary in a forward pass: messages, feature tokens, those to another node, and
        samples that several encoder replicas encode. No node is another where `ranks_per_node` is None.
        """
    def idle_by_cause(
        self, schedule: Schedule, spans: Sequence[tuple[int, str, int, int]], makespan_ns: int
    ) -> tuple[int, int, int, int]:
        """Idle ns of one measured step over all ranks: (ramp, imbalance, transfer, data wait).

        Spans are (rank, action, start ns, end ns), of every action of every rank; `makespan_ns` is first
        start to last end, reduction and optimizer included. What ranks waited for samples before their
        common start is in no span: the data wait here is 0.
        """
