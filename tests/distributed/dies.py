"""A job in which one rank kills itself, or raises, while the others wait for it."""

import os
import signal
import sys

import numpy as np
from mpi4py import MPI

comm = MPI.COMM_WORLD
comm.Barrier()
if comm.Get_rank() == 1:
    if sys.argv[1] == "raises":
        raise OSError("the disk of this rank is gone")
    os.kill(os.getpid(), signal.SIGKILL)
comm.Allgather(np.zeros(1), np.zeros(comm.Get_size()))
