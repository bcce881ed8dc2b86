"""`nsa.NsaCache`: append, crop, reorder and attend in any order.

The oracle is `nsa` over the tokens of each sequence alone: the bits must be the same, and results of padding must be 0.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from blitz_attn.nsa import NsaCache, nsa

from . import arrays, checks
from .arrays import INTEGERS_AS, integers_as
from .draw import Draw
from .nsa_draws import Setting, draw_rules
from .problems import Finding, problem

STEPS = ("append", "append with lens", "crop", "crop to a number", "reorder", "attend")


@problem("NsaCache", weight=1.0)
def cache(draw: Draw) -> None:
    setting = Setting(draw, packed=False)
    _, options = draw_rules(setting, ("paper",))
    kv_heads, dim, v_dim = setting.kv_heads, setting.dim, setting.v_dim
    for name, shape in (("w_k_compress", (kv_heads, dim, dim)), ("w_v_compress", (kv_heads, v_dim, v_dim)), ("gate_proj_weight", (setting.heads, 3, dim))):
        if draw.flag(f"has_{name}", 0.3):
            options[name] = setting.weight(name, *shape).given
    options["dtype"] = setting.named
    rng = draw.rng("tokens")
    poison = draw.pick("rejected", (1.0, 100.0, np.nan, np.inf))  # factor of tokens that will be cropped, and of padding
    steps = [draw.pick(f"step[{i}]", STEPS, (5, 3, 3, 1, 2, 4)) for i in range(draw.integer("steps", 1, 24, likely=(4, 12)))]
    most = draw.pick("most", (3, 1, 8, 40), (4, 2, 2, 1))  # tokens per step

    def dressed(x: np.ndarray) -> Any:
        return arrays.dressed(np.ascontiguousarray(x), setting.dtype, setting.kind)

    def drawn(shape: tuple[int, ...], factor: float = 1.0) -> np.ndarray:
        return arrays.stored(arrays.rounded(rng.standard_normal(shape) * factor, setting.dtype), setting.dtype)

    def given(numbers: Any) -> Any:
        return integers_as(INTEGERS_AS[rng.integers(len(INTEGERS_AS))], numbers)

    with checks.at_level(draw):
        held = NsaCache(**options, num_threads=checks.threads(draw))
        batch = max(1, len(setting.lens))
        tokens = [tuple(drawn((0, kv_heads, size)) for size in (dim, v_dim)) for _ in range(batch)]
        for step in [*steps, "attend"]:
            lens = [len(k) for k, _ in tokens]
            if step.startswith("append"):
                count, batch = int(rng.integers(0, most, endpoint=True)), len(tokens)
                counts = rng.integers(0, count, batch, endpoint=True) if "lens" in step else np.full(batch, count)
                new = [drawn((batch, count, kv_heads, size)) for size in (dim, v_dim)]
                held.append(*map(dressed, new), given(counts) if "lens" in step else None)
                more = [tuple(x[b, :n] for x in new) for b, n in enumerate(counts)]
                tokens = [tuple(map(np.concatenate, zip(old, own, strict=True))) for old, own in zip(tokens, more, strict=True)]
            elif step == "crop" and held.lens.size:  # crops draft tokens, and some earlier ones
                count = int(rng.integers(0, most, endpoint=True))
                held.append(*(dressed(drawn((len(tokens), count, kv_heads, size), poison)) for size in (dim, v_dim)))
                kept = [max(0, n - int(rng.integers(0, most, endpoint=True)) * int(rng.integers(2))) for n in lens]
                held.crop(given(kept))
                tokens = [tuple(x[:n] for x in pair) for pair, n in zip(tokens, kept, strict=True)]
            elif step == "crop to a number":
                kept_by_all = max(0, max(lens) - int(rng.integers(0, most, endpoint=True)))
                held.crop(kept_by_all)
                tokens = [tuple(x[:kept_by_all] for x in pair) for pair in tokens]
            elif step == "reorder" and held.lens.size:
                chosen = rng.integers(0, len(tokens), int(rng.integers(1, 5)) if rng.integers(3) == 0 else len(tokens))
                held.reorder(given(chosen))
                tokens = [tokens[n] for n in chosen]
            elif step == "attend" and held.lens.size:
                count = int(rng.integers(0, min(most, *lens), endpoint=True)) if min(lens) else 0
                counts = [count] * len(tokens)
                if rng.integers(2):  # rows of padding
                    count = int(rng.integers(0, most, endpoint=True))
                    counts = [int(rng.integers(0, min(count, n), endpoint=True)) for n in lens]
                q = drawn((len(tokens), count, setting.heads, dim))
                for row, n in zip(q, counts, strict=True):
                    row[n:] = drawn(row[n:].shape, poison)
                out = held.attend(dressed(q), lens=given(counts) if [count] * len(tokens) != counts or rng.integers(2) else None)
                for b, (pair, n) in enumerate(zip(tokens, counts, strict=True)):
                    one = nsa(*(dressed(x[None]) for x in (q[b, :n], *pair)), **options)
                    checks.same_bits(f"sequence {b} of {len(tokens)}", out[b : b + 1, :n], one)
                    if any(checks.bits_of(out[b, n:])):
                        raise Finding(f"padding of sequence {b}: not 0")
            if held.lens.size and held.lens.tolist() != [len(k) for k, _ in tokens]:
                raise Finding(f"lens: {held.lens.tolist()} after {step}")
    setting.check_inputs()
