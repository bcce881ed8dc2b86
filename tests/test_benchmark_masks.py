"""The benchmark of masks at sizes that take no time: what it prints, and that it notices wrong results."""

import sys
from pathlib import Path

import numpy as np
import pytest

sys.path.append(str(Path(__file__).resolve().parent.parent / "benchmark"))

import masks
from _plots import parse_rows
from test_benchmark import run

SMALL = ("--seq", "100", "--heads", "4", "--head-dim", "24", "--repeats", "1", "--no-torch")


def test_rows_are_right_and_complete():
    rows = parse_rows(run("masks.py", *SMALL, "--dtypes", "float32", "bfloat16")[0], ("dtype", "mask"))
    assert {row["dtype"] for row in rows} == {"float32", "bfloat16"}
    assert {row["said_by"] for row in rows} == {"none", "causal", "kv_ranges", "attn_mask", "causal,alibi_slopes"}
    assert all(row["Equal"] == "yes" for row in rows)
    assert all(0 < float(row["Pairs"]) <= 1 for row in rows)


@pytest.mark.parametrize("number", range(masks.ROWS))
def test_a_wrong_result_is_noticed(number):
    operands = masks.draw(1, 4, 2, 100, 24, "float32", "BNSD", 1)
    case = masks.cases_of(operands, 1)[number]
    operands.call(None, (128, 128), 1, **case.options)()
    assert masks.is_equal(case, operands, 1)
    operands.out += np.float32(1e-4)
    assert not masks.is_equal(case, operands, 1)
