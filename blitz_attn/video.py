"""Videos: orders of tokens in which the tokens of a cube stand side by side, and block lists that rules over cubes make.

The tokens of a video model are a grid of frames, height and width, often with text before or after it. `Geometry` describes these tokens,
and `cube_order` sorts them into cubes. Rules (`Neighbourhood`, `SlidingTiles`, `Radial`) say which cubes see each other, and `blocks` turns
them into lists for attention over the tokens in that order. `density` tells which share of the blocks a list will keep, before it is made.
`choose_rules` chooses a rule for each head, and a `Schedule` says which blocks each denoising step attends to.

>>> import numpy as np
>>> import blitz_attn
>>> from blitz_attn import video
>>> order = video.cube_order(video.Geometry([(8, 16, 16), 77]))
>>> rng = np.random.default_rng(0)
>>> q, k, v = (rng.standard_normal((1, 2, order.geometry.num_tokens, 64), dtype=np.float32) for _ in range(3))
>>> sabi = video.blocks(order, video.SlidingTiles((1, 3, 3)))
>>> out = order.restore(blitz_attn.block_sparse_attention(*order.permute(q, k, v), sabi))
"""

from ._video.choose import choose_rules
from ._video.lists import blocks, density
from ._video.order import Geometry, TokenOrder, cube_order
from ._video.rules import Neighbourhood, Radial, SlidingTiles
from ._video.schedule import Schedule

__all__ = [
    "Geometry",
    "Neighbourhood",
    "Radial",
    "Schedule",
    "SlidingTiles",
    "TokenOrder",
    "blocks",
    "choose_rules",
    "cube_order",
    "density",
]
