"""Common parts of the tests of `integrations.torch`: tensors of every layout, and a list of blocks."""

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from blitz_attn import sabi  # noqa: E402

DTYPES = [torch.float32, torch.float16, torch.bfloat16, torch.float64]
LISTS = torch.from_numpy(sabi.from_block_mask(np.random.default_rng(0).random((2, 4, 4, 5)) < 0.6, dtype="int32"))


def tensors(layout="BNSD", dtype=torch.float32, grad=False, queries=31, keys=37, dims=(16, 16, 8)):
    torch.manual_seed(1)
    made = []
    for heads, tokens, dim in zip((4, 2, 2), (queries, keys, keys), dims, strict=True):
        x = torch.randn(2, heads, tokens, dim)
        if layout == "BSND":
            x = x.transpose(1, 2).contiguous()
        elif layout == "BSH":
            x = x.transpose(1, 2).flatten(2)
        elif layout == "TND":
            x = x.transpose(1, 2).flatten(0, 1)
        made.append(x.to(dtype).requires_grad_(grad))
    return made
