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
