"""What autograd keeps of a layer, and what of it is not counted: for the tests of the analytic model."""

import torch
from flop_configs import CONFIGS


def has_linear_attention(name):
    """Whether layers of the backbone have linear attention: all but the last of four."""
    return name.startswith(("qwen3_5", "minicpm"))


def has_short_convolution(name):
    """Whether layers of the backbone have a short convolution: all but the last."""
    return name == "lfm2_vl"


def has_windows(name):
    """Whether the first layer of the backbone sees a window, and the last all tokens before."""
    return name.startswith("gemma")


def kept_bytes(ran, dtype):
    """Bytes that autograd keeps, each storage once; parameters and what all layers share are not counted."""
    own = {p.untyped_storage().data_ptr() for part in ran.parts for p in part.parameters()}
    own |= {tensor.untyped_storage().data_ptr() for tensor in ran.constants}
    kept = {}

    def pack(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own and tensor.is_floating_point():
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    leaf = ran.leaf.to(dtype).requires_grad_(ran.wants_gradient)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        result = ran.run(leaf)
    del result
    return sum(kept.values())


def kept_besides(name, ran, dtype):
    """What a layer with attention keeps besides on a CPU, or in float32.

    GLM and Qwen3.5 put the rotated part of a head and the rest together, head by head. PyTorch's attention gives its
    result in the order of the queries, so it is copied; packed kernels give it token by token.
    """
    text = CONFIGS[name]["text_config"]
    if name.startswith("gemma4"):
        return kept_besides_in_gemma4(text, ran, dtype)
    if has_windows(name):
        # One more than the weight of each of six norms, whatever the number of tokens.
        return 4 * (4 * text["hidden_size"] + 2 * text["head_dim"])
    if name.startswith("glm"):
        queries = text["num_attention_heads"] * text.get("head_dim", 8)
        # The router's matrix is copied to float32, whatever the number of tokens.
        router = text.get("n_routed_experts", 0) * text["hidden_size"] * 4 if dtype != torch.float32 else 0
        return sum(ran.segments) * queries * dtype.itemsize + router
    if not has_linear_attention(name):
        return 0
    queries = text["num_attention_heads"] * text["head_dim"]
    rows = queries * dtype.itemsize
    if dtype == torch.float32:
        # No copy is made for the norm of the queries: the gates, which came of the same product, are kept too.
        rows += queries * dtype.itemsize
    # One more than the weight of each of four norms, whatever the number of tokens.
    return sum(ran.segments) * rows + 4 * 2 * (text["hidden_size"] + text["head_dim"])


def kept_besides_in_gemma4(text, ran, dtype):
    """Of the layer that sees all tokens."""
    own = text.get("per_layer_config", {}).get("2", {})
    size, keys = own.get("head_dim", text["global_head_dim"]), own.get("num_key_value_heads", 1)
    # The number that scales the layer, whatever the number of tokens.
    scale = dtype.itemsize
    width, has_experts = text["hidden_size"], text.get("enable_moe_block", False)
    if dtype == torch.float32:
        # The norms of keys and values read one tensor, where both are of one product; those before MLP, router and experts
        # too.
        shared = keys * size * text["attention_k_eq_v"] + 2 * width * has_experts
        return scale - sum(ran.segments) * 4 * shared
    # The weights of six norms in float32, too; with experts of nine.
    return scale + 4 * ((4 + 3 * has_experts) * width + 2 * size)
