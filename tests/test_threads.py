"""The number of threads follows fixed rules and changes no result, concurrent callers are safe, the GIL is free while kernels run, and calls
need little memory and stack."""

import os
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

import blitz_attn
from blitz_attn import _core, sabi, testing
from cases import same_bits
from interpreters import python


@pytest.fixture(autouse=True)
def default_threads():
    """Every test leaves the number of threads as the environment sets it."""
    yield
    blitz_attn.set_num_threads(None)


def problem(seed=0, tokens=700):
    """A call that is large enough for several threads, with rows of unequal cost."""
    q, k, v = testing.make_qkv(2, 4, 2, tokens, tokens, 64, seed=seed)
    lists = sabi.random_with_frame(tokens, tokens, (64, 64), 0.5, batch=2, heads=4, seed=seed)
    return q, k, v, {"sabi": lists, "block_shape": (64, 64), "causal": True, "return_lse": True}


def attend(q, k, v, **options):
    return blitz_attn.block_sparse_attention(q, k, v, **options)


# ---- The number of threads ----------------------------------------------------------------------------------------

TELL = "import blitz_attn._core as c; print(c.get_num_threads(), c.num_threads_source())"


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({"BLITZ_ATTN_NUM_THREADS": "3", "OMP_NUM_THREADS": "5"}, "3 BLITZ_ATTN_NUM_THREADS"),
        ({"OMP_NUM_THREADS": "5"}, "5 OMP_NUM_THREADS"),
        ({"OMP_NUM_THREADS": "5,2"}, "5 OMP_NUM_THREADS"),
        ({"BLITZ_ATTN_NUM_THREADS": "many", "OMP_NUM_THREADS": "5"}, "5 ignored"),
    ],
)
def test_environment(variables, expected):
    count, _, source = python("-c", TELL, **variables).partition(" ")
    assert (count, expected.split()[1] in source) == (expected.split()[0], True)


@pytest.mark.parametrize("value", ["", "0", "-2", "many", "99999999999999999999"])
def test_wrong_environment_is_ignored(value):
    usual = python("-c", TELL).split()[0]
    count, _, source = python("-c", TELL, BLITZ_ATTN_NUM_THREADS=value).partition(" ")
    assert count == usual
    assert ("BLITZ_ATTN_NUM_THREADS is not a number from 1 to 1024 and is ignored" in source) == bool(value)


def test_affinity():
    if not hasattr(os, "sched_setaffinity"):
        pytest.skip("this system has no affinity to set")
    one = min(os.sched_getaffinity(0))
    assert python("-c", f"import os; os.sched_setaffinity(0, [{one}]); {TELL}").split()[0] == "1"


INHERIT = """
import os, re
import numpy as np
import blitz_attn

def allowed(task):
    return re.search(r"Cpus_allowed_list:\\s*(\\S+)", open(f"/proc/self/task/{task}/status").read())[1]

before = set(os.listdir("/proc/self/task"))
every = os.sched_getaffinity(0)
one = {min(every)}
os.sched_setaffinity(0, one)
x = np.ones((1, 4, 1024, 64), np.float32)
blitz_attn.block_sparse_attention(x, x, x, num_threads=3)
workers = set(os.listdir("/proc/self/task")) - before
os.sched_setaffinity(0, every)
blitz_attn.block_sparse_attention(x, x, x, num_threads=3)
print(len(workers), {allowed(x) for x in workers} == {str(min(one))}, blitz_attn.get_num_threads() == len(every))
os.sched_setaffinity(0, one)
print(blitz_attn.get_num_threads() == len(every))
"""


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="this system has no affinity to set")
def test_workers_inherit_the_affinity_of_the_thread_that_starts_them():
    """The library sets no affinity. The default number of threads is found once, when it is first needed."""
    assert python("-c", INHERIT) == "2 True True\nTrue"


# Threads that write to new memory have page faults, which Linux counts for each thread. Huge pages would take one fault for 2 MiB.
# A worker may have a few faults for its own stack, if its first task comes late. A worker that shared the writing would have a third of all faults.
FAULTS = """
import ctypes, os, threading
import numpy as np
import blitz_attn

ctypes.CDLL(None).prctl(41, 1, 0, 0, 0)  # PR_SET_THP_DISABLE

def faults():
    tasks = os.listdir("/proc/self/task")
    return {int(x): int(open(f"/proc/self/task/{x}/stat").read().rpartition(")")[2].split()[7]) for x in tasks}

def watch(name, work):
    before = faults()
    made = work()
    count = {task: n - before.get(task, 0) for task, n in faults().items()}
    own = count.pop(threading.get_native_id())
    print(name, own > 200, sum(count.values()) < own // 8)

x = np.ones((2048, 4, 64), np.float32)
tables, shape = np.arange(128)[None], (128, 16, 4, 64)
for threads in (1, 3):
    blitz_attn.append_paged_kv(x, x, np.zeros(shape, np.float32), np.zeros(shape, np.float32), slot_mapping=range(2048), num_threads=threads)
watch("plan", lambda: blitz_attn.PagedPlan(tables.repeat(1024, axis=0), [2048] * 1024, page_size=16, num_threads=3))
caches = [np.zeros((1024, 16, 4, 64), np.float32) for _ in range(2)]
watch("decode", lambda: [blitz_attn.append_paged_kv(x[:1], x[:1], *caches, slot_mapping=[16 * n], num_threads=3) for n in range(1024)])
"""


@pytest.mark.skipif(sys.platform != "linux", reason="needs /proc")
@pytest.mark.skipif("asan" in os.environ.get("LD_PRELOAD", ""), reason="a sanitizer writes to memory of its own")
def test_the_caller_writes_plans_and_single_tokens_first():
    """On a machine of several nodes, memory that the caller writes first lands on the caller's node."""
    assert python("-c", FAULTS).splitlines() == ["plan True True", "decode True True"]


def test_set_over_environment():
    code = "import blitz_attn as b; b.set_num_threads(7); print(b.get_num_threads()); b.set_num_threads(None); print(b.get_num_threads())"
    assert python("-c", code, BLITZ_ATTN_NUM_THREADS="3").split() == ["7", "3"]


def test_set_and_back():
    before = blitz_attn.get_num_threads()
    blitz_attn.set_num_threads(before + 3)
    assert blitz_attn.get_num_threads() == before + 3
    assert "set_num_threads" in blitz_attn.show_config("dict")["threads"]["why"]
    blitz_attn.set_num_threads(None)
    assert blitz_attn.get_num_threads() == before


@pytest.mark.parametrize(("value", "error"), [(0, ValueError), (-1, ValueError), (10**6, ValueError), (2.0, TypeError), ("2", TypeError)])
def test_set_refuses(value, error):
    before = blitz_attn.get_num_threads()
    with pytest.raises(error, match=r"^num_threads: expected .*, got "):
        blitz_attn.set_num_threads(value)
    assert blitz_attn.get_num_threads() == before


# ---- Results do not depend on threads -----------------------------------------------------------------------------


def test_concurrent_callers():
    """Callers in several Python threads, each with work of its own, get the results that they get alone."""
    problems = [problem(seed, tokens) for seed, tokens in enumerate((700, 300, 64, 512))]
    expected = [attend(q, k, v, **options) for q, k, v, options in problems]
    with ThreadPoolExecutor(4) as pool:
        results = list(pool.map(lambda n: attend(*problems[n % 4][:3], num_threads=1 + n % 3, **problems[n % 4][3]), range(32)))
    for n, (out, lse) in enumerate(results):
        assert same_bits(out, expected[n % 4][0])
        assert same_bits(lse, expected[n % 4][1])


def test_concurrent_settings():
    """If caps and thread counts change during a call, its results differ at most by the rounding of another level."""
    q, k, v, options = problem(tokens=300)
    expected, _ = attend(q, k, v, **options)
    stop = threading.Event()

    def change():
        while not stop.is_set():
            for threads in (1, 4, None):
                blitz_attn.set_num_threads(threads)
            for level in blitz_attn.isa_levels():
                with blitz_attn.isa(level):
                    pass

    changer = threading.Thread(target=change)
    changer.start()
    try:
        for _ in range(20):
            np.testing.assert_allclose(attend(q, k, v, **options)[0], expected, rtol=0, atol=1e-5)
    finally:
        stop.set()
        changer.join()


# ---- The GIL ------------------------------------------------------------------------------------------------------


def test_gil_is_free_during_a_call():
    """Another Python thread runs while a call does. If the call held the GIL, the other thread would run only before and after it."""
    ticks = []
    stop = threading.Event()

    def tick():
        while not stop.wait(0.001):
            ticks.append(time.perf_counter())

    ticker = threading.Thread(target=tick)
    with blitz_attn.isa("portable"):
        ticker.start()
        try:
            tokens, start, end = 1024, 0.0, 0.0
            while end - start < 0.1:  # until the call is long enough for the test
                tokens *= 2
                q, k, v = testing.make_qkv(1, 4, 4, tokens, tokens, 64)
                start = time.perf_counter()
                blitz_attn.block_sparse_attention(q, k, v, num_threads=1)
                end = time.perf_counter()
        finally:
            stop.set()
            ticker.join()
    inside = [t for t in ticks if start + 0.1 * (end - start) < t < end - 0.1 * (end - start)]
    assert len(inside) >= 3


# ---- Threads without much memory ----------------------------------------------------------------------------------

FIRST_CALL = """
import ctypes, os, resource, threading
import numpy as np
import blitz_attn
q = np.zeros((1, 2, 1500, 64), np.float32)
out = np.empty_like(q)
malloc = ctypes.CDLL(None).malloc
malloc.restype = ctypes.c_void_p

def call():
    with open("/proc/self/statm") as file:
        used = int(file.read().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    resource.setrlimit(resource.RLIMIT_AS, (used, resource.RLIM_INFINITY))
    for size in (1 << 20, 1 << 16, 1 << 12, 1 << 10, 800):
        while malloc(size):
            pass
    try:
        blitz_attn.block_sparse_attention(q, q, q, out=out)
        os.write(1, b"result\\n")
    except MemoryError:
        os.write(1, b"MemoryError\\n")

child = os.fork()
if not child:
    thread = threading.Thread(target=call)
    thread.start()
    thread.join()
    os._exit(0)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="needs /proc and a limit of addresses")
@pytest.mark.skipif("asan" in os.environ.get("LD_PRELOAD", ""), reason="a sanitizer needs more than the limit leaves")
@pytest.mark.skipif(hasattr(_core, "_fail_allocation"), reason="this build counts by variables of the thread, which the system allocates")
def test_first_call_of_a_thread_without_memory():
    """The library allocates what it keeps per thread. With thread-local variables instead, glibc would end the process where memory is missing."""
    assert python("-c", FIRST_CALL) in ("MemoryError\n0", "result\n0")


SMALL_STACK = """
import threading
from cases_operations import operations
import blitz_attn

def call(level):
    with blitz_attn.isa(level):
        for operation in operations().values():
            operation.call()
    print("done", end=" ")

for level in blitz_attn.isa_levels():
    threading.stack_size((256 if level == "amx" else 128) << 10)
    thread = threading.Thread(target=call, args=(level,))
    thread.start()
    thread.join()
"""


@pytest.mark.skipif("asan" in os.environ.get("LD_PRELOAD", ""), reason="a sanitizer needs a larger stack")
def test_small_stack_of_a_caller():
    """The stack is as small as the header says that a calling thread needs."""
    assert python("-c", SMALL_STACK).split() == ["done"] * len(blitz_attn.isa_levels())
