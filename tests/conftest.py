"""Fixtures of all suites, and the choice of the tests that run (sampling.py)."""

import gc
import os
import sys

# The reference multiplies many small matrices, for which BLAS threads cost more time than they save, above all on a busy machine.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
# With memory of the usual size, each benchmark script would take two seconds to measure how fast memory is read.
os.environ.setdefault("BENCHMARK_DRAM_BYTES", str(1 << 24))

import pytest

import blitz_attn
import sampling
from cases import ISA_LEVELS

DEFAULT_MARKS = "not full and not model"  # as in pyproject.toml


@pytest.fixture(params=ISA_LEVELS)
def isa_level(request):
    """Each level of `ISA_LEVELS`, in use while the test runs."""
    with blitz_attn.isa(request.param):
        yield request.param


@pytest.fixture(scope="module")
def one_torch_thread():
    """Torch uses one thread: in small models, several threads would wait for each other more than they compute."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def show(capfd):
    """Prints a line while a long test still runs."""

    def show(line):
        with capfd.disabled():
            print(line, file=sys.stderr, flush=True)

    return show


def pytest_report_header():
    return sampling.description()


# The collected tests are millions of objects that live to the end, and Python's garbage collector would go through them repeatedly. Without
# the garbage collector, collecting tests takes half as long, and the whole suite takes about 8 % less time (182 instead of 197 seconds).
def pytest_collection():
    gc.disable()


def pytest_collection_finish():
    gc.freeze()
    gc.enable()


@pytest.hookimpl(trylast=True)  # sees only the tests that -m and -k have left
def pytest_collection_modifyitems(config, items):
    """Leave out tests marked long, and tests outside the sample. Nothing is left out with SAMPLE_SEED=all or -m, or if a test is named with
    its options."""
    if sampling.ALL or any("[" in argument for argument in config.args) or config.option.markexpr != DEFAULT_MARKS:
        return
    left_out = sampling.left_out(items) | {item for item in items if item.get_closest_marker("long")}
    if left_out:
        config.hook.pytest_deselected(items=[item for item in items if item in left_out])
        items[:] = [item for item in items if item not in left_out]
