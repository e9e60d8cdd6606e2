"""A model profile whose bytes are counted and whose times are made up: for tests of the memory model."""

from __future__ import annotations

import torch
from made_up import made_up_profile
from piece_bytes import peak_bytes

from dflop.models.adapter import LlmInput
from dflop.models.recompute import FULL, SELECTIVE, recomputing
from dflop.profiling.memory import count_split

CPU = torch.device("cpu")


def llm_input(num_tokens, num_labels, num_features=0, num_segments=4):
    """Packed samples of about equal length."""
    ends = [num_tokens * index // num_segments for index in range(num_segments + 1)]
    targets_T = torch.full((num_tokens,), -100)
    targets_T[:num_labels] = 1
    return LlmInput(
        input_ids_T=torch.ones(num_tokens, dtype=torch.int64),
        feature_mask_T=torch.arange(num_tokens) < num_features,
        positions_T=torch.cat([torch.arange(b - a) for a, b in zip(ends, ends[1:], strict=False)]),
        cu_seqlens=torch.tensor(ends, dtype=torch.int32),
        targets_T=targets_T,
    )


def _split_bytes(forward, module, inputs):
    """Of I and W."""
    given = torch.ones_like(forward())
    backward = lambda result: torch.autograd.backward(result, given)  # noqa: E731
    split = count_split(forward, backward, module, CPU, lambda _: (*inputs, given))
    return {
        "queued_bytes": split.queued_bytes, "input_workspace_bytes": split.input_peak_bytes,
        "weight_workspace_bytes": split.weight_peak_bytes,
    }  # fmt: skip


def _point(size, piece, split):
    times = {"forward_ns": 50_000 + 1000 * size, "backward_ns": 50_000 + 2000 * size}
    halves = {"input_ns": 30_000 + 1000 * size, "weight_ns": 30_000 + 1000 * size, "spread_ns": 0}
    return {
        "size": size, **times, **halves, "repeats": 1,
        "activation_bytes": piece.kept_bytes, "workspace_bytes": piece.workspace_bytes,
        "split": split,
    }  # fmt: skip


def _recompute(layers, sizes, kept_bytes):
    """What layers keep that recompute, by mode; `kept_bytes` counts it for a size."""

    def point(size, mode):
        with recomputing(layers, mode):
            return {"size": size, "extra_ns": 500 * size, "activation_bytes": kept_bytes(size)}

    return {mode: [point(size, mode) for size in sizes] for mode in (SELECTIVE, FULL)}


def _module(count, module, points, recompute=None):
    parameters = list(module.parameters())
    return {
        **({"recompute": recompute} if recompute else {}),
        "count": count,
        "linear": {"points": points},
        "attention": {"points": []},
        "num_parameters": sum(p.numel() for p in parameters),
        "parameter_bytes": 4 * sum(p.numel() for p in parameters),
    }


def count_modules(adapter, tiles, llm_tokens, label_tokens):
    """The `modules` of a model profile, float32 on this CPU; attention is part of the linear curves."""
    encoder = adapter.build_encoder(CPU, torch.float32, 0).train()
    tower = encoder.model.vision_tower
    tower = getattr(tower, "vision_model", tower)
    width = adapter.hidden_size
    rest = [p for p in encoder.parameters() if all(p is not q for q in tower.parameters())]

    def over_tiles(forward, module, parameters):
        points = []
        for n in tiles:
            pixels = torch.randn(n, 3, adapter.image_size, adapter.image_size)
            hidden = tower.embeddings(pixels).detach()
            made = forward(n, pixels, hidden)
            piece = peak_bytes(made, CPU, parameters, [pixels, hidden])
            split = _split_bytes(made, module, [pixels, hidden])
            points.append(_point(n * adapter.encoder_tokens_per_tile, piece, split))
        return points

    def project(n, pixels, hidden):
        del pixels
        media = adapter.example_media(n)

        def forward():
            features = encoder.model.multi_modal_projector(hidden.detach().requires_grad_())
            tiles = features.split([grid.num_tiles for grid in media])
            return torch.cat(
                [adapter.pack(encoder.model, t, grid) for t, grid in zip(tiles, media, strict=True)]
            )

        return forward

    first = tower.encoder.layers[0]

    def run_first(n, p, h):
        return lambda: first(h.detach().requires_grad_(), None)

    def kept_by_first(num_tokens):
        n = num_tokens // adapter.encoder_tokens_per_tile
        hidden = tower.embeddings(torch.randn(n, 3, adapter.image_size, adapter.image_size)).detach()
        return peak_bytes(run_first(n, None, hidden), CPU, first.parameters(), [hidden]).kept_bytes

    modules = {
        "encoder_embedding": _module(
            1, tower.embeddings,
            over_tiles(
                lambda n, p, h: lambda: tower.embeddings(p),
                tower.embeddings, list(tower.embeddings.parameters()),
            ),
        ),
        "encoder_layer": _module(
            adapter.num_encoder_layers, first,
            over_tiles(run_first, first, list(first.parameters())),
            _recompute([first], [n * adapter.encoder_tokens_per_tile for n in tiles], kept_by_first),
        ),
        "projector": _module(
            1, encoder.model.multi_modal_projector,
            over_tiles(project, encoder.model.multi_modal_projector, rest),
        ),
    }  # fmt: skip
    # What the tower holds beside its layers (a last norm that nothing reads) is held all the same.
    held = sum(p.numel() for p in encoder.parameters())
    counted = sum(m["num_parameters"] * m["count"] for m in modules.values())
    modules["projector"]["num_parameters"] += held - counted
    modules["projector"]["parameter_bytes"] += 4 * (held - counted)

    def over_tokens(stage, sizes, batch_of, input_of):
        stage.train()
        points = []
        for n in sizes:
            batch, buffer = batch_of(n), input_of(n)
            made = lambda batch=batch, buffer=buffer: stage(batch, buffer.detach().requires_grad_())  # noqa: E731
            piece = peak_bytes(made, CPU, stage.parameters(), [buffer])
            points.append(_point(n, piece, _split_bytes(made, stage, [buffer])))
        return points

    def hidden_of(n):
        return torch.randn(n, width)

    embedding = adapter.build_llm_stage(0, 0, CPU, torch.float32, 0)
    layer = adapter.build_llm_layers(1, CPU, torch.float32, 0)
    head = adapter.build_llm_stage(adapter.num_llm_layers, 0, CPU, torch.float32, 0)
    modules["llm_embedding"] = _module(
        1, embedding,
        over_tokens(embedding, llm_tokens, lambda n: llm_input(n, 1, n // 2), lambda n: hidden_of(n // 2)),
    )  # fmt: skip

    def kept_by_layer(n):
        batch, hidden = llm_input(n, 1), hidden_of(n)
        made = lambda: layer(batch, hidden.detach().requires_grad_())  # noqa: E731
        return peak_bytes(made, CPU, layer.parameters(), [hidden]).kept_bytes

    modules["llm_layer"] = _module(
        adapter.num_llm_layers, layer, over_tokens(layer, llm_tokens, lambda n: llm_input(n, 1), hidden_of),
        _recompute(layer.layers_in_order(), llm_tokens, kept_by_layer),
    )  # fmt: skip
    modules["llm_head"] = _module(
        1, head,
        over_tokens(head, label_tokens, lambda n: llm_input(3 * n, n), lambda n: hidden_of(3 * n)),
    )  # fmt: skip
    return modules


def memory_profile(adapter, model_config, tiles, llm_tokens, label_tokens):
    """A model profile, format 2."""
    modules = count_modules(adapter, tiles, llm_tokens, label_tokens)
    profile = made_up_profile(model_config, 4 * adapter.hidden_size, modules)
    return {**profile, "is_tied": adapter.config.tie_word_embeddings}
