"""Layers that `torch.compile` has compiled, each by itself (`train.compile: layers`).

    layer(states, ...) --layer.forward--> compiled [norm, q, k, v] -> attention as it is -> compiled [rest]

Layers of one kind share what is compiled: a model of 80 layers is compiled as fast as one of 2. Sizes are
symbols in it, so no microbatch is compiled anew for its shape; the exception is a size of 1, which PyTorch
takes for a constant. Parameters keep their names, and modules their classes: the forward alone is replaced.

Attention over packed samples is called and not compiled: it is one fused call on a GPU, and on a CPU a loop
over samples, which would be compiled for each number of them. Collectives between cut maps are not compiled
either.

Two ways to run a layer need its operators one by one, which compiled code does not have. There the layer runs
as it is: recomputation in mode `selective`, and the backward in two parts.
"""

from __future__ import annotations

import functools
import logging
from collections import Counter
from typing import TYPE_CHECKING, Any

import torch

from dflop.models.errors import hinted, profile_error
from dflop.models.packing import PACKED, PACKED_ENCODER, TokensOfSamples, packed_attention
from dflop.models.recompute import is_keeping, is_replaying
from dflop.models.split_backward import is_splitting

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from torch import nn

_LOG = logging.getLogger("dflop")

NONE, LAYERS = MODES = ("none", "layers")
"""Values of `train.compile`."""
RECOMPILATIONS_MAX = 32
"""So often PyTorch compiles one function anew. After that it runs what it has not compiled yet as it is."""
WARNED_FROM = 8
"""Fewer are usual, of any family: with and without gradients, of one row and of more, for each kind of
attention."""

_again: Counter[str] = Counter()
"""By kind of layer, how often a call has compiled anew after the first."""
_begun: set[str] = set()


def compile_layers(piece: nn.Module, layers: Iterable[nn.Module], backend: str = "inductor") -> None:
    """Compiles the forward of each layer, in place, when it first runs.

    Call it before `fully_shard`, so that what that adds to a layer stays outside. Hooks of modules inside a
    layer may come later.

    Args:
        piece: of the model; names the layers.
        layers: of the piece.
        backend: of `torch.compile`.
    """
    import torch._functorch.config as functorch
    from transformers import AttentionInterface

    # So that an error comes in the forward of a layer, where its name is known.
    functorch.force_non_lazy_backward_lowering = True
    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, RECOMPILATIONS_MAX)
    attention = torch.compiler.disable(packed_attention)
    for name in (PACKED, PACKED_ENCODER):
        AttentionInterface.register(name, attention)
    names = {id(module): name for name, module in piece.named_modules()}
    for layer in layers:
        forward: Any = _CompiledForward(layer, names.get(id(layer), type(layer).__name__), backend)
        layer.forward = forward


def recompilations() -> dict[str, int]:
    """How often this process has compiled layers again, after the first time.

    Returns:
        By kind of layer, its class; kinds that were compiled once are not in it.
    """
    return dict(_again)


class _CompiledForward:
    """The forward of one layer."""

    def __init__(self, layer: nn.Module, name: str, backend: str) -> None:
        self._layer, self._name, self._kind = layer, name, type(layer).__name__
        self._plain: Callable[..., Any] = layer.forward
        # One `torch.compile` a layer, of the same function: the code is shared.
        self._compiled: Callable[..., Any] = torch.compile(self._plain, dynamic=True, backend=backend)
        self._is_prepared = False

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if is_splitting():
            _tell_of_halves()
            return self._plain(*args, **kwargs)
        if is_keeping() or is_replaying():
            return self._plain(*args, **kwargs)
        if not self._is_prepared:
            self._prepare()
        tokens = kwargs.get("segment_tokens")
        if tokens is not None:
            kwargs["segment_tokens"] = TokensOfSamples(tokens)
        from torch._dynamo.exc import TorchDynamoException

        before = _num_graphs()
        try:
            result = self._compiled(*args, **kwargs)
        except TorchDynamoException as error:
            raise _named(self._name, error) from error
        if _num_graphs() != before:
            _note(self._kind)
        return result

    def _prepare(self) -> None:
        """Leaves hooks of modules inside the layer uncompiled: they send messages and keep state."""
        for module in self._layer.modules():
            if module is self._layer:
                continue
            for hooks in (module._forward_pre_hooks, module._forward_hooks):
                for key, hook in hooks.items():
                    hooks[key] = torch.compiler.disable(hook)
            if hasattr(module, "dealt_degree"):
                # It exchanges rows, as many as the router says.
                module.forward = torch.compiler.disable(module.forward)
        self._is_prepared = True


@functools.cache
def _tell_of_halves() -> None:
    """Says it once. Plans of estimates, and plans that are replayed, may have such microbatches."""
    _LOG.warning(
        "microbatches whose backward runs in two parts run their layers uncompiled (`train.compile`)"
    )


def _num_graphs() -> int:
    return torch._dynamo.utils.counters["stats"]["unique_graphs"]


def _note(kind: str) -> None:
    """Counts that a call of a layer compiled, and warns at each doubling."""
    if kind not in _begun:
        _begun.add(kind)
        return
    _again[kind] += 1
    count = _again[kind]
    if count >= WARNED_FROM and count & (count - 1) == 0:
        _LOG.warning(
            "layers of kind `%s` were compiled again %d times, last since %s. Each time takes seconds, and "
            "after %d times PyTorch runs what is new uncompiled; `train.compile: none` compiles nothing",
            kind,
            count,
            _last_reason(),
            RECOMPILATIONS_MAX,
        )


def _last_reason() -> str:
    """Which assumption of the compiled code did not hold, as PyTorch has it."""
    failures = [reasons[-1] for reasons in torch._dynamo.utils.guard_failures.values() if reasons]
    if not failures:
        return "an assumption did not hold"
    last = failures[-1]
    return "`" + " ".join(str(getattr(last, "reason", last)).split()) + "` did not hold"


def _named(name: str, error: Exception) -> Exception:
    """The error of a layer that cannot be compiled."""
    cause = getattr(error, "inner_exception", error)
    lines = (line.strip() for line in str(cause).splitlines())
    reason = f"{type(cause).__name__}: {next((line for line in lines if line), 'no reason given')}"
    hint = "`train.compile: none` trains without compiling"
    if "compiler" in reason.lower():
        hint = f"install a C++ compiler (`g++`), which `torch.compile` needs; {hint}"
    return hinted(profile_error(f"layer `{name}` cannot be compiled: {reason}"), hint)
