"""The examples that judge choosers by a model, with a small random model in the place of the real one."""

import argparse
import json
import sys
from pathlib import Path

import numpy as np
import pytest

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"
sys.path.insert(0, str(EXAMPLES))

import perplexity as example  # noqa: E402


@pytest.fixture(scope="module")
def small():
    """A model of two layers, and tokens for it."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers", minversion="5.0")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=61, hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        max_position_embeddings=512, initializer_range=0.3,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config).eval(), torch.randint(61, (1, 300))


def arguments(*argv):
    return example.parse_args([str(x) for x in argv])


@pytest.mark.parametrize("budget", ["top_p", "density"])
def test_rows_meet_their_density_and_dense_is_torchs(small, budget):
    args = arguments("--densities", 1, 0.6, "--choosers", "pooled", "sampled_rows", "--block", "16x16", "16x8", "--budget", budget)
    rows = list(example.rows_of(*small, args))
    assert [row.chooser for row in rows] == ["sdpa", "dense", *["pooled", "sampled_rows"] * 2]
    assert abs(rows[1].perplexity / rows[0].perplexity - 1) < 1e-4
    for row in rows[2:]:
        assert abs(row.reached - 0.6) < 0.03
        assert 0.6 < row.mass < 1
        assert row.rise == row.perplexity / rows[1].perplexity - 1 != 0
        assert 0 < row.choosing_s < row.prefill_s
        assert 0 < row.attention_s < row.prefill_s


def test_masses_and_profiles_are_rows_too(small, tmp_path):
    model, ids = small
    from blitz_attn import select

    profile = select.Profile(4, 2, 8, select.Pooled(), (16, 16), "top_p", ((0.5,) * 4, (1.0,) * 4), "mass", 0.9)
    profile.save(tmp_path / "own.json")
    args = arguments("--densities", 1, "--block", "16x16", "--top-p", 1, "--profile", tmp_path / "own.json")
    whole, own = list(example.rows_of(model, ids, args))[2:]
    assert (whole.reached, whole.mass, whole.rise) == (1, 1, 0)
    assert own.chooser == "own"
    assert 0.5 < own.reached < 1


def test_a_figure_is_drawn_from_rows_of_json(tmp_path):
    pytest.importorskip("matplotlib")
    common = {"text": "a", "block": "64x64", "budget": "top_p"}
    numbers = [("sdpa", 1, 10, 3), ("dense", 1, 10, 2), ("pooled", 0.5, 10.1, 1.5), ("pooled", 0.25, 10.3, 1)]
    names = ("chooser", "reached", "perplexity", "prefill_s")
    lines = [json.dumps(common | dict(zip(names, x, strict=True))) for x in numbers]
    (tmp_path / "rows.json").write_text("\n".join(lines), encoding="utf-8")
    left, right = example.draw([json.loads(x) for x in lines]).axes
    assert np.allclose(left.lines[0].get_xydata(), [[0.25, 3], [0.5, 1]])
    assert np.allclose(right.lines[0].get_xydata(), [[1, 3], [1.5, 1]])
    assert [x.get_xydata().tolist() for x in right.lines[1:]] == [[[2, 0]], [[3, 0]]]
    assert example.main(["--redraw", str(tmp_path / "rows.json"), "--figure", str(tmp_path / "rows.png")]) == 0
    assert (tmp_path / "rows.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("argv", "sentence"),
    [
        (["--text", "nowhere.txt"], "--text: no such file: nowhere.txt"),
        (["--tokens", "1"], "--tokens: expected at least 2, got 1"),
        (["--threads", "0"], "--threads: expected at least 1, got 0"),
        (["--block", "60x60"], "pool: expected a divisor of block_shape[0] = 60, got 8"),
        (["--profile", str(EXAMPLES / "perplexity.py")], "path: expected a profile in JSON"),
        (["--redraw", __file__], "--redraw: expected --figure beside it"),
    ],
)
def test_bad_input_is_refused_before_any_work(argv, sentence, capsys, monkeypatch):
    monkeypatch.setattr(example, "load", lambda *_: pytest.fail("the model was loaded"))
    text = [] if "--text" in argv else ["--text", __file__]
    assert example.main([*text, *argv]) == 1
    assert sentence in capsys.readouterr().err


@pytest.mark.parametrize(
    ("parse", "text"), [(example.block_of, "64"), (example.block_of, "0x64"), (example.share_of, "1.5"), (example.share_of, "nan")]
)
def test_bad_numbers_are_refused(parse, text):
    with pytest.raises(argparse.ArgumentTypeError, match="expected"):
        parse(text)
