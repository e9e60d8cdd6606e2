"""Parameters by name: a piece of a model gets the same values that it has in the whole model.

The whole model is built on the meta device, where it takes no memory. The pieces that a rank holds are taken
from it, get memory, and are filled from a generator that is seeded by (seed, full name). So the values are
the same in every layout.
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

import torch

from dflop.models.tensor import slices_of
from dflop.models.towers import BACKBONES

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import nn


# How many values `squared_norm` takes at a time. On a CPU their float64 copy stays in the cache of a core. On
# a GPU they are enough to keep it busy, and the copy is small beside its memory.
_NORM_SIZES = {"cpu": 1 << 16, "cuda": 1 << 24}

# Names of modules and parameters of the projector, over all families; the mergers are Qwen's and GLM's, and
# the convolution before GLM's is `downsample`.
_PROJECTORS = (
    "multi_modal_projector",
    "vision_projection",
    "projector",
    "embed_vision",
    "connector",
    "merger",
    "downsample",
    "deepstack_merger_list",
    "merger_list",
    "image_newline",
)
_PROJECTOR_PATHS = (".audio_tower.proj.", ".audio_tower.proj1.", ".audio_tower.proj2.")
"""Those whose own name is not enough: other modules have it too."""


def name_seed(seed: int, name: str) -> int:
    """Seed of the parameter `name`, from 0 to 2^63 - 1.

    Args:
        seed: the seed of the run.
        name: full Hugging Face name, for example `model.image_newline`.

    Returns:
        The first 8 bytes of a SHA-256, without the sign bit.
    """
    digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 1


def squared_norm(values: torch.Tensor) -> torch.Tensor:
    """Sum of squares, in float64.

    Works piece by piece, since PyTorch copies what it sums in another dtype: of all gradients of a rank at
    once, that would take four times their bytes where they are bfloat16.

    Args:
        values: a tensor of one dimension.

    Returns:
        A scalar on the same device.
    """
    pieces = values.split(_NORM_SIZES.get(values.device.type, _NORM_SIZES["cuda"]))
    norms = torch.stack([torch.linalg.vector_norm(piece, dtype=torch.float64) for piece in pieces])
    return norms.square().sum()


@torch.no_grad()
def fill_parameter(parameter: torch.Tensor, name: str, seed: int, std: float) -> None:
    """Fills one parameter: weights of norms with 1, biases with 0, all else from normal(0, `std`).

    Values are drawn in float32 on the CPU and then rounded. So they are the same, up to rounding, in any
    dtype on any device.

    Args:
        parameter: filled in place.
        name: full Hugging Face name.
        seed: the seed of the run.
        std: standard deviation.
    """
    owner, _, kind = name.rpartition(".")
    if kind.endswith("bias"):
        parameter.zero_()
    elif kind == "weight" and ("norm" in (last := owner.rpartition(".")[2]) or last.startswith("ln_")):
        parameter.fill_(1.0)
    else:
        generator = torch.Generator().manual_seed(name_seed(seed, name))
        values = torch.empty(parameter.shape, dtype=torch.float32).normal_(0.0, std, generator=generator)
        parameter.copy_(values)


def materialise(
    piece: nn.Module,
    device: torch.device,
    dtype: torch.dtype,
    seed: int | None,
    std: Callable[[str], float],
    fill: Callable[[torch.Tensor, str, int, float], None] = fill_parameter,
) -> None:
    """Gives a piece of a model on the meta device memory and values.

    A parameter that modules share (a head tied to the embedding) is made once, and they still share it.
    Buffers are not filled here: the caller has replaced those on the meta device by real ones.

    Args:
        piece: its parameters are on the meta device and have their full names.
        device: where it shall live.
        dtype: of all parameters.
        seed: the seed of the run; none: values are not set here but loaded later (`load.py`).
        std: standard deviation of a parameter, by its name.
        fill: fills one parameter; takes the arguments of `fill_parameter`.
    """
    for name, buffer in piece.named_buffers():
        assert not buffer.is_meta, f"buffer `{name}` would hold garbage"
    made: dict[torch.nn.Parameter, torch.nn.Parameter] = {}
    for module in piece.modules():
        for kind, parameter in module.named_parameters(recurse=False):
            if not parameter.is_meta:
                continue
            if parameter not in made:
                empty = torch.empty(parameter.shape, dtype=dtype, device=device)
                made[parameter] = torch.nn.Parameter(empty, requires_grad=parameter.requires_grad)
            module.register_parameter(kind, made[parameter])
        for kind, buffer in module.named_buffers(recurse=False):
            # Buffers change their device only: frequencies of rotary embeddings must stay float32.
            setattr(module, kind, buffer.to(device))
    if seed is None:
        return
    slices = slices_of(piece)
    for name, parameter in piece.named_parameters():
        if name in slices:
            # A slice gets the values that it has in the whole parameter.
            whole = torch.empty(slices[name].shape, dtype=dtype)
            fill(whole, name, seed, std(name))
            with torch.no_grad():
                parameter.copy_(slices[name].take(whole))
        else:
            fill(parameter, name, seed, std(name))


def kept_buffers(piece: nn.Module) -> dict[str, torch.Tensor]:
    """Buffers that files of weights hold, as the correction biases of routers: no gradient reaches them.

    Args:
        piece: of a model, or a whole one.

    Returns:
        By full name, the buffers themselves.
    """
    return {
        f"{path}.{kind}" if path else kind: buffer
        for path, module in piece.named_modules()
        for kind, buffer in module.named_buffers(recurse=False)
        # PyTorch tells of no other way which buffers `state_dict` has.
        if kind not in module._non_persistent_buffers_set
    }


def component_of(name: str) -> str:
    """The part of the model that a parameter belongs to, by its full Hugging Face name.

    Args:
        name: as in `model.vision_tower.encoder.layers.0.mlp.fc1.weight`.

    Returns:
        `projector` (between encoder and LLM; newline rows belong to it), `llm` or `encoder`.
    """
    parts = name.split(".")
    if any(part in _PROJECTORS for part in parts) or any(path in f".{name}." for path in _PROJECTOR_PATHS):
        return "projector"
    is_llm = parts[0] == "lm_head" or any(name in parts for name in BACKBONES)
    return "llm" if is_llm else "encoder"
