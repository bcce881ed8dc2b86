"""Fixtures of all suites."""

import os

# The reference multiplies many small matrices: BLAS threads would cost more than they bring, above all on a busy machine.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import pytest

import blitz_attn
from cases import ISA_LEVELS


@pytest.fixture(params=ISA_LEVELS)
def isa_level(request):
    """Each instruction set level that this machine has, in use while the test runs."""
    with blitz_attn.isa(request.param):
        yield request.param
