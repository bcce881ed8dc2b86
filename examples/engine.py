#!/usr/bin/env python3
"""A continuous-batching engine on NumPy and blitz_attn alone; the guide "Building an engine" goes through it step by step.

    python examples/engine.py --check                        # 60 requests to a small random model, in about a second
    python examples/engine.py --kv-dtype int8                # the cache in 8 bits
    python examples/engine.py --model smollm2 --requests 8   # a real model: examples/numpy_llama.py says what to install

Requests come and go while others run. In each step, running requests compute one token each, or chunks of their prompts, and all of them
share one call of the model and one paged attention call per layer. Full pages are shared among requests that begin alike. When pages run
out, the newest request gives up its pages and computes its tokens again later. Tokens are chosen greedily.

`--check` then runs each request by itself. With a float32 cache, it must get the same tokens (the exit code is 1 if a request does not).
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent))

from numpy_llama import Llama, random_llama, smollm2

import blitz_attn

# ---- The engine ---------------------------------------------------------------------------------------------------


@dataclass(eq=False)
class Request:
    """A prompt, and the tokens that have been generated."""

    tokens: list[int]  # the prompt, then the new tokens
    prompt: int  # how many of them are the prompt's
    end: int  # with this many tokens, the request is complete
    pages: list[int] = field(default_factory=list)  # none: the request waits
    cached: int = 0  # how many of the tokens are in the pages
    hashes: list[bytes] = field(default_factory=list)  # of full pages

    @property
    def missing(self) -> int:
        """Tokens that are not in the cache: one in decode, mostly more in prefill."""
        return len(self.tokens) - self.cached

    def hash_pages(self, page_size: int) -> list[bytes]:
        """Hashes of the pages that the tokens fill. Each covers all tokens up to the end of its page."""
        for begin in range(len(self.hashes) * page_size, len(self.tokens) - page_size + 1, page_size):
            before = self.hashes[-1] if begin else b""
            self.hashes.append(sha256(before + np.array(self.tokens[begin : begin + page_size]).tobytes()).digest())
        return self.hashes


class Pages:
    """Which pages are free, how many requests hold each page, and which tokens full pages contain."""

    def __init__(self, number: int) -> None:
        self.holders = [0] * number
        self.free = dict.fromkeys(range(number))  # in the order of their release
        self.known: dict[bytes, int] = {}  # the page with this hash, held or free
        self.hashes: list[bytes] = [b""] * number

    def find(self, hashes: list[bytes]) -> list[int]:
        """The pages of the longest beginning of these hashes whose pages are all in the cache."""
        found: list[int] = []
        while len(found) < len(hashes) and hashes[len(found)] in self.known:
            found.append(self.known[hashes[len(found)]])
        return found

    def hold(self, page: int) -> None:
        self.free.pop(page, None)
        self.holders[page] += 1

    def take(self) -> int:
        """A page to write to: the page that has been free for longest. Its content is forgotten."""
        page = next(iter(self.free))
        self.known.pop(self.hashes[page], None)
        self.hashes[page] = b""
        self.hold(page)
        return page

    def release(self, pages: list[int]) -> None:
        """Give pages back. They keep their content until they are taken again; the first pages of a request are taken last."""
        for page in reversed(pages):
            self.holders[page] -= 1
            if not self.holders[page]:
                self.free[page] = None

    def publish(self, page: int, content: bytes) -> None:
        """Let other requests find a full page."""
        if content not in self.known:
            self.known[content] = page
            self.hashes[page] = content


class Engine:
    """Runs requests to a model over a paged cache. `budget`: the most tokens of a step."""

    def __init__(self, model: Llama, pages: int, page_size: int = 16, budget: int = 64, kv_dtype: str = "float32", stop: int = -1) -> None:
        self.model, self.page_size, self.budget, self.stop = model, page_size, budget, stop
        self.pages = Pages(pages)
        shape = len(model.layers), pages, page_size, model.kv_heads
        self.k, self.v = (np.zeros((*shape, model.head_dim), kv_dtype) for _ in range(2))
        self.scales: list[dict[str, np.ndarray]] = [{} for _ in model.layers]
        if kv_dtype == "int8":  # one scale per token and head
            self.scales = [{name: np.zeros(shape[1:], np.float32) for name in ("k_scale", "v_scale")} for _ in model.layers]
        self.requests: list[Request] = []  # in order of arrival. Those that hold pages come first; the others wait.
        self.steps = self.computed = self.shared = self.preemptions = 0

    def submit(self, prompt: Sequence[int], new_tokens: int) -> Request:
        if not len(prompt) or new_tokens < 1 or -(-(len(prompt) + new_tokens) // self.page_size) > len(self.pages.holders):
            raise ValueError(f"prompt: expected tokens that fit into the cache with new ones, got {len(prompt)} and {new_tokens}")
        self.requests.append(Request([int(x) for x in prompt], len(prompt), len(prompt) + new_tokens))
        return self.requests[-1]

    def cancel(self, request: Request) -> None:
        """Drop a request, between two steps. Complete requests leave in the same way."""
        self.requests.remove(request)
        self.pages.release(request.pages)

    def preempt(self, request: Request) -> None:
        """Take a request's pages away. It waits, and later computes again whatever is no longer in the cache."""
        self.pages.release(request.pages)
        request.pages, request.cached = [], 0
        self.preemptions += 1

    def admit(self, request: Request) -> bool:
        """Give a waiting request the pages of all its tokens, if there are enough: shared pages that hold its beginning, and free pages."""
        known = request.hash_pages(self.page_size)[: (len(request.tokens) - 1) // self.page_size]  # at least one token is left to compute
        found = self.pages.find(known)
        new = -(-len(request.tokens) // self.page_size) - len(found)
        if new + sum(not self.pages.holders[page] for page in found) > len(self.pages.free):
            return False
        for page in found:
            self.pages.hold(page)
        request.pages = found + [self.pages.take() for _ in range(new)]
        request.cached = len(found) * self.page_size
        self.shared += request.cached
        return True

    def grow(self, request: Request) -> bool:
        """Give a running request a page for its newest token, if it needs one. If none is free, the newest requests are preempted."""
        while len(request.tokens) > len(request.pages) * self.page_size:
            if self.pages.free:
                request.pages.append(self.pages.take())
                continue
            newest = next(x for x in reversed(self.requests) if x.pages)
            self.preempt(newest)
            if newest is request:
                return False
        return True

    def schedule(self) -> list[tuple[Request, int]]:
        """The requests of the next step, and how many tokens each one computes: first requests that decode, then
        requests in prefill, then waiting requests that are admitted."""
        running = sorted((x for x in self.requests if x.pages), key=lambda x: x.missing > 1)[: self.budget]
        ready = [x for x in running if x.pages and self.grow(x)]  # growing may take the pages of requests further behind
        for request in [x for x in self.requests if not x.pages]:
            if sum(x.missing for x in ready) >= self.budget or not self.admit(request):
                break  # no later request overtakes this one
            ready.append(request)
        work, left = [], self.budget
        for request in ready:
            work.append((request, min(request.missing, left)))
            left -= work[-1][1]
        return [(request, n) for request, n in work if n]

    def step(self) -> list[Request]:
        """Run the model once. Returns the requests that are complete. Where the model or attention raises, the step can be repeated."""
        work = self.schedule()
        if not work:
            return []
        counts = [n for _, n in work]
        lengths = [request.cached + n for request, n in work]
        tables = np.zeros((len(work), max(len(request.pages) for request, _ in work)), np.int32)
        for row, (request, _) in zip(tables, work, strict=True):
            row[: len(request.pages)] = request.pages
        plan = blitz_attn.PagedPlan(tables, lengths, q_lens=counts, page_size=self.page_size, num_pages=len(self.pages.holders))

        def attend(layer: int, q: np.ndarray, k: np.ndarray, v: np.ndarray) -> np.ndarray:
            cache = self.k[layer], self.v[layer]
            plan.append(k, v, *cache, **self.scales[layer])
            return plan.attention(q, *cache, **self.scales[layer])

        tokens = np.concatenate([request.tokens[request.cached :][:n] for request, n in work])
        positions = np.concatenate([request.cached + np.arange(n) for request, n in work])
        logits = self.model.forward(tokens, positions, attend, np.cumsum(counts) - 1)
        for (request, n), row in zip(work, logits, strict=True):
            hashes = request.hash_pages(self.page_size)
            for number in range(request.cached // self.page_size, (request.cached + n) // self.page_size):
                self.pages.publish(request.pages[number], hashes[number])
            request.cached += n
            if not request.missing:
                request.tokens.append(int(row.argmax()))
        self.steps, self.computed = self.steps + 1, self.computed + len(tokens)
        complete = [x for x, _ in work if len(x.tokens) == x.end or (len(x.tokens) > x.prompt and x.tokens[-1] == self.stop)]
        for request in complete:
            self.cancel(request)
        return complete


# ---- Loads, and what each request gets by itself -----------------------------------------------------------------


SYSTEM = "You are a helpful assistant who answers questions about the countries of the world in one short and polite sentence."
COUNTRIES = ("France", "Japan", "Peru", "Kenya")


@dataclass
class Arrival:
    """A request of a load. Steps are counted from 0."""

    step: int
    prompt: list[int]
    new_tokens: int
    cancelled_at: int | None = None


def drawn_load(rng: np.random.Generator, requests: int, vocabulary: int, longest: int = 96, new_tokens: int = 32) -> list[Arrival]:
    """Requests that arrive one after the other. About half begin with one of three prefixes, and about one in eight is to be cancelled."""
    prefixes = [rng.integers(vocabulary, size=n).tolist() for n in rng.integers(longest // 4, longest // 2, size=3)]
    load, step = [], 0
    for _ in range(requests):
        step += int(rng.integers(4))
        prefix = prefixes[rng.integers(3)] if rng.random() < 0.5 else []
        own = rng.integers(vocabulary, size=rng.integers(1, longest - len(prefix) + 1)).tolist()
        cancelled_at = step + int(rng.integers(1, 20)) if rng.random() < 0.125 else None
        load.append(Arrival(step, prefix + own, int(rng.integers(1, new_tokens + 1)), cancelled_at))
    return load


def chats(tokenizer: Any, requests: int, new_tokens: int = 48) -> list[Arrival]:
    """Questions to a chat model, one per step, which all begin with the same system prompt."""
    questions = [f"{what} {country}?" for country in COUNTRIES for what in ("What is the capital of", "Which languages do people speak in")]
    texts = [f"<|im_start|>{role}\n{text}<|im_end|>\n" for role, text in [("system", SYSTEM), *(("user", x) for x in questions)]]
    asked = [texts[0] + texts[1 + n % len(questions)] + "<|im_start|>assistant\n" for n in range(requests)]
    return [Arrival(step, tokenizer.encode(text).ids, new_tokens) for step, text in enumerate(asked)]


def serve(engine: Engine, load: list[Arrival]) -> list[Request]:
    """Run a load to its end. Returns all of its requests; cancelled requests are not complete."""
    requests: dict[int, Request] = {}
    step = 0
    while engine.requests or len(requests) < len(load):
        for number, arrival in enumerate(load):
            if arrival.step == step:
                requests[number] = engine.submit(arrival.prompt, arrival.new_tokens)
            if arrival.cancelled_at == step and requests[number] in engine.requests:
                engine.cancel(requests[number])
        engine.step()
        step += 1
    return [requests[number] for number in range(len(load))]


def agreement(requests: list[Request], engine: Engine) -> float:
    """The share of requests that get the same tokens by themselves in `engine`. Cancelled requests are compared as far as they had come."""
    same = 0
    for request in requests:
        alone = engine.submit(request.tokens[: request.prompt], request.end - request.prompt)
        engine.pages.known.clear()  # so that the request computes its whole prompt
        while engine.requests:
            engine.step()
        same += alone.tokens[: len(request.tokens)] == request.tokens
    return same / len(requests)


def parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=("random", "smollm2"), default="random", help="(%(default)s)")
    parser.add_argument("--requests", type=int, default=60, help="at least one (%(default)s)")
    parser.add_argument("--pages", type=int, default=40, help="pages of the cache (%(default)s)")
    parser.add_argument("--page-size", type=int, default=16, help="tokens of a page (%(default)s)")
    parser.add_argument("--budget", type=int, default=64, help="the most tokens of a step (%(default)s)")
    parser.add_argument("--kv-dtype", choices=("float32", "float16", "int8"), default="float32", help="of the cache (%(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of the load (%(default)s)")
    parser.add_argument("--check", action="store_true", help="compare each request with the same request by itself")
    return parser.parse_args(argv)


def run(args: argparse.Namespace) -> int:
    """Print the numbers and the time of the load. Returns 1 if the cache is float32 and a request has other tokens than by itself."""
    model, tokenizer = (random_llama(), None) if args.model == "random" else smollm2()
    sizes = args.pages, args.page_size, args.budget, args.kv_dtype
    engine = Engine(model, *sizes, stop=-1 if tokenizer is None else tokenizer.token_to_id("<|im_end|>"))
    if tokenizer is None:
        load = drawn_load(np.random.default_rng(args.seed), args.requests, len(model.embedding))
    else:
        load = chats(tokenizer, args.requests)
    start = time.perf_counter()
    requests = serve(engine, load)
    seconds = time.perf_counter() - start
    prompts, new = sum(x.prompt for x in requests), sum(len(x.tokens) - x.prompt for x in requests)
    print(f"{len(requests)} requests: {prompts} tokens of prompts and {new} new ones in {engine.steps} steps")
    print(f"{engine.computed} tokens computed, {engine.shared} found in shared pages, {engine.preemptions} preemptions")
    print(f"{seconds:.2f} s, {new / seconds:.0f} new tokens/s")
    for request in requests[:4] if tokenizer else ():
        print("-", tokenizer.decode(request.tokens[request.prompt :]))
    if not args.check:
        return 0
    same = agreement(requests, Engine(model, *sizes, stop=engine.stop))
    print(f"{same:.1%} of the requests have the tokens that they get by themselves")
    return int(same < 1 and args.kv_dtype == "float32")


def main(argv: Sequence[str] | None = None) -> int:
    try:
        return run(parse_args(argv))
    except (ImportError, ValueError) as error:
        print(f"engine.py: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
