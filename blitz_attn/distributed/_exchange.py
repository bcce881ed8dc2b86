"""Messages between ranks for the stages of a call. Keys and values go straight from shards into windows, which have addresses for the whole
sequence. Only with `comm_type` "all_gather" are they packed on the way."""

from __future__ import annotations

import mmap
import sys
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import numpy as np
from numpy import ndarray

from .._float_mode import in_usual_mode
from . import _comm
from ._comm import Transfer, Waiter
from ._routes import Routes, Runs

MOST_MESSAGES = 64  # up to this many ranks, a stage has one message per pair of ranks; with more ranks, one collective
COMM_TYPES = ("auto", "p2p", "all_gather", "a2a")
RETURN = (1 << 15) - 1  # tag of sums that go back to the holders of keys: MPI promises that tags up to this one exist


# ---- Memory and datatypes -----------------------------------------------------------------------------------------


def window(shape: tuple[int, ...], dtype: str) -> ndarray:
    """Zeros in address space that takes memory only where it is written."""
    count = int(np.prod(shape)) * np.dtype(dtype).itemsize
    if not count:
        return np.zeros(shape, dtype)
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    if sys.platform == "linux":
        flags |= 0x4000  # MAP_NORESERVE, which the module `mmap` names from Python 3.13 on
    return np.frombuffer(mmap.mmap(-1, count, flags=flags), dtype).reshape(shape)


class Part(NamedTuple):
    """Stretches of tokens of some heads of an array (entries, heads, tokens, dims)."""

    array: ndarray
    heads: range
    entry: ndarray | None
    """The batch entry of each stretch; None: each stretch is of all entries."""
    begin: ndarray
    length: ndarray

    def stretch(self, n: int) -> ndarray:
        """A view of one stretch."""
        entry = slice(None) if self.entry is None else slice(int(self.entry[n]), int(self.entry[n]) + 1)
        begin = int(self.begin[n])
        return self.array[entry, self.heads.start : self.heads.stop, begin : begin + int(self.length[n])]

    def addresses(self) -> tuple[ndarray, ndarray]:
        """The address at which each stretch of each head begins, and its number of tokens."""
        base, (per_entry, per_head, per_token, _) = self.array.__array_interface__["data"][0], self.array.strides
        begin, length = base + self.begin * per_token, self.length
        if self.entry is None:
            begin = (np.arange(len(self.array))[:, None] * per_entry + begin).reshape(-1)
            length = np.tile(length, len(self.array))
        else:
            begin = begin + self.entry * per_entry
        heads = np.array(self.heads, np.int64)
        return (heads[:, None] * per_head + begin).reshape(-1), np.tile(length, len(heads))


def message(parts: Iterable[Part]) -> Any:
    """A committed datatype over absolute addresses: all parts, in their order, as one message of any number of bytes."""
    kinds: list[Any] = []
    runs: list[tuple[ndarray, ndarray]] = []  # parts whose tokens are contiguous; end_runs makes one datatype of them

    def end_runs() -> None:
        if runs:
            kinds.append(_comm.block_type(np.concatenate([a for a, _ in runs]).tolist(), np.concatenate([n for _, n in runs]).tolist()))
            runs.clear()

    for part in parts:
        begin, count = part.addresses()
        row, step = part.array.shape[-1] * part.array.itemsize, part.array.strides[2]
        if step == row:
            runs.append((begin, count * row))
        elif len(begin):
            end_runs()
            token = _comm.import_mpi().BYTE.Create_contiguous(row)
            spaced = token.Create_resized(0, step)
            kinds.append(spaced.Create_hindexed(count.tolist(), begin.tolist()))
            token.Free()
            spaced.Free()
    end_runs()
    if len(kinds) == 1:
        return kinds[0].Commit()
    whole = _comm.import_mpi().Datatype.Create_struct([1] * len(kinds), [0] * len(kinds), kinds).Commit()
    for kind in kinds:
        kind.Free()
    return whole


def _started(call: Callable[[Any, int, int], Any], rank: int, parts: list[Part], tag: int) -> Any:
    """A request of `Isend` or `Irecv` for the parts as one message."""
    kind = message(parts)
    request = call([_comm.import_mpi().BOTTOM, 1, kind], rank, tag)
    kind.Free()
    return request


def copy(source: Iterable[Part], target: Iterable[Part]) -> None:
    """Copies what a message would carry, between two places in this process."""
    for a, b in zip(source, target, strict=True):
        for n in range(len(a.length)):
            b.stretch(n)[...] = a.stretch(n)


# ---- Stages -------------------------------------------------------------------------------------------------------


class Piece(NamedTuple):
    """Rows that this rank computes for a KV head, and their arrays (entries, heads of the group, tokens, dims)."""

    head: int
    first: int
    end: int
    """Block rows `first` to `end` - 1, as `Problem` numbers them in the chain of all block rows."""
    begin: int
    """First token."""
    inputs: list[ndarray]
    outputs: list[ndarray]
    held: bool
    """Whether the arrays are parts of this rank's shards; else they are copies."""


class Stages:
    """The stages of one call on one rank: one KV head each.

    With `ahead`, the keys and values of the next stage travel while a stage is computed, and so do the queries of rows that other ranks
    hold. Results of such rows travel back. A rank's stages are in the order of its KV heads. A rank with fewer stages than others computes
    nothing in the last steps, in which it still sends keys and rows, and receives results and sums. With `comm_type` "all_gather", step n
    is that of KV head n on every rank instead, also on ranks that do not compute this head.

    Parameters
    ----------
    routes : Routes
    comm : communicator
    keys : list of ndarray
        This rank's shards of the arrays that have a row for each key (K and V), as (entries, KV heads, tokens, dims).
    inputs, outputs : list of ndarray
        Shards of the arrays that rows are computed from, and of those that results are written to: (entries, query heads, tokens, dims).
    comm_type : {"auto", "p2p", "all_gather", "a2a"}
    thread : bool
        Whether a thread waits for transfers.
    ahead : bool
        Whether the transfers of a stage start before the previous stage is computed.
    """

    def __init__(
        self, routes: Routes, comm: Any, keys: list[ndarray], inputs: list[ndarray], outputs: list[ndarray], *, comm_type: str,
        thread: bool, ahead: bool,
    ) -> None:  # fmt: skip
        self.routes, self.comm, self.keys, self.inputs, self.outputs = routes, comm, keys, inputs, outputs
        self.problem, self.size, self.rank = routes.problem, routes.size, int(comm.Get_rank())
        self.comm_type = comm_type if comm_type != "auto" else "p2p" if self.size <= MOST_MESSAGES else "a2a"
        self.thread, self.ahead = thread, ahead
        self.windows = [[self._kept_window(x) for x in keys] for _ in range(2)]  # of this stage and of the next
        stages = [routes.stages(rank) for rank in range(self.size)]
        if self.comm_type == "all_gather":
            self.order: list[list[int | None]] = [[h if h in s else None for h in range(self.problem.kv_heads)] for s in stages]
        else:
            self.order = [[*s, *[None] * (max(map(len, stages)) - len(s))] for s in stages]
        self.steps = len(self.order[self.rank])
        self.pieces: dict[int, list[Piece]] = {}
        self.gathered: dict[int, list[ndarray]] = {}
        self.alive: list[Any] = []  # datatypes of collectives, which must exist until the collectives end
        self.kept: list[Piece] = []  # pieces whose results are being sent

    def window_of(self, shard: ndarray) -> tuple[tuple[int, ...], str]:
        """Shape and dtype of a window: one head of a shard's array, over all tokens of the sequence."""
        return (len(shard), 1, self.problem.tokens[1], shard.shape[-1]), shard.dtype.str

    def _kept_window(self, shard: ndarray) -> ndarray:
        """A window that an earlier call has left, or else a new one. The first use of each page of new memory is slow."""
        try:
            return self.routes.windows[self.window_of(shard)].pop()
        except (KeyError, IndexError):
            return window(*self.window_of(shard))

    def _keep_windows(self) -> None:
        """Leave the windows to the next call. Old keys in them do no harm: a row is computed after all blocks that it lists have
        arrived."""
        for each in (x for windows in self.windows for x in windows):
            self.routes.windows.setdefault((each.shape, each.dtype.str), []).append(each)
        self.windows = []

    def run(self, compute: Callable[[Piece, list[ndarray]], None], sums: Sums | None = None) -> None:
        """Run all stages: ``compute(piece, keys)`` fills the outputs of a piece and, with `sums`, the parts of sums for its keys."""
        with Waiter(self.thread) as waiter:
            returned = self._receive_results()
            sent: list[Transfer] = []
            coming, going = self._start(0, waiter)
            for step in range(self.steps):
                following = self._start(step + 1, waiter) if self.ahead else None
                coming.wait()
                if self.thread:
                    sent.append(going)
                else:  # long messages move only inside MPI's calls: the receivers would wait until this rank's kernels end
                    going.wait()
                head = self.order[self.rank][step]
                if self.comm_type == "all_gather":
                    self._unpack(step)
                if head is not None:
                    if sums is not None:
                        sums.open()
                    for piece in self.pieces.pop(head):
                        compute(piece, self.windows[step % 2])
                        sent.append(self._send_results(piece, waiter))
                if sums is not None:
                    sums.send([order[step] for order in self.order], waiter)
                coming, going = self._start(step + 1, waiter) if following is None else following
            if sums is not None:
                sums.finish()
            for transfer in [*sent, waiter.submit(returned)]:
                transfer.wait()
        for kind in self.alive:
            kind.Free()
        self._keep_windows()

    # ---- What travels -------------------------------------------------------------------------------------------------

    def _held_keys(self, worker: int, head: int, shards: list[ndarray] | None = None) -> list[Part]:
        """The keys of this rank that a worker needs, in this rank's shards of keys or in `shards`, which have the same form."""
        runs = self.routes.kv_runs(self.rank, worker, head)
        return [Part(x, range(head, head + 1), self._entry(runs), runs.local, runs.length) for x in shards or self.keys]

    def _window_keys(self, holder: int, head: int, windows: list[ndarray]) -> list[Part]:
        runs = self.routes.kv_runs(holder, self.rank, head)
        return [Part(x, range(1), self._entry(runs), runs.begin, runs.length) for x in windows]

    def _entry(self, runs: Runs) -> ndarray | None:
        return None if self.problem.layout == "TND" or self.problem.entries == 1 else runs.entry

    def _rows(self, holder: int, worker: int, head: int) -> tuple[ndarray, ndarray]:
        """First tokens and lengths of the queries that travel between two ranks."""
        rows = self.routes.rows
        if not len(rows.head):
            return rows.begin, rows.begin
        which = (rows.head == head) & (rows.holder == holder) & (rows.worker == worker)
        return rows.begin[which], (rows.end - rows.begin)[which]

    def _held_rows(self, worker: int, head: int, arrays: list[ndarray]) -> list[Part]:
        begin, length = self._rows(self.rank, worker, head)
        heads = range(head * self.problem.group, (head + 1) * self.problem.group)
        return [Part(x, heads, None, self.routes.q_held.places(begin), length) for x in arrays]

    def _piece_rows(self, holder: int, piece: Piece, arrays: list[ndarray]) -> list[Part]:
        begin, length = self._rows(holder, self.rank, piece.head)
        inside = (begin >= piece.begin) & (begin < piece.begin + arrays[0].shape[2])
        return [Part(x, range(self.problem.group), None, begin[inside] - piece.begin, length[inside]) for x in arrays]

    # ---- Inputs of a stage ----------------------------------------------------------------------------------------------

    def _start(self, step: int, waiter: Waiter) -> tuple[Transfer, Transfer]:
        """Start the transfers of a step. Returns the transfer to this rank, and the transfer from this rank."""
        if step >= self.steps:
            return waiter.submit([]), waiter.submit([])
        head, windows = self.order[self.rank][step], self.windows[step % 2]
        if head is not None:
            self._make_pieces(head)
        into, out = {}, {}
        for other in range(self.size):
            if other != self.rank and head is not None:
                into[other] = self._inputs(other, head, windows)
            if other != self.rank and (wanted := self.order[other][step]) is not None:
                out[other] = self._outputs(other, wanted)
        into, out = ({p: parts for p, parts in side.items() if parts} for side in (into, out))
        receives, sends = self._collective(into, out) if self.comm_type == "a2a" else self._messages(into, out, 2 * step)
        if self.comm_type == "all_gather":
            receives += self._gather(step)
        elif head is not None:
            copy(self._held_keys(self.rank, head), self._window_keys(self.rank, head, windows))
        return waiter.submit(receives), waiter.submit(sends)

    def _inputs(self, holder: int, head: int, windows: list[ndarray]) -> list[Part]:
        parts = [] if self.comm_type == "all_gather" else self._window_keys(holder, head, windows)
        parts += [part for piece in self.pieces[head] if not piece.held for part in self._piece_rows(holder, piece, piece.inputs)]
        return [part for part in parts if len(part.length)]

    def _outputs(self, worker: int, head: int) -> list[Part]:
        parts = [] if self.comm_type == "all_gather" else self._held_keys(worker, head)
        return [part for part in [*parts, *self._held_rows(worker, head, self.inputs)] if len(part.length)]

    def _messages(self, into: dict[int, list[Part]], out: dict[int, list[Part]], tag: int) -> tuple[list[Any], list[Any]]:
        receive, send = self.comm.Irecv, self.comm.Isend
        return [_started(receive, p, x, tag) for p, x in into.items()], [_started(send, p, x, tag) for p, x in out.items()]

    def _collective(self, into: dict[int, list[Part]], out: dict[int, list[Part]]) -> tuple[list[Any], list[Any]]:
        mpi = _comm.import_mpi()
        sides = []
        for messages in (out, into):
            kinds = [message(messages[p]) if p in messages else mpi.BYTE for p in range(self.size)]
            self.alive += [kinds[p] for p in messages]
            sides.append((mpi.BOTTOM, [int(p in messages) for p in range(self.size)], [0] * self.size, kinds))
        return [self.comm.Ialltoallw(*sides)], []

    def _make_pieces(self, head: int) -> None:
        """The pieces of a stage. If this rank holds all rows of a piece, the piece's arrays are parts of shards. Otherwise they are
        buffers, into which this rank copies its own rows."""
        made = self.pieces[head] = []
        for first, end in self.routes.computed[head].of(self.rank):
            begin, after = int(self.problem.row_at[first]), int(self.problem.row_at[end])
            own = self.routes.q_held.overlap(self.rank, begin, after)
            held = len(own) == 1 and own[0][:2] == (begin, after)
            if held:
                local = slice(own[0][2], own[0][2] + after - begin)
                ins, outs = ([self._group_of(head, x)[:, :, local] for x in side] for side in (self.inputs, self.outputs))
            else:
                ins, outs = ([self._buffer(x, after - begin) for x in side] for side in (self.inputs, self.outputs))
                for a, b, place in own:
                    for buffer, shard in zip(ins, self.inputs, strict=True):
                        buffer[:, :, a - begin : b - begin] = self._group_of(head, shard)[:, :, place : place + b - a]
            made.append(Piece(head, first, end, begin, ins, outs, held))

    def _group_of(self, head: int, shard: ndarray) -> ndarray:
        """The query heads of a KV head."""
        return shard[:, head * self.problem.group : (head + 1) * self.problem.group]

    def _buffer(self, shard: ndarray, tokens: int) -> ndarray:
        """Room for rows of one KV head's query heads, with tokens before heads in memory for layout TND, else with heads before tokens."""
        entries, _, _, dims = shard.shape
        group = self.problem.group
        if self.problem.layout == "TND":
            return np.empty((entries, tokens, group, dims), shard.dtype).swapaxes(1, 2)
        return np.empty((entries, group, tokens, dims), shard.dtype)

    # ---- All keys to all ranks ----------------------------------------------------------------------------------------

    def _gather(self, head: int) -> list[Any]:
        """Start to gather all keys of a KV head on every rank. The keys are packed for that."""
        counts = self.routes.kv_held.counts(self.size)
        sizes = counts.tolist(), (np.cumsum(counts) - counts).tolist()
        requests, kept = [], []
        for shard in self.keys:
            mine = np.ascontiguousarray(shard[:, head].swapaxes(0, 1))  # tokens first, so that all ranks' tokens follow one another
            every = np.empty((self.problem.tokens[1], *mine.shape[1:]), mine.dtype)
            token = _comm.import_mpi().BYTE.Create_contiguous(mine[:1].nbytes or mine.itemsize * int(np.prod(mine.shape[1:]))).Commit()
            requests.append(self.comm.Iallgatherv([mine, sizes[0][self.rank], token], [every, *sizes, token]))
            self.alive.append(token)
            kept += [mine, every]
        self.gathered[head] = kept
        return requests

    def _unpack(self, head: int) -> None:
        kept = self.gathered.pop(head)
        if self.order[self.rank][head] is not None:
            for into, every in zip(self.windows[head % 2], kept[1::2], strict=True):
                self.routes.kv_held.put_in_order(every, into[:, 0].swapaxes(0, 1))

    # ---- Results of rows that other ranks hold ------------------------------------------------------------------------

    def _receive_results(self) -> list[Any]:
        """Start to receive the results of rows that this rank holds and other ranks compute."""
        rows = self.routes.rows
        mine = rows.holder == self.rank
        pairs = sorted(set(zip(rows.head[mine].tolist(), rows.worker[mine].tolist(), strict=True)))
        return [_started(self.comm.Irecv, worker, self._held_rows(worker, head, self.outputs), 2 * head + 1) for head, worker in pairs]

    def _send_results(self, piece: Piece, waiter: Waiter) -> Transfer:
        if piece.held:
            return waiter.submit([])
        self._store_own(piece)
        requests = []
        for holder in range(self.size):
            parts = [part for part in self._piece_rows(holder, piece, piece.outputs) if len(part.length)]
            if parts and holder != self.rank:
                requests.append(_started(self.comm.Isend, holder, parts, 2 * piece.head + 1))
        self.kept.append(piece)
        return waiter.submit(requests)

    def _store_own(self, piece: Piece) -> None:
        """Copy results that this rank computed for rows of its own into its shards."""
        for a, b, local in self.routes.q_held.overlap(self.rank, piece.begin, piece.begin + piece.outputs[0].shape[2]):
            for buffer, shard in zip(piece.outputs, self.outputs, strict=True):
                self._group_of(piece.head, shard)[:, :, local : local + b - a] = buffer[:, :, a - piece.begin : b - piece.begin]


@in_usual_mode
def _add(numbers: ndarray, to: ndarray) -> None:
    to += numbers


class Sums:
    """Sums per key, such as gradients. Each rank sends its part of a sum back to the rank that holds the key, which adds the parts in the
    order of the steps in which they were computed, and those of one step in the order of ranks.

    Parameters
    ----------
    stages : Stages
    totals : list of ndarray
        The sums for this rank's keys: shards (entries, KV heads, tokens, dims) of zeros at first, in the dtype of sums.
    """

    def __init__(self, stages: Stages, totals: list[ndarray]) -> None:
        self.stages, self.totals = stages, totals
        self.parts: list[ndarray] = []
        self.pending: tuple[Transfer, list[tuple[list[Part], list[Part]]], Any] | None = None

    def open(self) -> None:
        """Sets `parts` to zeros for one stage."""
        self.parts = [window(*self.stages.window_of(x)) for x in self.totals]

    def send(self, heads: list[int | None], waiter: Waiter) -> None:
        """Start to send the parts of this step, in which rank p computed KV head ``heads[p]``, and add those of the step before."""
        stages, requests = self.stages, []
        arriving: list[tuple[list[Part], list[Part]]] = []
        own = heads[stages.rank]
        for worker, head in enumerate(heads):
            if head is None:
                continue
            runs = stages.routes.kv_runs(stages.rank, worker, head)
            if not len(runs.length):
                continue
            to = stages._held_keys(worker, head, self.totals)
            packed, total = np.cumsum(runs.length) - runs.length, int(runs.length.sum())
            entry = None if to[0].entry is None else np.zeros_like(packed)
            shapes = [(len(x) if entry is None else 1, 1, total, x.shape[-1]) for x in self.totals]
            into = [Part(np.empty(s, x.dtype), range(1), entry, packed, runs.length) for s, x in zip(shapes, self.totals, strict=True)]
            if worker == stages.rank:
                copy(stages._window_keys(worker, head, self.parts), into)
            else:
                requests.append(_started(stages.comm.Irecv, worker, into, RETURN))
            arriving.append((into, to))
        for holder in range(stages.size):
            if own is not None and holder != stages.rank:
                parts = [part for part in stages._window_keys(holder, own, self.parts) if len(part.length)]
                if parts:
                    requests.append(_started(stages.comm.Isend, holder, parts, RETURN))
        self.finish()
        self.pending = waiter.submit(requests), arriving, self.parts
        self.parts = []

    def finish(self) -> None:
        """Wait until the parts of the last `send` have arrived, and add them."""
        if self.pending is None:
            return
        transfer, arriving, _ = self.pending
        transfer.wait()
        for into, to in arriving:
            for part, total in zip(into, to, strict=True):
                for n in range(len(part.length)):
                    _add(part.stretch(n), total.stretch(n))
        self.pending = None
