"""A model profile that nobody measured, for tests that need one."""

from __future__ import annotations

import json


def made_up_profile(model_config, hidden_bytes, modules):
    """A model profile, format 2: `modules` on a device and a link that do not exist.

    Args:
        model_config: hash of the model's configuration.
        hidden_bytes: of one hidden state.
        modules: as the profile has them.

    Returns:
        The fields of the file.
    """
    return {
        "dflop": "model_profile",
        "format_version": 2,
        "made_from": {"model_config": model_config},
        "family": "llava_onevision",
        "is_estimated": False,
        "device": {
            "kind": "cpu", "name": "made up", "num_threads": 1, "num_neighbours": 1, "dtype": "float32",
            "torch": "",
        },
        "hidden_bytes": hidden_bytes,
        "network": {
            "backend": "gloo", "is_assumed": False,
            "links": [{
                "collective": "point_to_point", "span": "node", "num_ranks": 2, "latency_ns": 100_000,
                "bandwidth_bytes_per_s": 1_000_000_000, "points": [],
            }],
        },
        "modules": modules,
        "optimizer_ns_per_million": 1_000_000,
    }  # fmt: skip


def with_experts(profile, path, count):
    """The same profile where each layer of the LLM has experts, of which a token reads one; written to `path`."""
    profile = json.loads(profile.read_text())
    layer = profile["modules"]["llm_layer"]
    own = {key: layer[key] // 2 for key in ("num_parameters", "parameter_bytes")}
    layer["experts"] = {"count": count, "per_token": 1, **own}
    path.write_text(json.dumps(profile))
    return str(path)
