"""The second line: all data-parallel ranks encode the media of a microbatch, each as much as the others.

The model's own code runs on, before and after its tower; only the tower's `forward` reads other rows
(`shared_tower.py`). A rank with media of fewer kinds than others (text alone, images where others have
videos) takes part without a row, in the same place, so that all ranks make the same calls in forward and
backward.
A model with two towers (pictures and sounds) has the work of each shared out.

`attend_encoder` is the same without sharing: each rank encodes its own media, and one without any meets the
others.
"""

from __future__ import annotations

from contextlib import contextmanager
from functools import partial
from inspect import signature
from typing import TYPE_CHECKING, Any

from torch import distributed
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint
from transformers.modeling_layers import GradientCheckpointingLayer

from dflop.integrations.encoder_families import find_families
from dflop.integrations.shared_tower import Ranks, SharedTower

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    import torch
    from torch import nn
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh

    from dflop.integrations.encoder_tiles import TileTower

_HANDLE = "_dflop_encoder"
"""Under this name a tower keeps its `BalancedEncoder`."""


class BalancedEncoder:
    """A model in whose encoder all ranks meet; made by `balance_encoder`, or by `attend_encoder`.

    Attributes:
        loads: predicted work of each rank in the last call of a tower, and what it was without sharing:
            two lists, in the unit of the cost. Empty of `attend_encoder`.
    """

    def __init__(
        self,
        model: nn.Module,
        group: ProcessGroup | DeviceMesh | None,
        cost: Callable[[int], float] | None,
        *,
        is_shared: bool = True,
    ) -> None:
        """See `balance_encoder`, and `attend_encoder` where it is not shared."""
        _check_shards(model)
        families = find_families(model)
        self._families = families
        if is_shared:
            _leave_alone(families)
        self._model: Any = families[0].model
        self.is_shared = is_shared
        # Trainers shard a model after this line.
        self._is_checked = False
        # It may be under DDP and recompute its layers after this line, and be evaluated first.
        self._is_checked_in_ddp = False
        is_alone = not distributed.is_available() or not distributed.is_initialized()
        self._ranks = Ranks(None if is_alone else distributed.group.WORLD if group is None else group)
        self.loads: tuple[list[float], list[float]] = ([], [])
        # The calls of towers in a forward of the model, in its order: the method, and which tower it calls.
        # Without a method the model's own forward calls the tower.
        self._calls: list[tuple[str | None, SharedTower]] = []
        self._next_call = 0
        self._is_in_method = False
        self._is_evaluating = False
        self._is_paused = False
        # accelerate copies a model where it compiles layers one by one. The copy knows whether it is trained.
        self._running: nn.Module = self._model
        self._token: torch.Tensor | None = None
        self._hooks: list[Any] = []
        self._replaced: list[tuple[Any, str]] = []
        for family in families:
            self._wrap(family, cost)
        for position, (name, _) in enumerate(self._calls):
            if name is not None:
                self._stand_in(self._model, name, self._call_method, position, getattr(self._model, name))
        self._hooks.append(self._model.register_forward_pre_hook(self._begin))
        self._backbone = getattr(self._model, families[0].backbone)
        self._end_hook = self._backbone.register_forward_pre_hook(self._end, with_kwargs=True, prepend=True)
        self._hooks.append(self._end_hook)

    def remove(self) -> None:
        """The model is as before."""
        for hook in self._hooks:
            hook.remove()
        for owner, name in self._replaced:
            del owner.__dict__[name]
        self._hooks, self._replaced = [], []

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """Within it ranks meet in the encoder in evaluation mode too, so that text alone hangs nobody there.

        Every rank must call the model equally often within it, as FSDP demands of a sharded model anyway.
        Each rank encodes its own media. The line of transformers does it for `trainer.evaluate`.
        """
        was, self._is_evaluating = self._is_evaluating, True
        try:
            yield
        finally:
            self._is_evaluating = was

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Within it the model is as before, in training mode too: ranks need not call it equally often.

        Trainers that generate do so in training mode. The line of transformers does it for them.
        """
        was, self._is_paused = self._is_paused, True
        try:
            yield
        finally:
            self._is_paused = was

    def _wrap(self, family: TileTower, cost: Callable[[int], float] | None) -> None:
        shared = SharedTower(family, self._ranks, cost)
        if handle_of(shared.tower) is not None:
            message = "the encoder of this model is shared out already"
            raise ValueError(message)
        # No closures: a copy of the model would share them, and compute with the weights of this one.
        self._stand_in(shared.tower, "forward", self._forward, shared)
        self._replace(shared.tower, _HANDLE, self)
        self._calls += [(name, shared) for name in family.methods or (None,)]

    def _forward(self, shared: SharedTower, *args: Any, **kwargs: Any) -> Any:
        """What stands in for the `forward` of a tower."""
        if not self._is_on:
            return shared.as_it_was(*args, **kwargs)
        self._next_call += 1
        if not self.is_shared or not self._running.training:
            output, token = shared.accompany(*args, **kwargs)
            self._keep(token)
            return output
        output, loads = shared.encode(*args, **kwargs)
        self.loads = self.loads if loads is None else loads
        return output

    def _stand_in(self, owner: Any, name: str, method: Any, *first: Any) -> None:
        """Has `method`, given `first`, called in place of the owner's method of that name."""
        call: Any = partial(method, *first)
        # `generate` of transformers gives a method what its signature names.
        call.__signature__ = signature(getattr(owner, name))
        self._replace(owner, name, call)

    def _replace(self, owner: Any, name: str, value: Any) -> None:
        owner.__dict__[name] = value
        self._replaced.append((owner, name))

    @property
    def _is_on(self) -> bool:
        # Outside of training ranks need not call the model equally often, unless who evaluates says so.
        is_met = not self._is_paused and (self._running.training or self._is_evaluating)
        return self._ranks.count > 1 and is_met

    def _begin(self, model: nn.Module, _: Any) -> None:
        self._running = model
        if not self._is_checked:
            _check_shards(self._model)
            for family in self._families:
                family.check_shards()
            self._is_checked = True
        in_ddp = DistributedDataParallel._get_active_ddp_module() is not None
        if in_ddp and self._is_on and model.training and not self._is_checked_in_ddp:
            for family in self._families:
                _check_recomputation(getattr(family.model, family.tower))
            self._is_checked_in_ddp = True
        self._next_call = 0
        self._token = None
        # FSDP puts its hook before those it finds. The calls of absent media must come before it gathers the
        # backbone, as the tower's calls do on other ranks.
        self._backbone._forward_pre_hooks.move_to_end(self._end_hook.id, last=False)

    def _call_method(self, position: int, method: Any, *args: Any, **kwargs: Any) -> Any:
        """What stands in for a method of the model that calls a tower."""
        # Qwen3-VL's method for videos calls that for images: the outer one says which turn it is.
        if self._is_on and not self._is_in_method:
            self._absent_until(position)
            self._next_call = position
            self._is_in_method = True
            try:
                return method(*args, **kwargs)
            finally:
                self._is_in_method = False
        return method(*args, **kwargs)

    def _end(self, module: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        del module
        if not self._is_on:
            return None
        self._absent_until(len(self._calls))
        token, self._token = self._token, None
        embeddings = kwargs.get("inputs_embeds")
        if token is None or embeddings is None:
            return None
        return args, {**kwargs, "inputs_embeds": embeddings + token.to(embeddings.dtype)}

    def _absent_until(self, position: int) -> None:
        """Takes part in the calls before `position` that this rank has no media for."""
        while self._next_call < position:
            self._keep(self._calls[self._next_call][1].pass_by())

    def _keep(self, token: torch.Tensor | None) -> None:
        """What enters the backbone will depend on `token`, so that its backward runs on this rank too."""
        if token is not None and token.requires_grad:
            self._token = token if self._token is None else self._token + token


def handle_of(tower: Any) -> BalancedEncoder | None:
    """Who lets all ranks meet in a tower.

    Args:
        tower: a module of the model.

    Returns:
        What `balance_encoder` or `attend_encoder` has made of it; None: neither was called.
    """
    return vars(tower).get(_HANDLE)


def _leave_alone(families: list[TileTower]) -> None:
    """Undoes `attend_encoder`, which does less than the line that is called now."""
    for family in families:
        handle = handle_of(getattr(family.model, family.tower))
        if handle is not None and not handle.is_shared:
            handle.remove()


def _check_shards(model: nn.Module) -> None:
    """Refuses shards whose ranks would still wait for each other, or gather each other's modules."""
    found = None
    if any(isinstance(module, FullyShardedDataParallel) for module in model.modules()):
        found = 'FSDP of version 1: shard it by FSDP2 (`fsdp_config={"version": 2}`, `fully_shard`)'
    elif any(hasattr(parameter, "ds_id") for parameter in model.parameters()):
        # It gathers linear layer by linear layer, in the order of the forward. A rank without media knows no
        # more than the order in which they were made.
        found = "DeepSpeed's ZeRO-3: take FSDP2, or ZeRO-2"
    if found is not None:
        message = f"the encoder of a model that is sharded must be under FSDP2, and this one is under {found}"
        raise ValueError(message)


def _check_recomputation(tower: nn.Module) -> None:
    """Refuses layers whose gradients DDP would be told of twice.

    A checkpoint that enters autograd again hides from the backward which parameters it has. The line lets
    each parameter have a gradient on all ranks, so such a one would have two of them: its own and a zero.
    """
    for name, layer in tower.named_modules():
        if not (isinstance(layer, GradientCheckpointingLayer) and layer.gradient_checkpointing):
            continue
        # Without the word PyTorch's function enters again.
        recompute: Any = layer._gradient_checkpointing_func
        is_torch = getattr(recompute, "func", recompute) is checkpoint
        enters_again = getattr(recompute, "keywords", {}).get("use_reentrant", is_torch)
        trains = any(p.requires_grad and not isinstance(p, DTensor) for p in layer.parameters())
        if enters_again and trains:
            message = (
                f"`use_reentrant` of gradient checkpointing is True, and layer `{name}` of the encoder "
                "trains under DDP: with the encoder shared it must be False "
                '(`gradient_checkpointing_kwargs={"use_reentrant": False}`)'
            )
            raise ValueError(message)


def balance_encoder(
    model: nn.Module,
    group: ProcessGroup | DeviceMesh | None = None,
    cost: Callable[[int], float] | None = None,
) -> BalancedEncoder:
    """Shares the encoder's work of each microbatch out over the data-parallel ranks; call it on each of them.

    In training mode the tiles, frames or windows of all ranks' media are divided by predicted cost; features
    and their gradients come back by all-to-all. Gradients are those of the model as it was. A microbatch of
    text alone takes part and hangs nobody, under DDP and FSDP2; no picture is made up for it. Call it
    before or after `fully_shard`, and on the model inside DDP.

    Every rank of `group` must call the model equally often in training mode, as DDP and FSDP demand anyway.
    In evaluation mode the model is as before, but for what is computed in `evaluating()` of the handle.

    Args:
        model: LLaVA 1.5, LLaVA-NeXT, LLaVA-OneVision, InternVL, Qwen2-VL, Qwen2.5-VL, Qwen3-VL, Qwen2-Audio,
            GLM-4.1V, GLM-4.5V, GLM-4.6V, GLM-OCR, Gemma 3, Gemma 4, Audio Flamingo 3, Voxtral, Qwen2.5-Omni
            or Qwen3-Omni (their thinkers), Idefics3, SmolVLM, Mistral3, LightOnOCR, LFM2-VL,
            MiniCPM-V 4.6 or PaddleOCR-VL of transformers, or one that docs/other_families.md has a yes for.
        group: the data-parallel ranks, or a mesh of one dimension; None: all ranks. Without a process group,
            or of one rank, there is nothing to share and the model runs as it was.
        cost: work of a unit by its number of patches, in any one unit; None: its multiplications. Only the
            vision towers of Qwen, GLM, Gemma 4, Mistral3, LightOnOCR, LFM2-VL, MiniCPM-V and PaddleOCR-VL
            ask: units of the others are all equal. Sounds of Qwen2.5-Omni, Qwen3-Omni and Gemma 4, which
            differ in length, are always divided by multiplications.

    Returns:
        A handle: `loads` says what was shared, `remove()` undoes it.

    Raises:
        ValueError: the model is of no such family, its encoder is shared out already, or the model is sharded
            by FSDP of version 1 or DeepSpeed's ZeRO-3. In the first step: layers of the encoder train under
            DDP, and are computed again with `use_reentrant=True`.
    """
    return BalancedEncoder(model, group, cost)


def attend_encoder(model: nn.Module, group: ProcessGroup | DeviceMesh | None = None) -> BalancedEncoder:
    """Lets a microbatch of text alone hang nobody under FSDP2; each rank encodes its own media.

    A rank without media gathers the encoder's layers as the others do, computes nothing, and brings zeros to
    the sums of gradients. So do ranks whose media are of fewer kinds (images, where others have videos too).
    Gradients are those of the model as it was. Before each call of the encoder one number of each rank goes
    between hosts (gloo), and all ranks wait for it.

    The integrations of transformers, TRL, accelerate and Lightning call it under FSDP2. A later
    `balance_encoder` takes its place. Every rank of `group` must call the model equally often in training
    mode, as FSDP demands anyway. In evaluation mode the model is as before, but in `evaluating()` of the
    handle: there text alone hangs nobody either.

    Args:
        model: as `balance_encoder` takes it, before or after `fully_shard`.
        group: the ranks that shard the model, or a mesh of one dimension; None: all ranks.

    Returns:
        A handle: `remove()` undoes it. That of an earlier call, or of `balance_encoder`, is given again.

    Raises:
        ValueError: the model is of no such family, or it is sharded by FSDP of version 1 or DeepSpeed's
            ZeRO-3.
    """
    for family in find_families(model):
        handle = handle_of(getattr(family.model, family.tower))
        if handle is not None:
            return handle
    return BalancedEncoder(model, group, None, is_shared=False)
