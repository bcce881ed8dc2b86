"""Measures how quickly the fuzzer finds mistakes. Each is planted in a copy of the tree, which is built and fuzzed until a problem fails.

    make fuzz-mistakes            # all of them; ARGS="--only window join" some
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
COPY = ROOT / "build" / "mistakes"
FOLDERS = ("csrc", "blitz_attn", "tests")
FILES = ("setup.py", "README.md", "LICENSE", "pyproject.toml")


class Mistake(NamedTuple):
    name: str
    what: str
    file: str
    right: str
    wrong: str


MISTAKES = [
    Mistake(
        "padding",
        "tiles are cut by the padded length again",
        "csrc/ops/plan/plan.c",
        "return t->gradients ? q.rows : q.valid;",
        "return q.rows;",
    ),
    Mistake(
        "ragged",
        "queries of ragged requests stand at the beginning of their keys, not at the end",
        "csrc/ops/problem.h",
        "p->q_begin[batch] : kv_valid - q_valid);",
        "p->q_begin[batch] : p->page_size && p->cu_q && p->batch > 1 ? 0 : kv_valid - q_valid);",
    ),
    Mistake(
        "mask",
        "a mask is read as if the listed keys had no gaps",
        "csrc/kernels/panel/bias_tmpl.inc",
        "(real)NAME(mask_number)(dtype, row, key_index[i] * source->stride);",
        "(real)NAME(mask_number)(dtype, row, (*key_index + i) * source->stride);",
    ),
    Mistake(
        "lanes",
        "gradients of a mask add lanes that have no query",
        "csrc/ops/backward/backward_bias.c",
        "w->slopes + j * width * real, panel->lanes);",
        "w->slopes + j * width * real, width);",
    ),
    Mistake(
        "slopes",
        "keys behind a query get nearer with their distance",
        "csrc/kernels/panel/bias_tmpl.inc",
        "- slope * NAME(v_max)(far, -far));",
        "- slope * far);",
    ),
    Mistake(
        "window",
        "the window's right bound is lost where the call is not causal",
        "csrc/ops/open/open_block_sparse.c",
        ".window_right = ba_min(args->window[1], INT32_MAX),",
        ".window_right = args->causal ? ba_min(args->window[1], INT32_MAX) : -1,",
    ),
    Mistake(
        "overflow",
        "a product of page sizes may wrap",
        "csrc/ops/kv_cache/pages.c",
        "if (__builtin_mul_overflow(unit, units, &page_tokens)) page_tokens = BA_MOST_TOKENS;",
        "page_tokens = (int64_t)((uint64_t)unit * (uint64_t)units);",
    ),
    Mistake(
        "stride",
        "layout BSND takes heads to lie side by side",
        "csrc/ops/open/open_block_sparse.c",
        "t->dims[1], t->dims[3], {t->data, step[0], step[2], step[1]}}; break;",
        "t->dims[1], t->dims[3], {t->data, step[0], t->dims[3], step[1]}}; break;",
    ),
    Mistake(
        "join",
        "the caller leaves a job while workers are still in it",
        "csrc/core/pool.c",
        "pool.places = 0;\n        wait_for_workers(thread);",
        "pool.places = 0;\n        pthread_mutex_unlock(&pool.lock);",
    ),
    Mistake(
        "parts",
        "the last part of a sequence's keys is not joined",
        "csrc/ops/attend/attend_join.c",
        "for (int64_t part = 1; part < parts; part++) {",
        "for (int64_t part = 1; part < parts - (parts > 2); part++) {",
    ),
    Mistake(
        "duplicates",
        "a block that is listed twice is not refused",
        "csrc/ops/plan/plan.c",
        "if (column < 0 || column >= columns || bitmap[column / 64] >> (column % 64) & 1) return false;",
        "if (column < 0 || column >= columns) return false;",
    ),
    Mistake(
        "lists",
        "every batch entry reads the first one's lists",
        "csrc/ops/plan/plan.c",
        "const int64_t offset = list_batch * t->strides[0] + list_head",
        "const int64_t offset = 0 * list_batch * t->strides[0] + list_head",
    ),
    Mistake(
        "groups",
        "heads of a group share the first one's lists",
        "csrc/ops/plan/plan.c",
        "return p->listed && p->blocks.dims[1] == p->heads && p->group > 1 ? 1 : p->group;",
        "return p->group;",
    ),
    Mistake(
        "table",
        "a table may be one page too short",
        "csrc/ops/kv_cache/page_tables.c",
        "ba_ceil_div(seq_lens[b], page_size) > width)",
        "ba_ceil_div(seq_lens[b], page_size) > width + 1)",
    ),
    Mistake(
        "diagonal",
        "gradients place the causal diagonal one key too far",
        "csrc/ops/backward/backward_tiles.c",
        "ba_range seen = ba_visible_keys(p, item->batch, query);",
        "ba_range seen = ba_visible_keys(p, item->batch, query);\n        seen.hi += seen.hi > 0 && seen.hi < ba_kv_span(p, item->batch).valid;",
    ),
    Mistake(
        "stretches",
        "stretches of a packed run read the first sequence's block lists",
        "blitz_attn/_nsa/sequences.py",
        "rows = slice(listed.start + begin // tile, listed.start - (-end // tile))",
        "rows = slice(begin // tile, -(-end // tile))",
    ),
    Mistake(
        "overlap",
        "a compressed block that overlaps three blocks adds to two of them",
        "csrc/ops/nsa/nsa_select.c",
        "for (int64_t n = 0; n < c->narrow; n++) {",
        "for (int64_t n = 0; n < ba_max(c->narrow - (c->narrow > 2), 1); n++) {",
    ),
    Mistake(
        "empty",
        "gradients by pairs read the weights of a panel that sees no key of the chunk",
        "csrc/kernels/panel/add_pairs_tmpl.inc",
        "if (panel->begin >= panel->end || key + rows <= panel->begin",
        "if (key + rows <= panel->begin",
    ),
    Mistake(
        "left_up",
        "sparse mode 2 of the upstream operator is causal to the bottom right",
        "blitz_attn/compat/torch_bsa.py",
        'return {"causal": True, "q_begin": 0}',
        'return {"causal": True}',
    ),
    Mistake(
        "stale",
        "the newest block is not always selected where the summaries end with a block, as upstream has it",
        "csrc/python/ops_quest.c",
        "pages = (tokens - 1) / a->page_size + 1;",
        "pages = tokens / a->page_size + ((tokens - since) % a->page_size != 0);",
    ),
    Mistake(
        "queries",
        "the score of a block is that of the request's last query, not the largest of all",
        "csrc/ops/select/select_pages.c",
        "    if (score > *page || score != score) *page = score;",
        "    *page = score;",
    ),
    Mistake(
        "scales",
        "all keys of a page are summarised with the scale of its first token",
        "csrc/ops/kv_cache/summarise_pages.c",
        "scales[t] = first[t * c->scale.token_stride];",
        "scales[t] = first[0];",
    ),
    Mistake(
        "refresh",
        "an append refreshes the summary of each request's newest token alone",
        "csrc/ops/kv_cache/append.c",
        "begin[b] = tables->seq_lens[b] - new_tokens(tables, b);",
        "begin[b] = tables->seq_lens[b] - (new_tokens(tables, b) > 0);",
    ),
]


def bring(source: str, target: str) -> None:
    """Copies a file unless the copy has the same contents. Unchanged files keep their dates, and are not compiled again."""
    if not Path(target).exists() or Path(source).read_bytes() != Path(target).read_bytes():
        shutil.copyfile(source, target)


def build() -> None:
    command = [sys.executable, "setup.py", "-q", "build_ext", "--inplace", "--build-temp", "build/temp"]
    environment = {**os.environ, "BLITZ_ATTN_CFLAGS": "-DBA_NO_SMALL_CALLS"}  # as make fuzz has it
    subprocess.run(command, cwd=COPY, env=environment, check=True, stdout=subprocess.DEVNULL)


def plant(mistake: Mistake) -> None:
    path = COPY / mistake.file
    text = path.read_text(encoding="utf-8")
    if text.count(mistake.right) != 1:
        raise SystemExit(f"{mistake.name}: expected its place once in {mistake.file}, found it {text.count(mistake.right)} times")
    path.write_text(text.replace(mistake.right, mistake.wrong), encoding="utf-8")


def find(seconds: float) -> tuple[float | None, str]:
    """The seconds until a problem failed, and its reproducer; None where no problem failed."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(COPY), str(COPY / "tests")])}
    command = [sys.executable, "-m", "fuzz", "--seconds", str(seconds), "--no-corpus", "--stop"]
    output = subprocess.run(command, cwd=COPY, env=environment, capture_output=True, text=True, check=False).stdout
    found = re.search(r"failure after ([0-9.]+) s", output)
    return (float(found[1]) if found else None), output.rpartition("make fuzz ")[2].strip()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", default=[], help="names of mistakes")
    parser.add_argument("--seconds", type=float, default=120)
    args = parser.parse_args()
    for folder in FOLDERS:
        shutil.copytree(ROOT / folder, COPY / folder, dirs_exist_ok=True, copy_function=bring, ignore=shutil.ignore_patterns("__pycache__", "*.so"))
    for path in (COPY / "csrc").rglob("*.c"):  # a source that has moved would be built twice
        if not (ROOT / path.relative_to(COPY)).exists():
            path.unlink()
    for name in FILES:
        bring(str(ROOT / name), str(COPY / name))
    missed = 0
    print(f"{'mistake':12}{'found after':>12}  what")
    for mistake in MISTAKES:
        if args.only and mistake.name not in args.only:
            continue
        started = time.monotonic()
        plant(mistake)
        try:
            build()
            print(f"mistakes: {mistake.name}: built in {time.monotonic() - started:.0f} s", file=sys.stderr)
            seconds, problem = find(args.seconds)
        finally:
            shutil.copyfile(ROOT / mistake.file, COPY / mistake.file)  # with today's date, so that it is compiled again
        missed += seconds is None
        print(f"{mistake.name:12}{'missed' if seconds is None else f'{seconds:.1f} s':>12}  {mistake.what}; {problem[:160]}", flush=True)
    return 1 if missed else 0


if __name__ == "__main__":
    raise SystemExit(main())
