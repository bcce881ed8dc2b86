"""`block_sparse_attention_backward`: the gradients of q, k and v, and of biases."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import numpy as np

import blitz_attn

from . import arrays, checks
from .attention_cases import Arguments, Case, Outputs, draw_alone, draw_case, draw_slice, laid_out, plain_arguments, rows_of
from .attention_oracle import Forward, Gradients, backward, forward
from .draw import Draw
from .problems import Finding, problem

CHECKS = ("oracle", "threads", "permute", "alone", "dense", "slice", "sums")
LARGEST = {"float16": 65504.0}


class Given(NamedTuple):
    """The arguments of a backward call that the forward call does not have, as (B, H, Sq, ...) for every layout."""

    dout: np.ndarray
    out: np.ndarray
    lse: np.ndarray
    dlse: np.ndarray | None

    def laid_out(self, case: Case) -> dict[str, np.ndarray]:
        """The arguments in the case's layout and dtypes. Rows behind the last query hold garbage."""
        p = case.problem
        beyond = np.arange(p.q.shape[2]) >= p.q_lens[:, None, None]
        laid = {}
        for name, x in self._asdict().items():
            if x is not None:
                x = np.where(beyond if x.ndim == 3 else beyond[..., None], case.garbage, x)
                laid[name] = np.ascontiguousarray(arrays.stored(laid_out(x, case.layout, p.q_lens), p.real if x.ndim == 3 else p.dtype))
        return laid


def gradients(case: Case, given: Given, rng: np.random.Generator, num_threads: int = 1, bias_grads: bool = False) -> tuple[Any, ...]:
    """Computes the gradients again with plain arrays, and with the entries of the lists in another order."""
    qkv, options = plain_arguments(case, rng)
    others = given.laid_out(case)
    dlse = others.pop("dlse", None)
    call = blitz_attn.block_sparse_attention_backward
    options |= {"dlse": dlse, "num_threads": num_threads, "bias_grads": bias_grads}
    return call(others["dout"], *qkv.values(), others["out"], others["lse"], **options)


def draw_given(draw: Draw, case: Case, f: Forward) -> Given:
    """Gradients of the results, and a forward result: the package's own, or the oracle's, rounded."""
    p = case.problem
    rng = draw.rng("gradients")
    dout = arrays.rounded(rng.standard_normal(f.out.shape) * draw.pick("dout.spread", (1.0, 0.01)), p.dtype)
    dlse = arrays.rounded(rng.standard_normal(f.lse.shape), p.real) if draw.flag("dlse") else None
    if draw.flag("own_forward"):
        qkv, options = plain_arguments(dataclasses.replace(case, layout="BNSD", has_q_lens=True, has_kv_lens=True), rng)
        out, lse = blitz_attn.block_sparse_attention(*qkv.values(), **options, return_lse=True)
        out, lse = arrays.values_of(out, p.dtype), arrays.values_of(lse, p.real)
    else:
        out, lse = arrays.rounded(f.out, p.dtype), arrays.rounded(f.lse, p.real)
    if draw.flag("lse.dropped", 0.1):  # a log-sum-exp of -inf means that the query attended nothing
        dropped = rng.random(lse.shape) < 0.3
        out[dropped], lse[dropped] = 0, -np.inf
    return Given(dout, out, lse, dlse)


def check_bias(case: Case, expected: Gradients, mask: Any, dmask: Any, dslopes: Any) -> None:
    """Checks the gradients of the given mask, and of the slopes."""
    p = case.problem
    if (dmask is None) != (mask is None or case.mask_dtype == "bool") or (dslopes is None) != (p.slopes is None):
        raise Finding("gradients of biases: others than those of what was given")
    if dmask is not None:
        values = arrays.values_of(dmask, case.mask_dtype)
        if values.shape != tuple(getattr(mask, "shape", values.shape)):
            raise Finding(f"dattn_mask: {values.shape} as the gradient of {tuple(mask.shape)}")
        values = values.reshape((1,) * (4 - values.ndim) + values.shape)
        right, allowed = expected.of_mask(values.shape, case.mask_dtype, p.real)
        off = np.abs(right) + allowed > LARGEST.get(case.mask_dtype, np.inf)
        checks.near("dattn_mask", np.where(off, 0, values), np.where(off, 0, right), allowed)
    if dslopes is not None:
        checks.near("dalibi_slopes", arrays.values_of(dslopes, "float32"), *expected.of_slopes(p.away()))


def check_numbers(case: Case, f: Forward, given: Given, got: dict[str, Any]) -> Gradients:
    p = case.problem
    expected = backward(p, f, *given)
    shown = f.seen & (given.lse > -np.inf)[..., None]
    touched = p.ungrouped(shown.any(axis=2)) > 0
    for i, (name, lens, some) in enumerate((("dq", p.q_lens, shown.any(axis=-1)), ("dk", p.kv_lens, touched), ("dv", p.kv_lens, touched))):
        values, allowed = expected[i], expected.allowed[i]
        overflow = np.abs(values) + allowed > LARGEST.get(p.dtype, np.inf)
        values, allowed, off, some = (
            laid_out(x, case.layout, lens) for x in (values, allowed, overflow, np.broadcast_to(some[..., None], values.shape))
        )
        ours = arrays.values_of(got[name], p.dtype)
        checks.near(name, np.where(off, 0, ours), np.where(off, 0, values), allowed)
        if ours[~some].any():
            raise Finding(f"{name}: not 0 where nothing was attended")
    return expected


@problem("block_sparse_attention_backward", weight=2)
def block_sparse_attention_backward(draw: Draw) -> None:
    check = draw.pick("check", CHECKS)
    case = draw_case(draw, spreads=(1, 0.02, 4), all_blocks=check == "dense")
    p = case.problem
    f = forward(p)
    case.bad &= ~(p.ungrouped(f.seen.any(axis=2)) > 0)  # bad keys that a query sees would spoil its gradients
    with checks.at_level(draw):
        given = draw_given(draw, case, f)
        made = Arguments(draw, case)
        for name, x in given.laid_out(case).items():
            made.arrays[name] = made.array(name, x, p.real if name in ("lse", "dlse") else p.dtype)
        lens = {"dq": p.q_lens, "dk": p.kv_lens, "dv": p.kv_lens}
        shapes = {name: laid_out(x, case.layout, lens[name]).shape for name, x in (("dq", p.q), ("dk", p.k), ("dv", p.v))}
        written = {"none": (), "all": ("dq", "dk", "dv"), "some": ("dk",)}[draw.pick("grads", ("none", "all", "some"))]
        outputs = Outputs(made, shapes, dict.fromkeys(shapes, p.dtype), written)
        grads = tuple(outputs.given.get(name) for name in shapes) if written else None
        call, x, bias_grads = blitz_attn.block_sparse_attention_backward, made.arrays, draw.flag("bias_grads")
        found = call(
            *(x[name] for name in ("dout", "q", "k", "v", "out", "lse")),
            **made.options,
            dlse=x.get("dlse"),
            grads=grads,
            bias_grads=bias_grads,
            num_threads=checks.threads(draw),
        )
        got = dict(zip(shapes, found[:3], strict=True))
        outputs.check(got)
        expected = check_numbers(case, f, given, got)
        if bias_grads:
            check_bias(case, expected, made.options.get("attn_mask"), *found[3:])
        rng = draw.rng("again")
        if check == "alone":
            check_alone(draw, case, given, got)
        elif check == "slice":
            check_slice(draw, case, given, got["dq"])
        elif check == "sums":
            check_sums(draw, case, given, found)
        elif check == "threads":
            mine = found if made.options.get("attn_mask") is None else found[:3]  # a mask may be repeated, and then its gradient is repeated, too
            again = gradients(case, given, rng, draw.pick("other_threads", checks.THREADS), bias_grads)
            for ours, theirs in zip(mine, again, strict=False):
                if ours is not None:
                    checks.same_bits("another number of threads", ours, theirs)
        elif check == "permute" and p.blocks is not None:
            checks.same_bits("other order", found[:3], gradients(case, given, rng))
        elif check == "dense" and p.blocks is not None:
            dense = gradients(dataclasses.replace(case, problem=dataclasses.replace(p, blocks=None)), given, rng)
            same = 3 if p.block_shape[0] % 128 == 0 else 1
            checks.same_bits("all blocks listed and no list", found[:same], dense[:same])


def check_slice(draw: Draw, case: Case, given: Given, dq: Any) -> None:
    """Compares some rows of dq with a call on only these rows."""
    p, drawn = case.problem, draw_slice(draw, case)
    if drawn is None:
        return
    (rows, part), first = drawn, drawn[0].start
    again = gradients(part, Given(*(None if x is None else x[:, :, rows] for x in given)), draw.rng("again"))[0]
    ours = arrays.stored(arrays.values_of(dq, p.dtype), p.dtype)
    for b in range(len(p.q_lens)):
        end = max(first, min(int(p.q_lens[b]), rows.stop))
        one = rows_of(ours, case.layout, p.q.shape[1], p.q_lens, b)[:, first:end]
        checks.same_bits("dq of a slice", one, rows_of(again, case.layout, p.q.shape[1], part.problem.q_lens, b))


def check_sums(draw: Draw, case: Case, given: Given, found: tuple[Any, Any, Any]) -> None:
    """Adding to zeros, and rounding, must give the usual dk and dv. Rows of blocks that no list names must stay as they are."""
    p = case.problem
    qkv, options = plain_arguments(case, draw.rng("again"))
    others = given.laid_out(case)
    dlse = others.pop("dlse", None)
    listed = np.ones(p.k.shape[:3], np.bool_)
    if p.blocks is not None:
        by_head = np.broadcast_to(p.grouped(p.blocks.any(axis=2)), (p.q.shape[0], p.q.shape[1], p.blocks.shape[3]))
        listed = (p.ungrouped(by_head) > 0)[:, :, np.arange(p.k.shape[2]) // p.block_shape[1]]
    sums = []
    for name, x in (("dk", p.k), ("dv", p.v)):
        placed = arrays.poisoned(draw, f"{name} sums", laid_out(x, case.layout, p.kv_lens).shape, p.real)
        held = np.broadcast_to(listed[..., None], x.shape)
        placed.array[...] = np.where(laid_out(held, case.layout, p.kv_lens), 0, np.nan)
        sums.append(placed)
    blitz_attn.block_sparse_attention_backward(
        others["dout"], *qkv.values(), others["out"], others["lse"], **options, dlse=dlse, grads=(None, *(x.array for x in sums)),
        accumulate=True, num_threads=draw.pick("other_threads", checks.THREADS),
    )  # fmt: skip
    for name, placed, usual, x in zip(("dk", "dv"), sums, found[1:3], (p.k, p.v), strict=True):
        placed.check_around()
        held = laid_out(np.broadcast_to(listed[..., None], x.shape), case.layout, p.kv_lens)
        got, theirs = arrays.values_of(placed.array, p.real), arrays.stored(arrays.values_of(usual, p.dtype), p.dtype)
        if not np.isnan(got[~held]).all():
            raise Finding(f"{name}: rows of blocks that no list names were written")
        with np.errstate(over="ignore"):
            rounded = arrays.stored(arrays.rounded(got[held], p.dtype), p.dtype)
        checks.same_bits(f"{name} rounded by NumPy", rounded, theirs[held])


def check_alone(draw: Draw, case: Case, given: Given, got: dict[str, Any]) -> None:
    """Compares one batch entry with a call on only this entry, with other padding."""
    p, drawn = case.problem, draw_alone(draw, case, case.layout)
    if drawn is None:
        return
    (b, single), heads = drawn, p.q.shape[1]
    s_q = single.problem.q.shape[2]

    def cut(x: np.ndarray | None) -> np.ndarray | None:
        if x is None:
            return None
        rows = x[b : b + 1, :, : int(p.q_lens[b])]
        return np.concatenate([rows, np.zeros((1, heads, s_q - rows.shape[2], *x.shape[3:]))], axis=2)

    again = gradients(single, Given(*(cut(x) for x in given)), draw.rng("again"))
    for (name, ours), theirs in zip(got.items(), again, strict=True):
        n_heads, lens = (heads, p.q_lens) if name == "dq" else (p.k.shape[1], p.kv_lens)
        one = rows_of(arrays.stored(arrays.values_of(ours, p.dtype), p.dtype), case.layout, n_heads, lens, b)
        checks.same_bits(f"{name} alone", one, rows_of(theirs, case.layout, n_heads, lens[b : b + 1], 0))
