"""A fixed sample of the fuzzer's problems of paged caches, of choosing pages, of native sparse attention and of merging.

They draw all options together, and have oracles of their own. `make fuzz` draws new ones.
"""

import contextlib

import pytest

from fuzz import cache_problems, merge_problems, nsa_cache_problems, nsa_parts_problems, nsa_problems, paged_problems, quest_problems
from fuzz.draw import Discard, Draw
from fuzz.problems import REGISTRY

MODULES = (cache_problems, merge_problems, nsa_cache_problems, nsa_parts_problems, nsa_problems, paged_problems, quest_problems)
PROBLEMS = [p for p in REGISTRY.values() if p.run.__module__ in {module.__name__ for module in MODULES}]


@pytest.mark.parametrize(
    ("problem", "seed"), [pytest.param(p, n, id=f"{p.name}-{n}") for p in PROBLEMS for n in range(round(15 * p.weight))]
)
def test_a_random_problem(problem, seed):
    with contextlib.suppress(Discard):  # what was drawn does not fit together
        problem.run(Draw(seed))
