"""A rank that dies ends the job. With ULFM, the other ranks go on and have the same bits."""

import re

import numpy as np
import pytest

import launcher
from blitz_attn.distributed import redistribute
from ranks import run, sentences

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


def survivors(what, options, ranks, deaths, seed):
    need("openmpi")
    job = launcher.run(
        launcher.HERE / "ulfm.py", what, deaths, seed, ranks=ranks, options=("--with-ft", "ulfm", *options), seconds=120, python=()
    )  # fmt: skip
    said = re.findall(rf"survivor \d+: {ranks - deaths} of {ranks} ranks, same bits", job.output)
    assert len(said) == ranks - deaths, job
    assert job.status == 0, job


@pytest.mark.parametrize("what", ["decode", pytest.param("prefill", marks=pytest.mark.long)])
def test_survivors_have_the_same_bits(what):
    survivors(what, SHARED_MEMORY, 3, 1, 0)


@pytest.mark.long
@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("options", [SHARED_MEMORY, TCP], ids=["shared memory", "tcp"])
@pytest.mark.parametrize("what", ["decode", "prefill"])
def test_survivors_have_the_same_bits_20_times(what, options, seed):
    survivors(what, options, 4 + seed % 3, 1 + seed % 2, seed)


# ---- Redistribution of tokens for a new plan ----------------------------------------------------------------------


def test_tokens_are_redistributed_for_a_new_plan():
    whole = np.random.default_rng(0).standard_normal((2, 3, 100, 4)).astype(np.float16)
    before = [[(0, 30), (70, 80)], [(30, 50), (0, 30)], [(50, 70), (80, 100)]]  # rank 1 has a copy of some tokens of rank 0
    after = [[(90, 100), (0, 5)], [(5, 90)], []]

    def shard(ranges):
        return np.concatenate([whole[:, :, :0], *(whole[:, :, a:b] for a, b in ranges)], axis=2)

    results = run(3, lambda comm: redistribute(shard(before[comm.Get_rank()]), before, after, comm=comm))
    for rank, result in enumerate(results):
        assert np.array_equal(result, shard(after[rank]))


def test_numbers_that_messages_cannot_have_are_refused():
    texts = sentences(2, lambda comm: redistribute(np.zeros(5, complex), [[(0, 5)], [(5, 10)]], [[], []], axis=0, comm=comm))
    assert texts == ["TypeError: x: expected numbers of 1, 2, 4 or 8 bytes, got complex128"] * 2


def test_tokens_that_no_rank_has_are_named():
    texts = sentences(2, lambda comm: redistribute(np.zeros(5), [[(0, 5)], [(5, 10)]], [[(0, 11)], []], axis=0, comm=comm))
    assert texts == ["ValueError: before: expected every token of after, got none that has token 10"] * 2
    texts = sentences(2, lambda comm: redistribute(np.zeros(4 + comm.Get_rank()), [[(0, 5)], [(5, 10)]], [[], []], axis=0, comm=comm))
    assert texts == ["ValueError: x: expected the 5 tokens of before, got shape (4,) (on rank 0)"] * 2
