"""The benchmark of choosers at sizes that take no time: every row is one JSON object, and its shares are those of its times."""

import json

import pytest

from test_benchmark_decode import run


def test_rows():
    out, _ = run("choosing.py", "--tokens 256 --dtype float32 bfloat16 -H 4 --kv-heads 2 -D 16 --block 64 --threads 1 --repeats 1")
    rows = [json.loads(line) for line in out.splitlines()]
    assert len({(row["dtype"], row["chooser"]) for row in rows}) == len(rows) == 14
    for row in rows:
        assert row["of_dense"] == pytest.approx(row["seconds"] / row["dense_seconds"])
        assert row["of_sparse"] == pytest.approx(row["seconds"] / row["sparse_seconds"])


def test_help():
    assert "usage:" in run("choosing.py", "--help")[0]
