"""Runs problems in worker processes until the time is over, and shrinks those that fail.

Before each problem, a worker writes the problem's number and operation into shared memory, so that the parent can name the problem of a crash or
a hang.
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

from .draw import Discard, Draw
from .problems import REGISTRY, load

HANG_SECONDS = 120
REPORT_SECONDS = 2.0
SHRINK_SECONDS = 60.0


# ---- One problem --------------------------------------------------------------------------------------------------


class Outcome(NamedTuple):
    kind: str  # "passed", "discarded", or what went wrong: the name of an exception or of a signal, "exit N" or "hang"
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


class _Told(dict[str, list[Any]]):
    """Values that shrinking may try. They are sent to the parent as they are drawn, so that the parent knows the options of a problem that crashes."""

    def __init__(self, draw: Draw, pipe: Any) -> None:
        self.draw, self.pipe = draw, pipe

    def __setitem__(self, name: str, values: list[Any]) -> None:
        super().__setitem__(name, values)
        self.pipe.send((name, self.draw.options[name], values))


def _run_and_tell(name: str, draw: Draw, pipe: Any) -> None:
    faulthandler.enable()
    draw.simpler = _Told(draw, pipe)
    outcome = run_one(name, draw)
    pipe.send(outcome._replace(simpler=dict(outcome.simpler)))


def run_apart(name: str, seed: int, fixed: dict[str, Any]) -> Outcome:
    """Runs the problem in a process of its own, so that a crash is an outcome, too."""
    context = multiprocessing.get_context("fork")
    here, there = context.Pipe(duplex=False)
    process = context.Process(target=_run_and_tell, args=(name, Draw(seed, fixed), there))
    process.start()
    there.close()
    kind, options, simpler = "", {}, {}
    try:
        while not kind:
            message = here.recv() if here.poll(HANG_SECONDS) else None
            if isinstance(message, Outcome):
                process.join()
                return message
            if message is None:
                process.kill()
                kind = "hang"
            else:
                option, options[option], simpler[option] = message
    except EOFError:
        pass
    process.join()
    kind = kind or _ending(process)
    return Outcome(kind, f"the process ended with {kind}", options, simpler)


def _ending(process: Any) -> str:
    code = process.exitcode or 0
    return signal.Signals(-code).name if code < 0 else f"exit {code}"


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
    """Fixes one option after the other to a simpler value, as long as the problem still fails in the same way."""
    until, best, again = time.monotonic() + SHRINK_SECONDS, dict(fixed), True
    failure = failure if failure.simpler else run_apart(name, seed, fixed)  # a worker that crashed has sent no options
    while again:
        again = False
        for option, values in list(failure.simpler.items()):
            for value in values:
                if time.monotonic() > until:
                    return best, failure
                outcome = run_apart(name, seed, {**best, option: value})
                if outcome.kind == failure.kind:
                    best[option], failure, again = value, outcome, True
                    break
    return best, failure


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


def _names_and_weights(only: list[str]) -> tuple[list[str], list[float]]:
    chosen = [p for p in REGISTRY.values() if (p.name in only if only else p.weight > 0)]
    weights = [p.weight or 1.0 for p in chosen]
    return [p.name for p in chosen], [weight / sum(weights) for weight in weights]


def _work(seed: int, first: int, step: int, only: list[str], cell: str, pipe: Any) -> None:
    """Runs the problems with numbers first, first + step, ... of the campaign `seed`, and reports through the pipe."""
    import numpy as np

    signal.signal(signal.SIGINT, signal.SIG_IGN)
    memory = shared_memory.SharedMemory(cell, track=False) if sys.version_info >= (3, 13) else shared_memory.SharedMemory(cell)
    names, weights = _names_and_weights(only)
    ended, reported = collections.Counter[tuple[str, str]](), -REPORT_SECONDS  # the first problem is reported at once
    for index in itertools.count(first, step):
        name = names[int(np.random.default_rng([seed, index]).choice(len(names), p=weights))]
        problem_seed = seed * 10**9 + index
        struct.pack_into("qq", memory.buf, 0, index, names.index(name))
        outcome = run_one(name, Draw(problem_seed))
        ended[name, outcome.kind] += 1
        if outcome.kind not in ("passed", "discarded"):
            pipe.send(("failure", name, problem_seed, outcome))
        if time.monotonic() - reported > REPORT_SECONDS:
            pipe.send(("ended", ended))
            ended, reported = collections.Counter(), time.monotonic()


class Worker:
    """A worker process, as its parent sees it."""

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
    """Runs problems for `seconds`. If none has passed or failed by then, the campaign waits for the first one, but gives up HANG_SECONDS after the
    start. With `stop`, the campaign ends at the first failure, which is not shrunk.

    Returns the number of different failures, or 1 if no problem passed.
    """
    names, _ = _names_and_weights(only)
    print(f"fuzz: {len(names)} operations, {jobs} processes, {seconds:.0f} s, SEED={seed}", file=sys.stderr)
    workers = [Worker(seed, i, jobs, only) for i in range(jobs)]
    ended, failures, started, shown = collections.Counter[tuple[str, str]](), {}, time.monotonic(), time.monotonic()

    def passed() -> int:
        return sum(n for (_, kind), n in ended.items() if kind == "passed")

    try:
        while time.monotonic() - started < (seconds if passed() or failures else max(seconds, HANG_SECONDS)) and not (stop and failures):
            multiprocessing.connection.wait([w.pipe for w in workers], timeout=0.5)
            for worker in workers:
                _listen(worker, names, ended, failures)
            if time.monotonic() - shown > 10:
                shown = time.monotonic()
                rate = passed() / (shown - started)
                print(
                    f"fuzz: {shown - started:5.0f} s  {passed()} problems, {rate:.0f} a second, {len(failures)} failures", file=sys.stderr
                )
    except KeyboardInterrupt:
        pass
    finally:
        for worker in workers:
            worker.close()
    took = time.monotonic() - started
    print(f"{'operation':40}{'problems':>10}{'a second':>10}{'discarded':>11}")
    for name in names:
        n = ended[name, "passed"]
        print(f"{name:40}{n:10}{n / took:10.1f}{ended[name, 'discarded']:11}")
    print(f"{'all':40}{passed():10}{passed() / took:10.1f}{sum(n for (_, kind), n in ended.items() if kind == 'discarded'):11}")
    for name, problem_seed, outcome, count, when in failures.values():
        print(f"\nfailure after {when - started:.1f} s, {count} times: {name}: {outcome.kind}\n{outcome.text}")
        best, last = ({}, outcome) if stop else shrink(name, problem_seed, {}, outcome)
        print(f"{last.text if best else ''}make fuzz REPLAY='{reproducer(name, problem_seed, best)}'")
    if not passed():
        print(f"fuzz: no problem passed in {took:.0f} s", file=sys.stderr)
        return 1
    return len(failures)


def _listen(worker: Worker, names: list[str], ended: collections.Counter[tuple[str, str]], failures: dict[Any, Any]) -> None:
    try:
        while worker.pipe.poll():
            message = worker.pipe.recv()
            if message[0] == "ended":
                ended.update(message[1])
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
    kind = "hang" if hangs else _ending(worker.process)
    if which < 0:
        raise SystemExit(f"fuzz: a worker ended with {kind} before its first problem")
    _note(failures, names[which], worker.seed * 10**9 + index, Outcome(kind, f"the process ended with {kind}", {}, {}))
    worker.start(index + worker.step)


def _note(failures: dict[Any, Any], name: str, seed: int, outcome: Outcome) -> None:
    """Records a failure. Failures of the same operation, kind and place in the program count as one."""
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
