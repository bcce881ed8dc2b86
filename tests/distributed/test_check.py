"""``python -m blitz_attn.distributed --check`` reports where ranks run, runs checks, and refuses mixed instruction sets."""

import itertools

import pytest

import blitz_attn
import launcher
from blitz_attn.distributed import Alone, _check, _comm
from ranks import run


def job(library, **options):
    how = launcher.starter(library)
    if isinstance(how, str):
        pytest.skip(how)
    return launcher.run(launcher.HERE / "run_check.py", "--check", library=library, **options)


@pytest.mark.parametrize(
    ("library", "ranks"), [("openmpi", 2), *(pytest.param(*job, marks=pytest.mark.long) for job in (("openmpi", 4), ("mpich", 3)))]
)
def test_all_is_well(library, ranks):
    done = job(library, ranks=ranks)
    assert done.status == 0, done.output
    assert f"blitz_attn {blitz_attn.__version__} on {ranks} ranks" in done.output
    assert done.output.count("as one process") == len(_check.CHECKS)
    assert "all checks passed" in done.output


def test_mixed_levels_are_refused():
    levels = blitz_attn.isa_levels(available=True)
    if len(levels) < 2:
        pytest.skip("this CPU has one level")
    done = job("openmpi", ranks=2, environment={"BLITZ_ATTN_ISA": levels[-1], "LEVEL_OF_RANK_1": levels[0]})
    assert done.status not in (0, None)
    assert f"got {levels[-1]} on rank 0 and {levels[0]} on rank 1: set BLITZ_ATTN_ISA={levels[0]} for all ranks" in done.output
    assert "as one process" not in done.output


def test_one_process(capsys):
    assert _check.run(Alone(), True) == 0
    said = capsys.readouterr().out
    assert "on 1 rank\n" in said
    assert "all checks passed" in said


def test_a_check_that_fails_on_one_rank_fails():
    def check(comm):
        if comm.Get_rank() == 2:
            raise RuntimeError("other bits")

    assert run(3, lambda comm: _check.outcome(comm, check)) == ["RuntimeError: other bits (on rank 2)"] * 3
    assert run(3, lambda comm: _check.outcome(comm, lambda comm: None)) == [""] * 3


def test_results_that_differ_are_reported(monkeypatch):
    def told(same):
        monkeypatch.setattr(_check, "same_bits", same)
        return [_check.outcome(Alone(), check) for check in _check.CHECKS.values()]

    assert told(lambda a, b: False) == [
        "AssertionError: out of float32 with dispatch='cut' differs from one process (on rank 0)",
        "AssertionError: out of float32 with interleave=None differs from one process (on rank 0)",
        "AssertionError: selected differs from one process (on rank 0)",
    ]
    sentence = "AssertionError: attention over the selected blocks differs from one process (on rank 0)"
    assert told(lambda a, b: a.dtype.kind == "i")[2] == sentence


def test_bytes_beyond_the_plan_are_reported(monkeypatch):
    count = itertools.count()
    monkeypatch.setattr(_check.Counting, "__init__", lambda self, comm: vars(self).update(_comm=comm))
    monkeypatch.setattr(_check.Counting, "sent", property(lambda self: next(count)), raising=False)
    sentence = "expected 0 bytes to be sent with dispatch='cut', as the plan says, got 1"
    assert _check.outcome(Alone(), _check.check_prefill) == f"AssertionError: {sentence} (on rank 0)"


def test_without_the_checks_there_is_only_a_report(capsys):
    assert _check.run(Alone(), False) == 0
    said = capsys.readouterr().out
    assert "on 1 rank\n" in said
    assert "passed" not in said


def test_a_warning_about_ranks_that_share_cpus():
    def place(host, threads, *cpus):
        return _comm.Place(host, cpus, "avx2", threads, 7)

    lines = _check.describe([place("a", 2, 0, 1), place("a", 2, 2, 3), place("b", 1, 0)])
    assert lines[1].split() == ["0", "a", "7", "0-1", "2", "avx2"]
    assert len(lines) == 4
    lines = _check.describe([place("a", 2, 0, 1), place("a", 2, 0, 1, 2)])
    assert lines[3] == "warning: ranks 0 and 1 on a may both use CPUs 0-1"
    assert lines[5] == "warning: 2 ranks on a run 4 threads on 3 CPUs"
    assert _check.ranges_text((0, 1, 2, 5, 7, 8)) == "0-2,5,7-8"
