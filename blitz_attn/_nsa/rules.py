"""The rules of a call of native sparse attention: sizes, strides and counts, checked."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from .. import _arrays
from .._float_mode import in_usual_mode

MOST = 2**30 - 1  # the largest size or number: the core's limit
CMP_GROUP = 128  # compressed keys that num_cmp_selected_blocks counts as one block


def number(x: Any, name: str, least: int = 1) -> int:
    value = _arrays.integer(x, name)
    if value < least:
        raise ValueError(f"{name}: expected {'a positive number' if least == 1 else f'{least} or more'}, got {value}")
    if value > MOST:
        raise ValueError(f"{name}: expected at most {MOST}, got {value}")
    return value


@in_usual_mode
def scale_of(scale: Any, dim: int) -> float:
    if scale is None:
        return 1 / math.sqrt(max(1, dim))
    value = _arrays.number(scale, "scale")
    if not math.isfinite(value):
        raise ValueError(f"scale: expected a finite number, got {value}")
    return value


def threads_of(num_threads: Any) -> int | None:
    return None if num_threads is None else number(num_threads, "num_threads")


def mode_of(mode: Any) -> str:
    return _arrays.choice(mode, "mode", ("paper", "mslk"))


@dataclass(frozen=True)
class Rules:
    """How blocks are compressed, seen and selected."""

    mode: str
    size: int  # l: tokens per compressed block
    stride: int  # d: tokens from the start of one compressed block to the next
    select: int  # l': tokens per selected block
    count: int  # n: entries of a row of a selection
    tile: int  # queries that share a selection
    init: int  # always selected: blocks at the start of the keys
    local: int  # always selected: blocks up to and with the query's own (not causal: around it)
    causal: bool

    @property
    def by_query(self) -> bool:
        return self.mode == "paper"

    @property
    def last(self) -> int:
        """Tokens from a compressed block's beginning to the first query that sees it."""
        return self.size - 1 if self.by_query else 0

    def rows(self, tokens: int) -> int:
        return -(-tokens // self.tile)


def window_and_groups(window_size: Any, num_cmp_selected_blocks: Any, rules: Rules) -> tuple[int, int | None]:
    """`window_size` and `num_cmp_selected_blocks`, checked."""
    window = number(window_size, "window_size")
    groups = None if num_cmp_selected_blocks is None else number(num_cmp_selected_blocks, "num_cmp_selected_blocks")
    if groups is not None and rules.by_query:
        raise ValueError(f'num_cmp_selected_blocks: expected None in mode "paper", got {groups}')
    return window, groups


def rules_of(
    mode: Any, compress_block_size: Any, num_selected_blocks: Any, q_tile_size: Any, compress_stride: Any, select_block_size: Any,
    init_blocks: Any, local_blocks: Any, causal: Any,
) -> Rules:  # fmt: skip
    """Checked rules, with the defaults of the mode."""
    mode, causal = mode_of(mode), _arrays.flag(causal, "causal")
    size, count = number(compress_block_size, "compress_block_size"), number(num_selected_blocks, "num_selected_blocks")
    tile = number(q_tile_size, "q_tile_size")
    stride = None if compress_stride is None else number(compress_stride, "compress_stride")
    select = None if select_block_size is None else number(select_block_size, "select_block_size")
    init, local = number(init_blocks, "init_blocks", 0), number(local_blocks, "local_blocks", 0)
    if mode == "mslk":
        for name, value in (("compress_stride", stride), ("select_block_size", select)):
            if value is not None and value != size:
                raise ValueError(f'{name}: expected None or compress_block_size = {size} in mode "mslk", got {value}')
        return Rules(mode, size, size, size, count, tile, 0, 0, causal)
    stride, select = stride or max(1, size // 2), select or size
    for name, value in (("compress_block_size", size), ("select_block_size", select)):
        if value % stride:
            own = "" if compress_stride is not None else "the default compress_block_size // 2 = "
            raise ValueError(f"compress_stride: expected a divisor of {name} = {value}, got {own}{stride}")
    if init + local > count:
        raise ValueError(f"num_selected_blocks: expected at least init_blocks + local_blocks = {init + local}, got {count}")
    return Rules(mode, size, stride, select, count, 1, init, local, causal)
