"""The backends in Triton: the same roundings as compile-time constants. Only ``block_sizes`` needs no Triton."""
