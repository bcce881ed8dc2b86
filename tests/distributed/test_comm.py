"""Ranks agree on a call before they send anything, transfers arrive, and jobs end. Cases run under mpirun (launcher.py)."""

import subprocess
import sys

import numpy as np
import pytest

import launcher
from blitz_attn.distributed import Alone, _comm
from ranks import sentences


@pytest.mark.parametrize("case", launcher.names_of("cases_comm"))
@pytest.mark.parametrize(("library", "ranks"), launcher.jobs())
def test_comm(library, ranks, case):
    launcher.passes(case, "cases_comm", ranks, library)


def test_a_job_that_hangs_is_ended():
    how = launcher.starter("openmpi")
    if isinstance(how, str):
        pytest.skip(how)
    job = launcher.run(launcher.HERE / "hangs.py", ranks=2, seconds=3)
    assert job.status is None
    assert job.seconds < 30
    pids = [int(line.split()[1]) for line in job.output.splitlines() if line.startswith("pid ")]
    assert len(pids) == 2
    states = [launcher.state_of(pid) for pid in pids]
    assert all(state is None or state[0] == "Z" for state in states), states


def test_the_sentence_without_mpi4py():
    code = (
        "import sys; sys.modules['mpi4py'] = None; from blitz_attn.distributed import _comm\n"
        "try: _comm.communicator()\n"
        "except ModuleNotFoundError as error: print(error)"
    )
    text = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=launcher.package_folder()).stdout
    assert text == "blitz_attn.distributed needs mpi4py: pip install mpi4py\n"


def test_the_package_imports_without_mpi4py():
    code = "import sys; sys.modules['mpi4py'] = None; import blitz_attn.distributed"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=launcher.package_folder())


def test_digests_tell_values_apart():
    rng = np.random.default_rng(0)
    array = rng.standard_normal((3, 4))
    values = [
        array,
        array.T.copy(),
        array.reshape(4, 3),
        array.astype(np.float32),
        (1, 2),
        ((1,), 2),
        ("1", 2),
        None,
        0,
        "",
        [],
        np.zeros(0),
    ]
    assert len({_comm.digest(v) for v in values}) == len(values)
    assert _comm.digest(array) == _comm.digest(np.asfortranarray(array)) == _comm.digest(array.copy())
    assert _comm.digest(np.int64(3)) == _comm.digest(3)


@pytest.mark.parametrize(
    ("error", "kind", "sentence"),
    [
        (RuntimeError("no library\nanywhere"), ImportError,
         r"^blitz_attn.distributed: mpi4py found no MPI library: .* \(no library anywhere\)$"),
        (ImportError("libmpi.so"), ImportError, r"^blitz_attn.distributed: mpi4py found no MPI library: .* \(libmpi.so\)$"),
        (ModuleNotFoundError("No module named 'x'", name="x"), ModuleNotFoundError, "^No module named 'x'$"),
    ],
)  # fmt: skip
def test_the_sentence_where_mpi4py_cannot_be_imported(error, kind, sentence, monkeypatch):
    def import_module(name):
        raise error

    monkeypatch.setattr(_comm.importlib, "import_module", import_module)
    with pytest.raises(kind, match=sentence):
        _comm.import_mpi()


def test_ranks_with_more_arguments_than_others_disagree():
    def work(comm):
        with _comm.Agreement(comm, "call") as agreement:
            agreement.same("k", 3)
            if comm.Get_rank() == 1:
                agreement.same("more", 5)

    sentence = "ValueError: call: expected the same arguments on all ranks, got more of them on some"
    assert sentences(2, work) == [sentence] * 2


class NoComm(Alone):
    def Allgather(self, *arguments):  # noqa: N802 - MPI's name
        raise AssertionError("no rank was to be asked")


def test_an_interrupt_does_not_wait_for_the_other_ranks():
    with pytest.raises(KeyboardInterrupt), _comm.Agreement(NoComm(), "call"):
        raise KeyboardInterrupt
