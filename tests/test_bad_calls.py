"""A fixed sample of the fuzzer's bad calls: every public function, with arguments replaced by unusual values (tests/fuzz/bad_calls.py).

They run in a process of their own, so that a crash has a name too. `make fuzz` draws new ones. And what every function must refuse.
"""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import blitz_attn
from blitz_attn.compat import torch_bsa
from fuzz.arena import Arena
from fuzz.good_calls import GROUPS

CALLS_EACH = 15
CHILD = f"""
import sys
import warnings

from fuzz import campaign
from fuzz.draw import Draw

warnings.simplefilter("error")
campaign.load()
from fuzz.good_calls import GROUPS

found = 0
for group, functions in GROUPS.items():
    for function in functions:
        for seed in range({CALLS_EACH}):
            name, fixed = f"bad_call.{{group}}", {{"function": function}}
            reproducer = campaign.reproducer(name, seed, fixed)
            print(reproducer, flush=True)
            outcome = campaign.run_one(name, Draw(seed, fixed))
            if outcome.kind not in ("passed", "discarded"):
                found += 1
                print(f"make fuzz REPLAY='{{reproducer}}'\\n{{outcome.text}}", file=sys.stderr)
sys.exit(found > 0)
"""


def test_a_sample_of_bad_calls():
    places = os.pathsep.join([str(Path(blitz_attn.__file__).parents[1]), *filter(None, sys.path)])
    environment = os.environ | {"PYTHONPATH": places}
    command = [sys.executable, "-X", "faulthandler", "-c", CHILD]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, f"{done.stderr}\nthe last call: {done.stdout.splitlines()[-1:]}"


# arguments that are lists or tables of integers, or a mask, wherever a public function takes them
INTEGERS = (
    "sabi", "kv_ranges", "q_lens", "kv_lens", "q_begin", "cu_seqlens", "cu_seqlens_q", "cu_seqlens_kv", "block_tables", "seq_lens", "indptr",
    "indices", "selected", "metadata_block_tables", "start_lens", "block_indices", "selected_indices", "recent",
    "lens", "lengths", "attn_mask",
)  # fmt: skip


@pytest.mark.parametrize("argument", INTEGERS)
def test_arrays_with_a_mask_are_refused(argument):
    """The memory of a masked array has numbers where its mask says that there are none: a list must not be read from it."""
    tried = set()
    for functions in GROUPS.values():
        for name, good in functions.items():
            for variety in range(12):
                arguments = good.make(Arena(0), variety)
                given = arguments.get(argument)
                if given is None or isinstance(given, (tuple, int)) or name == "scaled_dot_product_attention":
                    continue  # packed tables in a tuple are three lists, and a mask of torch's own operation is a tensor
                tried.add(name)
                with pytest.raises(TypeError, match=rf"^{argument}(\[0\])?: expected an array without a mask, got MaskedArray$"):
                    good.call(**arguments | {argument: np.ma.array(given)})
    assert tried


class _RaisingDtype:
    @property
    def dtype(self):
        raise RuntimeError("no dtype")


def test_an_array_whose_dtype_raises_is_refused():
    """As any object that is no array: what it raises is not for the caller."""
    cache, q = np.zeros((2, 4, 1, 8), np.int8), np.ones((1, 1, 8), np.float32)
    for name, other in (("k_scale", "v_scale"), ("v_scale", "k_scale")):
        with pytest.raises(TypeError, match=f"^{name}: expected an array, got _RaisingDtype$"):
            blitz_attn.paged_attention(q, cache, cache, np.array([[0]]), [1], **{name: _RaisingDtype(), other: 0.1})
    x = np.ones((1, 2, 128, 8), np.float32)
    with pytest.raises(TypeError, match="^atten_mask: expected a bool array, got _RaisingDtype$"):
        torch_bsa.blitz_sparse_attention(x, x, x, num_heads=2, input_layout="BNSD", atten_mask=_RaisingDtype())


def test_no_number_of_heads_is_refused():
    """0 is no way to say that a number is not given."""
    function = blitz_attn.block_sparse_attention
    x, flat = np.ones((1, 2, 16, 8), np.float32), np.ones((1, 16, 16), np.float32)
    with pytest.raises(ValueError, match="^num_heads: expected 2 like q, got 0$"):
        function(x, x, x, num_heads=0)
    with pytest.raises(ValueError, match="^num_kv_heads: expected 2 like k, got 0$"):
        function(x, x, x, num_kv_heads=0)
    with pytest.raises(ValueError, match="^num_kv_heads: expected at least 1, got 0$"):
        function(flat, flat, flat, layout="BSH", num_heads=2, num_kv_heads=0)


@pytest.mark.parametrize("name", ["dtype", "out_dtype"])
def test_a_dtype_of_foreign_byte_order_is_refused(name):
    x = np.ones((1, 2, 16, 8), np.float32)
    foreign = np.dtype(np.float32).newbyteorder()
    with pytest.raises(TypeError, match=f"^{name}: expected native byte order, got {foreign}$"):
        blitz_attn.block_sparse_attention(x, x, x, **{name: foreign})
