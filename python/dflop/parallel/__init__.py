"""Pieces of a model spread over the ranks that hold the same piece, by PyTorch's FSDP2."""
