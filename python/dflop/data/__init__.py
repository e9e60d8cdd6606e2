"""From sample indices to packed tensors, and the sampler for other trainers; this imports no torch."""
