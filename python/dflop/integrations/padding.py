"""A line for batches that are padded: the layers of the LLM backbone compute no padding.

    inputs_embeds_BTD, attention_mask_BT --> those of real tokens, [1, N, D] --layers, each row attends
    to itself--> hidden states, [1, N, D] --> hidden_BTD, zeros at padding

Dataset, collation, positions and loss stay as they are: the model's own code makes the embeddings and reads
the hidden states, of the shape that it knows. In evaluation, and with a cache, the model runs as without
the line.

Shape letters: B rows of a batch, T tokens of the longest of them, N real tokens of all, D width.
"""

from __future__ import annotations

import inspect
import warnings
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import torch
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from dflop.models.packing import packed_attention

if TYPE_CHECKING:
    from torch import nn

_PREFIX = "dflop_unpadded_"
_NEEDS_OTHERS = ("softcap", "s_aux", "position_bias")
"""Arguments that change the scores of attention, which `packed_attention` does not know."""
_KINDS_OF_LAYERS = frozenset(["full_attention", "sliding_attention"])


class Unpadded:
    """A model whose LLM backbone computes no padding; made by `remove_padding`.

    Attributes:
        num_tokens: tokens that its layers computed in training.
        num_padded_tokens: tokens they would have computed with padding.
    """

    def __init__(self, model: nn.Module) -> None:
        """See `remove_padding`."""
        self._decoder: Any = _decoder_of(model)
        config = self._decoder.config
        self._names = list(inspect.signature(type(self._decoder).forward).parameters)[1:]
        self._window: int | None = (
            getattr(config, "sliding_window", None) if getattr(config, "use_sliding_window", True) else None
        )
        # Where a call's rows are, from its begin to its end.
        self._place: tuple[torch.Tensor, int, int] | None = None
        self._told: set[str] = set()
        self.num_tokens = 0
        self.num_padded_tokens = 0
        self._before: str = config._attn_implementation
        config._attn_implementation = self._register(self._before)
        self._hooks = [
            self._decoder.register_forward_pre_hook(self._enter, with_kwargs=True),
            self._decoder.register_forward_hook(self._leave, always_call=True),
        ]

    def remove(self) -> None:
        """Takes the line back: the model computes padding again."""
        for hook in self._hooks:
            hook.remove()
        self._decoder.config._attn_implementation = self._before
        self._hooks = []

    @property
    def padding_ratio(self) -> float:
        """Tokens with padding over tokens without, of all calls: 1.5 is a third of the work for nothing."""
        return self.num_padded_tokens / max(1, self.num_tokens)

    def _register(self, before: str) -> str:
        """The name, for transformers, of attention that is packed where tokens are, else as before."""
        # Eager attention is no entry of the registry: each model has its own. `sdpa` gives the same numbers.
        usual = "sdpa" if before == "eager" else before
        name = _PREFIX + usual
        attend, mask = ALL_ATTENTION_FUNCTIONS[usual], ALL_MASK_ATTENTION_FUNCTIONS[usual]

        def attention(
            module: nn.Module,
            query: torch.Tensor,
            key: torch.Tensor,
            value: torch.Tensor,
            attention_mask: torch.Tensor | None = None,
            **options: Any,
        ) -> Any:
            if options.get("segment_tokens") is None:
                return attend(module, query, key, value, attention_mask, **options)
            wrong = [name for name in _NEEDS_OTHERS if options.get(name) is not None]
            if wrong:
                layer = type(module).__name__
                message = f"`remove_padding` knows no attention with `{wrong[0]}`, which {layer} has"
                raise ValueError(message)
            return packed_attention(module, query, key, value, attention_mask, **options)

        def mask_of(*args: Any, **options: Any) -> Any:
            # Made once a call, before its layers: rows of real tokens need none.
            return None if _UNPADDED_NOW else mask(*args, **options)

        AttentionInterface.register(name, attention)
        AttentionMaskInterface.register(name, mask_of)
        return name

    def _enter(self, decoder: nn.Module, args: tuple[Any, ...], given: dict[str, Any]) -> Any:
        given = {**dict(zip(self._names, args, strict=False)), **given}
        if not decoder.training or given.get("past_key_values") is not None:
            return None
        if given.get("output_hidden_states") or given.get("output_attentions"):
            self._tell("hidden states or attention weights of each layer are asked for")
            return None
        mask = given.get("attention_mask")
        if mask is None:
            return None
        if not isinstance(mask, torch.Tensor) or mask.dim() != 2:
            self._tell("the attention mask is not one of shape (batch, tokens)")
            return None
        batch, width = mask.shape
        kept = mask.ne(0)
        lengths: list[int] = kept.sum(dim=1).tolist()
        if self._window is not None and max(lengths) > self._window:
            self._tell(
                f"a row has {max(lengths)} tokens, the layers attend within a window of {self._window}"
            )
            return None
        self.num_tokens += sum(lengths)
        self.num_padded_tokens += batch * width
        if sum(lengths) in (0, batch * width):
            return None
        rows = kept.flatten().nonzero().squeeze(1)
        self._place = (rows, batch, width)
        _UNPADDED_NOW.append(self)
        found = {name: _packed(value, rows, batch, width) for name, value in given.items()}
        found["position_ids"] = _positions(given.get("position_ids"), rows, batch, width)
        found["attention_mask"] = None
        found["use_cache"] = False
        bounds = [0, *accumulate(lengths)]
        found["cu_seq_lens_q"] = torch.tensor(bounds, dtype=torch.int32, device=mask.device)
        found["segment_tokens"] = lengths
        # Positions in a cache, which there is none of.
        found.pop("cache_position", None)
        return (), found

    def _leave(self, _decoder: nn.Module, _args: Any, output: Any) -> Any:
        if self._place is None:
            return None
        rows, batch, width = self._place
        self._place = None
        _UNPADDED_NOW.pop()
        if output is None:
            # The call raised.
            return None
        hidden = output[0]
        whole = hidden.new_zeros(batch * width, hidden.shape[-1]).index_copy(0, rows, hidden[0])
        whole = whole.view(batch, width, -1)
        if isinstance(output, tuple):
            return (whole, *output[1:])
        output.last_hidden_state = whole
        return output

    def _tell(self, why: str) -> None:
        """Says once a reason that a batch is computed with its padding."""
        reason = why.split(",")[0] if self._window is not None else why
        if reason not in self._told:
            self._told.add(reason)
            warnings.warn(f"`remove_padding`: padding is computed, because {why}", stacklevel=2)


_UNPADDED_NOW: list[Unpadded] = []
"""Whose call is under way; at most one, as backbones do not call each other."""


def remove_padding(model: nn.Module) -> Unpadded:
    """Lets the layers of a model's LLM backbone compute real tokens alone, where batches are padded.

    Loss and gradients are those of the padded batch, to rounding. What is saved is what the padding took:
    with four samples of mixed lengths in a microbatch, a third of the work of the layers. Embedding, head
    and encoder run as before. Call it before or after the model is wrapped in DDP or `fully_shard`, on every
    rank.

    Args:
        model: of transformers, with a causal LLM backbone whose attention is chosen by name (`get_decoder`);
            also in PEFT. The batches have an `attention_mask` of tensor shape (batch, tokens).

    Returns:
        A handle: it counts tokens with and without padding, and takes the line back.

    Raises:
        ValueError: the model has no such backbone, or the line is there already.
    """
    return Unpadded(model)


def _decoder_of(model: Any) -> Any:
    model = getattr(model, "module", model)
    decoder = model.get_decoder() if hasattr(model, "get_decoder") else None
    config = getattr(decoder, "config", None)
    if decoder is None or config is None or not hasattr(decoder, "layers"):
        message = f"`{type(model).__name__}` has no LLM backbone with layers that `get_decoder` finds"
        raise ValueError(message)
    name = type(decoder).__name__
    if not getattr(decoder, "_supports_attention_backend", False):
        message = f"`{name}` does not take attention by name, which real tokens alone need"
        raise ValueError(message)
    others = sorted(set(getattr(config, "layer_types", None) or ()) - _KINDS_OF_LAYERS)
    if others:
        message = f"`{name}` has layers of kind `{others[0]}`, must be of {sorted(_KINDS_OF_LAYERS)}"
        raise ValueError(message)
    if str(config._attn_implementation).startswith(_PREFIX):
        message = f"`{name}` computes no padding already: call `remove_padding` once"
        raise ValueError(message)
    return decoder


def _packed(value: Any, rows: torch.Tensor, batch: int, width: int) -> Any:
    """The real tokens of what has an entry a token: [1, N, ...]; anything else as it is."""
    if isinstance(value, torch.Tensor) and tuple(value.shape[:2]) == (batch, width):
        return value.flatten(0, 1)[rows.to(value.device)][None]
    return value


def _positions(given: torch.Tensor | None, rows: torch.Tensor, batch: int, width: int) -> torch.Tensor:
    """Positions of the real tokens: [1, N], or [axes, 1, N] where the model has several."""
    if given is None:
        given = torch.arange(width, device=rows.device)[None]
    whole = given.expand(*given.shape[:-2], batch, width)
    return whole.flatten(-2)[..., rows][..., None, :]
