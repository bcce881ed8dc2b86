"""Runs the suite in several pytest processes, one per core, and adds up their results.

    python tests/run.py [PYTEST ARGUMENTS]

BLITZ_ATTN_TEST_PROCESSES sets another number of processes. Every process collects all tests. A file belongs to the process that first comes
to it, so that all processes are busy to the end. A few files go to one process together. A line is printed for every file that is done, and
about every 15 seconds for a file that is not done. pytest's reports of failures and of skipped tests follow at the end, and the last line is
a summary like pytest's. The exit status is 0 if tests ran, none failed and no process broke down. If the arguments name tests or files, or ask for
something other than a plain run (ALONE), one pytest process runs.
"""

import collections
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

import sampling

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
# One process takes all of these files, because torch's compiler takes seconds to import and to warm up.
TOGETHER = ("test_transformers_compile", "test_torch_operators", "test_torch_sdpa", "test_torch_sinks")
LONG = (  # these files are begun first
    *TOGETHER, "test_matrix", "test_nsa_backward", "test_lse", "test_kernels", "test_benchmark",
    "test_interrupt", "test_nsa", "test_memory",
)  # fmt: skip
ALONE = ("-h", "--help", "--version", "--collect-only", "--co", "--fixtures", "--markers", "--pdb", "-s", "--lf", "--ff", "--sw")
ORDER = ("failed", "passed", "skipped", "deselected", "xfailed", "xpassed", "warnings", "error")  # pytest's order
NO_TESTS = int(pytest.ExitCode.NO_TESTS_COLLECTED)


class Share:
    """A pytest plugin that runs the tests of files that no other process has taken, and prints which files are done."""

    def __init__(self, folder):
        self.folder, self.mine, self.file, self.counts = Path(folder), {}, None, collections.Counter()
        self.begun = self.told = time.monotonic()

    def takes(self, path):
        """Whether this process runs the tests of a file. The first process that asks takes the file."""
        name = TOGETHER[0] if path.stem in TOGETHER else path.name
        if name not in self.mine:
            try:
                (self.folder / name).touch(exist_ok=False)
                self.mine[name] = True
            except FileExistsError:
                self.mine[name] = False
        return self.mine[name]

    def tell(self, so_far=""):
        self.told = time.monotonic()
        counts = ", ".join(f"{count} {outcome}" for outcome, count in self.counts.items())
        print(f"{self.file.name:28} {self.told - self.begun:5.0f} s  {counts}{so_far}", file=sys.stderr, flush=True)

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items):
        items.sort(key=lambda item: LONG.index(item.path.stem) if item.path.stem in LONG else len(LONG))

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_protocol(self, item, nextitem):
        if self.file and item.path != self.file:
            self.tell()
            self.file = None
        if not self.takes(item.path):
            # pytest keeps what it set up for the folder and file of the previous test, and expects it to be torn down before the next test.
            item.session._setupstate.teardown_exact(nextitem)
            return True
        if not self.file:
            self.file = item.path
            self.begun = self.told = time.monotonic()
            self.counts.clear()
        return None

    def pytest_runtest_logreport(self, report):
        if report.when == "call" or report.outcome != "passed":
            self.counts[report.outcome] += 1
        if time.monotonic() - self.told > 15:
            self.tell(" so far")

    @pytest.hookimpl(hookwrapper=True)
    def pytest_report_teststatus(self):
        """Suppress the dots."""
        outcome = yield
        outcome.force_result((outcome.get_result()[0], "", ""))

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session):
        if self.file:
            self.tell()
        stats = session.config.pluginmanager.get_plugin("terminalreporter").stats
        counts = {category: len(reports) for category, reports in stats.items() if category}
        (self.folder / f"counts-{os.getpid()}.json").write_text(json.dumps(counts), encoding="utf-8")


def runs_alone(arguments):
    return any(a.partition("=")[0] in ALONE or (not a.startswith("-") and a.partition("::")[0].endswith(".py")) for a in arguments)


def summary(counts, seconds):
    """A line like pytest's last one."""
    parts = [f"{counts[name]} {name}" for name in sorted(counts, key=lambda n: ORDER.index(n) if n in ORDER else len(ORDER)) if counts[name]]
    text = f" {', '.join(parts) or 'no tests ran'} in {seconds:.0f}s ({int(seconds) // 60}:{int(seconds) % 60:02d}) "
    return text.center(100, "=")


def run(arguments, processes):
    """Exit status and counts of all processes together."""
    counts, status = collections.Counter(), NO_TESTS
    with tempfile.TemporaryDirectory() as folder:
        logs = [open(Path(folder) / f"log-{n}", "w+", encoding="utf-8", errors="replace") for n in range(processes)]  # noqa: SIM115
        command = [sys.executable, str(HERE / "run.py"), "--share", folder, "-q", "-p", "no:cacheprovider", *arguments]
        started = [subprocess.Popen(command, stdout=log) for log in logs]
        for process, log in zip(started, logs, strict=True):
            code = process.wait()
            log.seek(0)
            print(log.read(), end="")
            log.close()
            own = Path(folder) / f"counts-{process.pid}.json"
            if not own.exists() or code not in (0, 1, NO_TESTS):
                print(f"A process of the tests broke down, with status {code}.")
                counts["error"] += 1
            for name, count in json.loads(own.read_text(encoding="utf-8") if own.exists() else "{}").items():
                counts[name] = max(counts[name], count) if name == "deselected" else counts[name] + count
            if code != NO_TESTS:
                status = max(status if status != NO_TESTS else 0, 1 if code else 0)
    return (1 if counts["error"] or counts["failed"] else status), counts


def main(arguments):
    if arguments[:1] == ["--share"]:
        return pytest.main(arguments[2:], plugins=[Share(arguments[1])])
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    processes = int(os.environ.get("BLITZ_ATTN_TEST_PROCESSES") or cores)
    if processes < 2 or runs_alone(arguments):
        return pytest.main(arguments)
    begin = time.monotonic()
    print(sampling.description(), flush=True)
    status, counts = run(arguments, processes)
    if status == 1:
        print(f"To repeat it: make test SAMPLE_SEED={sampling.SEED}")
    print(summary(counts, time.monotonic() - begin))
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
