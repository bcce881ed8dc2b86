"""Time block lists in turns with dense attention over the same operands, check the outputs, and say how far from ideal they are."""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

import check
import roofline
from _bench import Contender, Progress, Timing, in_turns
from operands import Operands, dense_pairs, flops, kept_pairs
from other_libraries import UnavailableError, torch_sdpa, torch_tensor

PEAK_SECONDS = 0.05
SETTLE_SECONDS = 0.3  # NumPy's threads, which checked the result before, still wait busily for a while


@dataclass
class Job:
    """One block list to measure. `tag` is the caller's."""

    tag: Any
    block_shape: tuple[int, int]
    sabi: np.ndarray
    label: str = ""


@dataclass
class Result:
    """What was measured: `values` are the table's columns after the key columns."""

    values: dict[str, Any]
    reference: Timing
    own: Timing
    peak: float  # F in GFLOP/s, the median over the turns


def dense_call(operands: Operands, reference: str, threads: int) -> Callable[[], Any]:
    """Dense attention over the operands: `own` writes into `operands.out`, `torch` is torch's scaled_dot_product_attention."""
    if reference == "own":
        return operands.call(None, (128, 128), threads)
    options = {"is_causal": bool(operands.options.get("causal")), "scale": operands.options.get("scale")}
    if operands.views[1].shape[1] != operands.views[0].shape[1]:
        options["enable_gqa"] = True
    try:
        return torch_sdpa([tuple(torch_tensor(x, operands.dtype) for x in operands.views[:3])], threads, **options)[0]
    except UnavailableError:
        raise SystemExit("benchmark.py: --reference torch: torch is not installed: pip install torch, or use --reference own") from None


def _shape(operands: Operands) -> tuple[int, int, int, int, int, int]:
    """Heads of all batches, S_q, S_kv, D, D_v and the pairs of one dense head."""
    q, k, v, _ = operands.views
    pairs = dense_pairs(q.shape[2], k.shape[2], bool(operands.options.get("causal")))
    return q.shape[0] * q.shape[1], q.shape[2], k.shape[2], q.shape[3], v.shape[3], pairs


def dense_work(operands: Operands) -> float:
    """Floating-point operations of dense attention over the operands."""
    heads, _, _, head_dim, v_dim, pairs = _shape(operands)
    return heads * flops(pairs, head_dim, v_dim)


def is_equal(operands: Operands, job: Job, wanted_rows: int, seed: int) -> bool:
    """Whether `operands.out` holds the right answer for the job: every element written, sampled rows equal to the float64 reference."""
    q, k, v, out = operands.views
    if check.poisoned(operands.out):
        return False
    return check.outputs_equal(
        out, q, k, v, job.sabi, job.block_shape, wanted_rows=wanted_rows, seed=seed,
        scale=operands.options.get("scale"), causal=bool(operands.options.get("causal")), dtype=operands.bits,
    )  # fmt: skip


def measured(operands: Operands, jobs: Sequence[Job], args: argparse.Namespace, progress: Progress) -> Iterator[tuple[Job, Result]]:
    """Measure the jobs; each is yielded right after its last sample, with its result still in `operands.out`."""
    heads, s_q, s_kv, head_dim, v_dim, all_pairs = _shape(operands)
    causal = bool(operands.options.get("causal"))
    pairs = [kept_pairs(job.sabi, s_q, s_kv, job.block_shape, causal) for job in jobs]
    work = [heads * flops(count, head_dim, v_dim) for count in pairs]

    peaks: list[float] = []  # F is measured in the same turns: what else the machine does hits it as it hits the calls

    def measure_peak() -> None:
        peaks.append(roofline.peak_flops(args.threads, seconds=PEAK_SECONDS))

    def prepare() -> None:
        check.poison(operands.out)
        if args.repeats == 1:  # a turn can last minutes then: one measurement a row
            peaks.clear()
            time.sleep(SETTLE_SECONDS)
            measure_peak()

    contenders = [
        Contender("limit", measure_peak, 0.0),
        Contender("dense", dense_call(operands, args.reference, args.threads), heads * flops(all_pairs, head_dim, v_dim)),
    ]
    ahead = len(contenders)
    for job, cost in zip(jobs, work, strict=True):
        contenders.append(Contender(job.label, operands.call(job.sabi, job.block_shape, args.threads), cost, before_last=prepare))
    reference = Timing([])
    for index, timing in in_turns(contenders, args.repeats, args.warmup, progress):
        if index < ahead:
            reference = timing
            continue
        peak = statistics.median(peaks)
        job, cost, count = jobs[index - ahead], work[index - ahead], pairs[index - ahead]
        equal = is_equal(operands, job, args.check_rows, args.seed) if args.run_reference else None
        rate = cost / timing.median / 1e9
        values = {
            "Outputs_equal": None if equal is None else "yes" if equal else "no",
            "Ref_Latency_[usec]": reference.median * 1e6,
            "Our_Latency_[usec]": timing.median * 1e6,
            "GFLOP/s": rate,
            "Share_of_ideal": reference.median / timing.median * count / all_pairs,
            "Share_of_F": rate / peak if peak > 0 else None,
        }
        yield job, Result(values, reference, timing, peak)
