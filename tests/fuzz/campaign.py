"""Runs problems in worker processes until the time is over, and shrinks what fails.

A worker tells the parent which problem it is about to run through shared memory, so that a crash or a hang has a name too.
"""

from __future__ import annotations

import collections
import faulthandler
import itertools
import json
import multiprocessing
import os
import signal
import struct
import sys
import time
import traceback
from multiprocessing import shared_memory
from typing import Any, NamedTuple

from . import calls
from .draw import Discard, Draw, bucket
from .problems import REGISTRY, load

HANG_SECONDS = 120
REPORT_SECONDS = 2.0
SHRINK_SECONDS = 60.0


# ---- One problem --------------------------------------------------------------------------------------------------


class Outcome(NamedTuple):
    kind: str  # "passed", "discarded", or what went wrong: an exception's name, a signal's, "hang"
    text: str
    options: dict[str, Any]
    simpler: dict[str, list[Any]]


def run_one(name: str, draw: Draw) -> Outcome:
    try:
        REGISTRY[name].run(draw)
    except Discard as reason:
        return Outcome("discarded", str(reason), draw.options, draw.simpler)
    except Exception as error:
        lines = traceback.format_exception(error)
        return Outcome(type(error).__name__, "".join(lines), draw.options, draw.simpler)
    return Outcome("passed", "", draw.options, draw.simpler)


def _run_and_send(name: str, seed: int, fixed: dict[str, Any], pipe: Any) -> None:
    faulthandler.enable()
    pipe.send(run_one(name, Draw(seed, fixed)))


def run_apart(name: str, seed: int, fixed: dict[str, Any]) -> Outcome:
    """Runs the problem in a process of its own, so that a crash is an outcome like any other."""
    context = multiprocessing.get_context("fork")
    here, there = context.Pipe(duplex=False)
    process = context.Process(target=_run_and_send, args=(name, seed, fixed, there))
    process.start()
    there.close()
    outcome = None
    try:
        if here.poll(HANG_SECONDS):
            outcome = here.recv()
    except EOFError:
        pass
    else:
        if outcome is None:
            process.kill()
            outcome = Outcome("hang", f"no end within {HANG_SECONDS} s", dict(fixed), {})
    process.join()
    if outcome is None:
        code = process.exitcode or 0
        kind = signal.Signals(-code).name if code < 0 else f"exit {code}"
        outcome = Outcome(kind, f"the process ended with {kind}", dict(fixed), {})
    return outcome


# ---- Reproducers --------------------------------------------------------------------------------------------------


def reproducer(name: str, seed: int, fixed: dict[str, Any]) -> str:
    return f"{name}:{seed}" + (":" + json.dumps(fixed, separators=(",", ":")) if fixed else "")


def parse(text: str) -> tuple[str, int, dict[str, Any]]:
    name, _, rest = text.strip().partition(":")
    seed, _, fixed = rest.partition(":")
    if name not in REGISTRY:
        raise SystemExit(f"replay: expected one of {', '.join(REGISTRY)}, got {name!r}")
    return name, int(seed), json.loads(fixed) if fixed else {}


def shrink(name: str, seed: int, fixed: dict[str, Any], failure: Outcome) -> tuple[dict[str, Any], Outcome]:
    """Fixes one option after the other to a simpler value for as long as the problem fails in the same way."""
    until = time.monotonic() + SHRINK_SECONDS
    probe = Draw(seed, fixed)
    if not failure.simpler:  # a crash told nothing of its options: a draw of the same seed does, as far as it gets without the call
        failure = failure._replace(simpler={})
        probe_outcome = _options_of(name, probe)
        failure = failure._replace(options=probe_outcome.options, simpler=probe_outcome.simpler)
    best, again = dict(fixed), True
    while again:
        again = False
        for option, values in list(failure.simpler.items()):
            for value in values:
                if time.monotonic() > until:
                    return best, failure
                outcome = run_apart(name, seed, {**best, option: value})
                if outcome.kind == failure.kind:
                    best[option] = value
                    if outcome.simpler:
                        failure = outcome
                    else:
                        drawn = _options_of(name, Draw(seed, best))
                        failure = outcome._replace(options=drawn.options, simpler=drawn.simpler)
                    again = True
                    break
    return best, failure


def _draw_and_tell(name: str, seed: int, fixed: dict[str, Any], pipe: Any) -> None:
    draw = Draw(seed, fixed)

    class Telling(dict):
        def __setitem__(self, key: str, value: Any) -> None:
            super().__setitem__(key, value)
            pipe.send((key, value, draw.options.get(key)))

    draw.simpler = Telling()
    run_one(name, draw)


def _options_of(name: str, draw: Draw) -> Draw:
    """The options that a problem draws before it crashes."""
    context = multiprocessing.get_context("fork")
    here, there = context.Pipe(duplex=False)
    process = context.Process(target=_draw_and_tell, args=(name, draw.seed, draw.fixed, there))
    process.start()
    there.close()
    try:
        while here.poll(HANG_SECONDS):
            key, simpler, value = here.recv()
            draw.options[key], draw.simpler[key] = value, simpler
    except EOFError:
        pass
    process.kill()
    process.join()
    return draw


def replay(text: str) -> int:
    name, seed, fixed = parse(text)
    outcome = run_apart(name, seed, fixed)
    if outcome.kind in ("passed", "discarded"):
        print(f"{outcome.kind} {outcome.text}")
        return 0
    print(f"fails: {outcome.kind}\n{outcome.text}\nshrinking ...", file=sys.stderr)
    best, last = shrink(name, seed, fixed, outcome)
    print(last.text)
    print(f"options: {json.dumps(last.options)}")
    print(f"make fuzz REPLAY='{reproducer(name, seed, best)}'")
    return 1


# ---- Workers ------------------------------------------------------------------------------------------------------


class Tally:
    """Counts problems and calls of the package by operation, and which pairs of options have occurred together."""

    def __init__(self) -> None:
        self.passed: collections.Counter[str] = collections.Counter()
        self.discarded: collections.Counter[str] = collections.Counter()
        self.calls: collections.Counter[str] = collections.Counter()  # of problems that passed
        self.values: dict[str, dict[str, set[str]]] = collections.defaultdict(lambda: collections.defaultdict(set))
        self.pairs: dict[str, set[tuple[str, str, str, str]]] = collections.defaultdict(set)

    def count(self, name: str, draw: Draw, outcome: Outcome, made: int) -> None:
        if outcome.kind != "passed":
            self.discarded[name] += outcome.kind == "discarded"
            return
        self.passed[name] += 1
        self.calls[name] += made
        if self.passed[name] > 2000 and self.passed[name] % 16:
            return  # pairs are counted for a sample: it costs as much as a small problem
        met = [(key, bucket(key, value, draw.bounds)) for key, value in draw.options.items() if "[" not in key and not key.endswith(".details")]
        for key, value in met:
            self.values[name][key].add(value)
        pairs = self.pairs[name]
        for (a, x), (b, y) in itertools.combinations(met, 2):
            pairs.add((a, x, b, y))

    def add(self, passed: Any, discarded: Any, made: Any, values: Any, pairs: Any) -> None:
        self.passed += passed
        self.discarded += discarded
        self.calls += made
        for name, options in values.items():
            for key, seen in options.items():
                self.values[name][key] |= seen
        for name, seen in pairs.items():
            self.pairs[name] |= seen

    def take(self) -> tuple[Any, ...]:
        """The counts since the previous call of this method, in plain containers."""
        state = self.passed, self.discarded, self.calls, {n: dict(v) for n, v in self.values.items()}, dict(self.pairs)
        self.passed, self.discarded, self.calls = collections.Counter(), collections.Counter(), collections.Counter()
        self.values = collections.defaultdict(lambda: collections.defaultdict(set))
        self.pairs = collections.defaultdict(set)
        return state

    def coverage(self, name: str) -> float:
        """The share of possible pairs of values that have occurred, over all options that are ever drawn together."""
        met: dict[tuple[str, str], int] = collections.Counter((a, b) for a, _, b, _ in self.pairs[name])
        values = self.values[name]
        possible = sum(len(values[a]) * len(values[b]) for a, b in met)
        return sum(met.values()) / possible if possible else 1.0


def _names_and_weights(only: list[str]) -> tuple[list[str], list[float]]:
    chosen = [p for p in REGISTRY.values() if (p.name in only if only else p.weight > 0)]
    weights = [p.weight or 1.0 for p in chosen]
    return [p.name for p in chosen], [weight / sum(weights) for weight in weights]


def _work(seed: int, first: int, step: int, only: list[str], cell: str, pipe: Any) -> None:
    """Runs problems number first, first + step, ... of the campaign `seed`, and reports through the pipe."""
    import numpy as np

    signal.signal(signal.SIGINT, signal.SIG_IGN)
    memory = shared_memory.SharedMemory(cell, track=False) if sys.version_info >= (3, 13) else shared_memory.SharedMemory(cell)
    names, weights = _names_and_weights(only)
    tally, reported = Tally(), -REPORT_SECONDS  # the first problem is reported at once
    for index in itertools.count(first, step):
        name = names[int(np.random.default_rng([seed, index]).choice(len(names), p=weights))]
        problem_seed = seed * 10**9 + index
        struct.pack_into("qq", memory.buf, 0, index, names.index(name))
        draw, before = Draw(problem_seed), calls.made()
        outcome = run_one(name, draw)
        tally.count(name, draw, outcome, calls.made() - before)
        if outcome.kind not in ("passed", "discarded"):
            pipe.send(("failure", name, problem_seed, outcome))
        if time.monotonic() - reported > REPORT_SECONDS:
            pipe.send(("tally", *tally.take()))
            reported = time.monotonic()


class Worker:
    """A worker process, and the parent's record of it."""

    def __init__(self, seed: int, first: int, step: int, only: list[str]):
        self.seed, self.step, self.only = seed, step, only
        self.memory = shared_memory.SharedMemory(create=True, size=16)
        self.start(first)

    def start(self, first: int) -> None:
        struct.pack_into("qq", self.memory.buf, 0, first, -1)
        context = multiprocessing.get_context("fork")
        self.pipe, there = context.Pipe(duplex=False)
        self.process = context.Process(target=_work, args=(self.seed, first, self.step, self.only, self.memory.name, there))
        self.process.start()
        there.close()
        self.at, self.since = first, time.monotonic()

    def now(self) -> tuple[int, int]:
        return struct.unpack_from("qq", self.memory.buf, 0)

    def close(self) -> None:
        self.process.kill()
        self.process.join()
        self.memory.close()
        self.memory.unlink()


# ---- The campaign -------------------------------------------------------------------------------------------------


def campaign(seconds: float, seed: int, jobs: int, only: list[str], stop: bool = False) -> int:
    """Runs problems for `seconds`, however few until at least one has ended; with `stop` until the first failure, which is not shrunk.

    Returns the number of different failures.
    """
    names, _ = _names_and_weights(only)
    print(f"fuzz: {len(names)} operations, {jobs} processes, {seconds:.0f} s, SEED={seed}", file=sys.stderr)
    workers = [Worker(seed, i, jobs, only) for i in range(jobs)]
    tally, failures, started, shown = Tally(), {}, time.monotonic(), time.monotonic()
    try:
        while time.monotonic() - started < (seconds if tally.passed or failures else max(seconds, HANG_SECONDS)) and not (stop and failures):
            multiprocessing.connection.wait([w.pipe for w in workers], timeout=0.5)
            for worker in workers:
                _listen(worker, names, tally, failures)
            if time.monotonic() - shown > 10:
                shown = time.monotonic()
                done = sum(tally.passed.values())
                print(f"fuzz: {shown - started:5.0f} s  {done} problems, {done / (shown - started):.0f} a second, {len(failures)} failures", file=sys.stderr)
    except KeyboardInterrupt:
        pass
    finally:
        for worker in workers:
            worker.close()
    took = time.monotonic() - started
    print(f"{'operation':40}{'problems':>10}{'a second':>10}{'calls':>10}{'discarded':>11}{'pairs met':>11}")
    for name in names:
        n = tally.passed[name]
        print(f"{name:40}{n:10}{n / took:10.1f}{tally.calls[name]:10}{tally.discarded[name]:11}{tally.coverage(name):11.1%}")
    total = sum(tally.passed.values())
    print(f"{'all':40}{total:10}{total / took:10.1f}{sum(tally.calls.values()):10}{sum(tally.discarded.values()):11}")
    for name, problem_seed, outcome, count, when in failures.values():
        print(f"\nfailure after {when - started:.1f} s, {count} times: {name}: {outcome.kind}\n{outcome.text}")
        best, last = ({}, outcome) if stop else shrink(name, problem_seed, {}, outcome)
        print(f"{last.text if best else ''}make fuzz REPLAY='{reproducer(name, problem_seed, best)}'")
    if not total:
        print(f"fuzz: no problem passed in {took:.0f} s", file=sys.stderr)
        return 1
    return len(failures)


def _listen(worker: Worker, names: list[str], tally: Tally, failures: dict[Any, Any]) -> None:
    try:
        while worker.pipe.poll():
            message = worker.pipe.recv()
            if message[0] == "tally":
                tally.add(*message[1:])
            else:
                _, name, seed, outcome = message
                _note(failures, name, seed, outcome)
    except (EOFError, OSError):
        worker.process.join(5)
    index, which = worker.now()
    if index != worker.at:
        worker.at, worker.since = index, time.monotonic()
    hangs = worker.process.is_alive() and time.monotonic() - worker.since > HANG_SECONDS
    if worker.process.is_alive() and not hangs:
        return
    if hangs:
        worker.process.kill()
        worker.process.join()
    code = worker.process.exitcode or 0
    kind = "hang" if hangs else signal.Signals(-code).name if code < 0 else f"exit {code}"
    if which < 0:
        raise SystemExit(f"fuzz: a worker ended with {kind} before its first problem")
    _note(failures, names[which], worker.seed * 10**9 + index, Outcome(kind, f"the process ended with {kind}", {}, {}))
    worker.start(index + worker.step)


def _note(failures: dict[Any, Any], name: str, seed: int, outcome: Outcome) -> None:
    """Records a failure. Failures of one origin (operation, kind and place in the program) count as one."""
    places = [line.strip() for line in outcome.text.splitlines() if line.lstrip().startswith("File ")]
    key = name, outcome.kind, places[-1] if places else ""
    if key not in failures:
        failures[key] = (name, seed, outcome, 1, time.monotonic())
        print(f"fuzz: {outcome.kind} in {reproducer(name, seed, {})}", file=sys.stderr)
    else:
        first = failures[key]
        failures[key] = (*first[:3], first[3] + 1, first[4])


def run_corpus(path: str) -> int:
    """Runs problems that have failed before. Returns how many still fail."""
    failed = 0
    with open(path, encoding="utf-8") as lines:
        for line in lines:
            if not line.strip() or line.startswith("#"):
                continue
            outcome = run_apart(*parse(line))
            if outcome.kind == "discarded":
                print(f"corpus: no longer a problem ({outcome.text}): {line.strip()}", file=sys.stderr)
            elif outcome.kind != "passed":
                failed += 1
                print(f"corpus: {outcome.kind}\n{outcome.text}\nmake fuzz REPLAY='{line.strip()}'")
    return failed


def default_jobs() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


__all__ = ["campaign", "default_jobs", "load", "replay", "run_corpus"]
