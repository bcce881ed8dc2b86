"""Draws calls of attention for the problems of torch and of JAX."""

from __future__ import annotations

from typing import Any

import numpy as np

from blitz_attn.sabi import BlockList

from . import checks
from .arrays import as_integers
from .attention_cases import laid_out, listed
from .draw import Draw
from .nsa_draws import as_lists


class CallDraw:
    """A call of attention as other frameworks make it: sizes, rules, lengths and a list, and the shapes of q, k and v."""

    def __init__(self, draw: Draw, dtypes: tuple[str, ...]):
        self.dtype = draw.pick("dtype", dtypes)
        self.real = "float64" if self.dtype == "float64" else "float32"
        layout = draw.pick("layout", ("BNSD", "BSND", "BSH", "TND"))
        batch, kv_heads, group = (
            draw.pick("batch", (1, 2, 3, 0), (4, 3, 1, 0.2)),
            draw.pick("kv_heads", (1, 2, 3)),
            draw.pick("group", (1, 2, 4)),
        )
        s_q, s_kv = (draw.integer(name, 0, 60, likely=(1, 16, 33)) for name in ("s_q", "s_kv"))
        dim, v_dim = (draw.integer(name, 1, 64, likely=(1, 8, 16)) for name in ("dim", "v_dim"))
        heads, shape = kv_heads * group, (draw.pick("block_q", (8, 1, 16, 128)), draw.pick("block_kv", (8, 1, 16, 128)))
        self.options: dict[str, Any] = {
            "causal": draw.flag("causal"), "block_shape": shape, "scale": draw.pick("scale", (None, 0.3)), "layout": layout,
            "window": draw.pick("window", (None, "some")) and (draw.pick("left", (-1, 0, 5)), draw.pick("right", (-1, 0, 5))),
            "num_threads": checks.threads(draw),
        }  # fmt: skip
        if layout == "BSH":
            self.options |= {"num_heads": heads, "num_kv_heads": kv_heads}
        lens = {
            name: [draw.integer(f"{name}[{i}]", 0, n, likely=(n,)) for i in range(batch)]
            for name, n in (("q_lens", s_q), ("kv_lens", s_kv))
        }
        ragged = draw.flag("ragged")
        if layout == "TND":
            sums = {name: np.concatenate([[0], np.cumsum(x)]).astype(np.int64) for name, x in lens.items()}
            self.options |= {
                "cu_seqlens_q": as_integers(draw, "cu_q", sums["q_lens"]),
                "cu_seqlens_kv": as_integers(draw, "cu_kv", sums["kv_lens"]),
            }
            s_q, s_kv = (max(x, default=0) for x in lens.values())
        elif ragged:
            self.options |= {name: as_integers(draw, name, x) for name, x in lens.items()}
        self.sabi: Any = None
        if draw.flag("has_sabi"):
            rows, columns = -(-s_q // shape[0]), -(-s_kv // shape[1])
            rng = draw.rng("sabi")
            some = (batch, draw.pick("sabi.heads", (1, heads)), rows)
            blocks = rng.random((*some, columns)) < rng.random((*some, 1))
            self.sabi = as_lists(draw, "sabi", listed(blocks, "int32", rng, shuffled=True))
            if type(self.sabi) is np.ndarray and draw.flag("sabi.knows_shape", 0.3):
                self.sabi = BlockList(self.sabi, shape)
        self.heads, self.full = heads, (batch, heads, s_q, s_kv)
        self.shapes = {
            name: laid_out(np.empty((batch, count, tokens, width)), layout, np.array(lens[which])).shape
            for name, tokens, which, count, width in (
                ("q", s_q, "q_lens", heads, dim),
                ("k", s_kv, "kv_lens", kv_heads, dim),
                ("v", s_kv, "kv_lens", kv_heads, v_dim),
            )
        }
