"""One step of the engine: its requests, cut into runs that attend alike, with one plan per run for the calls of all layers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from ..._paged.plan import PagedPlan

# The most queries of a request that decodes: its new token and drafts. A request that is past its prompt and has more queries
# was preempted, and computes tokens again.
MOST_NEW_TOKENS = 32


class Run(NamedTuple):
    """Neighbouring requests that attend alike: "dense", "quest" (new tokens over chosen pages) or "sparse" (one prompt, over chosen
    blocks)."""

    how: str
    first: int  # requests
    end: int


@dataclass
class Step:
    """Tables and lengths of all requests of a step. No array shares memory with the engine's tensors, which change."""

    begins: np.ndarray  # (requests + 1,): the first query of each request
    seq_lens: np.ndarray  # (requests,)
    tables: np.ndarray  # (requests, blocks)
    block_size: int
    prefilling: np.ndarray  # (requests,): whether the queries are tokens of the prompt
    causal: bool | np.ndarray = True  # one flag for all requests, or one per request
    _made: dict[Any, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.requests = len(self.seq_lens)
        self.q_lens = np.diff(self.begins)

    def _once(self, key: Any, make: Callable[[], Any]) -> Any:
        """The result of `make`, which is called for the first layer that needs it."""
        if key not in self._made:
            self._made[key] = make()
        return self._made[key]

    def queries(self, run: Run) -> slice:
        """The queries of the requests of a run."""
        return slice(int(self.begins[run.first]), int(self.begins[run.end]))

    def runs(self, prompts_from: int | None, decode_budget: int | None) -> list[Run]:
        """The runs of a layer that leaves out blocks of prompts with at least `prompts_from` tokens, and pages beyond `decode_budget`
        tokens."""
        found: list[Run] = self._once(("runs", prompts_from, decode_budget), lambda: self._cut(prompts_from, decode_budget))
        return found

    def _cut(self, prompts_from: int | None, decode_budget: int | None) -> list[Run]:
        if (prompts_from is None and decode_budget is None) or self.causal is not True:
            return [Run("dense", 0, self.requests)]
        runs: list[Run] = []
        of_requests = zip(self.q_lens.tolist(), self.seq_lens.tolist(), self.prefilling.tolist(), strict=True)
        for i, (queries, tokens, prefilling) in enumerate(of_requests):
            how = "dense"
            if prefilling:
                if prompts_from is not None and tokens >= prompts_from:
                    how = "sparse"
            elif decode_budget is not None and tokens > decode_budget and queries <= MOST_NEW_TOKENS:
                how = "quest"
            if runs and how != "sparse" and runs[-1].how == how:
                runs[-1] = Run(how, runs[-1].first, i + 1)
            else:
                runs.append(Run(how, i, i + 1))
        return runs

    def plan(self, run: Run, **options: Any) -> PagedPlan:
        """The plan of a run, for layers with these options of `PagedPlan`."""
        tables, lens, q_lens = (x[run.first : run.end] for x in (self.tables, self.seq_lens, self.q_lens))
        found: PagedPlan = self._once(
            (run, tuple(options.items())),
            lambda: PagedPlan(tables, lens, page_size=self.block_size, q_lens=q_lens, kv_layout="HND", **options),
        )
        return found

    def ranges(self, window: int | None) -> np.ndarray | None:
        """The tokens that each query sees: (queries, 2). Returns None if one flag says that all requests are causal. `window`: how many
        tokens before itself a query sees and, if its request is not causal, how many after itself; None: all of them."""
        if self.causal is True:
            return None
        found: np.ndarray = self._once(("ranges", window), lambda: self._ranges(window))
        return found

    def _ranges(self, window: int | None) -> np.ndarray:
        causal = np.broadcast_to(np.asarray(self.causal, bool), self.requests)
        tokens = np.repeat(self.seq_lens, self.q_lens)
        at = np.arange(self.begins[-1]) - np.repeat(self.begins[:-1] - (self.seq_lens - self.q_lens), self.q_lens)
        first = np.zeros_like(at) if window is None else np.maximum(0, at - window)
        end = tokens if window is None else np.minimum(tokens, at + window + 1)
        return np.stack([first, np.where(np.repeat(causal, self.q_lens), at + 1, end)], axis=1)

    def touched(self) -> tuple[np.ndarray, np.ndarray]:
        """Page tables with only the blocks that hold the step's new tokens, and for each request the number of tokens in these blocks."""
        found: tuple[np.ndarray, np.ndarray] = self._once("touched", self._touched)
        return found

    def _touched(self) -> tuple[np.ndarray, np.ndarray]:
        first = (self.seq_lens - self.q_lens) // self.block_size
        count = -(-self.seq_lens // self.block_size) - first
        columns = np.minimum(first[:, None] + np.arange(max(1, count.max(initial=0))), self.tables.shape[1] - 1)
        lens = np.where(self.q_lens > 0, self.seq_lens - first * self.block_size, 0)
        return np.take_along_axis(self.tables, columns, axis=1), lens
