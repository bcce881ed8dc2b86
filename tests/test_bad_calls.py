"""A fixed sample of the fuzzer's bad calls: every public function, with arguments replaced by unusual values (tests/fuzz/bad_calls.py).

The calls run in a process of their own, so that a crash is reported with the name of the call. `make fuzz` draws new calls.
"""

import os
import subprocess
import sys
from pathlib import Path

import blitz_attn

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
