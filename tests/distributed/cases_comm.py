"""Cases of blitz_attn.distributed._comm, which ranks run under mpirun."""

import mmap
import threading
import time

import numpy as np
from mpi4py import MPI

import blitz_attn
from blitz_attn.distributed import _comm
from problems import raised, same_everywhere


def agreement(comm, fail=None, call="call", **values):
    with _comm.Agreement(comm, call) as a:
        if fail is not None:
            raise fail
        for name, value in values.items():
            a.same(name, value)


def case_agreement_of_all(comm):
    agreement(comm, shape=(2, 3), array=np.arange(5), text="x", number=1.5, none=None)


def case_error_of_one_rank(comm):
    last = comm.Get_size() - 1
    for kind in (TypeError, ValueError, MemoryError):
        fail = kind("q: expected é, got 1") if comm.Get_rank() == last else None
        text = same_everywhere(comm, raised(lambda fail=fail: agreement(comm, fail, shape=(1, comm.Get_rank()))))
        assert text == f"{kind.__name__}: q: expected é, got 1" + (f" (on rank {last})" if last else "")
    text = same_everywhere(comm, raised(lambda: agreement(comm, KeyError("a") if comm.Get_rank() == last else None)))
    assert text.startswith("RuntimeError: 'a'"), text


def case_errors_of_all_ranks(comm):
    assert raised(lambda: agreement(comm, ValueError("k: no"))) == "ValueError: k: no"
    text = same_everywhere(comm, raised(lambda: agreement(comm, ValueError(f"k: no {comm.Get_rank()}"))))
    assert text == "ValueError: k: no 0" + (" (on rank 0)" if comm.Get_size() > 1 else "")


def case_values_that_differ(comm):
    last = comm.Get_size() - 1
    if last == 0:
        return
    odd = comm.Get_rank() == last
    text = same_everywhere(comm, raised(lambda: agreement(comm, shape=(2, 4 if odd else 3), number=comm.Get_rank())))
    assert text == f"ValueError: shape: expected the same on all ranks, got (2, 3) on rank 0 and (2, 4) on rank {last}", text
    text = same_everywhere(comm, raised(lambda: agreement(comm, lists=np.arange(5) + odd)))
    assert text == (
        f"ValueError: lists: expected the same on all ranks, got int64 of shape (5,) on rank 0 and one with other values on rank {last}"
    ), text
    text = same_everywhere(comm, raised(lambda: agreement(comm, call="there" if odd else "here", **({} if odd else {"n": 1}))))
    assert text == f"ValueError: call: expected the same on all ranks, got 'here' on rank 0 and 'there' on rank {last}", text


def case_levels_that_differ(comm):
    levels = blitz_attn.isa_levels(available=True)
    if len(levels) < 2 or comm.Get_size() < 2:
        return
    with blitz_attn.isa(levels[0] if comm.Get_rank() else levels[-1]):
        text = same_everywhere(comm, raised(lambda: agreement(comm)))
    assert text.startswith("ValueError: BLITZ_ATTN_ISA: expected one instruction set level on all ranks"), text
    assert text.endswith(f"set BLITZ_ATTN_ISA={levels[0]} for all ranks or call blitz_attn.isa('{levels[0]}')"), text
    agreement(comm)


def case_libraries_that_differ(comm):
    """Libraries may differ if ranks run on two architectures, whose levels have different names and different bits."""
    last = comm.Get_size() - 1
    if last == 0:
        return
    library = _comm._LIBRARY
    try:
        if comm.Get_rank() == last:
            _comm._LIBRARY = _comm._noted("library", "blitz_attn 9.9 for the levels portable, neon")
        text = same_everywhere(comm, raised(lambda: agreement(comm)))
    finally:
        _comm._LIBRARY = library
    assert text.startswith(f"ValueError: library: expected the same on all ranks, got {library[2]} on rank 0 and 'blitz_attn 9.9 "), text
    assert text.endswith(f"neon' on rank {last}"), text


def case_bytes_of_all(comm):
    mine = bytes([comm.Get_rank()]) * (comm.Get_rank() * 1000)
    assert _comm.gather_bytes(comm, mine, [1000 * r for r in range(comm.Get_size())]) == [
        bytes([r]) * (1000 * r) for r in range(comm.Get_size())
    ]


def case_block_types(comm):
    """Runs of bytes are sent and received without packing. Adjacent runs become one run."""
    rank, size = comm.Get_rank(), comm.Get_size()
    sent = np.arange(1000, dtype=np.uint8) + rank
    received = np.zeros(1000, np.uint8)
    out, into = _comm.block_type([3, 7, 500], [4, 2, 100]), _comm.block_type([900, 10, 200], [4, 2, 100])
    requests = [
        comm.Isend([sent, 1, out], (rank + 1) % size, 5), comm.Irecv([received, 1, into], (rank - 1) % size, 5),
    ]  # fmt: skip
    type(requests[0]).Waitall(requests)
    before = np.arange(1000, dtype=np.uint8) + (rank - 1) % size
    expected = np.zeros(1000, np.uint8)
    # Bytes 3..8 are adjacent and become one run. The message fills the receiver's runs in their order.
    stream = np.concatenate([before[3:9], before[500:600]])
    expected[900:904], expected[10:12], expected[200:300] = stream[:4], stream[4:6], stream[6:]
    assert (received == expected).all()
    for kind in (out, into):
        kind.Free()


def case_block_types_beyond_2_gib(comm):
    """One message is received in runs that are gigabytes apart, in address space without memory. Runs may be gigabytes long, too."""
    place = np.frombuffer(mmap.mmap(-1, 9 << 30, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x4000), np.uint8)  # MAP_NORESERVE
    rank, size = comm.Get_rank(), comm.Get_size()
    sent = np.arange(256, dtype=np.uint8) + rank
    into = _comm.block_type([8 << 30, 5 << 30, 17], [100, 100, 56])
    requests = [comm.Irecv([place, 1, into], (rank - 1) % size, 6), comm.Isend(sent, (rank + 1) % size, 6)]
    type(requests[0]).Waitall(requests)
    came = np.concatenate([place[8 << 30 : (8 << 30) + 100], place[5 << 30 : (5 << 30) + 100], place[17:73]])
    assert (came == np.arange(256, dtype=np.uint8) + (rank - 1) % size).all()
    into.Free()
    long = _comm.block_type([0, 6 << 30], [5 << 30, 1])
    assert long.Get_size() == (5 << 30) + 1
    long.Free()


def case_waiter(comm):
    rank, size = comm.Get_rank(), comm.Get_size()
    for thread in (False, True):
        if thread and not _comm.has_threads():
            continue
        with _comm.Waiter(thread) as waiter:
            transfers = []
            for stage in range(4):
                sent, received = np.full(1 << 18, 10 * rank + stage, np.int32), np.zeros(1 << 18, np.int32)
                requests = [comm.Irecv(received, (rank - 1) % size, stage), comm.Isend(sent, (rank + 1) % size, stage)]
                transfers.append((waiter.submit(requests), sent, received, stage))
            for transfer, _, received, stage in transfers:
                transfer.wait()
                assert (received == 10 * ((rank - 1) % size) + stage).all()
        assert threading.active_count() == 1


def case_waiter_raises_in_wait(comm):
    class Broken:
        @staticmethod
        def Waitall(requests, statuses):  # noqa: N802 - MPI's name
            raise ConnectionError("gone")

    for thread in (False, True):
        with _comm.Waiter(thread) as waiter:
            transfer = waiter.submit([Broken()])
            time.sleep(0.001)
            assert raised(transfer.wait) == "ConnectionError: gone"


def case_waiter_raises_the_error_of_the_request_that_failed(comm):
    """Waitall itself reports only that a request failed, but run_with_survivors must know whether the error is that of a dead rank."""

    class Broken:
        @staticmethod
        def Waitall(requests, statuses):  # noqa: N802 - MPI's name
            for code in (MPI.SUCCESS, MPI.ERR_PENDING, MPI.ERR_TRUNCATE):
                statuses.append(MPI.Status())
                statuses[-1].Set_error(code)
            raise MPI.Exception(MPI.ERR_IN_STATUS)

    with _comm.Waiter(False) as waiter:
        transfer = waiter.submit([Broken()])
        try:
            transfer.wait()
        except MPI.Exception as error:
            assert error.Get_error_class() == MPI.ERR_TRUNCATE, error
        else:
            raise AssertionError("nothing was raised")


def case_places(comm):
    places = _comm.places(comm)
    assert len(places) == comm.Get_size()
    assert len({p.pid for p in places}) == comm.Get_size()
    assert places[comm.Get_rank()].isa in blitz_attn.isa_levels()
    assert not _comm.spans_hosts(comm)


def case_communicators(comm):
    assert _comm.communicator(None) is MPI.COMM_WORLD
    assert _comm.communicator(comm) is comm
    text = raised(lambda: _comm.communicator(3))
    assert text == "TypeError: comm: expected a communicator with the methods of mpi4py.MPI.Comm, got int without Get_rank", text
