#!/usr/bin/env python3
"""Runs the fuzzer of the C API (``make fuzz-c``): past findings, and then new inputs for a time. Prints a summary at the end.

Each job is a process with a seed of its own, and all jobs share one corpus. If a job finds something, all jobs end: its input is kept,
the command that runs it again is printed, and the exit status is 1.
"""

import argparse
import os
import random
import re
import subprocess
import sys
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
# An input is a few hundred choices at most. Outputs of a problem, and a sanitizer's shadow of them, stay far below the limit of memory.
LIMITS = ["-max_len=400", "-len_control=0", "-timeout=25", "-rss_limit_mb=3000"]
STARTS = 200  # random inputs that a run begins with, in addition to its corpus


def replay(fuzzer, files):
    """The first of the files whose call breaks a promise, and what was printed about it; None if all promises hold."""
    for file in files:
        run = subprocess.run([fuzzer, *LIMITS, file], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace", check=False)
        if run.returncode:
            return file, run.stdout
    return None


def write_starts(folder, seed):
    rng = random.Random(seed)
    folder.mkdir(parents=True, exist_ok=True)
    for i in range(STARTS):
        (folder / str(i)).write_bytes(bytes([rng.randrange(4), *rng.randbytes(rng.randrange(20, 300))]))


def start(fuzzer, job, seed, seconds, corpus, folder):
    log = (folder / f"job{job}.log").open("w+", errors="replace")
    command = [fuzzer, *LIMITS, f"-seed={seed}", f"-max_total_time={seconds}", "-print_final_stats=1", "-verbosity=1", "-reload=30"]
    command += [f"-artifact_prefix={folder}/", corpus, folder / "starts"]
    return subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT), log


def text_of(log):
    log.seek(0)
    return log.read()


def sum_up(logs, seconds):
    """Prints the number of executions, and of calls by operation, of all jobs together."""
    counts, executions = {}, 0
    for text in logs:
        done = re.search(r"number_of_executed_units: (\d+)", text)
        executions += int(done[1]) if done else max(map(int, re.findall(r"^#(\d+)", text, re.MULTILINE)), default=0)
        for name, *numbers in re.findall(r"^count (.+): (\d+) accepted, (\d+) refused, (\d+) compared, (\d+) skipped$", text, re.MULTILINE):
            counts[name] = [a + int(b) for a, b in zip(counts.get(name, [0] * 4), numbers, strict=True)]
    if counts:
        print(f"{'calls':32}{'accepted':>12}{'refused':>12}{'with oracle':>12}{'left out':>12}")
    for name, numbers in counts.items():
        print(f"{name:32}" + "".join(f"{n:12}" for n in numbers))
    calls = sum(2 * accepted + refused for accepted, refused, *_ in counts.values())  # an accepted call runs twice
    print(f"{executions} executions, {calls} calls in {seconds:.0f} s, {executions / max(seconds, 1e-9):.0f} executions a second")


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("fuzzer", type=Path)
    parser.add_argument("--seconds", type=int, default=60, help="0: past findings only")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--jobs", type=int, default=2)
    args = parser.parse_args()
    fuzzer = args.fuzzer.resolve()
    build = fuzzer.parent.parent

    past = sorted((HERE / "regressions").glob("*.bin"))
    broken = replay(fuzzer, past)
    if broken:
        print(broken[1], f"FUZZ_VERBOSE=1 {fuzzer} {broken[0]}", sep="\n")
        return 1
    print(f"{len(past)} past findings hold")
    if args.seconds <= 0:
        return 0

    corpus, folder = build / "corpus", build / "findings"
    corpus.mkdir(parents=True, exist_ok=True)
    write_starts(folder / "starts", args.seed)
    known = set(folder.glob("*-*"))
    began = time.monotonic()
    jobs = [start(fuzzer, job, args.seed * 1000 + job + 1, args.seconds, corpus, folder) for job in range(args.jobs)]
    failed = None
    try:
        while failed is None and any(process.poll() is None for process, _ in jobs):
            time.sleep(0.2)
            failed = next((log for process, log in jobs if process.poll()), None)
    finally:
        for process, _ in jobs:
            if process.poll() is None:
                process.terminate()
            process.wait()
    seconds = time.monotonic() - began
    failed = failed or next((log for process, log in jobs if process.returncode), None)
    logs = [text_of(log) for _, log in jobs]
    if failed:
        print(text_of(failed)[-6000:])
    sum_up(logs, seconds)
    for file in sorted(file for file in set(folder.glob("*-*")) - known if not file.name.startswith("slow")):
        print(f"found: FUZZ_VERBOSE=1 {os.path.relpath(fuzzer)} {os.path.relpath(file)}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
