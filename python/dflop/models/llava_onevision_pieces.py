"""The pieces of LLaVA-OneVision that ranks hold: the encoder with its projector, and runs of LLM layers.

    pixels_NCHW --SigLIP--> [N, P, Dv] --projector--> [N, P, D] --pack by media--> features_ED
    input_ids_T --embedding--> [T, D] <--features_ED at feature_mask_T
    hidden_TD --layers, packed attention--> hidden_TD --norm, head at targets--> sum of cross entropy

Shape letters: see `adapter.py`; Dv is the width of the encoder, K the number of positions with a target. All
modules are Hugging Face's, and so are the names of the parameters.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.nn.functional as F
from torch import nn
from transformers.models.llava_onevision import modeling_llava_onevision as hf

from dflop.models.towers import inner_tower

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dflop.models.adapter import EncoderInput, LlmInput, MediaGrid

IGNORED = -100
"""Target of a position that carries no loss, as everywhere in PyTorch."""


class LlavaOnevisionEncoder(nn.Module):
    """The vision tower with its projector; parameter names are those of the whole model."""

    def __init__(self, whole: nn.Module, config: Any) -> None:
        super().__init__()
        source = cast("Any", whole).model
        self.config = config
        self.model = nn.Module()
        self.model.vision_tower = source.vision_tower
        self.model.multi_modal_projector = source.multi_modal_projector
        self.model.image_newline = source.image_newline

    def layers_in_order(self) -> list[nn.Module]:
        """The layers of the tower that a forward runs, in their order."""
        layers = inner_tower(cast("Any", self.model).vision_tower).encoder.layers
        return list(layers[: max(self._wanted())])

    def _wanted(self) -> list[int]:
        """After how many layers the hidden states are selected."""
        num_layers = len(inner_tower(cast("Any", self.model).vision_tower).encoder.layers)
        named = self.config.vision_feature_layer
        return [index % (num_layers + 1) for index in ([named] if isinstance(named, int) else named)]

    def forward(self, batch: EncoderInput) -> torch.Tensor:
        """Features of all media, one after the other.

        Args:
            batch: tiles and what they belong to.

        Returns:
            features_ED: [E, D], dtype of the parameters; [0, D] without running anything when there are no
                tiles.

        Raises:
            ValueError: a medium gives another number of features than its `num_features`.
        """
        model = cast("Any", self.model)
        if batch.pixels_NCHW.shape[0] == 0:
            # Tied to one small parameter: the caller may run backward through it and finds a gradient of
            # zeros.
            return model.image_newline[None, :][:0]
        return self.project(self._select(batch.pixels_NCHW), batch.media)

    def project(self, selected_NPD: torch.Tensor, media: Sequence[MediaGrid]) -> torch.Tensor:
        """The projector's part of the way: from selected hidden states to packed features.

        Args:
            selected_NPD: [N, P, Dv], N at least 1.
            media: in the order of the tiles.

        Returns:
            features_ED [E, D].

        Raises:
            ValueError: a medium gives another number of features than its `num_features`.
        """
        features_NPD = cast("Any", self.model).multi_modal_projector(selected_NPD)
        tiles = features_NPD.split([grid.num_tiles for grid in media])
        packed = [self._pack(tile_features, grid) for tile_features, grid in zip(tiles, media, strict=True)]
        return torch.cat(packed)

    def _select(self, pixels_NCHW: torch.Tensor) -> torch.Tensor:
        """Hidden states [N, P, Dv] of the layers that the configuration names.

        Runs the layers one by one, as far as needed: the tower's own forward would also run the final norm
        (and the pooling head), which nothing reads.
        """
        tower = inner_tower(cast("Any", self.model).vision_tower)
        wanted = self._wanted()
        hidden_NPD = tower.embeddings(pixels_NCHW)
        kept = {0: hidden_NPD}
        for index, layer in enumerate(self.layers_in_order(), start=1):
            hidden_NPD = layer(hidden_NPD, None)
            if index in wanted:
                kept[index] = hidden_NPD
        selected = kept[wanted[0]] if len(wanted) == 1 else torch.cat([kept[i] for i in wanted], dim=-1)
        return selected[:, 1:] if self.config.vision_feature_select_strategy == "default" else selected

    def _pack(self, features_nPD: torch.Tensor, grid: MediaGrid) -> torch.Tensor:
        """Features [num_features, D] of one image or video, by Hugging Face's own methods."""
        newline_D = cast("torch.Tensor", self.model.image_newline)
        # Those methods read nothing but the configuration of the model they belong to.
        shell = cast("Any", SimpleNamespace(config=self.config))
        if grid.kind == "video":
            pooled_nQD = hf.LlavaOnevisionModel.apply_pooling(shell, features_nPD)
            features_ED = pooled_nQD.flatten(0, 1)
            # One newline a video, after its last frame, on whichever rank that is.
            if grid.is_end:
                features_ED = torch.cat([features_ED, newline_D[None]])
        else:
            features_ED = hf.LlavaOnevisionModel.pack_image_features(
                shell,
                [features_nPD],
                [[grid.height, grid.width]],
                image_newline=newline_D,
                vision_aspect_ratio=self.config.vision_aspect_ratio,
            )[0][0]
        if features_ED.shape[0] != grid.num_features:
            message = (
                f"{grid.kind} of {grid.width} x {grid.height} pixels in {grid.num_tiles} tiles gives "
                f"{features_ED.shape[0]} features, {grid.num_features} were expected"
            )
            raise ValueError(message)
        return features_ED


class LlavaOnevisionLlmStage(nn.Module):
    """A run of layers of the backbone; parameter names are those of the whole model."""

    def __init__(self, whole: nn.Module, layers: range, is_first: bool, is_last: bool) -> None:
        super().__init__()
        source = cast("Any", whole).model.language_model
        self.is_first = is_first
        self.is_last = is_last
        self.model = nn.Module()
        stage = self.model.language_model = nn.Module()
        if self.is_first:
            stage.embed_tokens = source.embed_tokens
        # A dictionary, since the keys of a list would start at 0 in every stage.
        stage.layers = nn.ModuleDict({str(index): source.layers[index] for index in layers})
        if layers:
            stage.rotary_emb = source.rotary_emb
        if self.is_last:
            stage.norm = source.norm
            self.lm_head = cast("Any", whole).lm_head

    def layers_in_order(self) -> list[nn.Module]:
        """Its layers, in the order in which a forward runs them."""
        return list(cast("Any", self.model).language_model.layers.values())

    def forward(self, batch: LlmInput, incoming: torch.Tensor) -> torch.Tensor:
        """The stage's part of the way from tokens to loss.

        Args:
            batch: the packed samples.
            incoming: features_ED [E, D] for the first stage, hidden_TD [T, D] for the others.

        Returns:
            hidden_TD [T, D]; from the last stage the sum of the cross entropy over all targets, a float32
            scalar.

        Raises:
            ValueError: the number of features differs from that of their places.
        """
        hidden_TD = self.hidden(batch, incoming)
        if not self.is_last:
            return hidden_TD
        logits_KV, targets_K = self.logits(batch, hidden_TD)
        return F.cross_entropy(logits_KV.float(), targets_K, reduction="sum")

    def hidden(self, batch: LlmInput, incoming: torch.Tensor) -> torch.Tensor:
        """Hidden states after the layers of this stage, before the final norm.

        Args:
            batch: the packed samples.
            incoming: as in `forward`.

        Returns:
            hidden_TD: [T, D].

        Raises:
            ValueError: the number of features differs from that of their places.
        """
        if batch.input_ids_T.shape[0] == 0:
            # No work, but a result that backward can start from: the gradient is exactly zero.
            smallest = min(self.parameters(), key=torch.Tensor.numel)
            return incoming[:0] + smallest.reshape(-1)[:0].sum()
        hidden_TD = self._embed(batch, incoming) if self.is_first else incoming
        stage = cast("Any", self.model).language_model
        if not stage.layers:
            return hidden_TD
        hidden_1TD, positions_1T = hidden_TD[None], batch.positions_T[None]
        position_embeddings = stage.rotary_emb(hidden_1TD, positions_1T)
        segment_tokens = batch.cu_seqlens.diff().tolist()
        for layer in stage.layers.values():
            hidden_1TD = layer(
                hidden_1TD,
                attention_mask=None,
                position_ids=positions_1T,
                use_cache=False,
                position_embeddings=position_embeddings,
                cu_seq_lens_q=batch.cu_seqlens,
                segment_tokens=segment_tokens,
            )
        return hidden_1TD[0]

    def _embed(self, batch: LlmInput, features_ED: torch.Tensor) -> torch.Tensor:
        """Text embeddings with the features in their places, [T, D]."""
        mask_T = batch.feature_mask_T
        places = int(mask_T.sum())
        if places != features_ED.shape[0]:
            message = f"{features_ED.shape[0]} features for {places} places"
            raise ValueError(message)
        # Placeholders read row 0, whose gradient from them is zero: their own id may lie outside the
        # vocabulary.
        embedded_TD = cast("Any", self.model).language_model.embed_tokens(
            batch.input_ids_T.masked_fill(mask_T, 0)
        )
        if places == 0:
            # Features of no rows still take part, so that their gradient is zeros rather than missing.
            return embedded_TD + features_ED.sum() if features_ED.requires_grad else embedded_TD
        return embedded_TD.masked_scatter(mask_T[:, None], features_ED.to(embedded_TD.dtype))

    def logits(self, batch: LlmInput, hidden_TD: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Logits where there is a target.

        Norm and head work on rows alone, so the other rows need not be computed.

        Args:
            batch: the packed samples.
            hidden_TD: [T, D], the result of `hidden` of the last stage.

        Returns:
            logits_KV [K, V] and targets_K [K] of the K positions with a target, in order.
        """
        chosen_T = batch.targets_T != IGNORED
        normed_KD = cast("Any", self.model).language_model.norm(hidden_TD[chosen_T])
        return self.lm_head(normed_KD), batch.targets_T[chosen_T]
