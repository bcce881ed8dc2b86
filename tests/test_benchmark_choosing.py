"""The benchmark of choosers at sizes that take no time: the shares of a row are those of its times."""

import re

import numpy as np
import pytest

import blitz_attn
from blitz_attn import select, testing
from test_benchmark_decode import run  # which also makes benchmark/ importable

import choosing_peers as peers  # isort: skip
from _plots import parse_rows  # isort: skip


def test_rows():
    out, _ = run("choosing.py", "--tokens 256 --dtype float32 bfloat16 -H 4 --kv-heads 2 -D 16 --block 64 --threads 1 --repeats 1")
    rows = parse_rows(out, ["dtype"])
    ours = [row for row in rows if not row["chooser"].startswith("torch_")]
    assert len({(row["dtype"], row["chooser"]) for row in rows}) == len(rows)
    assert len(ours) == 14
    assert out.count("torch is not installed") + len(rows) - len(ours) == 4
    calls = re.findall(r"dense ([0-9.]+) ms, sparse ([0-9.]+) ms", out)
    for row in rows:
        dense, sparse = map(float, calls[row["dtype"] == "bfloat16"])
        for share, time in ((row["%_of_dense"], dense), (row["%_of_sparse"], sparse)):  # times have three decimals, shares have two
            assert 100 * (row["ms"] - 6e-4) / (time + 6e-4) - 6e-3 <= share <= 100 * (row["ms"] + 6e-4) / (time - 6e-4) + 6e-3


def test_help():
    assert "usage:" in run("choosing.py", "--help")[0]


def test_peers_choose_what_they_say():
    """The choosers in torch against this library's: antidiagonal scores are the same, and block means keep the blocks with the largest."""
    torch = pytest.importorskip("torch")
    q, k, _ = testing.make_qkv(1, 4, 2, 256, 256, 16)
    tensors = torch.from_numpy(q), torch.from_numpy(k)
    options = {"block_shape": (32, 32), "causal": True, "return_scores": True}
    _, expected = blitz_attn.select_blocks_prefill(q, k, chooser=select.Antidiagonal(16), top_p=0.9, **options)
    scores = peers.antidiagonal_scores(*tensors, 32)[None].numpy()
    assert np.abs(scores - expected).max() < 1e-5
    ours, _ = blitz_attn.select_blocks_prefill(q, k, chooser=select.Antidiagonal(16), top_p=0.9, sink=0, recent=0, **options)
    kept = peers.antidiagonal(*tensors, 32, 0.9).numpy()
    assert all(sorted(np.flatnonzero(kept[h, r])) == [c for c in ours[0, h, r] if c >= 0] for h, r in np.ndindex(kept.shape[:2]))
    _, by_means = blitz_attn.select_blocks_prefill(q, k, chooser=select.Pooled(32, "mean", "mean"), top_k=1, **options)
    listed = peers.block_means(*tensors, 32, 0.5).numpy()
    for h, r in np.ndindex(listed.shape[:2]):
        wanted = -(-(r + 1) // 2)
        assert [c for c in listed[h, r] if c >= 0] == sorted(np.argsort(-by_means[0, h, r, : r + 1])[:wanted])
