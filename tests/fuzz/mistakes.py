"""Measures how quickly the fuzzer finds mistakes. Each mistake is planted in a copy of the tree, which is built and fuzzed until a problem fails.

    make fuzz-mistakes            # all mistakes; ARGS="--only window join" for some of them
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
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


# Each mistake has a name, a file and a description, and then the text that is replaced (-) and its replacement (+).
TABLE = r"""
padding in csrc/ops/problem.h: kernels are chosen by the padded length again
    - const int64_t valid = ba_q_span(p, batch).valid;
    + const int64_t valid = ba_q_span(p, batch).rows;
ragged in csrc/ops/problem.h: queries of ragged requests stand at the beginning of their keys, not at the end
    - p->q_begin[batch] : kv_valid - q_valid);
    + p->q_begin[batch] : p->page_size && p->cu_q && p->batch > 1 ? 0 : kv_valid - q_valid);
mask in csrc/kernels/panel/bias_tmpl.inc: a mask is read as if the listed keys had no gaps
    - (real)NAME(mask_number)(dtype, row, key_index[i] * source->stride);
    + (real)NAME(mask_number)(dtype, row, (*key_index + i) * source->stride);
slopes in csrc/kernels/panel/bias_tmpl.inc: keys behind a query get nearer with their distance
    - - slope * NAME(v_max)(far, -far));
    + - slope * far);
window in csrc/ops/open/open_block_sparse.c: the window's right bound is lost where the call is not causal
    - .window_right = ba_min(args->window[1], INT32_MAX),
    + .window_right = args->causal ? ba_min(args->window[1], INT32_MAX) : -1,
overflow in csrc/ops/kv_cache/pages.c: a product of page sizes may wrap
    - if (__builtin_mul_overflow(unit, units, &page_tokens)) page_tokens = BA_MOST_TOKENS;
    + page_tokens = (int64_t)((uint64_t)unit * (uint64_t)units);
stride in csrc/ops/open/open_block_sparse.c: layout BSND takes heads to lie side by side
    - t->dims[1], t->dims[3], {t->data, step[0], step[2], step[1]}}; break;
    + t->dims[1], t->dims[3], {t->data, step[0], t->dims[3], step[1]}}; break;
join in csrc/core/pool.c: the caller leaves a job while workers are still in it
    - pool.places = 0;
    -         wait_for_workers(thread);
    + pool.places = 0;
    +         pthread_mutex_unlock(&pool.lock);
parts in csrc/ops/attend/attend_join.c: the last part of a sequence's keys is not joined
    - for (int64_t part = 1; part < parts; part++) {
    + for (int64_t part = 1; part < parts - (parts > 2); part++) {
duplicates in csrc/ops/plan/plan.c: a block that is listed twice is not refused
    - if (column < 0 || column >= columns || bitmap[column / 64] >> (column % 64) & 1) return false;
    + if (column < 0 || column >= columns) return false;
lists in csrc/ops/plan/plan.c: every batch entry reads the first one's lists
    - const int64_t offset = list_batch * t->strides[0] + list_head
    + const int64_t offset = 0 * list_batch * t->strides[0] + list_head
groups in csrc/ops/plan/plan.c: heads of a group share the first one's lists
    - return p->listed && p->blocks.dims[1] == p->heads && p->group > 1 ? 1 : p->group;
    + return p->group;
table in csrc/ops/kv_cache/page_tables.c: a table may be one page too short
    - ba_ceil_div(seq_lens[b], page_size) > width)
    + ba_ceil_div(seq_lens[b], page_size) > width + 1)
diagonal in csrc/ops/backward/backward_tiles.c: gradients place the causal diagonal one key too far
    - ba_range seen = ba_visible_keys(p, item->batch, query);
    + ba_range seen = ba_visible_keys(p, item->batch, query);
    +         seen.hi += seen.hi > 0 && seen.hi < ba_kv_span(p, item->batch).valid;
stretches in blitz_attn/_nsa/sequences.py: stretches of a packed run read the first sequence's block lists
    - rows = slice(listed.start + begin // tile, listed.start - (-end // tile))
    + rows = slice(begin // tile, -(-end // tile))
overlap in csrc/ops/nsa/nsa_select.c: a compressed block that overlaps three blocks adds to two of them
    - for (int64_t n = 0; n < c->narrow; n++) {
    + for (int64_t n = 0; n < ba_max(c->narrow - (c->narrow > 2), 1); n++) {
empty in csrc/kernels/panel/add_pairs_tmpl.inc: gradients by pairs read the weights of a panel that sees no key of the chunk
    - if (panel->begin >= panel->end || key + rows <= panel->begin
    + if (key + rows <= panel->begin
left_up in blitz_attn/compat/torch_bsa.py: sparse mode 2 of the upstream operator is causal to the bottom right
    - return {"causal": True, "q_begin": 0}
    + return {"causal": True}
stale in csrc/python/ops_quest.c: the newest block is not always selected where the summaries end with a block, as upstream has it
    - pages = (tokens - 1) / a->page_size + 1;
    + pages = tokens / a->page_size + ((tokens - since) % a->page_size != 0);
queries in csrc/ops/select/select_pages.c: the score of a block is that of the request's last query, not the largest of all
    - if (score > *page || score != score) *page = score;
    + *page = score;
scales in csrc/ops/kv_cache/summarise_pages.c: all keys of a page are summarised with the scale of its first token
    - page, head, t);
    + page, head, 0);
refresh in csrc/ops/kv_cache/append.c: an append refreshes the summary of each request's newest token alone
    - begin[b] = tables->seq_lens[b] - new_tokens(tables, b);
    + begin[b] = tables->seq_lens[b] - (new_tokens(tables, b) > 0);
"""


def read(table: str) -> Iterator[Mistake]:
    for entry in re.split(r"\n(?=\w)", table.strip("\n")):
        head, *lines = entry.split("\n")
        name, file, what = re.fullmatch(r"(\w+) in (\S+): (.*)", head).groups()
        right, wrong = ("\n".join(line[6:] for line in lines if line[4] == sign) for sign in "-+")
        yield Mistake(name, what, file, right, wrong)


MISTAKES = list(read(TABLE))


def bring(source: str, target: str) -> None:
    """Copies a file unless the target has the same contents. Unchanged files keep their dates, so that they are not compiled again."""
    if not Path(target).exists() or Path(source).read_bytes() != Path(target).read_bytes():
        shutil.copyfile(source, target)


def build() -> None:
    command = [sys.executable, "setup.py", "-q", "build_ext", "--inplace", "--build-temp", "build/temp"]
    environment = {**os.environ, "BLITZ_ATTN_CFLAGS": "-DBA_NO_SMALL_CALLS"}  # as in make fuzz
    subprocess.run(command, cwd=COPY, env=environment, check=True, stdout=subprocess.DEVNULL)


def plant(mistake: Mistake) -> None:
    path = COPY / mistake.file
    text = path.read_text(encoding="utf-8")
    if text.count(mistake.right) != 1:
        raise SystemExit(f"{mistake.name}: expected its place once in {mistake.file}, found it {text.count(mistake.right)} times")
    path.write_text(text.replace(mistake.right, mistake.wrong), encoding="utf-8")


def find(seconds: float) -> tuple[float | None, str]:
    """The seconds until a problem failed, and its reproducer; None if no problem failed."""
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
