"""`select_blocks_prefill` and `select_and_attend_prefill`: every chooser, budget, rule, layout, dtype and kind of array."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

import blitz_attn
from blitz_attn import select

from . import arrays, checks
from .attention_cases import LAYOUTS, Arguments, Case, alone, draw_problem, inputs, laid_out, rules
from .attention_oracle import Attention, forward
from .bias_draws import draw_given_slopes, draw_mask, draw_slopes, place
from .draw import Discard, Draw
from .problems import Finding, problem
from .select_oracle import Choice, check_lists, mask_of, scores_of

NEAR = 1e-5  # error of scores, which add up to 1: float32 rounds sums of products, which become exponents


def draw_choice(draw: Draw, p: Attention) -> tuple[Choice, Any]:
    """The choice for the oracle, and the chooser for the package. Sets the block shape of the problem."""
    kind = draw.pick("chooser", ("pooled", "antidiagonal", "sampled_rows", "vertical_slash"), (3, 1, 1, 1))
    over = draw.pick("over", ("largest", "mean"))
    rows, keys, term = draw.integer("rows", 1, 16, likely=(1, 4, 8)), 1, "mean"
    parts_q, parts_kv = draw.integer("parts_q", 1, 8, likely=(1, 2, 4)), draw.integer("parts_kv", 1, 8, likely=(1, 2, 4))
    chooser: Any
    if kind == "pooled":
        keys = rows if draw.flag("pool.same") else draw.integer("keys", 1, 16, likely=(1, 4, 8))
        term = draw.pick("term", ("both", "mean", "bound"))
        chooser = select.Pooled((rows, keys) if keys != rows else rows, term, over)
    elif kind == "antidiagonal":
        keys, chooser = rows, select.Antidiagonal(rows, over)
    elif kind == "sampled_rows":
        chooser = select.SampledRows(rows, over)
        parts_kv = draw.integer("chooser.block_kv", 1, 64, likely=(16, 32))
    else:
        over, chooser = "mean", select.VerticalSlash(rows)
        parts_q, parts_kv = (
            draw.integer("chooser.block_q", 1, 64, likely=(16, 32)),
            draw.integer("chooser.block_kv", 1, 64, likely=(16, 32)),
        )
    p.block_shape = (parts_q if kind == "vertical_slash" else rows * parts_q, keys * parts_kv)
    budget = draw.pick("budget", ("density", "top_p", "threshold", "top_k"), (3, 2, 1, 1))
    per_kv_head = draw.flag("per_kv_head", 0.3)
    lists = p.k.shape[1] if per_kv_head else p.q.shape[1]
    numbers = [
        draw.integer(f"top_k[{i}]", 1, 12) if budget == "top_k" else draw.pick(f"{budget}[{i}]", (0.3, 1.0, 0.05, 0.9, 1e-3, 0.6))
        for i in range(lists if draw.flag("number_a_list", 0.3) else 1)
    ]
    names = ("sink", "recent", "last_columns", "first_rows", "last_rows")
    kept = {name: draw.pick(name, (0, 1, 2, 100), (5, 3, 2, 0.3)) for name in names}
    return Choice(kind, rows, keys, term, over, budget, numbers, per_kv_head=per_kv_head, **kept), chooser


def options_of(c: Choice, chooser: Any) -> dict[str, Any]:
    names = ("sink", "recent", "last_columns", "first_rows", "last_rows", "per_kv_head")
    number = c.numbers if len(c.numbers) > 1 else c.numbers[0]
    return {"chooser": chooser, c.budget: number} | {name: getattr(c, name) for name in names}


@problem("select_blocks_prefill", weight=2)
def select_blocks_prefill(draw: Draw) -> None:
    check = draw.pick("check", ("oracle", "threads", "alone", "attend", "apart"))
    p, layout, has_q_lens, has_kv_lens = draw_problem(
        draw, spreads=(1.0, 0.02, 4.0), regimes={"middle": 1}
    )  # small, because the oracle goes through pairs of tokens
    p.blocks = p.total = p.softcap = None
    p.scale = draw.pick("chooser.scale", (None, 1.0, 0.0, -0.3), (4, 1, 1, 1))
    c, chooser = draw_choice(draw, p)
    p.ranges = None if c.kind == "vertical_slash" else p.ranges
    case = Case(p, layout, np.zeros(p.k.shape[:3], bool), np.nan, has_q_lens, has_kv_lens)
    made = Arguments(draw, case)
    given = {name: made.arrays[name] for name in ("q", "k")}
    call = {name: x for name, x in made.options.items() if name != "sabi"} | options_of(c, chooser)
    index_dtype = draw.pick("index_dtype", ("int32", "uint16", "int16", "int64"))
    columns = -(-p.k.shape[2] // p.block_shape[1])
    with checks.at_level(draw):
        sabi, scores = blitz_attn.select_blocks_prefill(
            *given.values(), **call, index_dtype=index_dtype, return_scores=True, num_threads=checks.threads(draw)
        )
        made.check_unchanged()
        ours = np.asarray(scores)
        checks.near("scores", ours.astype(np.float64), scores_of(p, c), NEAR * max(1.0, float(np.abs(p.q).max(initial=0)) ** 2))
        kept = mask_of(sabi, columns, c, p.k.shape[1])
        check_lists(p, c, ours, kept)
        plain = {"dtype": p.dtype if p.dtype == "bfloat16" else None} | options_of(c, chooser)

        def again_by(case: Case, num_threads: int, **more: Any) -> Any:
            q, k, _ = inputs(case).values()
            return blitz_attn.select_blocks_prefill(q, k, **rules(case, {}), **plain, **more, return_scores=True, num_threads=num_threads)

        if check == "threads":
            again = again_by(case, draw.pick("other_threads", checks.THREADS), index_dtype=index_dtype)
            checks.same_bits("another number of threads", (np.asarray(sabi), ours), again)
        elif check == "alone" and p.q.shape[0]:
            b = int(draw.rng("alone.entry").integers(p.q.shape[0]))
            single = alone(case, b, draw.pick("alone.layout", LAYOUTS), 0, 0)
            again = again_by(single, 1)
            rows, own = again[1].shape[2:]
            checks.same_bits("scores alone", np.ascontiguousarray(ours[b : b + 1, :, :rows, :own]), again[1])
            if (mask_of(again[0], own, c, p.k.shape[1]) != kept[b : b + 1, :, :rows, :own]).any():
                raise Finding("other lists alone")
        elif check == "apart":
            made = {name: x for name, x in call.items() if name not in (c.budget, "chooser") and not hasattr(c, name)}
            made |= {"per_kv_head": c.per_kv_head, "num_threads": draw.pick("other_threads", checks.THREADS)}
            checks.same_bits("scores", ours, np.asarray(select.scores(*given.values(), chooser=chooser, **made)))
            again = blitz_attn.select_blocks_prefill(*given.values(), **call | {"chooser": lambda q, k, **options: ours}, index_dtype=index_dtype)
            checks.same_bits("a function's lists", np.asarray(sabi), np.asarray(again))
        elif check == "attend":
            _check_attend(draw, made, p, c, call, kept)


def _draw_added(draw: Draw, p: Attention) -> tuple[Attention, dict[str, Any]]:
    """Biases, softcap and sinks, which change attention but not the choice of blocks."""
    options: dict[str, Any] = {}
    heads = p.q.shape[1]
    if draw.flag("capped.attend", 0.25):
        p = dataclasses.replace(p, softcap=draw.pick("softcap.value", (1.0, 20.0, 0.1)))
        options["softcap"] = p.softcap
    if draw.flag("sinks", 0.25):
        p = dataclasses.replace(p, sinks=arrays.rounded(draw.rng("sinks").standard_normal(heads) * 3, "float32"))
        options["sinks"] = p.sinks if draw.flag("sinks.array") else p.sinks.tolist()
    if draw.flag("slopes", 0.25):
        p = dataclasses.replace(p, slopes=draw_slopes(draw, heads))
        options["alibi_slopes"] = draw_given_slopes(draw, p.slopes)
    if draw.flag("mask", 0.3):
        full = (*p.q.shape[:3], p.k.shape[2])
        mask, dtype = draw_mask(draw, full, p.dtype, p.seen(), spoils=False)
        p = dataclasses.replace(p, mask=mask)
        options["attn_mask"] = place(draw, mask, dtype, full)[1]
    return p, options


def _check_attend(draw: Draw, made: Arguments, p: Attention, c: Choice, call: dict[str, Any], kept: np.ndarray) -> None:
    blocks = np.repeat(kept, p.q.shape[1] // kept.shape[1], axis=1) if kept.shape[1] else kept
    p, added = _draw_added(draw, dataclasses.replace(p, blocks=blocks))
    out, lse, sabi = blitz_attn.select_and_attend_prefill(*made.arrays.values(), **call, **added, return_lse=True, return_sabi=True)
    if (mask_of(sabi, kept.shape[-1], c, p.k.shape[1]) != kept).any():
        raise Finding("select_and_attend_prefill chooses other blocks")
    f = forward(p)
    layout = made.case.layout
    for what, got, dtype, pair in (("out", out, p.dtype, (f.out, f.allowed_out)), ("lse", lse, p.real, (f.lse, f.allowed_lse))):
        expected, allowed = (laid_out(x, layout, p.q_lens) for x in pair)
        checks.near(what, arrays.values_of(got, dtype), expected, allowed)


@problem("refused_choices", weight=0.3)
def refused_choices(draw: Draw) -> None:
    """Sizes that do not divide a block, budgets out of range, two budgets, and no budget are refused."""
    rng = draw.rng("values")
    q, k = (rng.standard_normal((1, 2, 64, 8), np.float32) for _ in range(2))
    size, block = draw.integer("size", 0, 40), draw.integer("block", 1, 64)
    if size and block % size == 0:
        raise Discard("it divides")
    number = draw.pick("number", (0.0, -0.5, 1.5, "nan", "inf"))
    mistake = draw.pick("mistake", ("pool", "stride", "rows", "density", "top_p", "threshold", "top_k", "two", "none"))
    call: dict[str, Any] = {"density": 0.5, "block_shape": (block, block), "chooser": select.Pooled(block)}
    if mistake in ("pool", "stride", "rows"):
        call["chooser"] = {"pool": select.Pooled, "stride": select.Antidiagonal, "rows": select.SampledRows}[mistake](size)
    elif mistake == "two":
        call["top_p"] = 0.5
    elif mistake == "none":
        del call["density"]
    else:
        del call["density"]
        call[mistake] = 0 if mistake == "top_k" else float(number)
    checks.refused(lambda: blitz_attn.select_blocks_prefill(q, k, **call), "density" if mistake in ("two", "none") else mistake)
