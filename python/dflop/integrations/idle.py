"""A pass through modules without any input, so that other ranks do not wait for this rank in vain.

FSDP gathers a module's parameters when it is called, and sums its gradients when its backward has run; DDP
waits for the gradient of each parameter. A rank with nothing to compute must take part in both. So it calls
every module in its turn; each hands on one number, zero, that depends on every parameter.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import nn
from torch.distributed.tensor import DTensor

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable

    import torch


def depend(token: torch.Tensor, parameters: Iterable[nn.Parameter]) -> torch.Tensor:
    """`token`, as a function of each parameter that trains and is whole on this rank.

    Args:
        token: a number.
        parameters: shards (DTensor) among them are passed over: FSDP makes them whole where they are used.

    Returns:
        The same number.
    """
    for parameter in parameters:
        if parameter.requires_grad and not isinstance(parameter, DTensor):
            # Nothing of it: the sum is zero whatever the values, and so is each gradient.
            token = token + parameter.reshape(-1)[:0].sum().to(token.dtype)
    return token


def reached(result: torch.Tensor) -> set[int]:
    """`id` of each parameter that `result` is a function of.

    Args:
        result: of a computation whose graph is kept.

    Returns:
        None that are hidden in a checkpoint that enters autograd again.
    """
    found: set[int] = set()
    seen: set[Any] = set()
    waiting: list[Any] = [result.grad_fn]
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        variable = getattr(node, "variable", None)
        if variable is not None:
            found.add(id(variable))
        waiting.extend(child for child, _ in node.next_functions)
    return found


def pass_children(
    module: nn.Module,
    token: torch.Tensor,
    unread: Collection[nn.Module] = (),
    first: Collection[nn.Module] = (),
) -> torch.Tensor:
    """`token`, after each module inside `module` was called in the order of its registration.

    The module's own hooks are the caller's: call this where its `forward` would run.

    Args:
        module: of which nothing is computed.
        token: a number.
        unread: modules inside it whose results nobody reads on other ranks. They are called, and what they
            hand on is not read here either: FSDP gathers them in the forward and has no backward of them.
        first: children of the module that its `forward` calls before all others, in that order, where they
            are not registered so. What layers read then has a gradient here as on other ranks, or has none.

    Returns:
        The same number, a function of each parameter that trains, if it is whole or its module is read.
    """
    inner = [m for m in module.modules() if m is not module]
    before: list[tuple[nn.Module, dict[str, Any]]] = []
    try:
        for m in inner:
            changed: dict[str, Any] = {"forward": _hand_on(m, unread)}
            # A recomputation would call the real forward; there is nothing to save here.
            if getattr(m, "gradient_checkpointing", False):
                changed["gradient_checkpointing"] = False
            before.append((m, {name: m.__dict__[name] for name in changed if name in m.__dict__}))
            m.__dict__.update(changed)
        token = _hand_on(module, unread, first)(token)
        return depend(token, [p for m in unread for p in m.parameters()])
    finally:
        for m, old in before:
            for name in ("forward", "gradient_checkpointing"):
                if name in old:
                    m.__dict__[name] = old[name]
                elif name == "forward":
                    del m.__dict__[name]


def pass_module(module: nn.Module, token: torch.Tensor) -> torch.Tensor:
    """As `pass_children`, through the module's own hooks too.

    Args:
        module: of which nothing is computed.
        token: a number.

    Returns:
        The same number, a function of each parameter that trains.
    """
    old = module.__dict__.get("forward")
    module.__dict__["forward"] = lambda number: pass_children(module, number)
    try:
        return module(token)
    finally:
        if old is None:
            del module.__dict__["forward"]
        else:
            module.__dict__["forward"] = old


def _hand_on(
    module: nn.Module, unread: Collection[nn.Module] = (), first: Collection[nn.Module] = ()
) -> Callable[..., torch.Tensor]:
    def forward(token: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
        token = depend(token, module.parameters(recurse=False))
        others = [child for child in module.children() if not any(child is one for one in first)]
        for child in [*first, *others]:
            if isinstance(child, nn.ParameterDict | nn.ParameterList):
                # PyTorch lets nobody call them; adapters of peft hold some.
                token = depend(token, child.parameters())
                continue
            passed = child(token)
            token = token if any(child is one for one in unread) else passed
        # A number of its own: the hooks that FSDP puts on the results of a module and of its last child would
        # run in the order of their registration, the child's first.
        return token.clone()

    return forward
