"""`dflop check`: samples of the user's dataset, by dflop and by Hugging Face.

    samples, chosen by kind --each alone, Hugging Face's model--> losses, gradients --+
                            --packed into one microbatch, dflop's pieces-> the same --+--> equal?

So the check sees what lies between decoded media and a gradient: the processor's values, positions, features,
attention that keeps packed samples apart, the shift of labels, and the sum of the loss. Pictures, frames and
sounds are decoded by dflop for both, and dflop says for both which tokens have a loss.
"""

from __future__ import annotations

import json
import sys
import time
from dataclasses import asdict, dataclass
from heapq import heappop, heappush
from math import isfinite
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from dflop._native import Dataset
from dflop.checking.gradients import by_module, errors_of
from dflop.checking.pair import Pair, first_layers, inputs_of
from dflop.checking.reference import arguments_of, media_of
from dflop.checking.tokens import Processor, difference, first_line
from dflop.data.dataset import sample_from_encoded
from dflop.data.decoding import file_of
from dflop.models import load_adapter
from dflop.models.adapter import IGNORED
from dflop.models.compiled import LAYERS
from dflop.models.errors import hinted, profile_error

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from dflop.checking.gradients import ModuleError
    from dflop.data.sample import Sample
    from dflop.models.media import MediaFile

_LEAST_LOSS = 0.1
_KINDS = ("text", "image", "multi_image", "video", "audio", "mixed")


@dataclass
class SampleError:
    """One sample, by both."""

    id: str
    kind: str
    encoder_tokens: int
    llm_tokens: int
    label_tokens: int
    expected_loss: float
    """A mean over its label tokens, by Hugging Face's model."""
    loss: float
    """By dflop's pieces, likewise alone."""
    tokens: str
    """`equal`, `-` where they were not compared, or how they differ."""

    @property
    def error(self) -> float:
        """Of the expected loss, or of 0.1 where that is smaller: near 0 it is what rounding leaves."""
        return abs(self.loss - self.expected_loss) / max(abs(self.expected_loss), _LEAST_LOSS)

    def agrees(self, tolerance: float) -> bool:
        """Whether no token differs and the loss is within the tolerance."""
        return self.tokens in {"equal", "-"} and self.error <= tolerance


@dataclass
class Found:
    """What both made of the samples."""

    samples: list[SampleError]
    modules: list[ModuleError]
    notes: list[str]
    """What was not compared, and why."""


def check(request: Mapping[str, Any]) -> int:
    """Checks what the request names and prints what was found.

    Args:
        request: `config_path`, `data_profile`, `model_dir`; `chat_template`, a file or none; `recipe`,
            `compile`, as in `train`; `samples`, how many, or `chosen`, which; `layers` of the LLM or none;
            `seed`, or none to read weights; `tolerance`; `json`.

    Returns:
        The exit status: 0 all is equal within the tolerance, 1 something is not.

    Raises:
        Error: The samples or the model cannot be used.
    """
    dataset = Dataset(request["config_path"], request["data_profile"])
    indices = request["chosen"] or choose(dataset, request["samples"])
    layers, seed = request["layers"], request["seed"]
    with first_layers(Path(request["model_dir"]), layers) as model_dir:
        adapter: Any = load_adapter(model_dir)
        _say("building the model twice: dflop's pieces, and transformers' own")
        pair = Pair(adapter, seed)
        if request["compile"] == LAYERS:
            _say("compiling dflop's layers (`train.compile`)")
            pair.compile_layers()
        processor = Processor(adapter, request["model_dir"], request["chat_template"])
        compared = _compare(pair, processor, dataset, indices, request["tolerance"])
    tolerance = request["tolerance"]
    is_equal = all(each.agrees(tolerance) for each in compared.samples)
    is_equal = is_equal and all(each.error <= tolerance for each in compared.modules)
    found = {
        "equal": is_equal,
        "tolerance": tolerance,
        "model": type(pair.model).__name__,
        "weights": "read" if seed is None else "random",
        "llm_layers": adapter.num_llm_layers,
        "samples": [{**asdict(each), "error": each.error} for each in compared.samples],
        "modules": [asdict(each) for each in compared.modules],
        "notes": [*_of_recipe(request["recipe"]), *compared.notes],
    }
    print(json.dumps(_finite(found)) if request["json"] else "\n".join(_lines(found)))
    return 0 if is_equal else 1


def choose(dataset: Any, count: int) -> list[int]:
    """Samples of all kinds in turn, of each kind those with the fewest tokens.

    Args:
        dataset: A `Dataset`.
        count: How many; fewer where the dataset has no more with loss.

    Returns:
        Their indices.

    Raises:
        ProfileError: No sample has a label token.
    """
    by_kind: dict[str, list[tuple[int, int]]] = {}
    for index in range(len(dataset)):
        encoder_tokens, llm_tokens, label_tokens = dataset.shape(index)
        if label_tokens:
            found = by_kind.setdefault(dataset.kind(index), [])
            # Of each kind the smallest are kept, not all: a profile may have many millions.
            heappush(found, (-encoder_tokens - llm_tokens, -index))
            if len(found) > count:
                heappop(found)
    waiting = [sorted(by_kind[kind]) for kind in _KINDS if kind in by_kind]
    chosen: list[int] = []
    while len(chosen) < count and any(waiting):
        for samples in waiting:
            if samples and len(chosen) < count:
                chosen.append(-samples.pop()[1])
    if not chosen:
        message = "no sample of the data profile has a label token, so none has a loss"
        raise profile_error(message)
    return chosen


def _compare(
    pair: Pair, processor: Processor, dataset: Any, indices: Sequence[int], tolerance: float
) -> Found:
    samples: list[Sample] = []
    inputs: list[torch.Tensor] = []
    checked: list[SampleError] = []
    notes: dict[str, int] = {}
    left_out: dict[str, int] = {}
    for number, index in enumerate(indices, 1):
        encoded = dataset.encode(index)
        sample = sample_from_encoded(index, encoded, pair.adapter)
        num_targets = int((sample.targets_T != IGNORED).sum())
        if not num_targets:
            message = f"sample `{sample.id}` has no label token, so it has no loss"
            raise hinted(profile_error(message), "choose another with `--sample`")
        began = time.monotonic()
        files = list(_files(encoded))
        # First, as its errors name the sample and what was profiled.
        tiles = inputs_of(pair.adapter, sample, [(file, frames) for file, _, frames, _ in files])
        media = media_of(pair.adapter, files)
        try:
            expected = pair.own_loss(arguments_of(pair.adapter, sample, media), num_targets)
        except ImportError as error:
            why_not = f"transformers reads them with a package that is missing: {first_line(error)}"
            left_out[why_not] = left_out.get(why_not, 0) + 1
            continue
        # Whatever transformers finds wrong with what dflop made of the sample.
        except Exception as error:
            message = f"sample `{sample.id}`: transformers computes no loss of it: {first_line(error)}"
            raise profile_error(message) from error
        expected.backward()
        samples.append(sample)
        inputs.append(tiles)
        with torch.no_grad():
            loss = pair.packed_loss(samples[-1:], inputs[-1:])
        ids, why_not = processor.tokens(json.loads(dataset.messages(index)), media)
        if ids is None:
            notes[why_not] = notes.get(why_not, 0) + 1
            tokens = "-"
        else:
            tokens = difference(encoded.input_ids, ids) or "equal"
        sizes = dataset.shape(index)
        checked.append(
            SampleError(
                id=sample.id,
                kind=sample.kind,
                encoder_tokens=sizes[0],
                llm_tokens=sizes[1],
                label_tokens=sizes[2],
                expected_loss=float(expected.detach()) / num_targets,
                loss=float(loss) / num_targets,
                tokens=tokens,
            )
        )
        seconds = time.monotonic() - began
        size = f"{sample.kind}, {sizes[1]:,} LLM tokens"
        _say(f"sample {number} of {len(indices)} alone ({size}): {seconds:.0f} s")
    if not samples:
        message = f"no sample can be compared: {next(iter(left_out))}"
        raise profile_error(message)
    began = time.monotonic()
    pair.packed_loss(samples, inputs).backward()
    _say(f"all {len(samples)} packed into one microbatch: {time.monotonic() - began:.0f} s")
    expected_gradients = {n: _gradient(p) for n, p in pair.model.named_parameters()}
    gradients = {n: _gradient(p) for n, p in pair.parameters().items()}
    errors = errors_of(gradients, expected_gradients, tolerance)
    of = f"of {len(indices)} samples"
    said = [f"the tokens of {n} {of} were not compared: {why}" for why, n in notes.items()]
    said += [f"{n} {of} were left out: {why}" for why, n in left_out.items()]
    modules = by_module(errors, expected_gradients)
    if unreached := [module.module for module in modules if module.norm == 0 and module.error == 0]:
        said.append(
            f"no gradient reaches {len(unreached)} of {len(modules)} modules, so nothing was compared there: "
            f"the first is {unreached[0]}"
        )
    return Found(checked, modules, said)


def _of_recipe(recipe: str) -> list[str]:
    """That a recipe trains less than what was compared."""
    if recipe == "full":
        return []
    return [f"`train.recipe` is {recipe}: the whole model was compared, without adapters and nothing frozen"]


def _finite(value: Any) -> Any:
    """The same with null for what is no finite number, which JSON has not."""
    if isinstance(value, dict):
        return {name: _finite(each) for name, each in value.items()}
    if isinstance(value, list):
        return [_finite(each) for each in value]
    return None if isinstance(value, float) and not isfinite(value) else value


def _gradient(parameter: torch.nn.Parameter) -> torch.Tensor:
    """What no sample reaches has one of zero."""
    return torch.zeros_like(parameter) if parameter.grad is None else parameter.grad


def _files(encoded: Any) -> Iterator[tuple[MediaFile, str, Sequence[int], float | None]]:
    for medium in encoded.media:
        yield file_of(medium), medium.kind, medium.frame_indices, medium.sampled_fps


def _say(text: str) -> None:
    print(f"check: {text}", file=sys.stderr, flush=True)


def _lines(found: Mapping[str, Any]) -> Iterator[str]:
    """The result for people."""
    tolerance = found["tolerance"]
    weights = "weights as read" if found["weights"] == "read" else "random weights"
    yield f"{found['model']}, {found['llm_layers']} LLM layers, {weights}, float32 on the CPU"
    yield ""
    width = max(6, *(len(each["id"]) for each in found["samples"]))
    columns = f"{'kind':<12}{'encoder tokens':>15}{'LLM tokens':>12}{'labels':>8}{'tokens':>8}"
    yield f"{'sample':<{width}}  {columns}{'loss, transformers':>20}{'dflop':>12}{'apart by':>12}"
    for each in found["samples"]:
        is_known = each["tokens"] in {"equal", "-"}
        counts = f"{each['encoder_tokens']:>15,}{each['llm_tokens']:>12,}{each['label_tokens']:>8,}"
        losses = f"{each['expected_loss']:>20.6f}{each['loss']:>12.6f}{each['error']:>12.1e}"
        tokens = each["tokens"] if is_known else "differ"
        mark = _mark(each["error"], tolerance) if is_known else "  <--"
        yield f"{each['id']:<{width}}  {each['kind']:<12}{counts}{tokens:>8}{losses}{mark}"
        if not is_known:
            yield f"{'':<{width}}  dflop has {each['tokens']}"
    yield ""
    width = max(len(each["module"]) for each in found["modules"])
    yield f"{'gradient of':<{width}}{'parameters':>16}{'norm':>12}{'apart by':>12}"
    for each in found["modules"]:
        numbers = f"{each['num_parameters']:>16,}{each['norm']:>12.2e}{each['error']:>12.1e}"
        yield f"{each['module']:<{width}}{numbers}{_mark(each['error'], tolerance)}"
    yield ""
    yield from (f"note: {note}" for note in found["notes"])
    num = len(found["samples"])
    if found["equal"]:
        yield (
            f"equal within {tolerance:g}: {num} samples, packed by dflop and each alone by transformers, "
            "have the same losses and gradients"
        )
    else:
        yield f"NOT equal within {tolerance:g}: see the lines marked <--"


def _mark(error: float, tolerance: float) -> str:
    return "" if error <= tolerance else "  <--"
