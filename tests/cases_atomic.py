"""Objects that change, and calls that change them, for suites that stop such a call halfway."""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from blitz_attn import nsa
from cases_nsa import PAPER, WEIGHTS, problem


class Case(NamedTuple):
    make: Callable  # () -> an object
    call: Callable  # (object): may change the object
    seen: Callable  # (object) -> the state that a user can see, in a form that can be compared


# ---- NsaCache -----------------------------------------------------------------------------------------------------

Q, K, V, OPTIONS = problem(200, 4, 2, 8, 6, batch=3, weights=WEIGHTS[:3])
QUERIES = np.concatenate([Q[:, :4]] * 2)


def nsa_cache(tokens, lens=None):
    cache = nsa.NsaCache(**PAPER, **OPTIONS)
    if tokens:
        cache.append(K[:, :tokens], V[:, :tokens], lens)
    return cache


def seen_of_nsa_cache(cache):
    lens = cache.lens
    return None if not lens.size else (lens.tobytes(), cache.attend(QUERIES[: len(lens)], lens=np.minimum(lens, 4)).tobytes())


def nsa_case(call, tokens=70, lens=None):
    return Case(lambda: nsa_cache(tokens, lens), call, seen_of_nsa_cache)


def append(first, end, lens=None):
    return lambda cache: cache.append(K[:, first:end], V[:, first:end], lens)


NSA_CASES = {
    "NsaCache.append, the first": nsa_case(append(0, 30), 0),
    "NsaCache.append, with room": nsa_case(append(30, 50), 30),
    "NsaCache.append, full": nsa_case(append(70, 200)),
    "NsaCache.append, of several lengths": nsa_case(append(40, 60, [5, 0, 20]), 40, [40, 31, 7]),
    "NsaCache.crop": nsa_case(lambda cache: cache.crop([70, 3, 40])),
    "NsaCache.reorder": nsa_case(lambda cache: cache.reorder([2, 0, 0]), lens=[70, 31, 7]),
    "NsaCache.reorder, to more": nsa_case(lambda cache: cache.reorder([2, 0, 0, 1]), lens=[70, 31, 7]),
    "NsaCache.attend": nsa_case(seen_of_nsa_cache),
}
