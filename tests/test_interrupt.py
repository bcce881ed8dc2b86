"""Ctrl-C within a call ends the call soon with the handler's exception, and the next call is right."""

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

import sampling
from interpreters import python

# Each call would take many seconds, far more than the test waits.
CALLS = {
    "forward": "ba.block_sparse_attention(many(1, 1, 120000, 64), keys, keys, num_threads=threads)",
    "forward_lists": "ba.block_sparse_attention(many(1, 1, 120000, 64), keys, keys, np.arange(1875, dtype=np.int16)[None, None, None].repeat(1875, 2), block_shape=(64, 64), num_threads=threads)",
    "backward": "ba.block_sparse_attention_backward(out, out, keys, keys, out, lse, num_threads=threads)",
    "paged": "ba.paged_attention(many(4000, 8, 64), keys.reshape(7500, 16, 1, 64), keys.reshape(7500, 16, 1, 64), np.arange(7500, dtype=np.int32)[None].repeat(4000, 0), np.full(4000, 120000), num_threads=threads)",
    "select": "ba.select_blocks(many(4000, 8, 64), keys.reshape(7500, 16, 1, 64), np.arange(7500, dtype=np.int32)[None].repeat(4000, 0), np.full(4000, 120000), k=8, method='max', num_threads=threads)",
    "nsa": "nsa.nsa(many(1, 120000, 1, 64), keys.reshape(1, 120000, 1, 64), keys.reshape(1, 120000, 1, 64), window_size=120000, num_threads=threads)",
}

PROGRAM = """
    import os, signal, sys, threading, time
    import numpy as np
    import blitz_attn as ba
    from blitz_attn import nsa

    signal.signal(signal.SIGINT, signal.default_int_handler)  # a process that a shell starts in the background ignores SIGINT
    rng = np.random.default_rng(0)
    def many(*shape):
        return np.broadcast_to(rng.standard_normal(shape[-1], dtype=np.float32), shape).copy()
    keys = many(1, 1, 120000, 64)
    out, lse = many(1, 1, 120000, 64), np.zeros((1, 1, 120000), np.float32)
    threads = {threads}
    small = [rng.standard_normal((2, 4, 200, 32), dtype=np.float32) for _ in range(3)]
    expected = ba.block_sparse_attention(*small, num_threads=1)
    def small_is_right():
        return np.array_equal(ba.block_sparse_attention(*small, num_threads=threads), expected)
    assert small_is_right()
"""


def run(program, **names):
    """The output of a program. The time limit ends a program that hangs, and is long enough for a busy machine."""
    text = textwrap.dedent(PROGRAM).format(**names) + textwrap.dedent(program)
    result = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, timeout=600, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


@pytest.mark.sampled("options")
@pytest.mark.parametrize("threads", [1, 4])
@pytest.mark.parametrize("name", CALLS)
def test_ctrl_c_ends_a_call(name, threads):
    """The call ends after a few checks for signals. Time is the process's own processor time, which a busy machine does not lengthen."""
    program = f"""
        def interrupt():
            time.sleep(0.4)
            global sent
            sent = time.process_time()
            os.kill(os.getpid(), signal.SIGINT)
        threading.Thread(target=interrupt).start()
        try:
            {CALLS[name]}
        except KeyboardInterrupt:
            print("interrupted", time.process_time() - sent, small_is_right())
        else:
            print("ran to its end")
    """
    words = run(program, threads=threads).split()
    assert words[0] == "interrupted", words
    assert float(words[1]) < 2 * threads  # 0.1 s per thread is usual, and a whole call takes far more
    assert words[2] == "True"


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs timers of processor time")
def test_a_sample_of_operations_ends_soon():
    """The sample is of the operations and options in interrupts.py. The bound is wide enough for a busy machine."""
    script, seed = str(Path(__file__).with_name("interrupts.py")), sampling.SEED
    python(script, "--sample", "3", "--seed", seed, "--threads", "2", "--bound", "0.5", "--at", "0.05")


@pytest.mark.parametrize("threads", [1, 2])
def test_an_interrupted_append_can_be_repeated(threads):
    """An interrupted call has written only into slots of new tokens and summaries of their blocks, and repeating the call completes it."""
    program = """
        tokens, before, page, rows = 600000, 1000, 16, 64
        pages = (before + tokens) // page + 100
        x = rng.standard_normal((tokens, 1, 32), dtype=np.float32)
        table = rng.permutation(pages).astype(np.int32)[None]
        summary_pages = pages // rows + 2
        def arrays():
            caches = [np.full((pages, page, 1, 32), 7, np.int8) for _ in range(2)]
            scales = [np.full((pages, page, 1), 7, np.float32) for _ in range(2)]
            return [*caches, *scales, *(np.full((summary_pages, rows, 1, 32), 7, np.float32) for _ in range(3))]
        def append(k_cache, v_cache, k_scale, v_scale, *summaries):
            names = ("maxblocks", "minblocks", "meanblocks")
            ba.append_paged_kv(
                x, x, k_cache, v_cache, block_tables=table, seq_lens=[before + tokens], q_lens=[tokens], k_scale=k_scale, v_scale=v_scale,
                metadata_block_tables=np.arange(summary_pages)[None], num_threads=threads, **dict(zip(names, summaries)),
            )
        expected = arrays()
        append(*expected)
        written = [now != 7 for now in expected]
        partial, right = 0, True
        for at in (0.02, 0.15, 0.3):
            got = arrays()
            signal.signal(signal.SIGPROF, signal.default_int_handler)
            try:
                signal.setitimer(signal.ITIMER_PROF, at)
                append(*got)
                signal.setitimer(signal.ITIMER_PROF, 0)
            except KeyboardInterrupt:
                partial += not np.array_equal(got[1], expected[1])
            right &= all((now[~where] == 7).all() for now, where in zip(got, written))
            append(*got)
            right &= all(np.array_equal(now, full) for now, full in zip(got, expected))
        print(partial > 0, right)
    """
    assert run(program, threads=threads).split() == ["True", "True"]


@pytest.mark.parametrize("threads", [1, 4])
def test_a_call_goes_on_after_a_handler_that_does_not_raise(threads):
    """The result is right, and so are results of calls that the handler makes.

    The next signal is sent a fixed time after the handler has ended. A program that hangs is ended after 20 seconds plus 50
    times what the call takes without signals.
    """
    program = """
        import faulthandler
        q, k, v = (rng.standard_normal((1, 2, 6000, 64), dtype=np.float32) for _ in range(3))
        begin = time.monotonic()
        expected_long = ba.block_sparse_attention(q, k, v, num_threads=1)
        faulthandler.dump_traceback_later(20 + 50 * (time.monotonic() - begin), exit=True)
        ran = []
        def handler(number, frame):
            ran.append(small_is_right())
            signal.setitimer(signal.ITIMER_REAL, 0.02)
        signal.signal(signal.SIGALRM, handler)
        signal.setitimer(signal.ITIMER_REAL, 0.02)
        for _ in range(3):
            assert np.array_equal(ba.block_sparse_attention(q, k, v, num_threads=threads), expected_long)
        signal.setitimer(signal.ITIMER_REAL, 0)
        print(len(ran) > 1, all(ran))
    """
    assert run(program, threads=threads).split() == ["True", "True"]


def test_other_threads_are_left_alone():
    """Signal handlers run in the main thread, so a call in another thread runs to its end."""
    program = """
        q, k, v = (rng.standard_normal((1, 2, 6000, 64), dtype=np.float32) for _ in range(3))
        expected_long = ba.block_sparse_attention(q, k, v, num_threads=1)
        results = []
        thread = threading.Thread(target=lambda: results.append(ba.block_sparse_attention(q, k, v, num_threads=threads)))
        thread.start()
        try:
            os.kill(os.getpid(), signal.SIGINT)
            while thread.is_alive():
                time.sleep(0.01)
        except KeyboardInterrupt:
            print("interrupted")
        thread.join()
        print(np.array_equal(results[0], expected_long))
    """
    assert run(program, threads=2).split() == ["interrupted", "True"]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
def test_a_handler_that_forks():
    """The parent's call is right. In the child, which has none of the threads, the call ends with an exception, and the next call is right."""
    program = """
        q, k, v = (rng.standard_normal((1, 2, 8000, 64), dtype=np.float32) for _ in range(3))
        expected_long = ba.block_sparse_attention(q, k, v, num_threads=1)
        children = []
        def handler(number, frame):
            if not children:
                children.append(os.fork())
        signal.signal(signal.SIGALRM, handler)
        signal.setitimer(signal.ITIMER_REAL, 0.05)
        try:
            right = np.array_equal(ba.block_sparse_attention(q, k, v, num_threads=threads), expected_long)
        except RuntimeError as error:
            right = "forked" in str(error)
        if children and children[0] == 0:
            os._exit(0 if right and small_is_right() else 1)
        status = os.waitpid(children[0], 0)[1] if children else "no child"
        print(right, status)
    """
    assert run(program, threads=2).split() == ["True", "0"]
