"""What only tests and benches ask of the native module."""

from collections.abc import Sequence
from typing import Any, final

from dflop._native import Balance, Schedule, StepScheduler, _Meets

def load_config(path: str) -> dict[str, Any]:
    """The configuration at `path`, checked and with every default filled in."""

def model_modules(config: str, *, lora_rank: int = 0) -> tuple[dict[str, tuple[int, int]], int]:
    """Modules of the model that `config` (the text of a `config.json`) describes.

    Returns by name how many of it the model has and the parameters of one, and the parameters of the whole,
    each matrix once. With `lora_rank` the parts of layers that get adapters hold them; the whole has none.
    ProfileError for a field that decides the size and is missing or unknown.
    """

def module_flops(config: str, module: str, segments: Sequence[int], *, lora_rank: int = 0) -> dict[str, int]:
    """Floating point operations of a module over segments of these tokens (label tokens for `llm_head`).

    As `torch.utils.flop_counter` counts them: `forward`; `input` (gradients of what it reads and of all
    between) and `weight`, which make the backward; `recomputed`, the forward again under
    `torch.utils.checkpoint`.
    """

def module_activation_bytes(
    config: str, module: str, segments: Sequence[int], *, value_bytes: int = 2, lora_rank: int = 0
) -> int:
    """Bytes that the forward of a module keeps for its backward, with values of 2 or 4 bytes."""

def judge(
    encoder_ns: Sequence[int],
    llm_ns: Sequence[int],
    num_buckets: int,
    assignment: Sequence[int],
    *,
    meets: _Meets = "step",
    num_microbatches: int = 1,
) -> Balance:
    """An assignment made elsewhere, by the loads and the bound of `balance`; ScheduleError if it is none."""

def baselines() -> list[str]:
    """Names of the ways to fill buckets that others use, from those that know least of the samples."""

def baseline(
    name: str,
    encoder_ns: Sequence[int],
    llm_ns: Sequence[int],
    tokens: Sequence[int],
    num_buckets: int,
    *,
    seed: int = 0,
    solver_ms: int = 1000,
) -> tuple[list[int], str | None]:
    """Bucket of each sample by that baseline, for `judge`; of `paper`, who answered: `ilp` or `lpt, ...`.

    `tokens` are LLM tokens. `seed` is of `random`, `solver_ms` is the wall limit of the paper's solver.
    """

def simulate_measured(
    scheduler: StepScheduler,
    schedule: Schedule,
    spans: Sequence[tuple[int, str, int, int]],
    tail_ns: int | None = None,
) -> int:
    """Makespan in ns that the simulator gives when fed with the measured durations of one step.

    Spans are (rank, action, start ns, end ns). Reduction and optimizer take `tail_ns` on every rank; None: as
    predicted. PlanError where spans are missing or of another step.
    """

@final
class CostModel:
    """What a model profile predicts, for whoever compares it with measurements."""

    @staticmethod
    def read(path: str) -> CostModel:
        """The cost model of the profile at `path`; ArtifactError or ProfileError if there can be none."""
    def encoder(self, segments: Sequence[tuple[int, int]]) -> tuple[int, int, bool]:
        """Forward and backward of (count, tokens) encoder segments, in nanoseconds; whether extrapolated."""
    def llm_stage(
        self, llm_tokens: Sequence[int], label_tokens: int, num_layers: int, is_first: bool, is_last: bool
    ) -> tuple[int, int, bool]:
        """Likewise of packed samples on a run of layers."""
    def encoder_peak_bytes(self, segments: Sequence[tuple[int, int]], feature_tokens: int) -> tuple[int, int]:
        """Tensor bytes at the peak of one forward and backward of the encoder; those held in any case."""
    def stage_peak_bytes(
        self,
        llm_tokens: Sequence[int],
        label_tokens: int,
        feature_tokens: int,
        layers: tuple[int, bool, bool],
    ) -> tuple[int, int]:
        """Likewise of a run of layers: their number, whether it is the first, and the last."""

@final
class MediaShape:
    """What one medium costs."""

    @property
    def num_tiles(self) -> int: ...
    @property
    def segments(self) -> list[tuple[int, int]]:
        """(count, tokens) of each group of encoder segments."""
    @property
    def feature_tokens(self) -> int: ...
    @property
    def pieces(self) -> list[tuple[str | None, int]]:
        """What takes the placeholder's place: (text, 0) or (None, feature tokens)."""
    @property
    def frame_indices(self) -> list[int]: ...
    @property
    def patches(self) -> tuple[int, int] | None:
        """As of `Media`."""
    @property
    def first_patches(self) -> tuple[int, int] | None:
        """As of `Media`."""
    @property
    def last_patches(self) -> tuple[int, int] | None:
        """As of `Media`."""
    @property
    def parts(self) -> list[tuple[int, int, int]]:
        """How many parts of equal size in a row, segments and features of each; group after group."""

def encode_conversations(
    model_dir: str,
    marks: list[tuple[str, str, str]],
    samples: list[tuple[str, list[list[tuple[str | None, int]]]]],
) -> list[tuple[list[int], list[bool], list[int]]]:
    """Input ids, feature masks and labels of records, by a model directory's tokenizer and chat template.

    A mark is kind (image, video or audio), placeholder and feature token. A sample is a record as JSON and,
    for each of its media, what takes its place: texts and numbers of features. Errors are ProfileError.
    """

def media_shape(
    config_json: str,
    preprocessor_json: str,
    video_preprocessor_json: str,
    kind: str,
    height: int = 0,
    width: int = 0,
    num_images: int = 1,
    num_frames: int = 0,
    fps: float | None = None,
    duration_s: float | None = None,
    sample_rate: int = 0,
    max_frames: int | None = None,
    sample_fps: float | None = None,
) -> MediaShape:
    """What one medium costs by the files of a model directory ("{}" for one that is not there).

    Kind is image, video or audio; errors are ProfileError.
    """
