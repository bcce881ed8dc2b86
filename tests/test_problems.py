"""A fixed sample of the fuzzer's problems: all options of an operation are drawn together, and results are compared with an oracle.
`make fuzz` draws other problems."""

from contextlib import suppress

import numpy as np
import pytest

from blitz_attn import reference
from fuzz import backward_problems, problems
from fuzz.attention_cases import draw_case, laid_out, plain_arguments
from fuzz.attention_oracle import backward, forward
from fuzz.draw import Discard, Draw

FEWER = ("cache", "merge", "nsa", "nsa_parts", "paged", "quest")  # problems of these files take longer
LEFT_OUT = ("bad_calls",)  # see test_refusals.py and test_bad_calls.py


def cells():
    """Seeds for each problem. The number of seeds is the problem's weight times 40, or times 15 if problems of its file take longer."""
    for problem in problems.load().values():
        file = problem.run.__module__.rpartition(".")[2]
        count = 15 if file.removesuffix("_problems") in FEWER else 40
        if file not in LEFT_OUT:
            yield from (pytest.param(problem, seed, id=f"{problem.name}-{seed}") for seed in range(round(count * problem.weight)))


@pytest.mark.parametrize(("problem", "seed"), list(cells()))
def test_right(problem, seed):
    with suppress(Discard):  # the drawn options do not fit together
        problem.run(Draw(seed))


@pytest.mark.parametrize("seed", range(100))
def test_twins_of_attention(seed):
    """The float64 twins of attention and of its gradients agree with the fuzzer's oracle."""
    draw = Draw(seed, {"bad_keys": 0.0, "own_forward": False})
    case = draw_case(draw)
    p, f = case.problem, forward(case.problem)
    arrays, options = plain_arguments(case, draw.rng("order"))
    out, lse = reference.block_sparse_attention(*arrays.values(), **options, return_lse=True)
    given = backward_problems.draw_given(draw, case, f)
    laid = given.laid_out(case)
    dlse = laid.pop("dlse", None)
    found = reference.block_sparse_attention_backward(
        laid["dout"], *arrays.values(), laid["out"], laid["lse"], **options, dlse=dlse, bias_grads=True
    )
    right = backward(p, f, *given)
    wanted = [(out, f.out, p.q_lens), (lse, f.lse, p.q_lens), (found[0], right.dq, p.q_lens)]
    wanted += [(found[1], right.dk, p.kv_lens), (found[2], right.dv, p.kv_lens)]
    for got, exact, lens in wanted:
        exact = laid_out(exact, case.layout, lens)
        size = np.abs(exact[np.isfinite(exact)]).max(initial=1)
        np.testing.assert_allclose(got, exact, rtol=1e-9, atol=1e-9 * size)
    if found[3] is not None:
        shape = (1,) * (4 - found[3].ndim) + found[3].shape
        exact = right.of_mask(shape, "float64", "float64")[0]
        np.testing.assert_allclose(found[3].reshape(shape), exact, rtol=1e-9, atol=1e-9 * np.abs(exact).max(initial=1))
    if found[4] is not None:
        exact = right.of_slopes(p.away())[0]
        np.testing.assert_allclose(found[4], exact, rtol=1e-9, atol=1e-9 * np.abs(exact).max(initial=1))
