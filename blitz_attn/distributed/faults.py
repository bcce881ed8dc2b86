"""Going on without the ranks that died. Open MPI can do that under ``mpirun --with-ft ulfm``."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, TypeVar

import numpy as np
from numpy import ndarray

from ._comm import Agreement, communicator, import_mpi

__all__ = ["finish", "is_failure", "redistribute", "run_with_survivors"]

Ranges = Sequence[tuple[int, int]]

T = TypeVar("T")


def is_failure(error: BaseException) -> bool:
    """Whether an error says that some rank died, or that a survivor has given up the communicator because of that.

    Parameters
    ----------
    error : BaseException
        An error that a call has raised.

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

    Where ranks die, the survivors give up the communicator, agree on a new communicator without the dead, and run the work again on it, as
    often as necessary. The work must make its plans anew each time. Results, except gradients of keys and values, have the same bits on
    fewer ranks. All ranks call this function together.

    Parameters
    ----------
    work : callable
        ``work(comm, ranks)``, where ``ranks[i]`` is the number that rank i of `comm` had in the communicator that the call was given.
        The work may be run several times, and must not change its inputs. An error that no death causes must be raised by all
        ranks.
    comm : communicator, optional
        Default: ``MPI.COMM_WORLD``.

    Returns
    -------
    result : object
        The result of `work` on this rank, in the run that ended well on all ranks.
    comm : communicator
        The communicator of that run: the given communicator if no rank died.

    Raises
    ------
    RuntimeError
        The communicator has no `Revoke`, and cannot outlive the death of a rank.

    See Also
    --------
    finish : ends a process after ranks have died.

    Notes
    -----
    A rank that ends well cannot know that others saw a failure. So after each run, all ranks agree whether the run ended well everywhere.
    Revoke makes the ranks that still wait for messages of the run give up. Agree and Shrink work on revoked communicators and in spite of
    further deaths. If another rank dies meanwhile, the shrunk communicator is shrunk again.

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


_BITS = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}  # dtypes that messages have, by bytes per element


def redistribute(x: ndarray, before: Sequence[Ranges], after: Sequence[Ranges], *, axis: int = 2, comm: Any = None) -> ndarray:
    """Bring tokens from the ranks that hold them to the ranks that hold them in a new plan. All ranks call this function together.

    Parameters
    ----------
    x : ndarray
        The tokens of ``before[rank]``, one stretch after the other along `axis`. The dtype, whose elements have 1, 2, 4 or 8 bytes, and the
        other axes are the same on all ranks.
    before : sequence of sequence of (int, int)
        For each rank of `comm` the stretches of tokens ``(begin, end)`` that it has. A token that several ranks have is taken
        from the lowest of these ranks.
    after : sequence of sequence of (int, int)
        For each rank the stretches that it is to have.
    axis : int
        The axis of tokens.
    comm : communicator, optional
        Default: ``MPI.COMM_WORLD``.

    Returns
    -------
    ndarray
        The tokens of ``after[rank]``, one stretch after the other.

    Raises
    ------
    TypeError, ValueError
        `x` has elements of another size, or objects. `x` does not have as many tokens as ``before[rank]``, or no rank has a token that some
        rank is to have. All ranks raise the error.

    See Also
    --------
    run_with_survivors : runs work again, with new plans, after ranks have died.

    Examples
    --------
    >>> import numpy as np
    >>> from blitz_attn.distributed import Alone, redistribute
    >>> redistribute(np.arange(6), [[(0, 6)]], [[(4, 6), (0, 1)]], axis=0, comm=Alone()).tolist()
    [4, 5, 0]
    """
    comm = communicator(comm)
    with Agreement(comm, "redistribute") as agreement:
        rank, size = agreement.rank, agreement.size
        had, wanted = ([_tokens(ranges) for ranges in side] for side in (before, after))
        if len(had) != size or len(wanted) != size:
            raise ValueError(f"before: expected stretches of {size} ranks, as after, got {len(had)} and {len(wanted)}")
        array = np.moveaxis(np.asarray(x), axis, 0)
        agreement.same("before and after", (*had, *wanted))
        agreement.same("x", (array.dtype.str, array.shape[1:]))
        if array.dtype.hasobject or array.dtype.itemsize not in _BITS:
            raise TypeError(f"x: expected numbers of 1, 2, 4 or 8 bytes, got {array.dtype}")
        if len(array) != len(had[rank]):
            raise ValueError(f"x: expected the {len(had[rank])} tokens of before, got shape {np.shape(x)}")
        last = max((int(tokens.max(initial=-1)) for tokens in (*had, *wanted)), default=-1)
        holder, place = np.full(last + 1, -1), np.zeros(last + 1, np.int64)
        for other in reversed(range(size)):
            holder[had[other]] = other
        place[had[rank]] = np.arange(len(had[rank]))
        for tokens in wanted:
            for token in tokens[holder[tokens] < 0]:
                raise ValueError(f"before: expected every token of after, got none that has token {token}")
    row = int(np.prod(array.shape[1:]))
    sends = [place[tokens[holder[tokens] == rank]] for tokens in wanted]
    comes = [np.flatnonzero(holder[wanted[rank]] == other) for other in range(size)]
    sides = []
    for parts in (sends, comes):
        counts = np.array([len(part) * row for part in parts])
        sides.append((counts.tolist(), (np.cumsum(counts) - counts).tolist()))
    received = np.empty((len(wanted[rank]), *array.shape[1:]), array.dtype)
    if row:
        bits = _BITS[array.dtype.itemsize]
        sent = np.ascontiguousarray(array[np.concatenate(sends)])
        buffer = np.empty_like(received)
        comm.Alltoallv([sent.view(bits), sides[0]], [buffer.view(bits), sides[1]])
        received[np.concatenate(comes)] = buffer
    return np.ascontiguousarray(np.moveaxis(received, 0, axis))


def _tokens(ranges: Ranges) -> ndarray:
    return np.concatenate([np.arange(0), *(np.arange(a, b) for a, b in ranges)])


def finish(comm: Any, *, comm_before: Any = None, status: int = 0) -> None:
    """If ranks have died, end this process after all other survivors have called this function, too; otherwise return.

    After deaths, MPI_Finalize of Open MPI 5.0, which mpi4py calls when Python ends, may wait for the dead over tcp. So the process ends
    without MPI_Finalize: output is flushed, but functions registered with `atexit` are not called.

    Parameters
    ----------
    comm : communicator
        The communicator that `run_with_survivors` returned.
    comm_before : communicator, optional
        The communicator that `run_with_survivors` was given. Default: ``MPI.COMM_WORLD``.
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
    """Whether `flag` is true on all ranks that are alive. All of them get the same answer.

    The operation may raise on ranks that had not noticed a death before, but the value is the same on all ranks. The value is read from the
    buffer of the nonblocking form, because the blocking form has no result where it raises.
    """
    value = np.array([flag], np.intc)
    comm.Ack_failed()
    try:
        comm.Iagree(value).Wait()
    except Exception as error:
        if not is_failure(error):
            raise
    return bool(value[0])


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
