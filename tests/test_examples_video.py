"""examples/video.py: the same noise is denoised with each way to attend."""

import csv
import importlib.util
import io
from pathlib import Path

import pytest

import blitz_attn

torch = pytest.importorskip("torch")
pytest.importorskip("diffusers", minversion="0.42")


@pytest.fixture(scope="module")
def script():
    path = Path(__file__).resolve().parent.parent / "examples" / "video.py"
    spec = importlib.util.spec_from_file_location("video_example", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_that_ways_differ_from_the_first_sparse_step_on(script, capsys, tmp_path):
    threads = torch.get_num_threads()
    try:
        check(script, capsys, tmp_path)
    finally:
        torch.set_num_threads(threads)
        blitz_attn.set_num_threads(None)


def check(script, capsys, tmp_path):
    told = ["--grids", "5x16x16", "--steps", "4", "--dense-steps", "2", "--heads", "1", "--layers", "1", "--dtype", "float32"]
    assert script.main(told) == 0
    table = capsys.readouterr().out
    rows = {row["way"]: row for row in csv.DictReader(io.StringIO(table))}
    assert list(rows) == ["dense", *(x for x in script.ways(0) if x != "dense")]
    for way, row in rows.items():
        errors = [float(x) for x in row["error"].split()]
        assert len(errors) == 4
        if way == "sdpa":
            assert max(errors) < 1e-4
        else:
            assert errors[:2] == [0, 0]  # the same bits: dense steps are attention over all blocks
            assert (max(errors[2:]) > 1e-3) == (way != "dense")
        assert 0 < float(row["density"]) <= 1
        assert 0 < float(row["attention"]) < 1
    file = tmp_path / "table.csv"
    file.write_text(table)
    pytest.importorskip("matplotlib")
    assert script.main(["--draw", str(file), "-o", str(tmp_path / "x.png")]) == 0
    assert (tmp_path / "x.png").stat().st_size > 1000


def test_what_the_script_refuses(script, capsys):
    for told, sentence in (
        (["--grids", "8x16"], "expected frames x height x width in tokens, such as 8x32x32, got '8x16'"),
        (["--dense-steps", "8"], "--dense-steps: expected at least 0 and fewer than --steps, got 8"),
    ):
        with pytest.raises(SystemExit):
            script.main(told)
        assert sentence in capsys.readouterr().err
