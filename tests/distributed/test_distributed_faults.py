"""A rank that dies ends the job, or with ULFM the others go on and have the same bits."""

import re

import pytest

import launcher

SHARED_MEMORY, TCP = (), ("--mca", "btl", "tcp,self", "--mca", "pml", "ob1")


def need(library):
    how = launcher.starter(library)
    if isinstance(how, str):
        pytest.skip(how)


@pytest.mark.parametrize("how", ["raises", "killed"])
@pytest.mark.parametrize("library", ["openmpi", pytest.param("mpich", marks=pytest.mark.long)])
def test_a_rank_that_dies_ends_the_job(library, how):
    need(library)
    job = launcher.run(launcher.HERE / "dies.py", how, ranks=3, library=library, seconds=60)
    assert job.status not in (0, None), job.output
    assert job.seconds < 30
    if how == "raises":
        assert "OSError: the disk of this rank is gone" in job.output
    named = {"openmpi": r"(?i)process (rank|name).*\b1\b|rank 1\b", "mpich": r"(?i)rank 1\b|process 1\b|\[1\]|EXIT CODE: 9"}[library]
    assert re.search(named, job.output), job.output


def survivors(options, ranks, deaths, seed):
    need("openmpi")
    job = launcher.run(
        launcher.HERE / "ulfm.py", deaths, seed, ranks=ranks, options=("--with-ft", "ulfm", *options), seconds=60, python=()
    )  # fmt: skip
    said = re.findall(rf"survivor \d+: {ranks - deaths} of {ranks} ranks, same bits", job.output)
    assert len(said) == ranks - deaths, job
    assert job.status == 0, job


def test_survivors_have_the_same_bits():
    survivors(SHARED_MEMORY, 3, 1, 0)


@pytest.mark.long
@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("options", [SHARED_MEMORY, TCP], ids=["shared memory", "tcp"])
def test_survivors_have_the_same_bits_20_times(options, seed):
    survivors(options, 4 + seed % 3, 1 + seed % 2, seed)
