"""Block-sparse attention, forward and backward: softmax attention in which lists of key blocks say which keys each block of queries
attends to."""

from ._block_sparse.call import block_sparse_attention, block_sparse_attention_backward

__all__ = ["block_sparse_attention", "block_sparse_attention_backward"]
