"""Threads that may run on all cores of a worker of vLLM.

vLLM binds each of torch's threads to a core of its own, and so also the thread that calls attention. Threads that the calling thread starts
would all be bound to its core.
"""

from __future__ import annotations

import os

import numpy as np

from ...block_sparse import block_sparse_attention
from ...config import get_num_threads


def start_threads() -> int:
    """Start the library's threads on all cores to which threads of this process are bound, if this thread has fewer. Returns the number of
    these cores, or of threads where the system does not bind threads."""
    if not hasattr(os, "sched_setaffinity"):
        return get_num_threads()
    own, cores = os.sched_getaffinity(0), set()
    for thread in os.listdir("/proc/self/task"):
        try:
            cores |= os.sched_getaffinity(int(thread))
        except ProcessLookupError:  # the thread has ended
            continue
    if cores == own:
        return len(cores)
    os.sched_setaffinity(0, cores)
    try:
        x = np.zeros((1, 4 * get_num_threads(), 128, 64), np.float32)
        block_sparse_attention(x, x, x)  # this call has work for all threads, which stay for later calls
    finally:
        os.sched_setaffinity(0, own)
    return len(cores)
