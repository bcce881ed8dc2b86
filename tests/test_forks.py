"""A process forks while its other threads are within calls: every child works, and the parent's calls are right."""

import os

import pytest

from interpreters import python

pytestmark = [
    pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork"),
    pytest.mark.skipif("asan" in os.environ.get("LD_PRELOAD", ""), reason="a sanitizer's allocator may be locked in the child"),
]

FORKS = 50

PROGRAM = f"""
import os, signal, threading, time
from cases_concurrent import bits, calls

expected = {{name: bits(call()) for name, call in calls(1).items()}}
mine = calls(4)
stop = threading.Event()
made, wrong = [0] * 3, []

def make_calls(number):
    own = calls(2 + number)
    while not stop.is_set():
        for name, call in own.items():
            if bits(call()) != expected[name]:
                wrong.append(name)
            made[number] += 1

def child(first):
    signal.alarm(60)  # a hang ends as a signal
    right = all(bits(call()) == expected[name] for name, call in mine.items())
    if first:  # a child of a child must work, too
        process = os.fork()
        if process == 0:
            child(False)
        right &= os.waitpid(process, 0)[1] == 0
    threads = len(os.listdir("/proc/self/task")) if os.path.exists("/proc/self/task") else 4
    os._exit(3 if not right else 4 if threads < 4 else 0)  # the child has made threads of its own

callers = [threading.Thread(target=make_calls, args=[number]) for number in range(3)]
for caller in callers:
    caller.start()
codes = []
for n in range({FORKS}):
    time.sleep(0.002 * (n % 7))  # at other moments of the calls
    process = os.fork()
    if process == 0:
        child(n == 0)
    codes.append(os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]))
stop.set()
for caller in callers:
    caller.join()
assert [name for name, call in mine.items() if bits(call()) != expected[name]] == []
print(codes.count(0), len(wrong), min(made) > 0)
"""


def test_forks_while_other_threads_call():
    assert python("-c", PROGRAM).split() == [str(FORKS), "0", "True"]
