"""A line for batches that are padded: the layers of the LLM backbone compute no padding.

    inputs_embeds_BTD, attention_mask_BT --> those of real tokens, [1, N, D] --layers, each row attends
    to itself--> hidden states, [1, N, D] --> hidden_BTD, zeros at padding

Dataset, collation, positions and loss stay as they are: the model's own code makes the embeddings and reads
the hidden states, of the shape that it knows. In evaluation, and where a cache is given or asked for, the
model runs as without the line.

Shape letters: B rows of a batch, T tokens of the longest of them, N real tokens of all, D width.
"""

from __future__ import annotations

import inspect
import sys
import warnings
from functools import partial
from itertools import accumulate, count
from typing import TYPE_CHECKING, Any, cast
from weakref import WeakSet, ref

import torch
from torch import nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from dflop.integrations.backbone import backbone_of, unwrapped
from dflop.integrations.parameter_cost import towers_inside
from dflop.models.backbone import TEXT_MODELS
from dflop.models.delta_rule import CONVOLUTION, LINEAR, RULE, keep_samples_apart, linear_layers
from dflop.models.layer_kinds import WITH_WINDOWS, kinds_of_layers, sees_pictures_whole, window_of
from dflop.models.packing import TokensOfSamples, packed_attention
from dflop.models.short_conv import CONV, WITH_SHORT_CONV, gets_bounds
from dflop.models.sight import sights

if TYPE_CHECKING:
    from collections.abc import Callable

_PREFIX = "dflop_unpadded_"
_NUMBERS = count()
IN_FORCE: WeakSet[Unpadded] = WeakSet()
"""The handles of this process whose line was not taken back, as long as their models live."""
_NEEDS_OTHERS = ("softcap", "s_aux", "position_bias")
"""Arguments that change the scores of attention, which `packed_attention` does not know."""
_KINDS_OF_LAYERS = frozenset(["full_attention", "sliding_attention"])
_OF_EACH_LAYER = (
    "output_hidden_states",
    "output_attentions",
    "output_router_logits",
    "return_shared_kv_states",
)
"""Results with an entry a token or layer, which the model's own code reads in the padded shape."""
_EARLIER = ("cache", "past_key_values", "shared_kv_states")
"""Arguments with keys and values that the call does not make; transformers from 5.24 on says `cache`."""


class Unpadded:
    """A model whose LLM backbone computes no padding; made by `remove_padding`.

    Attributes:
        num_tokens: tokens that its layers computed in training.
        num_padded_tokens: tokens they would have computed with padding.
    """

    def __init__(self, model: nn.Module) -> None:
        """See `remove_padding`."""
        self._decoder: Any = _decoder_of(model)
        config = self._config = self._decoder.config
        self._names = _names_of(self._decoder)
        self._window: int | None = (
            getattr(config, "sliding_window", None) if getattr(config, "use_sliding_window", True) else None
        )
        kinds = set(kinds_of_layers(config) or ())
        # Of layers that see windows here, where packed attention knows windows.
        self._windows = {window_of(config, kind) for kind in kinds}
        self._whole = {window_of(config, kind) for kind in kinds if sees_pictures_whole(config, kind)}
        # What the model was given that makes masks before it calls the backbone, and the lengths found there.
        self._ahead: tuple[dict[str, Any], list[int] | None] | None = None
        # Where a call's real tokens are, from its begin to its end.
        self._place: tuple[torch.Tensor, int, int] | None = None
        self._has_attended = False
        self._told: set[str] = set()
        # How far inside of the model the module stands that was called first; what it was told of a cache.
        self._outermost: int | None = None
        self._cache: str | None = None
        self.num_tokens = 0
        self.num_padded_tokens = 0
        self._take_attention()
        self._hooks: list[Any] = []
        for depth, module in enumerate(_around(model, self._decoder)):
            begin = partial(self._begin, depth, _names_of(module))
            self._hooks += [
                module.register_forward_pre_hook(begin, with_kwargs=True),
                module.register_forward_hook(partial(self._end, depth), always_call=True),
            ]
        self._hooks += [
            self._decoder.register_forward_pre_hook(self._enter, with_kwargs=True),
            self._decoder.register_forward_hook(self._leave, always_call=True),
        ]
        owner = _maker_of_masks(model, self._decoder)
        if owner is not None:
            self._owner_names = _names_of(owner)
            self._hooks += [
                owner.register_forward_pre_hook(self._look_ahead, with_kwargs=True),
                owner.register_forward_hook(self._forget, always_call=True),
            ]
        IN_FORCE.add(self)

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Of a copy of the model (`copy.deepcopy`): the line holds there too, under a name of its own."""
        self.__dict__.update(state)
        if self._hooks:
            # The name that was copied leads to the other model's handle.
            self._take_attention()
            IN_FORCE.add(self)

    def remove(self) -> None:
        """Takes the line back: the model computes padding again."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
        IN_FORCE.discard(self)
        # Of models with one configuration object another one may have the line.
        others = [handle._packed for handle in IN_FORCE if handle._config is self._config]
        self._config._attn_implementation = others[0] if others else _behind(self._config)

    @property
    def padding_ratio(self) -> float:
        """Tokens with padding over tokens without, of all calls: 1.5 is a third of the work for nothing."""
        return self.num_padded_tokens / max(1, self.num_tokens)

    def _take_attention(self) -> None:
        """Packed attention in place of the one that the configuration names."""
        self._before: str = _behind(self._config)
        self._packed = self._register()
        self._config._attn_implementation = self._packed

    def _register(self) -> str:
        """The name, for transformers, of packed attention.

        It is in force in packed calls, which make no mask, and between calls, when layers of an earlier one
        are computed again. Other calls run under the name that was there before.
        """
        # One for each model: its attention is that of this handle. transformers keeps it for ever, but not
        # the handle and its model: the model's hooks hold the handle. Models without the line may have the
        # name too, with the configuration or a copy of it.
        held, before = ref(self), self._before
        name = f"{_PREFIX}{next(_NUMBERS)}_{before}"

        @torch.compiler.disable
        def attention(
            module: nn.Module,
            query: torch.Tensor,
            key: torch.Tensor,
            value: torch.Tensor,
            attention_mask: torch.Tensor | None = None,
            **options: Any,
        ) -> Any:
            layer, handle = type(module).__name__, held()
            if options.get("segment_tokens") is None:
                if handle is not None and handle._place is not None:
                    message = (
                        f"`{layer}` is not told which tokens are a sample's: `remove_padding` cannot be used"
                    )
                    raise ValueError(message)
                return _attend(before, module, query, key, value, attention_mask, options)
            if handle is None:
                message = (
                    f"`{layer}`: `remove_padding` was taken back before the backward that computes it again"
                )
                raise ValueError(message)
            wrong = [name for name in _NEEDS_OTHERS if options.get(name) is not None]
            if wrong:
                message = f"`remove_padding` knows no attention with `{wrong[0]}`, which `{layer}` has"
                raise ValueError(message)
            handle._has_attended = True
            return packed_attention(module, query, key, value, attention_mask, **options)

        def mask(*given: Any, **named: Any) -> Any:
            handle = held()
            if handle is not None and handle._place is not None:
                return None
            ahead = None if handle is None else handle._ahead
            if ahead is not None and ahead[1] is not None:
                return None
            # Of a model that makes it before it calls its backbone, as PaliGemma: that call is not packed.
            return ALL_MASK_ATTENTION_FUNCTIONS[before](*given, **named)

        AttentionInterface.register(name, attention)
        AttentionMaskInterface.register(name, mask)
        return name

    def _begin(
        self, depth: int, names: list[str], _: nn.Module, args: tuple[Any, ...], given: dict[str, Any]
    ) -> None:
        """What the caller has chosen: an attention, a cache.

        Its backbone may be given a cache by default, which nobody reads.
        """
        if _behind(self._config) != self._before:
            # Another one was chosen (`set_attn_implementation`).
            self._take_attention()
        if self._outermost is None or depth <= self._outermost:
            given = {**dict(zip(names, args, strict=False)), **given}
            self._outermost, self._cache = depth, _earlier(given)
            if self._cache is None and given.get("use_cache"):
                self._cache = "a cache is asked for (`use_cache=True`)"

    def _end(self, depth: int, *_: Any) -> None:
        if depth == self._outermost:
            self._outermost = None

    def _look_ahead(self, owner: nn.Module, args: tuple[Any, ...], given: dict[str, Any]) -> None:
        """Before masks are made: none are where the call will be packed."""
        given = {**dict(zip(self._owner_names, args, strict=False)), **given}
        lengths = self._lengths(given, owner.training)
        self._ahead = (given, lengths)
        self._config._attn_implementation = self._before if lengths is None else self._packed

    def _forget(self, *_: Any) -> None:
        self._ahead = None
        self._config._attn_implementation = self._packed

    def _enter(self, decoder: nn.Module, args: tuple[Any, ...], given: dict[str, Any]) -> Any:
        # `decoder` may be a copy: accelerate makes one where it compiles layers one by one.
        # An interrupt may have ended the last call without `_leave`.
        self._place, self._has_attended = None, False
        given = {**dict(zip(self._names, args, strict=False)), **given}
        if self._ahead is None:
            places, lengths = None, self._lengths(given, decoder.training)
        else:
            before, lengths = self._ahead
            places = _pictures(before)
            if lengths is not None:
                given["attention_mask"] = before["attention_mask"]
        self._config._attn_implementation = self._before if lengths is None else self._packed
        if lengths is None:
            return None
        mask = cast("torch.Tensor", given["attention_mask"])
        batch, width = mask.shape
        self.num_tokens += sum(lengths)
        self.num_padded_tokens += batch * width
        rows = mask.ne(0).flatten().nonzero().squeeze(1)
        found = {name: _real(value, rows, batch, width) for name, value in given.items()}
        found["position_ids"] = _positions(given.get("position_ids"), rows, batch, width)
        found["attention_mask"] = None
        found["use_cache"] = False
        found.update(dict.fromkeys(given.keys() & _EARLIER))
        if "logits_to_keep" in given:
            # Gemma 4 leaves out the first tokens of a row in its last layers. The whole model does it behind.
            found["logits_to_keep"] = 0
        bounds = [0, *accumulate(lengths)]
        found["cu_seq_lens_q"] = torch.tensor(bounds, dtype=torch.int32, device=mask.device)
        found["segment_tokens"] = TokensOfSamples(lengths)
        if self._windows:
            # Pictures, where the model is told of them: Hugging Face's sees them whole then alone.
            if places is None or not self._whole:
                places_N = torch.zeros_like(rows, dtype=torch.bool)
            else:
                places_N = places.flatten()[rows]
            found["sights"] = sights(
                self._windows,
                places_N,
                found["cu_seq_lens_q"],
                lengths,
                bool(places_N.any()),
                self._whole,
            )
        # Positions in a cache, which there is none of.
        found.pop("cache_position", None)
        self._place = (rows, batch, width)
        return (), found

    def _lengths(self, given: dict[str, Any], is_training: bool) -> list[int] | None:
        """Real tokens of each row; None where the call is computed as without the line."""
        mask = given.get("attention_mask")
        if not is_training or mask is None:
            return None
        if cache := self._cache or _earlier(given, is_made=True):
            return self._tell("cache", cache)
        config = self._config
        asked = [name for name in _OF_EACH_LAYER if given.get(name, getattr(config, name, False))]
        if asked:
            return self._tell("outputs", f"`{asked[0]}` is asked for")
        if not isinstance(mask, torch.Tensor) or mask.dim() != 2:
            return self._tell("mask", "the attention mask is not one of shape (batch, tokens)")
        kept = mask.ne(0)
        lengths: list[int] = kept.sum(dim=1).tolist()
        if sum(lengths) == 0:
            return None
        if self._window is not None and not self._windows and max(lengths) > self._window:
            row = f"a row has {max(lengths)} tokens"
            return self._tell("window", f"{row}, the layers attend within a window of {self._window}")
        counts_as_known = given.get("position_ids") is not None or config.model_type in TEXT_MODELS
        if not counts_as_known and not bool(kept[:, 0].all()):
            how = f"how `{config.model_type}` then counts positions is not known"
            return self._tell("positions", f"a row begins with padding, and {how}")
        return lengths

    def _leave(self, _decoder: nn.Module, _args: Any, output: Any) -> Any:
        place, self._place = self._place, None
        self._config._attn_implementation = self._packed
        if place is None or output is None:
            # As without the line, or the call raised.
            return None
        if not self._has_attended:
            message = "no layer took its attention by name: `remove_padding` cannot be used with this model"
            raise ValueError(message)
        rows, batch, width = place
        hidden = output[0]
        whole = hidden.new_zeros(batch * width, hidden.shape[-1]).index_copy(0, rows, hidden[0])
        whole = whole.view(batch, width, -1)
        if isinstance(output, tuple):
            return (whole, *output[1:])
        output.last_hidden_state = whole
        return output

    def _tell(self, kind: str, why: str) -> None:
        """Says why a batch is computed with its padding, once a kind of reason."""
        if kind not in self._told:
            self._told.add(kind)
            warnings.warn(f"`remove_padding`: padding is computed, because {why}", stacklevel=2)


def remove_padding(model: nn.Module) -> Unpadded:
    """Lets the layers of a model's LLM backbone compute real tokens alone, where batches are padded.

    Loss and gradients are those of the padded batch, to rounding, where no label is predicted from padding:
    with padding on the left, a row's first token has none. What is saved is what the padding took: with four
    samples of mixed lengths in a microbatch, a third of the work of the layers. Embedding, head and encoder
    run as before. A cache is made where the call asks for it by `use_cache=True`, not where the configuration
    alone has it. Call it before or after the model is wrapped in DDP or `fully_shard`, on every rank.

    Args:
        model: of transformers, with a causal LLM backbone whose attention is chosen by name (`get_decoder`);
            also in PEFT. The batches have an `attention_mask` of tensor shape (batch, tokens).

    Returns:
        A handle: it counts tokens with and without padding, and takes the line back.

    Raises:
        ValueError: the model has no such backbone, or the line is there already. In the first step: its
            layers do not hand on which tokens are a sample's.
    """
    return Unpadded(model)


def _names_of(decoder: Any) -> list[str]:
    """Arguments of a backbone, in order."""
    return list(inspect.signature(type(decoder).forward).parameters)[1:]


def _around(model: nn.Module, decoder: nn.Module) -> list[nn.Module]:
    """The modules that hold the backbone, the outermost first; it is the last."""
    return [one for one in model.modules() if any(inner is decoder for inner in one.modules())]


def _maker_of_masks(model: nn.Module, decoder: nn.Module) -> nn.Module | None:
    """The module that makes the masks of the backbone, from arguments of its own; none: the backbone does."""
    config: Any = decoder.config
    if config.model_type not in WITH_WINDOWS:
        return None
    return next(
        (m for m in model.modules() if dict(m.named_children()).get("language_model") is decoder), None
    )


def _decoder_of(model: Any) -> Any:
    if isinstance(model, nn.DataParallel):
        message = "`DataParallel` runs one model in several threads: start a process a device instead"
        raise ValueError(message)
    decoder = backbone_of(model)
    config, name = decoder.config, type(decoder).__name__
    hooks = decoder._forward_pre_hooks.values()
    if any(isinstance(getattr(hook, "__self__", None), Unpadded) for hook in hooks):
        message = f"`{name}` computes no padding already: call `remove_padding` once"
        raise ValueError(message)
    # PaliGemma gives its backbone masks that it has made: such calls are computed with their padding.
    makes_masks = unwrapped(model).config.model_type == "paligemma"
    wrong = _reason_against(decoder, config, makes_masks=makes_masks)
    if wrong is not None:
        message = f"`remove_padding` cannot be used with `{name}`: {wrong}"
        raise ValueError(message)
    wrapped = (CONVOLUTION, RULE) if any(linear_layers(config)) else ()
    if config.model_type in WITH_SHORT_CONV:
        wrapped = (CONVOLUTION,)
    if wrapped:
        # The class of a wrapped module stands elsewhere, but inherits from transformers' own.
        modules = [sys.modules[kind.__module__] for kind in type(decoder).__mro__]
        keep_samples_apart(next(module for module in modules if hasattr(module, wrapped[-1])), wrapped)
    return decoder


def _reason_against(decoder: Any, config: Any, *, makes_masks: bool) -> str | None:
    names = _names_of(decoder)
    if towers_inside(decoder):
        return "it holds its encoders itself, and their attention goes by the same name"
    is_known = config.model_type in TEXT_MODELS
    # Of Qwen3.5 transformers does not say so.
    if not (is_known or getattr(decoder, "_supports_attention_backend", False)):
        return "it does not take attention by name"
    if getattr(config, "is_encoder_decoder", False) or "encoder_hidden_states" in names:
        return "its layers also attend to an encoder"
    if "position_ids" not in names or "attention_mask" not in names:
        return "it takes no `position_ids` or no `attention_mask`"
    known = _KINDS_OF_LAYERS | ({LINEAR, CONV} if is_known else set())
    others = sorted(set(getattr(config, "layer_types", None) or ()) - known)
    if others:
        return f"it has layers of kind `{others[0]}`, must be of {sorted(known)}"
    if config.model_type in WITH_SHORT_CONV and not gets_bounds():
        return "its short convolutions would mix the samples of a row in this transformers, 5.23 is needed"
    both = getattr(config, "use_bidirectional_attention", None)
    if both not in (None, False, "vision") and not makes_masks:
        return f"its tokens see those behind them too (`use_bidirectional_attention: {both}`)"
    if getattr(config, "attn_logit_softcapping", None) is not None:
        return "its attention has soft caps (`attn_logit_softcapping`)"
    if any(name.endswith("sinks") for name, _ in decoder.named_parameters()):
        return "its attention has sinks"
    return None


def _earlier(given: dict[str, Any], *, is_made: bool = False) -> str | None:
    """What is given with keys and values of earlier tokens; no empty cache that the model has made itself."""
    for name in _EARLIER:
        if (value := given.get(name)) is None:
            continue
        if not (is_made and hasattr(value, "get_seq_length") and value.get_seq_length() == 0):
            return f"keys and values of earlier tokens are given (`{name}`)"
    return None


def _behind(config: Any) -> str:
    """The attention that a configuration names, or that is behind the name of a packed one."""
    name: str = config._attn_implementation
    return name.removeprefix(_PREFIX).partition("_")[2] if str(name).startswith(_PREFIX) else name


def _attend(
    before: str,
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    options: dict[str, Any],
) -> Any:
    """Attention as it was before the line: of a call that is not packed, or of a model without the line."""
    attend: Callable[..., Any]
    if before == "eager":
        # No entry of the registry: each model's module has its own.
        attend = vars(sys.modules[type(module).__module__])["eager_attention_forward"]
    else:
        attend = ALL_ATTENTION_FUNCTIONS[before]
    config, name = module.config, module.config._attn_implementation
    # Flash attention reads its own name there.
    config._attn_implementation = before
    try:
        return attend(module, query, key, value, attention_mask, **options)
    finally:
        config._attn_implementation = name


def _pictures(given: dict[str, Any]) -> torch.Tensor | None:
    """Places of pictures, [B, T], where a Gemma is told of them."""
    if (types := given.get("token_type_ids")) is not None:
        return types == 1
    if (types := given.get("mm_token_type_ids")) is not None:
        # Of sounds they are 3.
        return (types == 1) | (types == 2)
    return None


def _real(value: Any, rows: torch.Tensor, batch: int, width: int) -> Any:
    """The real tokens of what has an entry a token: [1, N, ...]; anything else as it is."""
    if isinstance(value, torch.Tensor) and tuple(value.shape[:2]) == (batch, width):
        # No view: torch.compile would compile a layer once for views and once for other tensors.
        return value.flatten(0, 1)[rows.to(value.device)[None]]
    return value


def _positions(given: torch.Tensor | None, rows: torch.Tensor, batch: int, width: int) -> torch.Tensor:
    """Positions of the real tokens: [1, N], or [axes, 1, N] where the model has several."""
    if given is None:
        given = torch.arange(width, device=rows.device)[None]
    whole = given.expand(*given.shape[:-2], batch, width)
    return whole.flatten(-2)[..., rows][..., None, :]
