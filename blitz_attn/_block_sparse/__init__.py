"""The calls over block lists. Public through `blitz_attn.block_sparse`."""
