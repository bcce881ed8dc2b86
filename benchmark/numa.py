#!/usr/bin/env python3
"""Shows on which NUMA nodes the pages of a cache, plans and scratch memory land, and which threads touch them first.

    python benchmark/numa.py                                                # all CPUs of the process
    numactl --cpunodebind=1 --membind=1 python benchmark/numa.py            # a process of one node

Each line of the table is one piece of memory: how many MiB came to each node while the piece was made or written, and the page faults of
the calling thread and of all workers meanwhile. A page of memory lands on the node of the thread that touches it first, unless a policy
(`numactl --membind`, `--interleave`) says otherwise. Linux only. On a machine of one node, the faults still tell which threads touch which
memory.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import re
import sys
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

import _bench  # noqa: F401  (finds the library of this checkout)
import blitz_attn

MIB = 1 << 20
HEADS, KV_HEADS, DIM, PAGE = 8, 4, 128, 16


def faults() -> dict[int, int]:
    """Page faults of each thread of this process so far."""
    found = {}
    for task in Path("/proc/self/task").iterdir():
        found[int(task.name)] = int((task / "stat").read_text(encoding="ascii").rpartition(")")[2].split()[7])
    return found


def mappings() -> dict[str, Counter[str]]:
    """Bytes on each node of every mapping of this process that belongs to no file, by the mapping's address."""
    found = {}
    for line in Path("/proc/self/numa_maps").read_text(encoding="ascii").splitlines():
        if " file=" in line:
            continue
        size = int(re.search(r"kernelpagesize_kB=(\d+)", line)[1]) if "kernelpagesize_kB" in line else 4
        found[line.split()[0]] = Counter({node: int(n) * size * 1024 for node, n in re.findall(r" (N\d+)=(\d+)", line)})
    return found


def growth(before: dict[str, Counter[str]]) -> Counter[str]:
    """Bytes that have come to each node since `before`."""
    total: Counter[str] = Counter()
    for sign, maps in ((1, mappings()), (-1, before)):
        for nodes in maps.values():
            for node, size in nodes.items():
                total[node] += sign * size
    return total


def watch(name: str, work: Callable[[], object]) -> object:
    """Run `work`, and print which nodes its memory came to and which threads had page faults. Returns the result of `work`."""
    before, own = faults(), threading.get_native_id()
    maps = mappings()
    result = work()
    nodes = growth(maps)
    counts = {task: count - before.get(task, 0) for task, count in faults().items()}
    total = sum(counts.values())
    shown = ", ".join(f"{node} {nodes[node] / MIB:5.1f}" for node in sorted(nodes))
    print(f"{name:<46} {shown:<20} {counts[own]:>6} {total - counts[own]:>6}", flush=True)
    return result


def cpus_of(task: int) -> str:
    return re.search(r"Cpus_allowed_list:\s*(\S+)", Path(f"/proc/self/task/{task}/status").read_text(encoding="ascii"))[1]


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=16384, help="of the cache, a multiple of 64 from 2048 on (%(default)s)")
    tokens = parser.parse_args(argv).tokens
    if not Path("/proc/self/numa_maps").exists():
        print("numa.py: expected Linux with /proc/self/numa_maps", file=sys.stderr)
        return 1
    # Huge pages would hide which thread comes first: one fault brings 2 MiB. PR_SET_THP_DISABLE is 41.
    ctypes.CDLL(None).prctl(41, 1, 0, 0, 0)
    nodes = sorted(x.name for x in Path("/sys/devices/system/node").glob("node[0-9]*"))
    print(f"# {len(nodes)} nodes; CPUs {cpus_of(os.getpid())}; {blitz_attn.get_num_threads()} threads")
    print(f"{'':<46} {'MiB on each node':<20} {'faults: caller, workers':>6}")
    rng = np.random.default_rng(0)
    k, v = (rng.standard_normal((tokens, KV_HEADS, DIM), dtype=np.float32) for _ in range(2))
    q = rng.standard_normal((512, HEADS, DIM), dtype=np.float32)
    tables, lens = np.arange(tokens // PAGE, dtype=np.int32)[None], [tokens]
    shape = (tokens // PAGE, PAGE, KV_HEADS, DIM)
    warm = np.zeros((64, PAGE, KV_HEADS, DIM), np.float32)  # starts the workers
    blitz_attn.append_paged_kv(k[:1024], v[:1024], warm, warm.copy(), block_tables=tables[:, :64], seq_lens=[1024], q_lens=[1024])

    caches = watch("np.zeros: two caches", lambda: [np.zeros(shape, np.float32) for _ in range(2)])
    append = {"block_tables": tables, "seq_lens": lens, "q_lens": [tokens]}
    watch("append_paged_kv: a prompt, into new memory", lambda: blitz_attn.append_paged_kv(k, v, *caches, **append))
    caches = watch("np.full: two caches", lambda: [np.full(shape, 0, np.float32) for _ in range(2)])
    watch("append_paged_kv: a prompt, into filled memory", lambda: blitz_attn.append_paged_kv(k, v, *caches, **append))
    small = [np.zeros(shape, np.float32) for _ in range(2)]

    def decode() -> None:
        for page in range(0, tokens // PAGE, 4):
            blitz_attn.append_paged_kv(k[:1], v[:1], *small, slot_mapping=[page * PAGE])

    watch("append_paged_kv: calls of one token", decode)
    many = np.tile(tables, (1024, 1))
    watch("PagedPlan of 1024 requests", lambda: blitz_attn.PagedPlan(many, lens * 1024, page_size=PAGE))
    out = np.full(q.shape, 0, np.float32)
    chunk = {"block_tables": tables, "seq_lens": [2048], "q_lens": [len(q)], "out": out}
    watch("paged_attention: scratch of a chunk", lambda: blitz_attn.paged_attention(q, *caches, **chunk))
    watch("paged_attention: scratch, the same call again", lambda: blitz_attn.paged_attention(q, *caches, **chunk))
    tasks = sorted(int(x.name) for x in Path("/proc/self/task").iterdir())
    print("# CPUs that each thread may use:", "; ".join(cpus_of(task) for task in tasks))
    return 0


if __name__ == "__main__":
    sys.exit(main())
