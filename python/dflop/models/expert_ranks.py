"""Experts dealt out over ranks (expert parallelism): each rank of a group has some experts of a layer, whole.

    rows_TD, experts chosen by each --a row for each choice, by expert--> [S, D]
      --to the ranks that have them--> [R, D] --own experts, as transformers runs them--> [R, D]
      --back--> [S, D] --times its weight, summed over the choices--> [T, D]

Shape letters: T tokens of this rank, K experts that a token reads, S = T x K, R rows that this rank's experts
read, E experts of the layer, G ranks of the group, D width. Router, weights and sum stay on the token's rank.
A backward exchanges the gradients in the same way, and a layer that recomputes exchanges its rows again. So
the ranks of a group meet in each layer: each of them runs it, if only with no rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import torch

from dflop.models.errors import hinted, profile_error
from dflop.models.experts import experts_field, experts_path, has_experts, num_experts
from dflop.models.tensor import Slice, take_slice

if TYPE_CHECKING:
    from collections.abc import Iterable

    from torch import nn

    from dflop.models.sums import Sums


@dataclass(frozen=True)
class ExpertRank:
    """Among how many ranks experts are dealt out, and which of them this one is."""

    degree: int = 1
    """Ranks of an expert group; 1: each rank has all experts."""
    rank: int = 0
    """This rank's position in its group, from 0."""


ALL_EXPERTS = ExpertRank()
"""A rank that has all experts."""


def deal_experts(layers: Iterable[nn.Module], text: Any, dealt: ExpertRank) -> None:
    """Leaves each layer that has experts those of one rank: of E experts the E / degree from E rank / degree.

    Args:
        layers: of the backbone, changed in place; on any device.
        text: configuration of the backbone.
        dealt: whose experts.

    Raises:
        ProfileError: the backbone has no experts, or their number cannot be dealt out evenly.
    """
    if dealt.degree == 1:
        return
    again = "plan again with `--only llm.ep=1`"
    if not has_experts(text):
        message = f"a backbone of `{text.model_type}` has no experts to deal out over {dealt.degree} ranks"
        raise hinted(profile_error(message), again)
    count = num_experts(text)
    if count % dealt.degree:
        message = (
            f"`text_config.{experts_field(text)}` is {count}, must be a multiple of the expert parallel "
            f"degree {dealt.degree}"
        )
        raise hinted(profile_error(message), again)
    own = count // dealt.degree
    for layer in layers:
        experts = _module(layer, experts_path(text))
        # The first layers of some backbones have an MLP there.
        if not hasattr(experts, "num_experts"):
            continue
        for kind, parameter in list(experts.named_parameters(recurse=False)):
            take_slice(experts, kind, Slice(0, tuple(parameter.shape), ((dealt.rank * own, own),)))
        experts.num_experts = own
        experts.dealt_degree = dealt.degree


def _module(layer: nn.Module, path: str) -> Any:
    owner, _, name = path.rpartition(".")
    return getattr(layer.get_submodule(owner), name, None)


def dealt_experts(layer: nn.Module) -> nn.Module | None:
    """The experts of a layer.

    Args:
        layer: of a backbone.

    Returns:
        The module that `deal_experts` has changed; none where the layer has no experts, or all.
    """
    return next((module for module in layer.modules() if hasattr(module, "dealt_degree")), None)


def add_exchange(piece: nn.Module, sums: Sums) -> None:
    """Makes dealt experts give what all experts of a layer would.

    Args:
        piece: holds layers that `deal_experts` has changed.
        sums: over the ranks of the expert group, whose position is that of `ExpertRank`. All of them must run
            the same layers, forward and backward, each with its own rows, or none.
    """
    for module in piece.modules():
        if hasattr(module, "dealt_degree"):
            cast("Any", module).forward = _DealtForward(module, sums)


def no_rows(experts: nn.Module, passed: torch.Tensor) -> torch.Tensor:
    """Takes part in what the ranks of a group do in a layer, with no rows of this rank.

    Args:
        experts: dealt out.
        passed: a number of what ran before; a gradient goes back to it.

    Returns:
        The same number.
    """
    width = next(p.shape[-1] for name, p in experts.named_parameters() if name == "gate_up_proj")
    # Of the same graph as what ran before, so that layers meet in their order in the backward, too.
    rows = passed.reshape(1, 1).expand(1, width)[:0]
    ids = torch.empty(0, 1, dtype=torch.int64, device=passed.device)
    return passed + experts(rows, ids, rows[:, :1]).sum()


class _Exchange(torch.autograd.Function):
    """Rows to the ranks that they are for; the backward brings their gradients back."""

    @staticmethod
    def forward(
        ctx: Any, rows: torch.Tensor, sums: Sums, sent: list[int], received: list[int]
    ) -> torch.Tensor:
        ctx.sums, ctx.sent, ctx.received = sums, sent, received
        return sums.exchange(rows, sent, received)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        return ctx.sums.exchange(gradients[0], ctx.received, ctx.sent), None, None, None


class _DealtForward:
    """The forward of experts that are dealt out, in place of their own."""

    def __init__(self, experts: nn.Module, sums: Sums) -> None:
        self._experts: Any = experts
        self._own: Any = experts.forward
        self._sums = sums

    def __call__(
        self, hidden_TD: torch.Tensor, index_TK: torch.Tensor, weights_TK: torch.Tensor
    ) -> torch.Tensor:
        num_tokens, num_chosen = index_TK.shape
        own, degree = self._experts.num_experts, self._experts.dealt_degree
        parameters = list(self._experts.parameters())
        chosen_S = index_TK.reshape(-1)
        by_expert_S = chosen_S.argsort(stable=True)
        # Not by `bincount`, which waits for the device: it asks how many it must count.
        counts = chosen_S.new_zeros(degree * own).index_add_(0, chosen_S, torch.ones_like(chosen_S))
        counts_GE = counts.view(degree, own)
        # Of each rank, how many rows it has for each expert of this one.
        held_GE = self._sums.exchange(counts_GE, [1] * degree, [1] * degree)
        sent, received = torch.stack([counts_GE.sum(1), held_GE.sum(1)]).tolist()
        # Those of other ranks bring gradients even where nothing trains that this rank's rows come from.
        if torch.is_grad_enabled() and not hidden_TD.requires_grad:
            hidden_TD = hidden_TD.detach().requires_grad_()
        # As the weights are: a rank without rows must know the type of those that come.
        rows_SD = hidden_TD.index_select(0, by_expert_S // num_chosen).to(parameters[0].dtype)
        rows_RD = _Exchange.apply(rows_SD, self._sums, sent, received)
        if rows_RD.shape[0]:
            experts = torch.arange(own, device=rows_RD.device).repeat(degree)
            own_R = experts.repeat_interleave(held_GE.reshape(-1), output_size=rows_RD.shape[0])
            made_RD = self._own(rows_RD, own_R[:, None], rows_RD.new_ones(rows_RD.shape[0], 1))
        else:
            # Each trained parameter gets a gradient, of zeros, as on the ranks with the same experts.
            made_RD = rows_RD + sum(p.reshape(-1)[:0].sum() for p in parameters)
        made_SD = _Exchange.apply(made_RD, self._sums, received, sent)
        place_S = torch.empty_like(by_expert_S)
        place_S[by_expert_S] = torch.arange(place_S.shape[0], device=place_S.device)
        made_TKD = made_SD.index_select(0, place_S).view(num_tokens, num_chosen, hidden_TD.shape[1])
        return (made_TKD * weights_TK[..., None]).sum(1).to(hidden_TD.dtype)
