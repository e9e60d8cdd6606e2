"""What a sample costs by the parameters of the model that trains: for models that nobody measured.

model -> multiplications of an encoder token, and of an LLM token -> cost(encoder tokens, LLM tokens)
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import nn

from dflop.integrations.backbone import backbone_of, unwrapped

if TYPE_CHECKING:
    from collections.abc import Iterator

    import torch

_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
_COUNTED_ALONE = (nn.Linear, *_CONVOLUTIONS)
# What configurations call the experts of a layer, and those that a token reads.
_NUM_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
_EXPERTS_PER_TOKEN = ("num_experts_per_tok", "top_k_experts", "moe_topk", "moe_k")
# Experts that tokens of pictures read in place of those of text (ERNIE 4.5 VL).
_OF_OTHER_TOKENS = ("vision_moe",)
# What encodes sounds, where the model that holds it has an encoder of pictures too.
_OF_SOUNDS = ("audio_tower", "audio_embed", "embed_audio")
_OF_PICTURES = ("vision_tower", "vision_model", "visual", "image_embed")
# What draws pictures beside an encoder that reads them (Janus): no sample runs it in training.
_DRAWS = ("vqmodel", "generation_embeddings", "generation_aligner", "generation_head")
# Linear maps that read a table of distances, not tokens (Gemma 4's sounds).
_OF_DISTANCES = ("relative_k_proj",)


@dataclass(frozen=True)
class ParameterCost:
    """Floating point operations of a sample in forward and backward; `dflop.costs` takes it as `cost`."""

    encoder_token: float
    """Of an encoder token; of pictures, where sounds have an encoder of their own."""
    llm_token: float
    """Of an LLM token, without what it sees of others."""
    llm_pair: float
    """Of two LLM tokens of which one sees the other."""
    sound_token: float | None = None
    """Of an encoder token of sounds, where they have an encoder of their own."""

    def __call__(self, tokens: Any) -> tuple[float, float]:
        """The cost of a sample.

        Args:
            tokens: Its encoder tokens, each taken for one of `encoder_token`, and its LLM tokens.

        Returns:
            Of encoder and LLM.
        """
        encoder, llm = tokens
        # Causal: a token sees half of the others in the mean.
        return self.encoder_token * encoder, self.llm_token * llm + self.llm_pair * llm * llm / 2


def cost_of_parameters(model: nn.Module, *, is_trained: bool = True) -> ParameterCost:
    """Counts what an encoder token and an LLM token cost in the model that you train.

    A parameter of a linear map takes two operations forward, two for the gradient of its input and two for
    its own. The last two are left out where `requires_grad` says that nothing needs them: freeze first, then
    count. Of experts those count that a token reads.

    Not counted: what encoder tokens see of each other, windows of the LLM's attention (all layers are taken
    to see the whole sample), the recurrence of linear attention, norms, embeddings, and forwards that
    recomputation repeats. A projector is taken to read every encoder token. Tables of embeddings, also those
    of single layers (Gemma 4 E2B, E4B), are looked up and cost nothing.

    Of one LoRA for all experts of a layer (VeOmni) each map counts once, also the one that runs for each
    expert that a token reads. LoRA of experts by peft (`target_parameters`) counts as if a token read the
    adapters of all experts.

    Args:
        model: of transformers, with or without adapters of peft, inside DDP or not. Its values are not read:
            it may be on the `meta` device.
        is_trained: whether gradients are computed; else the cost is that of a forward alone.

    Returns:
        A function for `dflop.costs("data_profile.parquet", cost=...)`.

    Raises:
        ValueError: it has no LLM backbone that `get_decoder` finds, or experts of an unknown form.
    """
    whole, decoder = unwrapped(model), backbone_of(model)
    head = whole.get_output_embeddings() if hasattr(whole, "get_output_embeddings") else None
    # All below the head too: with adapters or a copy that trains it is a wrapper of peft.
    parts = [part for part in (decoder, head) if part is not None]
    of_llm = {id(module) for part in parts for module in part.modules()}
    of_llm -= {id(module) for tower in towers_inside(decoder) for module in tower.modules()}
    share = _share_of_experts(decoder.config)
    if share < 1 and all(next(_experts(module), None) is None for module in decoder.modules()):
        name = type(whole).__name__
        message = (
            f"`{name}` has experts that are not side by side in one parameter, as transformers 5 has them"
        )
        raise ValueError(message)
    of_sounds = _of_sounds(whole)
    others = of_llm | of_sounds
    encoder = _Component(whole, lambda module: id(module) not in others, 1.0, is_trained=is_trained)
    sounds = _Component(whole, lambda module: id(module) in of_sounds, 1.0, is_trained=is_trained)
    llm = _Component(whole, lambda module: id(module) in of_llm, share, is_trained=is_trained)
    is_reached = encoder.is_trained or sounds.is_trained
    is_reached |= is_trained and any(weight.requires_grad for weight in decoder.parameters())
    squares = 2 * 2 * _width_of_heads(decoder) * (3 if is_reached else 1)
    return ParameterCost(
        encoder.flops(is_reached=False),
        llm.flops(is_reached=is_reached),
        squares,
        sounds.flops(is_reached=False) if of_sounds else None,
    )


def towers_inside(decoder: nn.Module) -> list[nn.Module]:
    """Encoders that a backbone holds beside its layers, as Phi-4-multimodal's does.

    Args:
        decoder: the backbone.

    Returns:
        Its children with convolutions, which read pixels or sound; mostly none.
    """
    beside = [child for name, child in decoder.named_children() if name != "layers"]
    return [child for child in beside if any(isinstance(one, _CONVOLUTIONS) for one in child.modules())]


class _Component:
    """The linear maps of encoder or LLM, in the order in which the model holds them."""

    def __init__(self, whole: nn.Module, is_part: Any, share: float, *, is_trained: bool) -> None:
        replaced = _replaced(whole)
        for name, module in whole.named_modules():
            if name.endswith((*_OF_DISTANCES, *_OF_OTHER_TOKENS)):
                replaced |= {id(one) for one in module.modules()}
        replaced |= _that_draws(whole)
        # Whether its weight trains, and numbers of it that a token is multiplied with.
        self._maps = [
            (is_trained and weight.requires_grad, count)
            for module in whole.modules()
            if is_part(module) and id(module) not in replaced
            for weight, count in _maps(module, share)
        ]

    @property
    def is_trained(self) -> bool:
        """Whether any of them trains."""
        return any(is_trained for is_trained, _ in self._maps)

    def flops(self, *, is_reached: bool) -> float:
        """Operations of a token; `is_reached`: gradients pass through all of them, whatever trains."""
        total = 0.0
        for is_trained, count in self._maps:
            # A gradient that is needed there passes through all that stands behind it.
            is_reached |= is_trained
            total += 2 * count * (1 + is_reached + is_trained)
        return total


def _of_sounds(whole: nn.Module) -> set[int]:
    """Modules of the encoder of sounds, where there is one of pictures beside it."""
    found: set[int] = set()
    for module in whole.modules():
        held = dict(module.named_children())
        if not held.keys().isdisjoint(_OF_SOUNDS[:2]) and not held.keys().isdisjoint(_OF_PICTURES):
            found |= {id(one) for name in _OF_SOUNDS if name in held for one in held[name].modules()}
    return found


def _maps(module: nn.Module, share: float) -> Iterator[tuple[torch.Tensor, float]]:
    """Weights of a module's own, and how many numbers of each a token is multiplied with."""
    if isinstance(module, nn.Linear):
        # By its sizes: quantized weights are packed.
        yield module.weight, float(module.in_features * module.out_features)
        return
    if isinstance(module, _CONVOLUTIONS):
        yield module.weight, float(module.weight.numel())
        return
    for weight in _experts(module):
        yield weight, weight.numel() * share


def _replaced(whole: nn.Module) -> set[int]:
    """Modules that compute nothing, as peft keeps them beside copies that train (`modules_to_save`)."""
    wrappers = [module for module in whole.modules() if hasattr(module, "modules_to_save")]
    originals = [getattr(wrapper, "original_module", None) for wrapper in wrappers]
    return {id(module) for one in originals if isinstance(one, nn.Module) for module in one.modules()}


def _that_draws(whole: nn.Module) -> set[int]:
    """Modules that draw pictures, where others read them."""
    found: set[int] = set()
    for module in whole.modules():
        held = dict(module.named_children())
        if not held.keys().isdisjoint(_OF_PICTURES):
            found |= {id(one) for name in _DRAWS if name in held for one in held[name].modules()}
    return found


def _experts(module: nn.Module) -> Iterator[torch.Tensor]:
    """Weights of experts side by side in it; a table of positions has three axes too, and no such name."""
    if not _says_experts(module):
        return
    # VeOmni's LoRA moves each weight into a module beside its `lora_A`. Wrappers of peft, and experts inside
    # of a block that says their number too, say it themselves: they come by themselves.
    taken = [child for child in module.children() if hasattr(child, "lora_A") and not _says_experts(child)]
    holders = [one for child in taken for one in child.modules() if not isinstance(one, _COUNTED_ALONE)]
    for holder in (module, *holders):
        yield from (weight for weight in holder.parameters(recurse=False) if weight.dim() == 3)


def _says_experts(module: nn.Module) -> bool:
    return any(hasattr(module, name) for name in _NUM_EXPERTS)


def _share_of_experts(config: Any) -> float:
    """The share of a layer's experts that one token reads; 1 where the model has none."""

    def first(names: tuple[str, ...]) -> int:
        return next((int(found) for name in names if (found := getattr(config, name, None))), 0)

    count, read = first(_NUM_EXPERTS), first(_EXPERTS_PER_TOKEN)
    return read / count if count and read else 1.0


def _width_of_heads(decoder: Any) -> int:
    """Values of the queries of a token, over all layers with attention."""
    config = decoder.config
    heads = int(config.num_attention_heads)
    attentions = [layer.self_attn for layer in decoder.layers if hasattr(layer, "self_attn")]
    # Nemotron-H calls what mixes tokens by one name, be it attention or not.
    mixers = [layer.mixer for layer in decoder.layers if hasattr(layer, "mixer")]
    attentions += [one for one in mixers if type(one).__name__.endswith("Attention")]
    sizes = [getattr(one, "head_dim", None) or config.hidden_size // heads for one in attentions]
    return sum(heads * int(size) for size in sizes)
