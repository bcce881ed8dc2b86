"""Native sparse attention as a whole: `nsa` and `nsa_backward`. Its parts are in nsa_parts_problems."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

import blitz_attn.nsa  # noqa: F401 - imports the module, because the name nsa of the package may be the function
from blitz_attn.nsa import NSAContext, compress_kv, nsa, nsa_backward

from . import arrays, checks
from . import nsa_oracle as oracle
from .arrays import as_integers
from .draw import Draw
from .nsa_draws import Setting, Tensor, as_lists, draw_rules, list_parts, lists_shape, random_lists, weight_near
from .nsa_oracle import Arithmetic, Near, Rules, exact
from .problems import Finding, problem


class Call(NamedTuple):
    """Arguments of `nsa` with their values."""

    setting: Setting
    rules: Rules
    options: dict[str, Any]
    q: Tensor
    k: Tensor
    v: Tensor
    w_k: Tensor | None
    w_v: Tensor | None
    gate_weight: Tensor | None
    gates: Tensor | None
    lists: np.ndarray | None  # given lists

    def run(self, **more: Any) -> Any:
        return nsa(self.q.given, self.k.given, self.v.given, **{**self.options, **more})


@contextlib.contextmanager
def pieces(draw: Draw) -> Iterator[None]:
    """Shortens the pieces in which the package computes long calls, so that a problem may have several pieces."""
    module = sys.modules["blitz_attn.nsa"]
    before = module.PIECE_ELEMENTS
    module.PIECE_ELEMENTS = draw.pick("piece_elements", (before, 64, 1024, 8192))
    try:
        yield
    finally:
        module.PIECE_ELEMENTS = before


def draw_call(draw: Draw, poisonous: bool) -> tuple[Call, dict[str, list[np.ndarray]]]:
    """A call, and for each of q, k and v the masks (heads, tokens) of each sequence's non-finite rows."""
    setting = Setting(draw)
    rules, options = draw_rules(setting)
    contents = draw.pick("contents", ("normal", "integers", "zeros", "large", "near"), (6, 1, 0.5, 1, 1))
    values = {}
    for name, shape in setting.shapes.items():
        x = setting.normal(name, *shape)
        if contents == "integers" and name != "v":
            x = np.clip(np.round(x), -1, 1)
        elif contents == "zeros" and name == "k":
            x = np.zeros_like(x)
        elif contents == "large" and name == "q":
            x *= 6
        elif contents == "near" and name == "k":
            x = 1 + x / 8
        values[name] = x
    bad = {}
    poison = draw.pick("poison", ("none", "k", "v", "q"), (6, 1, 1, 1)) if poisonous else "none"
    number = draw.pick("poison_number", (np.nan, np.inf, -np.inf)) if poisonous else 0.0
    for name, x in values.items():
        spots = np.zeros(x.shape[:-1], np.bool_)
        if name == poison:
            spots = draw.rng("poison").random(spots.shape) < 1.5 / max(1, setting.cu[-1])
            x[spots] = number
        bad[name] = [part[..., 0] for part in setting.parts(spots[..., None])]
    q, k, v = (setting.tensor(name, values[name]) for name in ("q", "k", "v"))
    w_k = setting.weight("w_k_compress", setting.kv_heads, setting.dim, setting.dim) if draw.flag("has_w_k", 0.3) else None
    w_v = setting.weight("w_v_compress", setting.kv_heads, setting.v_dim, setting.v_dim) if draw.flag("has_w_v", 0.3) else None
    gating = draw.pick("gating", ("none", "weight", "gates"), (1, 2, 1))
    gate_weight = setting.weight("gate_proj_weight", setting.heads, 3, setting.dim) if gating == "weight" else None
    gates = setting.weight("gates", *setting.shape(setting.heads, 3), amplitude=1.0) if gating == "gates" else None
    lists = None
    has_lists, for_kv_heads, places = (
        draw.flag("has_block_indices", 0.25),
        draw.flag("indices_of_kv_heads"),
        draw.integer("places", 0, 12, likely=(2, 4)),
    )
    if has_lists:
        heads = setting.kv_heads if rules.mode == "paper" or for_kv_heads else setting.heads
        lists = random_lists(setting, "block_indices", heads, rules.tile, rules.wide, places)
        options["block_indices"] = as_lists(draw, "block_indices", lists)
    for name, x in (("w_k_compress", w_k), ("w_v_compress", w_v), ("gate_proj_weight", gate_weight), ("gates", gates)):
        if x is not None:
            options[name] = x.given
    options |= {"cu_seqlens": setting.cu_seqlens(), "dtype": setting.named, "num_threads": checks.threads(draw)}
    if draw.flag("leave_out"):
        options = {name: x for name, x in options.items() if x is not None}
    return Call(setting, rules, options, q, k, v, w_k, w_v, gate_weight, gates, lists), bad


class Whole(NamedTuple):
    """The oracle's results for one sequence."""

    q: Near
    k: Near
    v: Near
    k_cmp: Near
    v_cmp: Near
    branches: list[oracle.Attention]
    gates: Near
    out: Near
    tainted: np.ndarray  # (H, tokens)


def zeroed(x: np.ndarray) -> Near:
    return exact(np.where(np.isfinite(x), x, 0))


def work_off(call: Call, context: NSAContext, bad: dict[str, list[np.ndarray]], how: Arithmetic) -> list[Whole]:
    """The oracle's results for all sequences. Unless lists are given, the selection comes from the context, and is checked."""
    setting, rules = call.setting, call.rules
    indices = np.asarray(context.block_indices)
    if call.lists is not None:
        ended = np.logical_or.accumulate(call.lists < 0, axis=-1)
        if indices.shape != call.lists.shape:
            raise Finding(f"block_indices: shape {indices.shape} of the context where {call.lists.shape} was given")
        indices = np.where(ended, -1, call.lists)
    heads = indices.shape[-3]
    if indices.shape != lists_shape(setting, heads, rules.tile, indices.shape[-1]):
        raise Finding(f"block_indices: shape {indices.shape}, expected {lists_shape(setting, heads, rules.tile, rules.count)}")
    groups = None if context.groups is None else list_parts(setting, np.asarray(context.groups), rules.tile)
    given_gates = list(setting.parts(call.gates.values)) if call.gates is not None else None
    parts = zip(*(setting.parts(x.values) for x in (call.q, call.k, call.v)), list_parts(setting, indices, rules.tile), strict=True)
    wholes = []
    for i, (q_raw, k_raw, v_raw, lists) in enumerate(parts):
        q, k, v = zeroed(q_raw), zeroed(k_raw), zeroed(v_raw)
        bad_q, bad_k, bad_v = (bad[name][i] for name in "qkv")
        tokens, group = q_raw.shape[1], setting.group
        k_cmp, v_cmp = oracle.compress(k, weight_near(call.w_k), rules, how), oracle.compress(v, weight_near(call.w_v), rules, how)
        pooled = oracle.pooling(tokens, rules.block, rules.stride).value > 0
        bad_kc, bad_vc = ((x[:, None, :] & pooled).any(-1) for x in (bad_k, bad_v))
        whole_sight = oracle.sees_blocks(tokens, rules)[None]
        sight = whole_sight if groups is None else whole_sight & oracle.sees_groups(groups[i], tokens, k_cmp.value.shape[1], rules.tile)
        listed = oracle.sees_listed(lists, tokens, rules.wide, rules.tile, rules.causal)
        listed = np.repeat(listed, setting.heads // len(listed), axis=0)
        near = oracle.sees_window(tokens, rules.window, rules.causal)[None]
        tainted = bad_q.copy()
        for seen, bad_keys in ((sight, bad_kc | bad_vc), (listed, bad_k | bad_v), (near, bad_k | bad_v)):
            tainted |= (seen & np.repeat(bad_keys, group, axis=0)[:, None, :]).any(-1)
        branches = [
            oracle.attend(q, k_cmp, v_cmp, sight, rules.scale, how),
            oracle.attend(q, k, v, listed, rules.scale, how),
            oracle.attend(q, k, v, near, rules.scale, how),
        ]
        if call.lists is None:
            score_tainted = bad_q | (whole_sight & np.repeat(bad_kc, group, axis=0)[:, None, :]).any(-1)
            check_selection(call, branches[0], q, k_cmp, (score_tainted, bad_q, bad_kc), lists, None if groups is None else groups[i], how)
        if call.gate_weight is not None:
            gates = oracle.sigmoid_gates(q, exact(call.gate_weight.values), how)
        elif given_gates is not None:
            gates = exact(given_gates[i])
        else:
            gates = Near(np.full((setting.heads, tokens, 3), 1 / 3), how.unit)
        out = oracle.combine([x.out.rounded(how) for x in branches], gates, how)
        wholes.append(Whole(q, k, v, k_cmp, v_cmp, branches, gates, out, tainted))
    return wholes


def check_selection(call: Call, compressed: Any, q: Near, k_cmp: Near, bad: Any, lists: np.ndarray, groups: Any, how: Arithmetic) -> None:
    rules = call.rules
    score_tainted, bad_q, bad_blocks = bad
    if rules.mode == "paper":
        scores = oracle.paper_scores(compressed, q.value.shape[1], call.setting.kv_heads, rules, score_tainted, how)
    else:
        scores = oracle.mslk_scores(q, k_cmp, rules, bad_q, bad_blocks, how)
    mistake = oracle.selection_mistake(lists, scores, rules.count)
    if mistake is None and groups is not None:
        kept = oracle.group_scores(scores, how)
        mistake = oracle.selection_mistake(groups, kept, groups.shape[-1])
        mistake = mistake and f"groups: {mistake}"
    if mistake is not None:
        raise Finding(f"block_indices: {mistake}")


def check_context(call: Call, context: NSAContext, wholes: list[Whole]) -> None:
    setting = call.setting
    if tuple(context.shape) != setting.shape(setting.heads, setting.v_dim):
        raise Finding(f"context.shape: {context.shape}")
    tainted = [x.tainted for x in wholes]
    for name, i in (("compressed", 0), ("selected", 1), ("window", 2)):
        parts = [Near(x.branches[i].lse.value, x.branches[i].lse.error) for x in wholes]
        lse = np.asarray(context.lse[name])
        if str(lse.dtype) != setting.real:
            raise Finding(f"lse {name}: dtype {lse.dtype}")
        if parts:
            expected, allowed = (setting.joined([getattr(p, x)[..., None] for p in parts], ())[..., 0] for x in ("value", "error"))
            mask = setting.joined([x[..., None] for x in tainted], ())[..., 0]
            allowed = np.where(np.isfinite(expected), allowed, 0)
            checks.near(f"lse {name}", np.where(mask, 0, lse), np.where(mask, 0, expected), allowed)
    if call.gates is None and wholes:
        expected, allowed = setting.joined_near([x.gates for x in wholes])
        mask = setting.joined([x[..., None] for x in tainted], ())
        checks.near("gates", np.where(mask, 0, np.asarray(context.gates)), np.where(mask, 0, expected), allowed)


@problem("nsa", weight=2.0)
def whole_forward(draw: Draw) -> None:
    with checks.at_level(draw) as level, pieces(draw):
        call, bad = draw_call(draw, poisonous=True)
        setting = call.setting
        how = Arithmetic(setting.dtype, level)
        out, context = call.run(return_context=True)
        shape = setting.shape(setting.heads, setting.v_dim)
        check = draw.pick("check", ("oracle", "threads", "plain", "out", "alone", "last"), (3, 1, 1, 1, 1, 2))
        written = setting.result("out", shape) if check == "out" else None
        if check == "threads":
            again, other = call.run(num_threads=draw.pick("other_threads", checks.THREADS), return_context=True)
            checks.same_bits("other threads", out, again)
            checks.same_bits("other threads, block_indices", np.asarray(context.block_indices), np.asarray(other.block_indices))
        elif check == "plain":
            checks.same_bits("without a context", out, call.run())
        elif written is not None:
            if call.run(out=written[1]) is not written[1]:
                raise Finding("out: another array came back")
            checks.same_bits("with out", out, written[1])
            written[0].check_around()
        elif check == "alone" and setting.lens:
            one_alone(call, out)
        elif check == "last":
            last_queries(call, out)
    setting.check_inputs()
    wholes = work_off(call, context, bad, how)
    setting.near("out", out, [x.out for x in wholes], shape=shape, tainted=[x.tainted for x in wholes])
    if tuple(out.shape) != shape:
        raise Finding(f"out: shape {tuple(out.shape)}, expected {shape}")
    check_context(call, context, wholes)


def one_alone(call: Call, out: Any) -> None:
    """Checks that one sequence, drawn at random, has the result that it has alone."""
    setting, draw = call.setting, call.setting.draw
    which = draw.rng("alone").integers(len(setting.lens))
    tokens = slice(setting.cu[which], setting.cu[which + 1]) if setting.packed else slice(which, which + 1)
    options = dict(call.options)
    if setting.packed:
        options["cu_seqlens"] = [0, setting.lens[which]]
    if call.gates is not None:
        options["gates"] = call.gates.cut(tokens)
    if call.lists is not None:
        part = list_parts(setting, call.lists, call.rules.tile)[which]
        options["block_indices"] = part if setting.packed else part[None]
    checks.same_bits("a sequence alone", out[tokens], nsa(*(x.cut(tokens) for x in (call.q, call.k, call.v)), **options))


def last_queries(call: Call, out: Any) -> None:
    """Checks that the last queries of each sequence have the rows of the whole call, also with compressed keys and values that the caller keeps,
    and with room for more tokens in the arrays."""
    setting, draw, tile = call.setting, call.setting.draw, call.rules.tile
    rng, options = draw.rng("last"), dict(call.options)
    length = setting.lens[0] if setting.lens else draw.options["tokens"]
    lens = np.array(setting.lens if setting.packed else [length], np.int64)
    begins = (lens - rng.integers(0, np.minimum(lens, draw.pick("last", (1, 2, 8, 1000))), endpoint=True)) // tile * tile
    where = np.concatenate([np.zeros(0, np.int64), *(np.arange(a, n) + at for a, n, at in zip(begins, lens, setting.cu, strict=False))])
    rows = where if setting.packed else (slice(None), slice(int(begins[0]), length))
    if setting.packed:
        options["cu_seqlens_q"] = as_integers(draw, "cu_seqlens_q", np.concatenate([[0], np.cumsum(lens - begins)]))
    if call.gates is not None:
        options["gates"] = call.gates.cut(rows)
    if call.lists is not None:
        parts = list_parts(setting, call.lists, tile)
        if setting.packed:
            cut = [part[:, a // tile :] for part, a in zip(parts, begins, strict=True)]
            options["block_indices"] = np.concatenate([call.lists[:, :0], *cut], axis=1)
        else:
            options["block_indices"] = call.lists[:, :, int(begins[0]) // tile :]
    k, v = call.k.placed.array, call.v.placed.array
    if draw.flag("room") and not setting.packed:
        spare = draw.integer("spare", 0, 40, likely=(0, 1, 16))
        k, v = (
            np.concatenate([x, np.full((len(x), spare, *x.shape[2:]), 0x7FC0 if x.dtype == np.uint16 else np.nan, x.dtype)], 1)
            for x in (k, v)
        )
        options["kv_lens"] = as_integers(draw, "kv_lens", np.full(len(k), length))
    keys, values = (arrays.dressed(np.ascontiguousarray(x), setting.dtype, setting.kind) for x in (k, v))
    if draw.flag("keeps_compressed"):
        weights = [options.pop(name, None) for name in ("w_k_compress", "w_v_compress")]
        more = {"cu_seqlens": options.get("cu_seqlens"), "dtype": options.get("dtype")}
        options["compressed_kv"] = compress_kv(keys, values, call.rules.block, *weights, stride=call.rules.stride, **more)
    some = nsa(call.q.cut(rows), keys, values, **options)
    checks.same_bits("the last queries", out[rows], some)


@problem("nsa_backward", weight=2.0)
def whole_backward(draw: Draw) -> None:
    with checks.at_level(draw) as level, pieces(draw):
        call, bad = draw_call(draw, poisonous=False)
        setting = call.setting
        how = Arithmetic(setting.dtype, level)
        _, context = call.run(return_context=True)
        dout = setting.drawn("dout", *setting.shape(setting.heads, setting.v_dim))
        grads = nsa_backward(dout.given, context, num_threads=call.options["num_threads"])
        if draw.pick("check", ("oracle", "threads")) == "threads":
            again = nsa_backward(dout.given, context, num_threads=draw.pick("other_threads", checks.THREADS))
            for name, one, other in zip(grads._fields, grads, again, strict=True):
                if one is not None:
                    checks.same_bits(f"other threads, {name}", one, other)
    setting.check_inputs()
    wholes = work_off(call, context, bad, how)
    check_gradients(call, grads, dout, wholes, how)


def check_gradients(call: Call, grads: Any, dout: Tensor, wholes: list[Whole], how: Arithmetic) -> None:
    setting, rules, unit = call.setting, call.rules, how.unit
    dq, dk, dv, dgates = [], [], [], []
    sums: dict[str, list[Near]] = {"dw_k_compress": [], "dw_v_compress": [], "dgate_proj_weight": []}
    for x, dout_raw in zip(wholes, setting.parts(dout.values), strict=True):
        d = exact(dout_raw)
        dgate = oracle.gates_backward(d, [a.out.rounded(how) for a in x.branches], how)
        dgates.append(dgate)
        cmp, slc, win = (
            oracle.attend_backward(a, d.times(oracle.one_gate(x.gates, c)).rounded(how), setting.kv_heads, how)
            for c, a in enumerate(x.branches)
        )
        dkc, dwk = oracle.compress_backward(cmp.dk.rounded(how), x.k, weight_near(call.w_k), rules, how)
        dvc, dwv = oracle.compress_backward(cmp.dv.rounded(how), x.v, weight_near(call.w_v), rules, how)
        terms = [cmp.dq, slc.dq, win.dq]
        if call.gate_weight is not None:
            dlogits = oracle.logits_backward(dgate, x.gates, how)
            terms.append(oracle.dot(dlogits, exact(call.gate_weight.values), unit))
            sums["dgate_proj_weight"].append(oracle.dot(dlogits.turned(), x.q, unit))
        for name, part in (("dw_k_compress", dwk), ("dw_v_compress", dwv)):
            if part is not None:
                sums[name].append(part)
        dq.append(oracle.added(terms, how))
        dk.append(oracle.added([dkc, slc.dk, win.dk], how))
        dv.append(oracle.added([dvc, slc.dv, win.dv], how))
    setting.near("dq", grads.dq, dq)
    setting.near("dk", grads.dk, dk)
    setting.near("dv", grads.dv, dv)
    for name, given in (("dw_k_compress", call.w_k), ("dw_v_compress", call.w_v), ("dgate_proj_weight", call.gate_weight)):
        got = getattr(grads, name)
        if (got is None) != (given is None):
            raise Finding(f"{name}: {got!r} where the weight was {'not ' if given is None else ''}given")
        if given is not None:
            parts = sums[name]
            summed = oracle.added(parts, how, between=False) if parts else exact(np.zeros(given.values.shape))
            setting.weight_near(name, got, summed, given)
    if (grads.dgates is None) != (call.gates is None):
        raise Finding("dgates: given where gates were not, or not where they were")
    if call.gates is not None and wholes:
        setting.weight_near("dgates", grads.dgates, setting.joined_near(dgates), call.gates)
