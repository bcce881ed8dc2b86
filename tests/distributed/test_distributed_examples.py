"""The examples of context parallelism run, and their results are those of one process."""

import subprocess
import sys

import pytest

import launcher

EXAMPLES = launcher.ROOT / "examples"


def run(*arguments, ranks=2, seconds=300):
    how = launcher.starter("openmpi")
    if isinstance(how, str):
        pytest.skip(how)
    job = launcher.run(EXAMPLES / "context_parallel.py", *arguments, ranks=ranks, seconds=seconds)
    assert job.status == 0, job.output
    return job.output


@pytest.mark.long
@pytest.mark.parametrize("ranks", [1, 3])
def test_a_layer(ranks):
    assert "bits: those of one process" in run("--tokens", "2048", "--heads", "4", "--check", ranks=ranks)


@pytest.mark.model
def test_a_model():
    said = run("--tokens", "1024", "--model", "--model-tokens", "512")
    if "left out" in said:
        pytest.skip(said.splitlines()[-1])
    assert "100.00 % choose the same token" in said


@pytest.mark.long
def test_a_job_is_started_again_after_a_death():
    how = launcher.starter("openmpi")
    if isinstance(how, str):
        pytest.skip(how)
    command, environment = how
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / "context_parallel_ray.py"), "--no-ray", "--kill", "--mpirun", " ".join(command)],
        env={**launcher.os.environ, **environment, "PYTHONPATH": launcher.package_folder()}, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done
    assert done.stdout.count("the bits of one process") == 2
    assert "attempt 1: status 137" in done.stdout
    assert "attempt 2: status 0" in done.stdout
