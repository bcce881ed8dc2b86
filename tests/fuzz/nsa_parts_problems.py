"""The parts of native sparse attention: compression, selection, the three branches, the gates, and the gradients of each."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from blitz_attn import nsa

from . import arrays, checks
from . import nsa_oracle as oracle
from .arrays import check_kind
from .draw import Draw
from .nsa_draws import Setting, Tensor, as_lists, draw_rules, exact_parts, list_parts, lists_shape, random_lists, weight_near
from .nsa_oracle import Arithmetic, Near, Rules, exact
from .problems import Finding, problem


def given(w: Tensor | None) -> Any:
    return None if w is None else w.given


class Part:
    """A problem of one part: its first draws, and the arithmetic of the oracle."""

    def __init__(self, draw: Draw, level: str):
        self.draw, self.setting = draw, Setting(draw)
        self.how = Arithmetic(self.setting.dtype, level)

    @classmethod
    @contextlib.contextmanager
    def at_level(cls, draw: Draw) -> Iterator[Part]:
        """A context for the calls of a problem. At its end, no input may have changed."""
        with checks.at_level(draw) as level:
            part = cls(draw, level)
            yield part
        part.setting.check_inputs()

    def common(self) -> dict[str, Any]:
        return {"dtype": self.setting.named, "num_threads": checks.threads(self.draw)}

    def called(self, call: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        """The results of a call. Half of the time, they are compared with results on another number of threads."""
        results = call(*arguments, **options)
        if self.draw.pick("check", ("oracle", "threads")) == "threads":
            other = call(*arguments, **options | {"num_threads": self.draw.pick("other_threads", checks.THREADS)})
            for a, b in zip(*((x if isinstance(x, tuple) else (x,)) for x in (results, other)), strict=True):
                if a is not None:
                    checks.same_bits("other threads", a, b)
        return results


def by_blocks(setting: Setting, rules: Rules, x: np.ndarray) -> list[np.ndarray]:
    """The sequences of an array that has one entry per compressed block, with heads first."""
    if not setting.packed:
        return [part.swapaxes(0, 1) for part in x]
    ends = np.concatenate([[0], np.cumsum([oracle.block_count(n, rules.block, rules.stride) for n in setting.lens])]).astype(int)
    return [x[ends[i] : ends[i + 1]].swapaxes(0, 1) for i in range(len(setting.lens))]


# ---- Compression --------------------------------------------------------------------------------------------------


def draw_compression(part: Part) -> tuple[Rules, dict[str, Any], list[Tensor], list[Tensor | None]]:
    draw, setting = part.draw, part.setting
    block = draw.integer("block_size", 1, 80, likely=(1, 2, 4, 8, 16))
    stride = draw.integer("stride", 1, 80, likely=(1, 2, 4, 8, block))
    dims = {"k": setting.dim, "v": setting.v_dim}
    sides = [setting.drawn(name, *setting.shapes[name]) for name in dims]
    weights = [setting.weight(f"w_{x}", setting.kv_heads, dim, dim) if draw.flag(f"has_w_{x}") else None for x, dim in dims.items()]
    options = {"stride": None if block == stride and draw.flag("default_stride") else stride, "cu_seqlens": setting.cu_seqlens()}
    return Rules(block=block, stride=stride), {**options, **part.common()}, sides, weights


@problem("compress_kv", weight=0.5)
def compress_kv(draw: Draw) -> None:
    with Part.at_level(draw) as part:
        rules, options, sides, weights = draw_compression(part)
        results = part.called(nsa.compress_kv, *(x.given for x in sides), rules.block, *map(given, weights), **options)
    for name, got, x, w in zip(("k_cmp", "v_cmp"), results, sides, weights, strict=True):
        shape = part.setting.blocks_shape(rules, part.setting.kv_heads, x.values.shape[-1])
        part.setting.near(name, got, [oracle.compress(one, weight_near(w), rules, part.how) for one in exact_parts(part.setting, x.values)])
        if tuple(got.shape) != shape:
            raise Finding(f"{name}: shape {tuple(got.shape)}")


@problem("compress_kv_backward", weight=0.5)
def compress_kv_backward(draw: Draw) -> None:
    with Part.at_level(draw) as part:
        setting = part.setting
        rules, options, sides, weights = draw_compression(part)
        grads = [
            setting.drawn(name, *setting.blocks_shape(rules, setting.kv_heads, x.values.shape[-1]))
            for name, x in zip(("dk_cmp", "dv_cmp"), sides, strict=True)
        ]
        results = part.called(
            nsa.compress_kv_backward, *(x.given for x in (*grads, *sides)), rules.block, *map(given, weights), **options
        )
    for i, (x, d, w) in enumerate(zip(sides, grads, weights, strict=True)):
        parts = [
            oracle.compress_backward(exact(done), one, weight_near(w), rules, part.how)
            for done, one in zip(by_blocks(setting, rules, d.values), exact_parts(setting, x.values), strict=True)
        ]
        setting.near(f"d{'kv'[i]}", results[i], [dx for dx, _ in parts])
        check_weight(setting, f"dw_{'kv'[i]}", results[2 + i], [dw for _, dw in parts if dw is not None], w, part.how)


def check_weight(setting: Setting, name: str, got: Any, parts: list[Near], w: Tensor | None, how: Arithmetic) -> None:
    if (got is None) != (w is None):
        raise Finding(f"{name}: {'None' if got is None else 'an array'} where the weight was {'not ' if w is None else ''}given")
    if w is None:
        return
    setting.weight_near(name, got, oracle.added(parts, how) if parts else exact(np.zeros(w.values.shape)), w)


# ---- Selection ----------------------------------------------------------------------------------------------------


@problem("score_and_select_blocks")
def score_and_select_blocks(draw: Draw) -> None:
    """Ties are judged without a tolerance if arithmetic is exact: in mslk mode, for small integers, whole tiles
    of 2^n queries, and a scale that is 0, 2^n or -2^n."""
    with Part.at_level(draw) as part:
        setting, how = part.setting, part.how
        rules, options = draw_rules(setting)
        contents = draw.pick("contents", ("normal", "integers", "equal"), (3, 2, 1))
        bad = draw.pick("poison", ("none", "k_cmp", "q"), (4, 1, 1))
        shapes = {"q": setting.shape(setting.heads, setting.dim), "k_cmp": setting.blocks_shape(rules, setting.kv_heads, setting.dim)}
        values, spots = {}, {}
        for name, shape in shapes.items():
            x = setting.normal(name, *shape)
            if contents == "integers":
                x = np.clip(np.round(x * 0.7), -1, 1)
            elif contents == "equal" and name == "k_cmp":
                x = np.broadcast_to(np.clip(np.round(setting.normal("k", setting.dim)), -1, 1), shape).copy()
            spots[name] = (
                draw.rng("poison").random(shape[:-1]) < 1.5 / max(1, shape[0], shape[-3]) if name == bad else np.zeros(shape[:-1], np.bool_)
            )
            x[spots[name]] = np.nan
            values[name] = x
        q, k_cmp = (setting.tensor(name, values[name]) for name in shapes)
        keywords = {
            "causal": rules.causal, "scale": options["scale"], "mode": rules.mode, "cu_seqlens": setting.cu_seqlens(), **part.common(),
            **{name: options[name] for name in ("q_tile_size", "init_blocks", "local_blocks", "compress_stride", "select_block_size") if name in options},
        }  # fmt: skip
        with_lse = draw.flag("has_lse") and rules.mode == "paper" and bad == "none"
        if with_lse:
            _, keywords["lse"] = nsa.compressed_attention(
                q.given, k_cmp.given, k_cmp.given, rules.block, stride=rules.stride, causal=rules.causal, scale=options["scale"],
                cu_seqlens=keywords["cu_seqlens"], mode=rules.mode, return_lse=True, dtype=setting.named,
            )  # fmt: skip
        lists = part.called(nsa.score_and_select_blocks, q.given, k_cmp.given, rules.count, rules.block, **keywords)
    heads = setting.kv_heads if rules.mode == "paper" else setting.heads
    if not isinstance(lists, np.ndarray) or lists.dtype != np.int32 or lists.shape != lists_shape(setting, heads, rules.tile, rules.count):
        raise Finding(f"lists: {type(lists).__name__} {getattr(lists, 'dtype', None)} {getattr(lists, 'shape', None)}")
    q_spots = list(setting.parts(spots["q"][..., None]))
    k_spots = by_blocks(setting, rules, spots["k_cmp"][..., None])
    q_parts, k_parts = list(setting.parts(q.values)), by_blocks(setting, rules, k_cmp.values)
    for i, listed in enumerate(list_parts(setting, lists, rules.tile)):
        qs, ks = (exact(np.where(np.isfinite(x[i]), x[i], 0)) for x in (q_parts, k_parts))
        bad_q, bad_k = q_spots[i][..., 0], k_spots[i][..., 0]
        if rules.mode == "paper":
            seen = oracle.sees_blocks(setting.lens[i], rules)[None]
            tainted = bad_q | (seen & np.repeat(bad_k, setting.group, axis=0)[:, None, :]).any(-1)
            scores = oracle.paper_scores(
                oracle.attend(qs, ks, ks, seen, rules.scale, how), setting.lens[i], setting.kv_heads, rules, tainted, how
            )
        else:
            scores = oracle.mslk_scores(qs, ks, rules, bad_q, bad_k, how)
            powers = rules.tile & (rules.tile - 1) == 0 and setting.lens[i] % rules.tile == 0 and rules.scale in (0.0, 0.25, -0.5, 1.0)
            if contents == "integers" and powers:
                scores = scores._replace(score=Near(scores.score.value, np.zeros_like(scores.score.value)))
        mistake = oracle.selection_mistake(listed, scores, rules.count)
        if mistake is not None:
            raise Finding(f"sequence {i}: {mistake}")


# ---- Branches -----------------------------------------------------------------------------------------------------


class Branch:
    """A drawn call of one of the three branches, forward and backward."""

    def __init__(self, part: Part, name: str):
        draw, setting = part.draw, part.setting
        self.setting, self.how, self.name = setting, part.how, name
        self.rules, options = draw_rules(setting)
        self.keywords = {"causal": self.rules.causal, "scale": options["scale"], "cu_seqlens": setting.cu_seqlens(), **part.common()}
        compressed = name == "compressed_attention"
        if compressed:
            self.keywords |= {"mode": self.rules.mode}
            if self.rules.mode == "paper":
                self.keywords["stride"] = self.rules.stride
            self.sizes: tuple[Any, ...] = (self.rules.block,)
        elif name == "selected_attention":
            tile, places = draw.pick("tile", (1, 2, 5, 16, 64, 300)), draw.integer("places", 0, 12, likely=(2, 4))
            self.tile = tile
            self.lists = random_lists(
                setting, "block_indices", setting.kv_heads if draw.flag("for_kv_heads") else setting.heads, tile, self.rules.wide, places
            )
            self.sizes = (as_lists(draw, "block_indices", self.lists), self.rules.wide)
            self.keywords["q_tile_size"] = tile
        else:
            self.sizes = (self.rules.window,)
        self.seen = self.sights()
        shapes = setting.shapes
        if compressed:
            shapes |= {x: setting.blocks_shape(self.rules, *shapes[x][-2:]) for x in "kv"}
        values = {x: setting.normal(x, *shape) for x, shape in shapes.items()}
        # Only keys that no query sees may be NaN or infinite, so that gradients are defined, too.
        self.number = draw.pick("unseen", (None, np.nan, np.inf))
        if self.number is not None:
            for x in ("k", "v"):
                for part, seen in zip(self.key_parts(values[x]), self.seen, strict=True):
                    seen = np.broadcast_to(seen, (setting.heads, *seen.shape[1:])).any(1)
                    part[~seen.reshape(setting.kv_heads, setting.group, seen.shape[-1]).any(1)] = self.number
        self.q, self.k, self.v = (setting.tensor(x, values[x]) for x in "qkv")

    def key_parts(self, x: np.ndarray) -> list[np.ndarray]:
        return by_blocks(self.setting, self.rules, x) if self.name == "compressed_attention" else list(self.setting.parts(x))

    def sights(self) -> list[np.ndarray]:
        rules, lens = self.rules, self.setting.lens
        if self.name == "compressed_attention":
            return [oracle.sees_blocks(n, rules)[None] for n in lens]
        if self.name == "window_attention":
            return [oracle.sees_window(n, rules.window, rules.causal)[None] for n in lens]
        parts = list_parts(self.setting, self.lists, self.tile)
        return [
            np.repeat(oracle.sees_listed(x, n, rules.wide, self.tile, rules.causal), self.setting.heads // len(x), axis=0)
            for x, n in zip(parts, lens, strict=True)
        ]

    def run(self, **more: Any) -> Any:
        return getattr(nsa, self.name)(self.q.given, self.k.given, self.v.given, *self.sizes, **{**self.keywords, **more})

    def results(self) -> list[oracle.Attention]:
        parts = zip(self.setting.parts(self.q.values), self.key_parts(self.k.values), self.key_parts(self.v.values), self.seen, strict=True)
        return [
            oracle.attend(exact(q), exact(np.nan_to_num(k, posinf=0)), exact(np.nan_to_num(v, posinf=0)), seen, self.rules.scale, self.how)
            for q, k, v, seen in parts
        ]


def check_forward(draw: Draw, name: str) -> None:
    with Part.at_level(draw) as part:
        branch, setting = Branch(part, name), part.setting
        out, lse = branch.run(return_lse=True)
        check = draw.pick("check", ("oracle", "threads", "without_lse"))
        if check == "threads":
            checks.same_bits(
                "other threads", (out, lse), branch.run(return_lse=True, num_threads=draw.pick("other_threads", checks.THREADS))
            )
        elif check == "without_lse":
            checks.same_bits("without the log-sum-exp", out, branch.run())
    results = branch.results()
    setting.near("out", out, [x.out for x in results])
    check_kind("lse", lse, setting.real, setting.kind)
    if tuple(lse.shape) != setting.shape(setting.heads) or tuple(out.shape) != setting.shape(setting.heads, setting.v_dim):
        raise Finding(f"shapes {tuple(out.shape)} and {tuple(lse.shape)}")
    setting.near("lse", lse[..., None], [Near(x.lse.value[..., None], x.lse.error[..., None]) for x in results], dtype=setting.real)


def check_backward(draw: Draw, name: str) -> None:
    with Part.at_level(draw) as part:
        branch, setting = Branch(part, name), part.setting
        out, lse = branch.run(return_lse=True)
        dout = setting.drawn("dout", *setting.shape(setting.heads, setting.v_dim))
        if draw.flag("dressed_results"):  # results are passed as views and kinds of their own
            out = setting.tensor("out", arrays.values_of(out, setting.dtype)).given
            lse = setting.tensor(
                "lse", arrays.values_of(lse, setting.real), setting.real, "torch" if setting.kind == "torch" else "numpy"
            ).given
        arguments = (dout.given, branch.q.given, branch.k.given, branch.v.given, out, lse, *branch.sizes)
        grads = part.called(getattr(nsa, f"{name}_backward"), *arguments, **branch.keywords)
    parts = [
        oracle.attend_backward(a, exact(d), setting.kv_heads, branch.how)
        for a, d in zip(branch.results(), setting.parts(dout.values), strict=True)
    ]
    setting.near("dq", grads[0], [x.dq for x in parts])
    for what, got, x in (("dk", grads[1], branch.k), ("dv", grads[2], branch.v)):
        if tuple(got.shape) != x.values.shape:
            raise Finding(f"{what}: shape {tuple(got.shape)}, expected {x.values.shape}")
        setting.near(what, got, [getattr(part, what) for part in parts])


for _name in ("compressed_attention", "selected_attention", "window_attention"):
    problem(_name, weight=0.7)(lambda draw, name=_name: check_forward(draw, name))
    problem(f"{_name}_backward", weight=0.7)(lambda draw, name=_name: check_backward(draw, name))


# ---- Gates --------------------------------------------------------------------------------------------------------


@problem("compute_gates", weight=0.3)
def compute_gates(draw: Draw) -> None:
    with Part.at_level(draw) as part:
        setting, how = part.setting, part.how
        q = setting.drawn("q", *setting.shape(setting.heads, setting.dim), amplitude=draw.pick("amplitude", (1.0, 0.0, 30.0)))
        weight = setting.weight("gate_proj_weight", setting.heads, 3, setting.dim) if draw.flag("has_weight", 0.8) else None
        gates = part.called(nsa.compute_gates, q.given, given(weight), **part.common())
    if weight is None:
        expected = [Near(np.full((setting.heads, n, 3), 1 / 3), how.unit) for n in setting.lens]
    else:
        expected = [oracle.sigmoid_gates(exact(one), exact(weight.values), how) for one in setting.parts(q.values)]
    setting.near("gates", gates, expected, dtype=setting.real)
    if tuple(gates.shape) != setting.shape(setting.heads, 3):
        raise Finding(f"gates: shape {tuple(gates.shape)}")


def draw_gating(part: Part) -> tuple[list[Tensor], Tensor]:
    setting = part.setting
    branches = [setting.drawn(name, *setting.shape(setting.heads, setting.v_dim)) for name in ("o_cmp", "o_slc", "o_win")]
    return branches, setting.weight("gates", *setting.shape(setting.heads, 3), amplitude=1.0)


@problem("gate_and_combine", weight=0.3)
def gate_and_combine(draw: Draw) -> None:
    with Part.at_level(draw) as part:
        branches, gates = draw_gating(part)
        out = part.called(nsa.gate_and_combine, *(x.given for x in branches), gates.given, **part.common())
    parts = zip(*(part.setting.parts(x.values) for x in (*branches, gates)), strict=True)
    part.setting.near("out", out, [oracle.combine([exact(x) for x in one[:3]], exact(one[3]), part.how) for one in parts])


@problem("gating_backward", weight=0.3)
def gating_backward(draw: Draw) -> None:
    with Part.at_level(draw) as part:
        setting, how = part.setting, part.how
        q = setting.drawn("q", *setting.shape(setting.heads, setting.dim))
        dout = setting.drawn("dout", *setting.shape(setting.heads, setting.v_dim))
        branches, gates = draw_gating(part)
        weight = setting.weight("gate_proj_weight", setting.heads, 3, setting.dim) if draw.flag("has_weight", 0.8) else None
        arguments = (*(x.given for x in (q, dout, *branches, gates)), given(weight))
        results = part.called(nsa.gating_backward, *arguments, **part.common())
    parts = [[exact(x) for x in one] for one in zip(*(setting.parts(x.values) for x in (q, dout, *branches, gates)), strict=True)]
    for c, name in enumerate(("do_cmp", "do_slc", "do_win")):
        setting.near(name, results[c], [d.times(oracle.one_gate(g, c)) for _, d, *_, g in parts])
    dlogits = [oracle.logits_backward(oracle.gates_backward(d, list(o), how), g, how) for _, d, *o, g in parts]
    if (results[3] is None) != (weight is None):
        raise Finding("dq: None with a weight, or an array without")
    if weight is not None:
        setting.near("dq", results[3], [oracle.dot(x, exact(weight.values), how.unit) for x in dlogits])
    dw = [oracle.dot(x.turned(), one[0], how.unit) for x, one in zip(dlogits, parts, strict=True)]
    check_weight(setting, "dgate_proj_weight", results[4], dw, weight, how)
