"""Going on without the ranks that died, where the MPI library can: Open MPI under ``mpirun --with-ft ulfm``."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from contextlib import suppress
from typing import Any, TypeVar

from ._comm import communicator, import_mpi

__all__ = ["finish", "is_failure", "run_with_survivors"]

T = TypeVar("T")


def is_failure(error: BaseException) -> bool:
    """Whether an error says that some rank died, or that a survivor has given up the communicator because of that.

    Parameters
    ----------
    error : BaseException
        What a call has raised.

    Returns
    -------
    bool

    Examples
    --------
    >>> from blitz_attn.distributed import is_failure
    >>> is_failure(ValueError("q: expected an array"))
    False
    """
    if not hasattr(error, "Get_error_class"):  # not MPI's
        return False
    mpi = import_mpi()
    names = ("ERR_PROC_FAILED", "ERR_PROC_FAILED_PENDING", "ERR_REVOKED")
    return error.Get_error_class() in [getattr(mpi, name) for name in names if hasattr(mpi, name)]


def run_with_survivors(work: Callable[[Any, list[int]], T], *, comm: Any = None) -> tuple[T, Any]:
    """Run a collective piece of work until it has ended well on all ranks that are alive.

    Where ranks die, the survivors give up the communicator, agree on one without the dead, and run the work again on that, as often
    as it takes. The work makes its plans anew each time: results have the same bits for any number of ranks. All ranks call this together.

    Parameters
    ----------
    work : callable
        ``work(comm, ranks)``, where ``ranks[i]`` is the number that rank i of `comm` had in the communicator that the call was given.
        It may be run several times, and must leave what it reads as it was. Errors that are not of dead ranks must be raised by all
        ranks alike.
    comm : communicator, optional
        Default: ``MPI.COMM_WORLD``.

    Returns
    -------
    result : object
        What `work` returned on this rank, in the run that ended well on all ranks.
    comm : communicator
        The one of that run: the given one where no rank died.

    Raises
    ------
    RuntimeError
        The MPI library cannot go on without dead ranks.

    See Also
    --------
    finish : how a process ends after that.

    Notes
    -----
    A rank that ends well cannot know that others saw a failure. So after each run all agree whether it ended well everywhere. Revoke makes
    the ranks that still wait for messages of the run give up; Agree and Shrink work on revoked communicators and in spite of further
    deaths, and are repeated until they end on all ranks.

    Examples
    --------
    >>> from blitz_attn.distributed import Alone, run_with_survivors
    >>> run_with_survivors(lambda comm, ranks: ranks, comm=Alone())[0]
    [0]
    """
    comm = communicator(comm)
    if comm.Get_size() == 1:
        return work(comm, [0]), comm
    if not hasattr(comm, "Revoke"):
        raise RuntimeError(
            "comm: expected a communicator that survives failures (mpi4py 4.1 over Open MPI, mpirun --with-ft ulfm), got another"
        )
    mpi = import_mpi()
    for each in (comm, mpi.COMM_SELF):
        each.Set_errhandler(mpi.ERRORS_RETURN)
    first = comm.Get_group()
    while True:
        group = comm.Get_group()
        ranks = group.Translate_ranks(list(range(comm.Get_size())), first)
        try:
            result, well = work(comm, list(ranks)), True
        except Exception as error:
            if not is_failure(error):
                raise
            well = False
            comm.Revoke()
        if _agree(comm, well):
            return result, comm
        comm = _shrink(comm, mpi)


def finish(comm: Any, *, comm_before: Any = None, status: int = 0) -> None:
    """End this process, where ranks have died, once the other survivors have come here too; else return.

    After deaths, Open MPI 5.0's own end (MPI_Finalize, which mpi4py calls when Python ends) may wait for the dead over tcp. So the process
    then ends without it: output is flushed, but functions registered with `atexit` are not called.

    Parameters
    ----------
    comm : communicator
        What `run_with_survivors` returned.
    comm_before : communicator, optional
        What it was given. Default: ``MPI.COMM_WORLD``.
    status : int
        Exit status.

    Examples
    --------
    >>> from blitz_attn.distributed import Alone, finish, run_with_survivors
    >>> alone = Alone()
    >>> result, comm = run_with_survivors(lambda comm, ranks: "done", comm=alone)
    >>> finish(comm, comm_before=alone)  # nobody died: nothing happens
    """
    if comm.Get_size() == communicator(comm_before).Get_size():
        return
    with suppress(Exception):  # survivors that are further on may have ended already
        comm.Barrier()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def _agree(comm: Any, flag: bool) -> bool:
    """Whether `flag` is true on all ranks that are alive."""
    while True:
        try:
            comm.Ack_failed()
            return bool(comm.Agree(int(flag)))
        except Exception as error:
            if not is_failure(error):
                raise


def _shrink(comm: Any, mpi: Any) -> Any:
    """A communicator of the ranks that are alive, on which all of them have agreed."""
    while True:
        comm.Revoke()
        smaller = comm.Shrink()
        smaller.Set_errhandler(mpi.ERRORS_RETURN)
        try:
            smaller.Barrier()
            well = True
        except Exception as error:
            if not is_failure(error):
                raise
            well = False
        if _agree(smaller, well):
            return smaller
        comm = smaller
