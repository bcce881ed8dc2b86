"""Under a storm of signals, calls of several threads have the same bits as without signals, and none fails."""

import signal

import pytest

from interpreters import python

pytestmark = pytest.mark.skipif(not hasattr(signal, "setitimer"), reason="this system has no timers that send signals")

# There are two storms at once: a timer of the process, whose signals go to the main thread, and signals to each thread that makes calls. Python runs
# handlers only on the main thread, but the system interrupts any thread that a signal is sent to.
PROGRAM = """
import signal, sys, threading, time
import blitz_attn
from blitz_attn import testing
from cases_concurrent import bits, calls

long = testing.make_qkv(1, 2, 2, 10000, 10000, 64)  # a call of it is far longer than the time between two checks for signals
expected_long = bits(blitz_attn.block_sparse_attention(*long, num_threads=2))
expected = {name: bits(call()) for name, call in calls(1).items()}
wrong, ran, within = [], 0, False

def check(own):
    for name, call in own.items():
        if bits(call()) != expected[name]:
            wrong.append(name)

def nothing(number, frame):
    global ran
    ran += 1

own_of_handler = {name: call for name, call in calls(2).items() if name in ("forward", "paged", "merge")}

def calling(number, frame):
    global ran, within
    ran += 1
    if within or ran % 8:  # signals come faster than calls return
        return
    within = True
    check(own_of_handler)
    within = False

def make_calls(number):
    own = calls(2 + number)
    while not stop.is_set():
        check(own)
        made[number] += 1

def storm():
    while not stop.is_set():
        for caller in callers:
            signal.pthread_kill(caller.ident, signal.SIGUSR1)
        time.sleep(0.001)

stop, made = threading.Event(), [0, 0]
callers = [threading.Thread(target=make_calls, args=[number]) for number in range(2)]
sender = threading.Thread(target=storm)
for name in (signal.SIGALRM, signal.SIGUSR1):
    signal.signal(name, {"nothing": nothing, "calls": calling}[sys.argv[1]])
for caller in callers:
    caller.start()
sender.start()
signal.setitimer(signal.ITIMER_REAL, 0.001, 0.001)
own, until = calls(3), time.monotonic() + 1
while time.monotonic() < until or min(made) == 0 or ran < 100:
    check(own)
if bits(blitz_attn.block_sparse_attention(*long, num_threads=2)) != expected_long:
    wrong.append("long")
signal.setitimer(signal.ITIMER_REAL, 0)
stop.set()
sender.join()  # no signal may be sent to a thread that has ended
for caller in callers:
    caller.join()
check(own)
print(len(wrong), min(made) > 0, ran >= 100)
"""


@pytest.mark.parametrize("handler", ["nothing", "calls"])
def test_storm_of_signals(handler):
    assert python("-c", PROGRAM, handler).split() == ["0", "True", "True"]
