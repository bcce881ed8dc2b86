"""Chooses which tests of a grid run: by default a sample in which every pair of options occurs.

A test marked ``sampled`` is parametrised with a full product of options. All cases are collected, and most are deselected again. With a number, as in
``sampled(3)``, that many such samples run together. Tests that take seconds each are marked ``sampled("options")``: every option occurs, but not
every pair. The environment variable ``SAMPLE_SEED`` draws another sample, and ``SAMPLE_SEED=all`` runs everything. With ``-m``, or if the
command line names a test with its options, nothing is left out.

``SAMPLE_ONE_IN=3`` keeps one case in three of every parametrised function, sampled or not, and one in three of the other tests of each file, but at
least one. This variable is for a further run of the suite: with another Python over the same kernels, or over kernels that have checks of their own.
``SAMPLE_CELLS_ONE_IN=3`` thins only parametrised functions: every test function runs, in fewer cases. Neither variable leaves out a case of a test
that is marked ``whole``.
"""

import heapq
import itertools
import os
import random

SEED = os.environ.get("SAMPLE_SEED") or "0"
ALL = SEED == "all"
ONE_IN = int(os.environ.get("SAMPLE_ONE_IN") or 1)
CELLS_ONE_IN = int(os.environ.get("SAMPLE_CELLS_ONE_IN") or ONE_IN)


def description():
    if ALL:
        return "grids of options: all"
    cells = f", of which one case in {CELLS_ONE_IN} runs" if CELLS_ONE_IN > 1 else ""
    others = f", and one in {ONE_IN} of the tests without options" if ONE_IN > 1 else ""
    return f"grids of options: every pair{cells}{others}, SAMPLE_SEED={SEED} (another number draws others, SAMPLE_SEED=all runs all)"


def covering(cells, rng, pairs=True):
    """Positions of a few cells that contain every option that occurs in any cell, and with ``pairs`` every pair of options.

    A cell is a tuple of options, one per axis. The cell with the most missing pairs (without ``pairs``: options) is always taken next.
    """
    order = rng.sample(range(len(cells)), len(cells))
    together = 2 if pairs else 1
    pairs = [set(itertools.combinations_with_replacement(enumerate(cells[n]), together)) for n in order]
    missing, taken = set().union(*pairs), []
    best = [(-len(of_cell), place) for place, of_cell in enumerate(pairs)]
    heapq.heapify(best)
    while missing:
        count, place = heapq.heappop(best)
        now = -len(pairs[place] & missing)
        if now == count:  # counts only fall, so no other cell has more
            taken.append(order[place])
            missing -= pairs[place]
        elif now:
            heapq.heappush(best, (now, place))
    return taken


def sample(items):
    """The tests of one marked function that run."""
    name = items[0].nodeid.partition("[")[0]
    rng = random.Random(f"{SEED} {name}")  # independent of which other tests are collected
    (times,) = items[0].get_closest_marker("sampled").args or (1,)
    axes = sorted(items[0].callspec.params)
    cells = [tuple(repr(item.callspec.params[axis]) for axis in axes) for item in items]
    if times == "options":
        positions = covering(cells, rng, pairs=False)
    else:
        positions = set().union(*(covering(cells, rng) for _ in range(times)))
    return [items[n] for n in sorted(positions)]


def one_in(items, number):
    """One in `number` of the tests, but at least one. `items` are one function's cases, or the tests of a file that have no options."""
    rng = random.Random(f"{SEED} one in {number} of {items[0].nodeid.partition('[')[0]}")
    return rng.sample(items, -(-len(items) // number))


def left_out(items):
    """The tests that the sample leaves out."""
    functions = {}
    for item in items:
        has_options = hasattr(item, "callspec")
        if has_options or ONE_IN > 1:
            functions.setdefault(item.nodeid.partition("[" if has_options else "::")[0], []).append(item)
    out = set()
    for tests in functions.values():
        if tests[0].get_closest_marker("whole"):
            continue
        kept = sample(tests) if tests[0].get_closest_marker("sampled") else tests
        out.update(tests)
        out.difference_update(one_in(kept, CELLS_ONE_IN if hasattr(tests[0], "callspec") else ONE_IN))
    return out
