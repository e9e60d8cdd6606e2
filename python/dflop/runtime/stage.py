"""One stage of one component: forward and backward of a microbatch, with what backward needs kept in between.

    encoder      EncoderInput           --F--> features_ED     gradient of features_ED --B--> nothing
      with several stages, each but the last gives hidden_RU instead, and each but the first takes them
    LLM, first   LlmInput, features_ED  --F--> hidden_TD       gradient of hidden_TD   --B--> of features_ED
    LLM, middle  LlmInput, hidden_TD    --F--> hidden_TD       gradient of hidden_TD   --B--> of hidden_TD
    LLM, last    LlmInput, hidden_TD    --F--> loss share      nothing                 --B--> of hidden_TD

Where ranks meet in each action (ZeRO-3, dealt experts), F and B also run for a microbatch without samples
(`parallel/nothing.py`). B may run in two parts: I gives the same gradient as B, and keeps what the gradients
of the weights need; W computes those.

A tensor that comes in is a leaf of a new autograd graph: no graph crosses ranks.

Of ranks that share the encoder's layers the first alone has what the encoder reads. It sends that to the
others at the start of the forward, by a broadcast of the group, whose ranks meet in each layer anyway.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, TypeVar

import torch

from dflop.models.adapter import EncoderInput, LlmInput
from dflop.models.recompute import NONE, recomputing
from dflop.models.split_backward import BackwardSplitter, WeightQueue
from dflop.models.sums import Sums
from dflop.parallel.shard import layers_of
from dflop.runtime.failure import talking
from dflop.runtime.losses import sums_by_sample

if TYPE_CHECKING:
    from torch import nn

    from dflop.parallel.nothing import NothingPass

Batch = TypeVar("Batch", EncoderInput, LlmInput)


def to_device(batch: Batch, device: torch.device, is_copied: bool = False) -> Batch:
    """The batch with its tensors on `device`. The copy may still be under way when this returns.

    Args:
        batch: On the CPU or the device.
        device: Of this rank.
        is_copied: Whether to copy tensors that are on the device already, too.

    Returns:
        The same batch there.
    """
    moved = {
        field.name: value.to(device, non_blocking=True, copy=is_copied)
        for field in fields(batch)
        if isinstance(value := getattr(batch, field.name), torch.Tensor)
    }
    return replace(batch, **moved)


@dataclass(frozen=True)
class _InFlight:
    """A microbatch between its forward and its backward."""

    incoming: torch.Tensor | None
    outgoing: torch.Tensor
    is_split: bool


class Stage:
    """This rank's piece of the model at work."""

    def __init__(
        self,
        module: nn.Module,
        is_last: bool,
        device: torch.device,
        nothing: NothingPass | None = None,
        *,
        gives_features: bool = True,
        needs_gradient: bool = True,
        recompute: str = NONE,
        sums: Sums | None = None,
    ) -> None:
        """No microbatch is in flight.

        Args:
            module: The piece, on `device`, as the adapter built it.
            is_last: Whether it ends in the loss.
            device: Of this rank.
            nothing: What to run for a microbatch without samples where ranks meet in each action; else none.
            gives_features: Whether it is the last stage of the encoder; not used in the LLM.
            needs_gradient: Whether anything before this stage trains. If not, what goes back is one row of
                zeros, as `boundary.stage_transfers` has it.
            recompute: What the layers recompute, as `recompute.modes_of` has it, in microbatches that say
                nothing else.
            sums: Of the ranks that share its layers; none: this rank has them whole.
        """
        self.module = module
        self._sums = Sums(None) if sums is None else sums
        self._gives_features = gives_features
        self._needs_gradient = needs_gradient
        self._nothing = nothing
        self._recompute = recompute
        self._layers = layers_of(module)
        self._is_last = is_last
        self._device = device
        self._splitter = BackwardSplitter(module)
        self._in_flight: dict[int, _InFlight] = {}
        self._weights: dict[int, WeightQueue] = {}
        self.copies_inputs = False
        """Whether to copy even inputs that are on the device already, so that their memory is counted."""
        self._losses: list[torch.Tensor] = []
        self._sample_losses: dict[int, torch.Tensor] = {}

    def begin(self) -> None:
        """Starts a step."""
        assert not self._in_flight, "every forward had its backward"
        assert not self._weights, "every I had its W"
        self._losses = []
        self._sample_losses = {}

    @property
    def sample_losses(self) -> dict[int, list[float]]:
        """By microbatch, the loss of each of its samples, summed over label tokens; of the last stage only.

        Read it after the step: it waits for the device.
        """
        if not self._sample_losses:
            return {}
        sizes = [len(losses) for losses in self._sample_losses.values()]
        found = torch.cat(list(self._sample_losses.values())).cpu().split(sizes)
        return dict(zip(self._sample_losses, (losses.tolist() for losses in found), strict=True))

    @property
    def loss(self) -> float:
        """This rank's share of the loss since `begin`, divided by the label tokens of the global batch."""
        return sum(torch.stack(self._losses).tolist()) if self._losses else 0.0

    def forward(
        self,
        microbatch: int,
        batch: EncoderInput | LlmInput,
        incoming_RD: torch.Tensor | None,
        label_tokens: int,
        is_split: bool = False,
        recompute: str | None = None,
    ) -> torch.Tensor | None:
        """Runs the stage on one microbatch; under `torch.no_grad` nothing is kept for a backward.

        Args:
            microbatch: Its number, for `backward`.
            batch: Its samples, on the CPU or the device; on the meta device what another rank sends.
            incoming_RD: What came from the stage above, [R, D], on the device; none for the encoder's first.
            label_tokens: Of the whole global batch, at least 1.
            is_split: Whether its backward will run as I and W.
            recompute: What the layers recompute in this microbatch; none: what the stage was made with.

        Returns:
            What leaves this stage, [R, D], detached; none from the last stage of the LLM.

        Raises:
            ValueError: The encoder gave another number of rows than the samples have places for.
        """
        if incoming_RD is not None:
            incoming_RD.requires_grad_(self._needs_gradient)
        # The backward runs what the forward noted: the layers are changed for the forward alone.
        with self._splitting(is_split), recomputing(self._layers, self._mode(recompute)):
            moved = self._moved(batch)
            outgoing = self.module(moved) if incoming_RD is None else self.module(moved, incoming_RD)
        if isinstance(batch, EncoderInput) and self._gives_features:
            expected = sum(media.num_features for media in batch.media)
            if outgoing.shape[0] != expected:
                found = outgoing.shape[0]
                message = f"the encoder gave {found} feature rows, the samples have places for {expected}"
                raise ValueError(message)
        if self._is_last:
            outgoing = outgoing / label_tokens
            rows_K = getattr(self.module, "row_losses_K", None)
            if rows_K is not None and isinstance(batch, LlmInput):
                self._sample_losses[microbatch] = sums_by_sample(rows_K, batch)
        if torch.is_grad_enabled():
            self._in_flight[microbatch] = _InFlight(incoming_RD, outgoing, is_split)
        elif self._is_last:
            self._losses.append(outgoing)
        return None if self._is_last else outgoing.detach()

    def backward(self, microbatch: int, gradient_RD: torch.Tensor | None) -> torch.Tensor | None:
        """Runs backward through what `forward` left; parameters add their gradients to `.grad`.

        If the forward was called with `is_split`, this is I: gradients of the weights wait for `weights`.

        Args:
            microbatch: As given to `forward`.
            gradient_RD: Gradient of what left this stage, [R, D]; none for the last stage.

        Returns:
            Gradient of what came in, [R, D]; [1, D] zeros where nothing before this stage trains; none for
            the encoder's first stage.
        """
        kept = self._in_flight.pop(microbatch)
        if kept.outgoing.requires_grad:
            # Layers that recompute run their forward again in this backward: it must be split like the first.
            with self._splitting(kept.is_split) as queue:
                torch.autograd.backward(kept.outgoing, gradient_RD)
            if queue is not None:
                self._weights[microbatch] = queue.take()
        if self._is_last:
            # The loss is read later. Reading it here would wait for this backward on a GPU, and the gradient
            # would be sent only after that.
            self._losses.append(kept.outgoing.detach())
        incoming = kept.incoming
        if incoming is None:
            return None
        if not self._needs_gradient:
            return torch.zeros_like(incoming[:1])
        return torch.zeros_like(incoming) if incoming.grad is None else incoming.grad

    def pass_by(self, takes_gradient: bool, microbatch: int, recompute: str | None = None) -> None:
        """Takes part in an action of which this rank has no sample, where ranks meet in each action.

        Args:
            takes_gradient: Whether it is a backward.
            microbatch: Its number.
            recompute: What the layers recompute in this microbatch; none: what the stage was made with.
        """
        if self._nothing is None:
            return
        if not takes_gradient:
            passed = self._nothing.forward(self._mode(recompute))
            if torch.is_grad_enabled():
                self._in_flight[microbatch] = _InFlight(None, passed, is_split=False)
            return
        passed = self._in_flight.pop(microbatch).outgoing
        if passed.requires_grad:
            passed.backward()

    def weights(self, microbatch: int) -> None:
        """Runs W: adds to `.grad` the weights' gradients that I has left, and frees what they needed."""
        queue = self._weights.pop(microbatch, None)
        if queue is not None:
            queue.flush()

    def _mode(self, recompute: str | None) -> str:
        """What the layers recompute in a microbatch; nothing where no backward comes."""
        return recompute or self._recompute if torch.is_grad_enabled() else NONE

    def _moved(self, batch: EncoderInput | LlmInput) -> EncoderInput | LlmInput:
        if not isinstance(batch, EncoderInput):
            return to_device(batch, self._device, self.copies_inputs)
        inputs_N = batch.inputs_N
        if inputs_N.is_meta:
            moved = replace(batch, inputs_N=torch.empty_like(inputs_N, device=self._device))
        else:
            moved = to_device(batch, self._device, self.copies_inputs)
        # Later stages of the encoder read none, on no rank of the group.
        if self._sums.is_silent or inputs_N.numel() == 0:
            return moved
        # A broadcast goes by the order in memory, and what receives it has the usual one.
        moved = replace(moved, inputs_N=moved.inputs_N.contiguous())
        with talking("share what the encoder reads"):
            self._sums.spread(moved.inputs_N)
        return moved

    def _splitting(self, is_split: bool) -> AbstractContextManager[WeightQueue | None]:
        # Splitting has a cost, so it is on only for such microbatches; else layers run as PyTorch has them.
        return self._splitter.splitting() if is_split else nullcontext()
