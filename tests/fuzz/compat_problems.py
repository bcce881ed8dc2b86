"""Upstream's interfaces: `compat.torch_bsa` is compared with dense masks, and `compat.mslk` with `blitz_attn.nsa` in mode "mslk"."""

from __future__ import annotations

from typing import Any

import numpy as np

from blitz_attn import nsa
from blitz_attn.compat import mslk, torch_bsa

from . import arrays, checks
from . import nsa_oracle as oracle
from .arrays import as_integers, check_kind
from .attention_cases import laid_out, listed
from .attention_oracle import Attention, forward
from .draw import Discard, Draw
from .nsa_draws import Setting, draw_rules
from .nsa_oracle import Arithmetic, Near, exact
from .problems import Finding, problem

KINDS = ("numpy", "ml_dtypes", "torch")
DTYPES = tuple(x for x in arrays.FLOATS if x != "bfloat16" or arrays.HAS_ML_DTYPES or arrays.HAS_TORCH)
NO_BOUND = 2147483647


# ---- torch_bsa ----------------------------------------------------------------------------------------------------


def draw_lengths(draw: Draw, name: str, batch: int, tokens: int) -> tuple[Any, list[int]]:
    """The argument, and the lengths that it means: a single number applies to all entries, and surplus numbers are ignored."""
    how = draw.pick(name, ("none", "one", "each", "more"), (4, 2, 3, 1))
    numbers = [draw.integer(f"{name}[{i}]", 0, tokens, likely=(0, 1, tokens)) for i in range(batch + 1)]
    if how == "none" or not batch:
        return None, [tokens] * batch
    if how == "one":
        return as_integers(draw, name, numbers[:1]), numbers[:1] * batch
    return as_integers(draw, name, numbers if how == "more" else numbers[:batch]), numbers[:batch]


def draw_blocks(draw: Draw, heads: int, lens: list[tuple[int, int]], s_q: int, s_kv: int, shape: tuple[int, int]) -> tuple[Any, Any]:
    """A block list in upstream's form, and a mask (B, N, rows, columns) of the listed blocks."""
    rng = draw.rng("sabi")
    dtype, share = draw.pick("sabi.dtype", ("uint16", "int16", "int32", "int64")), draw.pick("sabi.share", (0.5, 0.0, 0.9, 1.0))
    how, width = draw.pick("sabi", ("none", "list", "three"), (1, 3, 1)), draw.pick("sabi.width", ("columns", "narrow"))
    if how == "none":
        return None, None
    rows, columns = -(-s_q // shape[0]), -(-s_kv // shape[1])
    kept = rng.random((len(lens), heads, rows, columns)) < share
    lists = listed(kept, dtype, rng, extra=columns - int(kept.sum(-1).max(initial=0)) if width == "columns" else 0, shuffled=True)
    return lists[0] if how == "three" and len(lens) == 1 else lists, kept


ORDER = (
    "atten_mask", "sabi", "actual_seq_lengths", "actual_seq_lengths_kv", "num_heads", "scale_value", "pre_tokens", "next_tokens", "input_layout",
    "num_key_value_heads", "sparse_mode", "softmax_lse_flag", "block_shape",
)  # fmt: skip


@problem("blitz_sparse_attention")
def blitz_sparse_attention(draw: Draw) -> None:
    with checks.at_level(draw):
        dtype = draw.pick("dtype", DTYPES)
        kind = draw.pick("kind", tuple(x for x in arrays.kinds_for(dtype) if x in KINDS))
        layout = draw.pick("input_layout", (None, "BNSD", "BSND", "BSH", "BNSD_BSND", "TND"))
        form = {None: "BSH", "BNSD_BSND": "BNSD"}.get(layout, layout)
        large = draw.flag("large", 0.25)
        most = 400 if large else 40
        mode = draw.pick("sparse_mode", (None, 0, 2, 3, 4, 10, 12, 13, 14))
        mode = 3 if form == "TND" and (mode or 0) % 10 == 2 else mode
        rule = (mode or 0) % 10
        s_q, s_kv = (draw.integer(name, 0, most, likely=(1, 16, 33, 128, 129, 300)) for name in ("s_q", "s_kv"))
        batch = draw.pick("batch", (1, 2, 3, 0), (4, 3, 1, 0.2)) if not large else 1
        kv_heads, group = draw.pick("kv_heads", (1, 2, 3)), draw.pick("group", (1, 2, 4)) if not large else 1
        named_heads = draw.pick("num_heads", ("given", None))
        if form == "BSH" and named_heads is None:
            kv_heads = group = 1
        heads = kv_heads * group
        dim, v_dim = draw.integer("dim", 1, 80, likely=(8, 16, 64)), draw.integer("v_dim", 1, 80, likely=(8, 16, 64))
        shape = tuple(draw.pick(f"block_shape.{i}", (128, 256, 512, 1024), (4, 1, 1, 1)) for i in range(2))
        q_given, q_lens = draw_lengths(draw, "q_lens", batch, s_q)
        kv_given, kv_lens = draw_lengths(draw, "kv_lens", batch, s_kv)
        packed_q, packed_kv = ([draw.integer(f"tnd_{x}[{i}]", 0, most) for i in range(batch)] for x, most in (("q", s_q), ("kv", s_kv)))
        if form == "TND":
            q_lens, kv_lens = packed_q, packed_kv
            q_given, kv_given = (as_integers(draw, f"{name}.sums", np.cumsum(x)) for name, x in (("q", q_lens), ("kv", kv_lens)))
            s_q, s_kv = max(q_lens, default=0), max(kv_lens, default=0)
        sabi, blocks = draw_blocks(draw, heads, list(zip(q_lens, kv_lens, strict=True)), s_q, s_kv, shape)

        tensors: dict[str, Any] = {}
        for name, n, count, width in (("query", s_q, heads, dim), ("key", s_kv, kv_heads, dim), ("value", s_kv, kv_heads, v_dim)):
            lens = q_lens if name == "query" else kv_lens
            values = arrays.rounded(draw.rng(name).standard_normal((batch, count, n, width)), dtype)
            if name != "query" and draw.flag(f"{name}.garbage"):
                for b in range(batch):
                    values[b, :, kv_lens[b] :] = np.nan
            stored = laid_out(values, form, np.array(lens, np.int64))
            placed = arrays.place(draw, name, arrays.stored(stored, dtype), views=arrays.views_for(kind))
            tensors[name] = values, placed, arrays.dressed(placed.array, dtype, kind)

        scale = draw.pick("scale_value", (None, 0.125, 0.5))
        pre, after = (
            draw.pick("pre_tokens", (None, 0, 3, 20, 2147473647, NO_BOUND)),
            draw.pick("next_tokens", (None, 0, 2, 65536, NO_BOUND)),
        )
        mask = np.zeros((4, 4), np.bool_) if rule and draw.flag("atten_mask") else None
        shape_as = draw.pick("block_shape.as", ("list", "tuple"))
        options = {
            "atten_mask": arrays.dressed(mask, "bool", "torch") if kind == "torch" and mask is not None else mask,
            "sabi": arrays.dressed(sabi, "int", "torch") if kind == "torch" and sabi is not None and draw.flag("sabi.torch") and sabi.dtype != np.uint16 else sabi,
            "actual_seq_lengths": q_given, "actual_seq_lengths_kv": kv_given, "num_heads": heads if named_heads else None,
            "scale_value": scale, "pre_tokens": pre, "next_tokens": after, "input_layout": layout,
            "num_key_value_heads": draw.pick("num_key_value_heads", (None, 0)) if group == 1 else kv_heads, "sparse_mode": mode,
            "softmax_lse_flag": draw.pick("softmax_lse_flag", (None, False, True)),
            "block_shape": None if shape == (128, 128) and draw.flag("default_shape") else shape_as,
        }  # fmt: skip
        if options["block_shape"] is not None:
            options["block_shape"] = list(shape) if options["block_shape"] == "list" else shape
        given = [tensors[name][2] for name in ("query", "key", "value")]
        style = draw.pick("style", ("keywords", "positions", "short"))
        if style == "positions":
            out, lse = torch_bsa.blitz_sparse_attention(*given, *(options[name] for name in ORDER))
        else:
            left = {name: x for name, x in options.items() if style == "keywords" or x is not None}
            out, lse = torch_bsa.blitz_sparse_attention(*given, **left)
    for _, placed, _ in tensors.values():
        placed.check_unchanged()
    check_kind("attention_out", out, dtype, kind)
    with_lse = bool(options["softmax_lse_flag"]) and form != "TND"
    window = (NO_BOUND if pre is None else pre, after or 0) if rule == 4 else None
    lens = [np.array(x, np.int64) for x in (q_lens, kv_lens)]
    values = (np.nan_to_num(x) for x, _, _ in tensors.values())
    begin = np.zeros(batch, np.int64) if rule == 2 else None
    p = Attention(dtype, *values, *lens, blocks, shape, 1.0 if scale is None else scale, rule in (2, 3), window, begin)
    f, form_out = forward(p), "BSND" if layout == "BNSD_BSND" else form
    expected, allowed = (laid_out(x, form_out, lens[0]) for x in (f.out, f.allowed_out))
    checks.near("attention_out", arrays.values_of(out, dtype), expected, allowed)
    if not with_lse:
        if tuple(lse.shape) != (0,):
            raise Finding(f"softmax_lse: shape {tuple(lse.shape)} where none was asked for")
        return
    check_kind("softmax_lse", lse, p.real, kind)
    checks.near("softmax_lse", arrays.values_of(lse, p.real), f.lse, f.allowed_lse)


# ---- mslk ---------------------------------------------------------------------------------------------------------


class Upstream:
    """Drawn arguments of `mslk`'s functions, and the corresponding keyword arguments of `blitz_attn.nsa`."""

    def __init__(self, draw: Draw, packed: bool | None = None):
        self.draw = draw
        self.setting = setting = Setting(draw, kinds=KINDS, dtypes=DTYPES, packed=packed)
        self.rules, options = draw_rules(setting, ("mslk",))
        self.Q, self.K, self.V = (setting.drawn(name.upper(), *shape) for name, shape in setting.shapes.items())
        self.W_k = setting.weight("W_k", setting.kv_heads, setting.dim, setting.dim) if draw.flag("has_W_k") else None
        self.W_v = setting.weight("W_v", setting.kv_heads, setting.v_dim, setting.v_dim) if draw.flag("has_W_v") else None
        self.gate = setting.weight("gate", setting.heads, 3, setting.dim) if draw.flag("has_gate") else None
        self.cu = setting.cu_seqlens()
        self.options = options

    def given(self, name: str) -> Any:
        x = getattr(self, name)
        return None if x is None else x.given


def call_in_style(draw: Draw, function: Any, leading: tuple[Any, ...], options: dict[str, Any]) -> Any:
    """Calls with `options`, which have upstream's order: all by position, all by name, or by name without those that are None."""
    style = draw.pick("style", ("keywords", "positions", "short"))
    if style == "positions":
        return function(*leading, *options.values())
    return function(*leading, **{name: x for name, x in options.items() if style == "keywords" or x is not None})


def same(what: str, one: Any, other: Any) -> None:
    """Asserts that both results have the same bits, kind, dtype and shape."""
    if (one is None) != (other is None):
        raise Finding(f"{what}: None and an array")
    if one is None:
        return
    if type(one) is not type(other) or one.dtype != other.dtype or tuple(one.shape) != tuple(other.shape):
        raise Finding(
            f"{what}: {type(one).__name__} {one.dtype} {tuple(one.shape)}, expected {type(other).__name__} {other.dtype} {tuple(other.shape)}"
        )
    checks.same_bits(what, one, other)


def all_same(names: tuple[str, ...], ones: Any, others: Any) -> None:
    for name, one, other in zip(names, ones, others, strict=True):
        same(name, one, other)


def stacked(u: Upstream, x: Any, counts: list[int], fill: float) -> Any:
    """The rows of packed sequences as (sequences, most, ...), with `fill` behind the shorter sequences."""
    most = max(counts, default=0)
    shape = (len(counts), most, *x.shape[1:])
    result = x.new_full(shape, fill) if u.setting.kind == "torch" else np.full(shape, fill, x.dtype)
    begin = 0
    for i, n in enumerate(counts):
        result[i, :n] = x[begin : begin + n]
        begin += n
    return result


@problem("mslk.nsa", weight=0.7)
def mslk_nsa(draw: Draw) -> None:
    with checks.at_level(draw):
        u = Upstream(draw)
        options = {
            "compress_block_size": u.rules.block, "num_selected_blocks": u.rules.count, "window_size": u.rules.window,
            "W_k_compress": u.given("W_k"), "W_v_compress": u.given("W_v"), "gate_proj_weight": u.given("gate"), "causal": u.rules.causal,
            "softmax_scale": u.options["scale"], "q_tile_size": u.rules.tile, "n_block_size": draw.pick("n_block_size", (128, 64)),
            "cu_seqlens": u.cu, "max_seqlen": draw.pick("max_seqlen", (None, 7)), "num_cmp_selected_blocks": u.options.get("num_cmp_selected_blocks"),
        }  # fmt: skip
        function = getattr(mslk, draw.pick("function", ("nsa", "nsa_forward")))
        out = call_in_style(draw, function, (u.Q.given, u.K.given, u.V.given), options)
        ours = nsa.nsa(
            u.Q.given, u.K.given, u.V.given, w_k_compress=u.given("W_k"), w_v_compress=u.given("W_v"), gate_proj_weight=u.given("gate"),
            cu_seqlens=u.cu, **u.options,
        )  # fmt: skip
    same("out", out, ours)
    u.setting.check_inputs()


@problem("mslk.compress_kv", weight=0.4)
def mslk_compress(draw: Draw) -> None:
    with checks.at_level(draw):
        u = Upstream(draw)
        setting, block = u.setting, u.rules.block
        weights, packed = {"W_k": u.given("W_k"), "W_v": u.given("W_v")}, {"cu_seqlens": u.cu}
        leading = (u.K.given, u.V.given, block)
        ours = nsa.compress_kv(*leading, *weights.values(), **packed)
        counts = [n // block for n in setting.lens]
        if setting.packed:
            results = call_in_style(draw, mslk.fused_compress_kv, leading, {**weights, **packed, "max_seqlen": None})
            all_same(("K_cmp", "V_cmp"), results, [stacked(u, x, counts, 0) for x in ours])
        else:
            fused = draw.flag("fused")
            function = mslk.fused_compress_kv if fused else mslk.compress_kv
            all_same(("K_cmp", "V_cmp"), call_in_style(draw, function, leading, {**weights, **(packed if fused else {})}), ours)
        d_ours = [setting.drawn(name, *x.shape).given for name, x in zip(("dK_cmp", "dV_cmp"), ours, strict=True)]
        # the call must read nothing behind a sequence's blocks
        d_given = [stacked(u, x, counts, np.nan) for x in d_ours] if setting.packed else d_ours
        grads = mslk.fused_compress_kv_backward(*d_given, *leading, *weights.values(), **packed)
        expected = nsa.compress_kv_backward(*d_ours, *leading, *weights.values(), **packed)
        all_same(("dK", "dV"), grads[:2], expected[:2])
        for name, one, other in zip(("dW_k", "dW_v"), grads[2:], expected[2:], strict=True):
            if one is None:
                same(name, one, other)
            else:  # the bits of NumPy's matrix product depend on the layout of its operands in memory
                kind = str(one.dtype).rpartition(".")[2].replace("uint16", "bfloat16")
                one, other = (arrays.values_of(x, kind) for x in (one, other))
                checks.near(name, one, other, 2 * checks.EPSILON["bfloat16"] * np.abs(other).max(initial=0))
    setting.check_inputs()


@problem("mslk.score_and_select_blocks", weight=0.4)
def mslk_select(draw: Draw) -> None:
    with checks.at_level(draw):
        u = Upstream(draw)
        setting, rules = u.setting, u.rules
        K_cmp, _ = nsa.compress_kv(u.K.given, u.V.given, rules.block, u.given("W_k"), u.given("W_v"), cu_seqlens=u.cu)
        counts, tiles = [n // rules.block for n in setting.lens], [-(-n // rules.tile) for n in setting.lens]
        blocks = max(counts, default=0) if setting.packed else K_cmp.shape[1]
        ours = nsa.score_and_select_blocks(
            u.Q.given, K_cmp, min(rules.count, blocks) or rules.count, rules.block, causal=rules.causal, q_tile_size=rules.tile,
            scale=u.options["scale"], mode="mslk", cu_seqlens=u.cu,
        )  # fmt: skip
        options = {"causal": rules.causal, "q_tile_size": rules.tile, "softmax_scale": u.options["scale"]}
        leading = (u.Q.given, stacked(u, K_cmp, counts, np.nan) if setting.packed else K_cmp, rules.count, rules.block)
        function = mslk.score_and_select_blocks
        if setting.packed or draw.flag("fused"):
            function, options = mslk.fused_score_and_select_blocks, options | {"cu_seqlens": u.cu, "max_seqlen": None}
        results = call_in_style(draw, function, leading, options)
    results = np.asarray(results)
    if results.dtype != np.int32:
        raise Finding(f"dtype {results.dtype}")
    if setting.packed:
        expected = np.full((len(tiles), setting.heads, max(tiles, default=0), ours.shape[-1]), -1, np.int32)
        begin = 0
        for i, n in enumerate(tiles):
            expected[i, :, :n] = ours[:, begin : begin + n]
            begin += n
        ours = expected
    same("block_indices", results, ours)
    setting.check_inputs()


@problem("mslk.gates", weight=0.3)
def mslk_gates(draw: Draw) -> None:
    with checks.at_level(draw):
        u = Upstream(draw)
        setting = u.setting
        names = ("O_cmp", "O_slc", "O_sld", "dO")
        *branches, dO = (setting.tensor(name, setting.normal(name, *setting.shape(setting.heads, setting.v_dim))).given for name in names)
        chunk = draw.pick("chunk_size", (None, 5))
        gates = mslk.compute_gates(u.Q.given, u.given("gate"), chunk)
        same("gates", gates, nsa.compute_gates(u.Q.given, u.given("gate")))
        ours = nsa.gate_and_combine(*branches, gates)
        same("O", mslk.gate_and_combine(*branches, gates, chunk), ours)
        same("fused O", mslk.fused_gate_and_combine(u.Q.given, *branches, u.given("gate")), ours)
        grads = mslk.fused_gating_backward(u.Q.given, dO, *branches, gates, u.given("gate"))
        expected = nsa.gating_backward(u.Q.given, dO, *branches, gates, u.given("gate"))
        all_same(("dO_cmp", "dO_slc", "dO_sld", "dQ_gate", "dW_gate"), grads, expected)
    setting.check_inputs()


@problem("mslk.reference", weight=0.3)
def mslk_reference(draw: Draw) -> None:
    """Compares the reference's results and gradients, which are float64 for every dtype of inputs, with the oracle."""
    u = Upstream(draw, packed=False)
    setting, rules = u.setting, u.rules
    if draw.options["size"] == "long":
        raise Discard("the reference is slow")
    how = Arithmetic("float64", "")
    common = (rules.causal, u.options["scale"], rules.tile)
    lists = mslk.compute_block_indices_reference(u.Q.given, u.K.given, rules.block, rules.count, u.given("W_k"), *common)
    leading = (u.Q.given, u.K.given, u.V.given)
    weights = (u.given("W_k"), u.given("W_v"), u.given("gate"))
    out = mslk.nsa_forward_reference(*leading, rules.block, rules.count, rules.window, *weights, *common, _block_indices=lists)
    if not isinstance(out, np.ndarray) or out.dtype != np.float64 or lists.dtype != np.int64:
        raise Finding(f"dtypes {out.dtype} and {lists.dtype}")
    if not setting.lens:
        return
    blocks = setting.lens[0] // rules.block
    parts = []
    for i in range(len(setting.lens)):
        q, k, v = (exact(x.values[i].swapaxes(0, 1)) for x in (u.Q, u.K, u.V))
        w_k, w_v = (None if w is None else exact(w.values) for w in (u.W_k, u.W_v))
        k_cmp, v_cmp = oracle.compress(k, w_k, rules, how), oracle.compress(v, w_v, rules, how)
        tokens = setting.lens[i]
        nothing = np.zeros((setting.heads, tokens), np.bool_), np.zeros((setting.kv_heads, blocks), np.bool_)
        scores = oracle.mslk_scores(q, k_cmp, rules, *nothing, how)
        mistake = oracle.selection_mistake(lists[i], scores, lists.shape[-1])
        if mistake is not None:
            raise Finding(f"block_indices: {mistake}")
        listed = oracle.sees_listed(lists[i], tokens, rules.wide, rules.tile, rules.causal)
        branches = [
            oracle.attend(q, k_cmp, v_cmp, oracle.sees_blocks(tokens, rules)[None], rules.scale, how),
            oracle.attend(q, k, v, listed, rules.scale, how),
            oracle.attend(q, k, v, oracle.sees_window(tokens, rules.window, rules.causal)[None], rules.scale, how),
        ]
        third = Near(np.full((setting.heads, tokens, 3), 1 / 3), how.unit)
        gates = third if u.gate is None else oracle.sigmoid_gates(q, exact(u.gate.values), how)
        parts.append(oracle.combine([x.out for x in branches], gates, how))
    expected, allowed = (np.stack([getattr(x, y).swapaxes(0, 1) for x in parts]) for y in ("value", "error"))
    checks.near("O", out, expected, allowed + 1e-15)
