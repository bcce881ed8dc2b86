"""Every mistake that `make fuzz-mistakes` plants (tests/fuzz/mistakes.py) still has its place in the code."""

import pytest

from fuzz.mistakes import MISTAKES, ROOT


@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda mistake: mistake.name)
def test_a_mistake_has_one_place(mistake):
    assert (ROOT / mistake.file).read_text(encoding="utf-8").count(mistake.right) == 1
