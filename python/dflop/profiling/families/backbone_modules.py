"""The modules of the backbone's pieces: Hugging Face's layers, called as training calls them.

Shape letters: T LLM tokens, E feature tokens, D width, K label tokens, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from dflop.models.backbone import rotate
from dflop.models.layer_kinds import kinds_of_layers, sees_pictures_whole, window_of
from dflop.models.loss import capped, summed_cross_entropy
from dflop.models.sequence import all_rows, own_rows
from dflop.models.sight import picture_places, sights
from dflop.profiling.families.source import bounds_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dflop.models.sums import Sums


@dataclass(frozen=True)
class Pack:
    """What layers must know of the samples of a pack, which lie one after the other."""

    cu_seqlens: torch.Tensor
    """[M + 1] int32."""
    segment_tokens: tuple[int, ...]
    """Tokens of each sample: the differences of `cu_seqlens`."""
    positions_1T: torch.Tensor
    """[1, T]; restarts at 0 with each sample."""
    angles: dict[str | None, tuple[torch.Tensor, torch.Tensor]]
    """Cosine and sine of the rotary embedding, by kind of layer."""
    seen: dict[str, Any]
    """What each kind of layers sees, as an argument of the layers; empty where all see their samples."""


class LlmEmbedding(nn.Module):
    """Embedding, with features put in their places."""

    def __init__(self, embed_tokens: nn.Module, rotary: nn.Module, text: Any) -> None:
        super().__init__()
        self.embed_tokens, self.rotary = embed_tokens, rotary
        self.kinds = set(kinds_of_layers(text) or [None])
        self.row_sums: Sums | None = None

    def forward(
        self,
        features_ED: torch.Tensor,
        ids_T: torch.Tensor,
        mask_T: torch.Tensor,
        rows_E: torch.Tensor,
        positions_1T: torch.Tensor,
    ) -> torch.Tensor:
        """Hidden states before the first layer.

        Args:
            features_ED: of all media; wider than D where later layers add features too (DeepStack).
            ids_T: int64; where a feature goes, any id.
            mask_T: bool; true where a feature goes.
            rows_E: int64; where features go.
            positions_1T: int64.

        Returns:
            hidden_TD; this rank's rows where ranks share them.
        """
        ids_T = ids_T.masked_fill(mask_T, 0)
        embedded_TD = self.embed_tokens(ids_T)
        # Rotary angles are computed here and not with the layers: a stage does it once, while the time of a
        # layer is multiplied by the number of layers.
        for kind in self.kinds:
            rotate(self.rotary, positions_1T, embedded_TD, kind)
        embedded_TD = nn.functional.pad(embedded_TD, (0, features_ED.shape[1] - embedded_TD.shape[1]))
        hidden_TD = embedded_TD.index_copy(0, rows_E, features_ED)
        return hidden_TD if self.row_sums is None else own_rows(hidden_TD, self.row_sums)


class LlmLayers(nn.Module):
    """A run of decoder layers over packed samples."""

    def __init__(
        self, layers: Sequence[nn.Module], rotary: nn.Module, text: Any, picture_tokens: int | None
    ) -> None:
        super().__init__()
        self.layers, self.rotary, self.picture_tokens = nn.ModuleList(layers), rotary, picture_tokens
        self.kinds: list[str | None] = [*(kinds_of_layers(text) or [None] * len(layers))]
        named = {kind for kind in self.kinds if kind is not None}
        self.windows = {window_of(text, kind) for kind in named}
        self.whole_in = {window_of(text, kind) for kind in named if sees_pictures_whole(text, kind)}

    def pack(
        self,
        segments: Sequence[int],
        like: torch.Tensor,
        positions: torch.Tensor | None = None,
        mask_T: torch.Tensor | None = None,
    ) -> Pack:
        """What the layers must know of these samples.

        Args:
            segments: tokens each.
            like: tells device and dtype.
            positions: as in `rotate`; None: those of plain text.
            mask_T: true at places of features; None: as of usual pictures.

        Returns:
            Arguments of `forward`.
        """
        of_text_1T = torch.cat([torch.arange(tokens) for tokens in segments])[None].to(like.device)
        positions = of_text_1T if positions is None else positions
        angles = {kind: rotate(self.rotary, positions, like, kind) for kind in set(self.kinds)}
        bounds, seen = bounds_of(segments, like.device), {}
        if self.windows:
            if mask_T is None:
                mask_T = picture_places(segments, self.picture_tokens, like.device)
            has_pictures = bool(mask_T.any())
            seen["sights"] = sights(self.windows, mask_T, bounds, segments, has_pictures, self.whole_in)
        return Pack(bounds, tuple(segments), of_text_1T, angles, seen)

    def forward(self, hidden_TD: torch.Tensor, pack: Pack) -> torch.Tensor:
        """Hidden states after the layers.

        Args:
            hidden_TD: before; this rank's rows where ranks share them.
            pack: of the samples.

        Returns:
            As many rows.
        """
        hidden_1TD = hidden_TD[None]
        for kind, layer in zip(self.kinds, self.layers, strict=True):
            hidden_1TD = layer(
                hidden_1TD,
                attention_mask=None,
                position_ids=pack.positions_1T,
                use_cache=False,
                position_embeddings=pack.angles[kind],
                cu_seq_lens_q=pack.cu_seqlens,
                segment_tokens=pack.segment_tokens,
                **pack.seen,
            )
        return hidden_1TD[0]


class LlmHead(nn.Module):
    """Final norm, logits and loss where there is a target."""

    def __init__(self, norm: nn.Module, lm_head: nn.Module) -> None:
        super().__init__()
        self.norm, self.lm_head = norm, lm_head
        self.row_sums: Sums | None = None

    def logits(self, hidden_TD: torch.Tensor, chosen_T: torch.Tensor) -> torch.Tensor:
        """Logits of the chosen rows.

        Args:
            hidden_TD: after the last layer.
            chosen_T: bool.

        Returns:
            logits_KV; of a rank's own part of the vocabulary, where it is cut.
        """
        return capped(self.lm_head, self.lm_head(self.norm(hidden_TD[chosen_T])))

    def forward(self, hidden_TD: torch.Tensor, targets_T: torch.Tensor) -> torch.Tensor:
        """The loss.

        Args:
            hidden_TD: after the last layer; this rank's rows where ranks share them.
            targets_T: the id that each row must predict, -100 where there is no loss.

        Returns:
            Sum of the cross entropy, a float32 scalar.
        """
        chosen_T = targets_T != -100
        targets_K = targets_T[chosen_T]
        if self.row_sums is not None:
            hidden_TD = all_rows(hidden_TD, targets_T.shape[0], self.row_sums)
        return summed_cross_entropy(self.lm_head, self.norm(hidden_TD[chosen_T]), targets_K)
