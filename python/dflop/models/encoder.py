"""The encoder that ranks hold: parts of Hugging Face's model under their own names, run as the family says.

    inputs_N, media --Encoder--> features_ED

Its layers may be split into runs, each on ranks of its own:

    inputs_N, media --first run--> hidden_RU --next run--> hidden_RU ... --last run--> features_ED

Shape letters: see `adapter.py`; R rows of all media (encoder tokens), U values of a row between two runs.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import nn

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from dflop.models.adapter import EncoderInput, MediaGrid


@dataclass(frozen=True)
class EncoderRun:
    """Consecutive layers of the encoder."""

    first_layer: int
    """From 0."""
    end_layer: int
    """The number after its last layer."""
    num_layers: int
    """How many layers of the whole encoder a forward runs."""

    @property
    def is_first(self) -> bool:
        """Whether it begins at the inputs, with the modules before the layers."""
        return self.first_layer == 0

    @property
    def is_last(self) -> bool:
        """Whether it ends with the features: it then has the modules after the layers, as the projector."""
        return self.end_layer == self.num_layers


def numbered(layers: Any) -> list[tuple[int, Any]]:
    """The layers that a module holds, each with its number in the whole tower.

    Args:
        layers: Hugging Face's list; or, in a run of layers, a dictionary by number.

    Returns:
        (number, layer), in order.
    """
    if isinstance(layers, nn.ModuleDict):
        return [(int(number), layer) for number, layer in layers.items()]
    return list(enumerate(layers))


def cut_to(
    part: nn.Module,
    run: EncoderRun,
    layers: nn.ModuleList,
    before: Sequence[nn.Module],
    numbers: range | None = None,
) -> None:
    """Removes from a part of the model, in place, all that does not belong to a run of its layers.

    Layers keep their names. The last run also has the layers that no forward runs, and all modules after the
    layers.

    Args:
        part: As `modules_of` gives it.
        run: What to keep.
        layers: All layers of its tower.
        before: Modules before the layers, which turn inputs into hidden states.
        numbers: Of the layers to keep, where they are not those of the run: a second tower.
    """
    if numbers is None:
        numbers = range(run.first_layer, len(layers) if run.is_last else run.end_layer)
    kept = {str(number): layers[number] for number in numbers}
    in_front = {id(p) for module in before for p in module.parameters()}
    in_layers = {id(p) for layer in layers for p in layer.parameters()}
    _prune(part, layers, kept, in_layers, lambda p: run.is_first if id(p) in in_front else run.is_last)


def _prune(
    module: nn.Module,
    layers: nn.ModuleList,
    kept: dict[str, nn.Module],
    in_layers: set[int],
    is_kept: Callable[[nn.Parameter], bool],
) -> None:
    """Removes parameters for which `is_kept` is false, modules left empty, and layers that are not `kept`."""
    for name, parameter in list(module.named_parameters(recurse=False)):
        if id(parameter) not in in_layers and not is_kept(parameter):
            del module._parameters[name]
    for name, child in list(module.named_children()):
        if child is layers:
            # A dictionary, since the keys of a list would start at 0 in every run.
            setattr(module, name, nn.ModuleDict(kept))
            continue
        had_any = any(True for _ in child.parameters())
        _prune(child, layers, kept, in_layers, is_kept)
        # A module that has only buffers, such as a rotary embedding, stays: all runs may use it.
        if had_any and not any(True for _ in child.parameters()):
            del module._modules[name]


def modules_of(source: nn.Module, names: Sequence[str]) -> nn.Module:
    """Some modules and parameters of `source`, under the names that they have in it.

    Args:
        source: a module.
        names: paths below it, for example `multi_modal_projector`.

    Returns:
        A module that has these and nothing else; they are shared with `source`.
    """
    part = nn.Module()
    for name in names:
        owner, found = part, source
        *path, last = name.split(".")
        for step in path:
            found = getattr(found, step)
            if not hasattr(owner, step):
                setattr(owner, step, nn.Module())
            owner = getattr(owner, step)
        setattr(owner, last, getattr(found, last))
    return part


class RunsEncoder(Protocol):
    """The part of a `FamilyAdapter` that the encoder needs."""

    @property
    def encoder_modules(self) -> Sequence[str]:
        """See `FamilyAdapter.encoder_modules`."""
        ...

    @property
    def feature_width(self) -> int:
        """See `FamilyAdapter.feature_width`."""
        ...

    def encode_run(
        self, model: Any, batch: EncoderInput, run: EncoderRun, incoming_RU: torch.Tensor | None
    ) -> torch.Tensor:
        """See `FamilyAdapter.encode_run`."""
        ...

    def row_width(self, layer: int) -> int:
        """See `FamilyAdapter.row_width`."""
        ...

    def encoder_run(self, layers: range | None) -> EncoderRun:
        """See `FamilyAdapter.encoder_run`."""
        ...

    def layers_in_order(self, model: Any) -> list[nn.Module]:
        """See `FamilyAdapter.layers_in_order`."""
        ...

    def idle_media(self, media: Sequence[MediaGrid]) -> list[MediaGrid]:
        """See `FamilyAdapter.idle_media`."""
        ...


class Encoder(nn.Module):
    """The encoder with its projector, or a run of its layers; parameters have the whole model's names."""

    def __init__(self, whole: nn.Module, family: RunsEncoder, run: EncoderRun | None = None) -> None:
        super().__init__()
        self.model = modules_of(whole.get_submodule("model"), family.encoder_modules)
        self.family = family
        self.run = run or family.encoder_run(None)
        self.runs_all_layers = False
        """Whether each forward with inputs must run every layer, as where ranks meet in each of them."""

    def layers_in_order(self) -> list[nn.Module]:
        """Its layers, in the order in which a forward runs them."""
        return self.family.layers_in_order(self.model)

    def forward(self, batch: EncoderInput, incoming_RU: torch.Tensor | None = None) -> torch.Tensor:
        """Features of all media, one after the other; hidden states where other layers follow.

        Args:
            batch: what the encoder reads, and the media it belongs to.
            incoming_RU: hidden states from the run before; none for the first.

        Returns:
            features_ED: [E, D], or hidden_RU, dtype of the parameters; no rows, without running anything,
                when there are no inputs.

        Raises:
            ValueError: a medium gives another number of features than its `num_features`.
        """
        if sum(grid.num_inputs for grid in batch.media) == 0:
            # The result depends on one small parameter, so that the caller can run backward: the gradient is
            # zeros.
            smallest = min(self.parameters(), key=lambda p: (not p.requires_grad, p.numel()))
            family, run = self.family, self.run
            width = family.feature_width if run.is_last else family.row_width(run.end_layer)
            none = smallest.new_zeros(0, width) + smallest.reshape(-1)[:0].sum()
            return none if incoming_RU is None else none + incoming_RU.sum()
        outgoing = self._run(batch, incoming_RU)
        if not self.run.is_last:
            return outgoing
        expected = sum(grid.num_features for grid in batch.media)
        if outgoing.shape[0] != expected:
            found = outgoing.shape[0]
            message = (
                f"the encoder gave {found} features of {len(batch.media)} media, {expected} were expected"
            )
            raise ValueError(message)
        return outgoing

    def _run(self, batch: EncoderInput, incoming_RU: torch.Tensor | None) -> torch.Tensor:
        idle = self.family.idle_media(batch.media) if self.runs_all_layers else []
        if not idle:
            return self.family.encode_run(self.model, batch, self.run, incoming_RU)
        inputs_N = batch.inputs_N
        zeros = inputs_N.new_zeros(sum(grid.num_inputs for grid in idle), *inputs_N.shape[1:])
        filled = replace(batch, inputs_N=torch.cat([inputs_N, zeros]), media=[*batch.media, *idle])
        features_ED = self.family.encode_run(self.model, filled, self.run, incoming_RU)
        # Nothing reads those of `idle`, so their layers get gradients of zero.
        return features_ED[: -sum(grid.num_features for grid in idle)]
