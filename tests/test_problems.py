"""A fixed sample of the fuzzer's problems: all options of an operation drawn together, against an oracle of its own. `make fuzz` draws
others."""

from contextlib import suppress

import numpy as np
import pytest

from blitz_attn import reference
from fuzz import attention_problems, backward_problems, compat_problems, problems, sabi_problems, select_problems
from fuzz.attention_cases import draw_case, laid_out, plain_arguments
from fuzz.attention_oracle import backward, forward
from fuzz.draw import Discard, Draw

MODULES = {x.__name__ for x in (attention_problems, backward_problems, compat_problems, sabi_problems, select_problems)}
MODULES |= {f"fuzz.{name}" for name in ("torch_problems", "jax_problems")}  # which compat_problems imports, where there are torch and JAX
OF_WEIGHT_1 = 40  # problems of an operation that has the weight 1
CELLS = [(p.name, seed) for p in problems.REGISTRY.values() if p.run.__module__ in MODULES for seed in range(round(OF_WEIGHT_1 * p.weight))]


@pytest.mark.parametrize(("name", "seed"), CELLS)
def test_right(name, seed):
    with suppress(Discard):
        problems.REGISTRY[name].run(Draw(seed))


@pytest.mark.parametrize("seed", range(100))
def test_twins_of_attention(seed):
    """Those of `blitz_attn.reference`, which compute in float64, against the same oracle."""
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
