"""Without enough memory or threads, calls raise MemoryError or use fewer threads. They never crash, leak or return wrong results.

Most tests need a build that fails on request, which `make faults` and `make asan` make. Limits of the system are tested in any build."""

import ctypes
import gc
import inspect
import os
import re
import resource
import subprocess
import sys
import tempfile
import threading
from contextlib import contextmanager, suppress
from pathlib import Path

import numpy as np
import pytest

import blitz_attn
from blitz_attn import _core, nsa, select
from blitz_attn.compat import mslk, select_attn_ops, torch_bsa
from cases import same_bits
from cases_atomic import NSA_CASES
from cases_operations import arrays_of, operations

injected = pytest.mark.skipif(not hasattr(_core, "_fail_allocation"), reason="this build does not fail on request: see make faults")
NAMES = list(operations())
BY_NUMPY = ("dequantize_kv", "dequantize_rows")  # these allocate only through NumPy
SMALL_NUMBERS = ("set_num_threads", "get_num_threads")  # return small integers, which Python has allocated already
sanitizer = ctypes.CDLL(None) if hasattr(ctypes.CDLL(None), "__lsan_do_recoverable_leak_check") else None
SEVEN = 7  # outputs are filled with it before calls


def fill(operation):
    for out in operation.outs:
        out.fill(SEVEN)


def is_filled(out):
    return bool((out == SEVEN).all())


def right_results(operation):
    """Copies of the arrays that the call returns, and of the outputs that it writes."""
    fill(operation)
    returned = [x.copy() for x in arrays_of(operation.call())]
    return returned, [x.copy() for x in operation.outs]


def check_right(operation, result, right):
    returned, left = right
    for got, expected in zip([*arrays_of(result), *operation.outs], [*returned, *left], strict=True):
        assert same_bits(got, expected)


def check_call(operation, right):
    fill(operation)
    check_right(operation, operation.call(), right)


# ---- What there is to call ----------------------------------------------------------------------------------------------

# Left out are classes of results and of rules, slow reference functions in NumPy, functions that only call other operations, and
# show_config, which searches the installed packages and otherwise only calls other settings.
LEFT_OUT = {
    "Antidiagonal", "NSAContext", "NSAGradients", "Pooled", "Profile", "SampledRows", "VerticalSlash", "allocate", "calibrate", "mslk.nsa_forward_reference",
    "mslk.nsa_backward_reference", "mslk.compute_block_indices_reference", "show_config",
}  # fmt: skip


def test_every_public_operation_is_called_or_left_out():
    modules = {blitz_attn: "", nsa: "", select: "", torch_bsa: "", select_attn_ops: "", mslk: "mslk."}
    public = {
        prefix + name
        for module, prefix in modules.items()
        for name in module.__all__
        if callable(what := getattr(module, name)) and not inspect.ismodule(what)
    }
    methods = {f"PagedPlan.{name}" for name, what in vars(blitz_attn.PagedPlan).items() if inspect.isfunction(what) and name[0] != "_"}
    assert public | methods == {name.partition(",")[0] for name in NAMES} | LEFT_OUT


# ---- Memory -----------------------------------------------------------------------------------------------------------


# LeakSanitizer does not search the memory in which Python 3.11 keeps local variables, and reports memory that only local variables hold as
# leaked. So it watches only allocations within the calls, none of which is still held at the time of a leak check.
if sanitizer:
    sanitizer.__lsan_disable()


@contextmanager
def watched():
    if sanitizer:
        sanitizer.__lsan_enable()
    try:
        yield
    finally:
        if sanitizer:
            sanitizer.__lsan_disable()


def lost():
    """The number of leaked allocations and LeakSanitizer's report of them; 0 and "" without LeakSanitizer."""
    if not sanitizer:
        return 0, ""
    with tempfile.TemporaryFile() as file:  # the report goes to file descriptor 2
        usual = os.dup(2)
        os.dup2(file.fileno(), 2)
        try:
            sanitizer.__lsan_do_recoverable_leak_check()
        finally:
            os.dup2(usual, 2)
            os.close(usual)
        file.seek(0)
        report = file.read().decode()
    return int((re.findall(r"leaked in (\d+) allocation", report) or [0])[0]), report


def attempt(operation, n):
    """Makes a call whose n-th allocation fails. Returns (result, exception, whether the call made n allocations)."""
    result = error = None
    _core._fail_allocation(n)
    try:
        with watched():
            result = operation.call()
    except BaseException as raised:
        error = raised
    return result, error, _core._fail_allocation(0) >= n


def fail_each_allocation(operation, right):
    """Make the call with its first allocation failing, then its second, and so on to the last. Returns the number of MemoryErrors."""
    failures = n = 0
    while True:
        n += 1
        fill(operation)
        result, error, reached = attempt(operation, n)
        if not reached:
            assert error is None, repr(error)
            check_right(operation, result, right)
            return failures
        assert isinstance(error, MemoryError), f"allocation {n}: {error!r}"
        failures += 1
        for out, finished in zip(operation.outs, right[1], strict=True):
            assert is_filled(out) or same_bits(out, finished), f"allocation {n}: an output that is neither untouched nor finished"
        result = error = None
        check_call(operation, right)


def held(operation):
    """The reference counts of the arrays of a call, which show whether a failed call still holds one."""
    given = [cell.cell_contents for cell in operation.call.__closure__ or () if isinstance(cell.cell_contents, np.ndarray)]
    return [sys.getrefcount(x) for x in [*given, *operation.outs]]


@injected
@pytest.mark.parametrize("threads", [1, 4])
@pytest.mark.parametrize("name", NAMES)
def test_each_allocation_fails_once(name, threads):
    operation = operations(threads)[name]
    right = right_results(operation)
    before, lost_before = held(operation), lost()[0]
    blocks = np.zeros(40, np.int64)
    for i in range(len(blocks)):  # after some rounds, the interpreter and NumPy keep no further memory for later calls
        failures = fail_each_allocation(operation, right)
        gc.collect()
        blocks[i] = _core._live_blocks()
        if i and blocks[i] <= blocks[i - 1]:
            break
    else:
        raise AssertionError(f"blocks of Python's memory that are not given back: {np.diff(blocks)}")
    assert held(operation) == before
    lost_now, report = lost()
    assert lost_now <= lost_before, report
    assert (failures > 0) == (name not in BY_NUMPY + SMALL_NUMBERS)


def in_a_thread(call):
    """The result of `call` in a new thread, or the MemoryError that `call` raises."""
    results = []

    def keep():
        if sanitizer:
            sanitizer.__lsan_disable()  # the setting is per thread
        try:
            results.append(call())
        except MemoryError as error:
            results.append(error)

    thread = threading.Thread(target=keep)
    thread.start()
    thread.join()
    return results[0]


@injected
@pytest.mark.parametrize("name", ["block_sparse_attention", "merge_states"])
def test_each_allocation_of_a_threads_first_call_fails_once(name):
    operation = operations(4)[name]
    right = right_results(operation)
    sentences = set()
    for n in range(1, 1000):
        fill(operation)
        result, error, reached = in_a_thread(lambda n=n: attempt(operation, n))
        if not reached:
            check_right(operation, result, right)
            break
        assert isinstance(error, MemoryError), f"allocation {n}: {error!r}"
        sentences.add(str(error))
        check_right(operation, in_a_thread(operation.call), right)
    assert "thread: expected memory for what the library keeps for this thread, got none" in sentences


class Empty:
    """Stands in for numpy.empty. Its n-th call raises MemoryError."""

    def __init__(self, n):
        self.left, self.empty = n, np.empty

    def __call__(self, *arguments, **options):
        self.left -= 1
        if self.left == 0:
            raise MemoryError("no room for an array")
        return self.empty(*arguments, **options)


@pytest.mark.parametrize("name", NAMES)
def test_each_result_finds_no_memory(name, monkeypatch):
    operation = operations()[name]
    right = right_results(operation)
    for n in range(1, 1000):
        empty = Empty(n)
        fill(operation)
        monkeypatch.setattr(np, "empty", empty)
        try:
            result = operation.call()
        except MemoryError:
            monkeypatch.undo()
            assert all(map(is_filled, operation.outs))
            check_call(operation, right)
        else:
            monkeypatch.undo()
            assert empty.left > 0
            check_right(operation, result, right)
            return


# ---- Limits, in processes of their own ----------------------------------------------------------------------------------

PRELUDE = """
import os, resource, sys
import numpy as np
import blitz_attn
from blitz_attn import _core, sabi, testing

def bits(threads, tokens=600, backward=True):
    q, k, v = testing.make_qkv(1, 4, 2, tokens, tokens, 32)
    lists = sabi.random_with_frame(tokens, tokens, (32, 32), 0.5, seed=1)
    options = {"block_shape": (32, 32), "causal": True, "num_threads": threads}
    out, lse = blitz_attn.block_sparse_attention(q, k, v, lists, return_lse=True, **options)
    grads = blitz_attn.block_sparse_attention_backward(out, q, k, v, out, lse, lists, **options)
    return [x.tobytes() for x in (out, lse, *grads)]

def threads_now():
    return len(os.listdir("/proc/self/task"))
"""


def run(program, *arguments, refused=None, **options):
    """Runs PRELUDE and a program in a process of its own. Exit status `refused` means that the system does not allow the test."""
    path = os.pathsep.join([str(Path(blitz_attn.__file__).resolve().parent.parent), *filter(None, sys.path)])
    environment = {**os.environ, "PYTHONPATH": path, "OPENBLAS_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", PRELUDE + program, *map(str, arguments)],
        capture_output=True, text=True, env=environment, timeout=300, check=False, **options,
    )  # fmt: skip
    if refused is not None and done.returncode == refused:
        pytest.skip(done.stderr.strip())
    assert done.returncode == 0, done.stderr
    return done.stdout


on_linux = pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="needs /proc")
# AddressSanitizer's shadow memory is terabytes of addresses, which count against a limit.
unsanitized = pytest.mark.skipif("asan" in os.environ.get("LD_PRELOAD", ""), reason="a sanitizer needs more than the limit leaves")

THREAD_FAILS = """
n, alone = int(sys.argv[1]), bits(1)
before = threads_now()
_core._fail_thread(n)
assert bits(6) == alone
assert threads_now() - before <= 5
assert _core._fail_thread(0) >= n
assert bits(6) == alone
assert threads_now() - before == 5  # now with the threads that could not be made at first
"""


@injected
@on_linux
@pytest.mark.parametrize("n", [1, 2, 3, 5])
def test_thread_cannot_be_made(n):
    run(THREAD_FAILS, n)


NO_PROCESSES = """
alone, before = bits(1), threads_now()
try:
    if os.getuid() == 0:  # the limit does not bind root
        os.setgid(65534)
        os.setuid(int(sys.argv[2]))
    resource.setrlimit(resource.RLIMIT_NPROC, (before + int(sys.argv[1]), before + int(sys.argv[1])))
except (OSError, ValueError) as error:
    print(error, file=sys.stderr)
    sys.exit(77)
assert bits(8) == alone
made = threads_now() - before
if made == 7:
    print("the system does not count threads against RLIMIT_NPROC", file=sys.stderr)
    sys.exit(77)
assert made <= int(sys.argv[1]), made
assert bits(8) == alone
"""


@on_linux
@pytest.mark.parametrize("spare", [0, 2])
def test_limit_of_processes(spare):
    """A user's threads count against RLIMIT_NPROC, and a call uses as many as the limit allows. The test takes a user id of its own."""
    run(NO_PROCESSES, spare, 60000 + os.getpid() % 5000, refused=77)


NO_ADDRESSES = """
size = int(next(line.split()[1] for line in open("/proc/self/status") if line.startswith("VmSize:"))) * 1024
small = bits(1, 300)
tokens, blocks = 1 << 15, 1 << 9
q, k, v = (np.zeros((1, 1, tokens, 64), np.float16) for _ in range(3))
grads = tuple(np.full_like(q, 7) for _ in range(3))
plans = np.broadcast_to(np.arange(blocks, dtype=np.int32), (1, 1, tokens // 64, blocks))
resource.setrlimit(resource.RLIMIT_AS, (size + (40 << 20), size + (40 << 20)))
try:
    lse = np.zeros((1, 1, tokens), np.float32)
    blitz_attn.block_sparse_attention_backward(q, q, k, v, q, lse, plans, block_shape=(64, 64), grads=grads, num_threads=64)
except MemoryError as error:
    assert str(error).startswith("scratch: expected "), error
else:
    raise AssertionError("there was memory enough")
assert all((x == 7).all() for x in grads)
assert bits(1, 300) == small
assert bits(2, 300) == small
"""


@on_linux
@unsanitized
def test_limit_of_addresses():
    run(NO_ADDRESSES)


SMALL_STACK = """
import threading
alone = bits(1)
assert bits(4) == alone
results = []
threading.stack_size(256 << 10)
thread = threading.Thread(target=lambda: results.append((bits(1), bits(4))))
thread.start()
thread.join()
assert results == [(alone, alone)]
"""


@on_linux
@unsanitized
@pytest.mark.parametrize("kib", [256, 512])
def test_small_stacks(kib):
    """RLIMIT_STACK limits the stack of the program's first thread, and is the default for all other threads' stacks.
    (Workers have at least 1 MiB.)"""
    limit = (kib << 10, kib << 10)
    run(SMALL_STACK, preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_STACK, limit))


# ---- Objects that change ------------------------------------------------------------------------------------------------


@injected
@pytest.mark.parametrize("name", [name for name in NSA_CASES if "append" in name or "attend" in name])  # cases that call the core
def test_an_object_is_as_before_an_allocation_that_fails_or_as_after_the_call(name):
    """Here allocations of the core fail; tests/test_atomic.py stops the same calls at bytecodes."""
    case = NSA_CASES[name]
    whole = case.make()
    before = case.seen(whole)
    case.call(whole)
    after = case.seen(whole)
    failed, reached = 0, True
    while reached:
        changed = case.make()
        _core._fail_allocation(failed + 1)
        with suppress(MemoryError):
            case.call(changed)
        reached = _core._fail_allocation(0) > failed
        failed += reached
        assert case.seen(changed) in (before, after)
    assert failed
    assert case.seen(changed) == after
