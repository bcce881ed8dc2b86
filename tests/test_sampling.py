"""The way the suite itself runs: a run in several processes runs each test once, and loses no failure."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent


# ---- Several processes ----------------------------------------------------------------------------------------------

FILES = {
    "passes": "import pytest\n@pytest.mark.parametrize('n', range(5))\ndef test_one(n): pass\ndef test_two(): pytest.skip('no reason')\n",
    "also_passes": "def test_three(): pass\n",
    "fails": "def test_four(): assert 1 == 2, 'what went wrong'\n",
    "has_no_setup": "import pytest\n@pytest.fixture\ndef broken(): raise ValueError\ndef test_five(broken): pass\n",
    "breaks_down": "import os\ndef test_six(): os._exit(0)\n",
    "cannot_be_imported": "import there_is_no_such_module\n",
}


def run_suite(folder, names, *arguments):
    """(exit status, output lines) of tests/run.py over the files of these names, in two processes."""
    (folder / "pytest.ini").write_text("[pytest]\n", encoding="utf-8")
    for name in names:
        (folder / f"test_{name}.py").write_text(FILES[name], encoding="utf-8")
    environment = {
        **os.environ,
        "BLITZ_ATTN_TEST_PROCESSES": "2",
        "SAMPLE_SEED": "7",
        "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
    }  # without plugins, which take long to import
    command = [sys.executable, str(HERE / "run.py"), *arguments]
    done = subprocess.run(
        command, cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=600, check=False
    )
    return done.returncode, done.stdout.splitlines()


def test_processes_together_run_each_test_once(tmp_path):
    status, lines = run_suite(tmp_path, ["passes", "also_passes"])
    assert status == 0
    assert "= 6 passed, 1 skipped in " in lines[-1]
    assert "SAMPLE_SEED=7" in lines[0]


@pytest.mark.parametrize(
    ("name", "told"),
    [("fails", "what went wrong"), ("has_no_setup", "ValueError"), ("breaks_down", "broke down"), ("cannot_be_imported", "ModuleNotFoundError")],
)  # fmt: skip
def test_no_failure_is_lost(name, told, tmp_path):
    status, lines = run_suite(tmp_path, ["passes", "also_passes", name])
    assert status == 1
    assert any(told in line for line in lines)
    assert "failed" in lines[-1] or "error" in lines[-1]
    assert "SAMPLE_SEED=7" in lines[-2]
