"""A job that never ends, because rank 1 does not reach the barrier."""

import os
import time

from mpi4py import MPI

print("pid", os.getpid(), flush=True)
if MPI.COMM_WORLD.Get_rank() == 0:
    MPI.COMM_WORLD.Barrier()
time.sleep(1000)
