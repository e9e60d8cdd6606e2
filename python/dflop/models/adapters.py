"""LoRA: adapters of low rank beside the frozen linear maps of the LLM, by peft.

    y = W x + alpha / r B A x     W frozen; A [r, in] drawn, B [out, r] zeros

peft puts them into a piece as into a whole model. Parameters then have its names: `q_proj.base_layer.weight`
for W, `q_proj.lora_A.default.weight` and `q_proj.lora_B.default.weight` for the adapters.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

import torch
from torch import nn

from dflop.models.parameters import component_of, name_seed
from dflop.models.tensor import Slice, slices_of
from dflop.models.towers import BACKBONES

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from peft import LoraConfig

_BASE = ".base_layer"
_ADAPTER = ".default"
"""The name that peft gives to the only adapter of a model, in names of parameters; its files leave it out."""
_MERGERS = ("deepstack_merger_list", "merger_list")
_PROJECTORS = (
    "multi_modal_projector",
    "vision_projection",
    "projector",
    "embed_vision",
    "connector",
    "merger",
    "downsample",
    "audio_tower.proj",
    "audio_tower.proj1",
    "audio_tower.proj2",
    *_MERGERS,
)


def is_adapter(name: str) -> bool:
    """Whether a parameter is an adapter's, by its name."""
    return ".lora_A." in name or ".lora_B." in name


def is_of_projector(name: str) -> bool:
    """Whether a parameter or module belongs to what trains besides the adapters and what peft saves.

    It cannot save single parameters, so not the newlines of the projector.

    Args:
        name: of the parameter or module.

    Returns:
        True for the modules of the projector, and what is in them.
    """
    return any(_is_within(module, name) for module in _PROJECTORS)


def _is_within(module: str, name: str) -> bool:
    return f".{module}." in f".{name}."


def lora_config(model: nn.Module, rank: int, alpha: float, source: Path | None = None) -> LoraConfig:
    """What peft needs to know.

    Args:
        model: the whole model or a piece of it, without adapters.
        rank: of the adapters, at least 1.
        alpha: their product is multiplied by `alpha / rank`.
        source: directory of the model without adapters, which the files then name.

    Returns:
        Adapters on every linear map of the LLM's layers.
    """
    from peft import LoraConfig

    maps = {
        name.rpartition(".")[2]
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear)
        and component_of(name) == "llm"
        and ".layers." in name
        # A router that is a linear map is as little adapted as others.
        and ".router." not in name
    }
    names = [name for name, _ in model.named_modules()]
    saved = {module for module in _PROJECTORS if any(_is_within(module, name) for name in names)}
    saved -= set(_MERGERS)
    # peft goes by the ends of paths: of a name that another module's ends with it gets the whole path.
    for name in {one for one in saved if any(path.endswith(f"_{one}") for path in names)}:
        saved = (saved - {name}) | {path for path in names if path.endswith(f".{name}")}
    # peft saves no list of modules, but each module of one.
    saved |= {f"{name}.{n}" for name in _MERGERS for n in range(len(_list_of(model, name)))}
    return LoraConfig(
        r=rank,
        # peft declares an integer, but a fraction works as well.
        lora_alpha=int(alpha) if float(alpha).is_integer() else alpha,  # pyright: ignore[reportArgumentType]
        target_modules=rf".*({'|'.join(BACKBONES)}).*\.({'|'.join(sorted(maps))})",
        modules_to_save=sorted(saved) or None,
        base_model_name_or_path=None if source is None else str(source),
        inference_mode=source is not None,
    )


def _list_of(model: nn.Module, name: str) -> Sequence[nn.Module]:
    """The modules of the list that the last part of a path names; empty where the model has no such list."""
    found = (module for path, module in model.named_modules() if path.rpartition(".")[2] == name)
    return list(cast("nn.ModuleList", next(found, nn.ModuleList())))


@torch.no_grad()
def add_adapters(model: nn.Module, rank: int, alpha: float, seed: int) -> None:
    """Puts adapters on a piece or a whole model. At first its results stay the same, since B is zeros.

    Args:
        model: changed in place; a piece without layers of the LLM is left as it is. Where tensor parallelism
            has cut the layers, each rank gets its part of the adapters of the whole layers.
        rank: of the adapters, at least 1.
        alpha: their product is multiplied by `alpha / rank`.
        seed: the values of A depend only on it and on the parameter's name, so not on the layout.
    """
    from peft import inject_adapter_in_model

    if not any(".layers." in name and component_of(name) == "llm" for name, _ in model.named_modules()):
        return
    config = lora_config(model, rank, alpha)
    # These modules train in place; peft would train a copy of each.
    config.modules_to_save = None
    # Of a whole model of some families peft would put the adapters that the MLP's names ask for on the
    # experts. A piece has no configuration, so peft does not there.
    of_model = model.__dict__.pop("config", None)
    try:
        inject_adapter_in_model(config, model)
    finally:
        if of_model is not None:
            model.__dict__["config"] = of_model
    _slice(model)
    slices = slices_of(model)
    for name, parameter in model.named_parameters():
        if ".lora_A." in name:
            part = slices.get(name)
            shape = parameter.shape if part is None else part.shape
            # Kaiming's uniform distribution with a = sqrt(5), as peft has it.
            bound = shape[1] ** -0.5
            generator = torch.Generator().manual_seed(name_seed(seed, name))
            values = torch.empty(shape, dtype=torch.float32)
            values.uniform_(-bound, bound, generator=generator)
            parameter.copy_(values if part is None else part.take(values))
        elif ".lora_B." in name:
            parameter.zero_()


def _slice(model: nn.Module) -> None:
    """Notes which part of a whole adapter this rank has, where tensor parallelism has cut the layers.

    Where the outputs of a map are cut, B is cut; where its inputs are cut, A is cut. The other matrix is
    whole on all ranks, and each rank has a summand of its gradient. So it is noted as a slice of everything,
    which the ranks share.
    """
    for module in model.modules():
        adapted: Any = module
        part: Slice | None = getattr(getattr(module, "base_layer", None), "tensor_slices", {}).get("weight")
        if part is None:
            continue
        outputs, inputs = part.shape
        (a,), (b,) = adapted.lora_A.values(), adapted.lora_B.values()
        rank = a.weight.shape[0]
        runs_a, runs_b = (((0, rank),), part.runs) if part.dim == 0 else (part.runs, ((0, outputs),))
        a.tensor_slices = {"weight": Slice(part.dim, (rank, inputs), runs_a)}
        b.tensor_slices = {"weight": Slice(0, (outputs, rank), runs_b)}


def merged(parameters: Mapping[str, torch.Tensor], rank: int, alpha: float) -> dict[str, torch.Tensor]:
    """Parameters of a model without adapters: each W becomes W + alpha / r B A, computed in float32.

    Args:
        parameters: of a model with adapters, by peft's names.
        rank: of the adapters.
        alpha: their product is multiplied by `alpha / rank`.

    Returns:
        By the names of the model without adapters.
    """
    found: dict[str, torch.Tensor] = {}
    for name, value in parameters.items():
        if is_adapter(name):
            continue
        owner, is_base, rest = name.partition(_BASE)
        if is_base and rest == ".weight":
            a, b = (parameters[f"{owner}.lora_{which}{_ADAPTER}.weight"].float() for which in "AB")
            found[owner + rest] = (value.float() + (alpha / rank) * (b @ a)).to(value.dtype)
        else:
            found[owner + rest] = value
    return found


def write_adapter(
    whole: nn.Module,
    parameters: Mapping[str, torch.Tensor],
    source: Path,
    out: Path,
    rank: int,
    alpha: float,
    dtype: torch.dtype,
) -> None:
    """Writes what trained as peft writes it: `PeftModel.from_pretrained(model, out)` reads it.

    Args:
        whole: the model of the source's `config.json`, without adapters; it may be on the meta device.
        parameters: of the model with adapters, by peft's names.
        source: directory of the model that training started from; the file names it.
        out: where to write; made if missing.
        rank: of the adapters.
        alpha: their product is multiplied by `alpha / rank`.
        dtype: of what is written.

    Raises:
        OSError: a file cannot be written.
    """
    from safetensors.torch import save_file

    tensors = {
        f"base_model.model.{name.replace(_ADAPTER, '')}": value.to(dtype).contiguous()
        for name, value in parameters.items()
        if is_adapter(name) or is_of_projector(name)
    }
    out.mkdir(parents=True, exist_ok=True)
    save_file(tensors, out / "adapter_model.safetensors", metadata={"format": "pt"})
    lora_config(whole, rank, alpha, source).save_pretrained(str(out))
