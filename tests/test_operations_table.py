"""The table of operations (csrc/python/operations.h), and what must agree with it: arguments of public functions, torch's schemas, signatures."""

import inspect
import re
from pathlib import Path

import numpy as np
import pytest

import blitz_attn
from blitz_attn import _core
from blitz_attn._operations import ARRAYS, OPERATIONS, arguments_of, naming_all

MADE = "empty"  # a function that makes the results for which the caller gives no array
STATE = "lse_out"  # public functions take this as the second of a pair, out
TRIPLE = "indptr last_page_len"  # public functions take these two within block_tables, if it is a tuple
TUPLE = "rules"  # all arguments behind it, as one tuple
INSIDE = "cu_rows routed key_stride key_last"  # only native sparse attention passes these to the core

# The operation of each public function, the arguments that only the table has, and the arguments that only the function has. Functions that call
# no operation directly are left out, and so are the operations of native sparse attention, several of which make up one public function.
FUNCTIONS = {
    "block_sparse_attention": ("block_sparse_attention", f"{MADE} {STATE} {INSIDE}", ""),
    "block_sparse_attention_backward": ("block_sparse_attention_backward", f"{MADE} {INSIDE} dq dk dv", "grads"),  # grads is dq, dk and dv
    # The core gets k as its v, too. A chooser becomes a name, two sizes, a term and a flag, or scores. A budget becomes a name and numbers.
    "select_blocks_prefill": (
        "select_prefill",
        f"{MADE} v sabi pool_q pool_k term largest budget budgets scores",
        "density top_p threshold top_k",
    ),
    "paged_attention": ("paged_attention", f"{MADE} {STATE} {TRIPLE} {TUPLE} selected counts selected_size", ""),
    "paged_select_attention": ("paged_attention", f"{MADE} {STATE} {TRIPLE} {TUPLE}", ""),
    "merge_states_n": ("merge_states", MADE, ""),
    "quantize_kv": ("quantize_kv", "values scale", ""),  # results
    "append_paged_kv": ("append_paged_kv", f"{TRIPLE} q_begin", ""),  # q_begin is an argument of the other calls with requests
    "quest_prefill_metadata": ("quest_metadata", "", ""),
    "select_tokens": ("select_tokens", "selected scores", "top_k return_scores"),  # results
    # The core gets source as a and b, and return_counts tells it whether to return counts.
    "select_blocks": ("select_blocks", f"{MADE} query a b selected_indices return_counts", "q source dense_below"),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_public_functions_have_the_arguments_of_the_table(name):
    operation, in_table, in_function = FUNCTIONS[name]
    table = {argument.name for argument in OPERATIONS[operation]}
    parameters = set(inspect.signature(getattr(blitz_attn, name)).parameters)
    assert (sorted(table - parameters), sorted(parameters - table)) == (sorted(in_table.split()), sorted(in_function.split()))


def test_arguments_have_the_defaults_of_the_function():
    found = arguments_of(blitz_attn.select_and_attend_prefill)
    assert {name: x.default for name, x in found.items()} == {
        name: x.default for name, x in inspect.signature(blitz_attn.select_and_attend_prefill).parameters.items() if name != "return_sabi"
    }
    assert (found["q"].role, found["window"].role, found["sink"].role) == ("floats", "pair", "integer")
    assert (found["chooser"].role, found["density"].role, found["top_k"].role) == ("chooser", "budget", "counts")
    learned = [name for name, x in arguments_of(blitz_attn.block_sparse_attention).items() if x.differentiable]
    assert learned == ["q", "k", "v", "attn_mask", "alibi_slopes", "sinks"]


def test_the_core_has_what_the_package_uses():
    """Type checkers accept any name as an operation of the core, so this test compares the names."""
    used = set()
    for path in Path(blitz_attn.__file__).parent.rglob("*.py"):
        used |= set(re.findall(r"\b_core\.(?!pyi\b)(\w+)", path.read_text(encoding="utf-8")))
    assert "paged_attention" in used
    assert used <= set(dir(_core))


def test_roles_are_those_of_the_core():
    roles = {argument.role for rows in OPERATIONS.values() for argument in rows}
    assert roles >= ARRAYS
    assert "integer" in roles - ARRAYS


# ---- torch ----------------------------------------------------------------------------------------------------------------


LISTS = """Tensor? q_lens=None, Tensor? kv_lens=None, Tensor? cu_seqlens_q=None, Tensor? cu_seqlens_kv=None, Tensor? kv_ranges=None,
    Tensor? attn_mask=None, Tensor? alibi_slopes=None"""
RULES = """int[] block_shape=128, float? scale=None, str layout="BNSD", bool causal=False, int[]? window=None, int? num_heads=None,
    int? num_kv_heads=None, int? num_threads=None, float? softcap=None"""
SCHEMAS = {
    "block_sparse_attention": f"""Tensor q, Tensor k, Tensor v, Tensor? sabi=None, {LISTS}, Tensor? sinks=None | {RULES},
        bool reads_mask=False, int? q_begin=None""",
    "block_sparse_attention_backward": f"""Tensor dout, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, Tensor? dlse=None,
        Tensor? sabi=None, {LISTS} | {RULES}, bool reads_mask=False, int? q_begin=None, bool bias_grads=False""",
    "select_and_attend_prefill": f"""Tensor q, Tensor k, Tensor v, {LISTS}, Tensor? sinks=None | {RULES}, str chooser="pooled",
        float[]? density=None, float[]? top_p=None, float[]? threshold=None, int[]? top_k=None, int? sink=1, int? recent=2,
        int? last_columns=0, int? first_rows=0, int? last_rows=0, bool per_kv_head=False""",
    "paged_attention": """Tensor q, Tensor k_cache, Tensor v_cache, Tensor block_tables, Tensor? seq_lens=None, Tensor? indptr=None,
        Tensor? last_page_len=None, Tensor? selected=None, Tensor? counts=None, Tensor? sinks=None, Tensor? k_scale=None,
        Tensor? v_scale=None, Tensor? q_lens=None, Tensor? kv_ranges=None, Tensor? attn_mask=None, Tensor? alibi_slopes=None
        | float? scale=None, str kv_layout="NHD", int? window=None, float? softcap=None, int? num_threads=None""",
    "attend_layer": """Tensor query, Tensor key, Tensor value, Tensor? padding=None, Tensor? packed=None, Tensor? q_position=None,
        Tensor? cu_seq_lens_q=None, Tensor? cu_seq_lens_k=None, Tensor? sinks=None, Tensor? block_indices=None, Tensor? mask=None,
        Tensor? position_bias=None | bool causal=True, int? left=None, int? right=None, SymInt q_offset=0, SymInt kv_offset=0,
        float? scaling=None, float? softcap=None, str config="", bool sparse=False, int? layer=None, int? index_block=None,
        str module="", str kind="" """,
}


@pytest.mark.parametrize("name", SCHEMAS)
def test_graphs_that_were_exported_find_their_operators(name):
    """Tensors of these schemas keep their places, and options their types and defaults. New tensors and options may be added."""
    torch = pytest.importorskip("torch")
    pytest.importorskip("blitz_attn.integrations.torch")
    if name == "attend_layer":
        pytest.importorskip("transformers")
        pytest.importorskip("blitz_attn.integrations._transformers.attention")
    schema = str(getattr(torch.ops.blitz_attn, name).default._schema)
    tensors, options = (part.split(", ") for part in schema[schema.index("(") + 1 : schema.index(") -> ")].split(", *, "))
    old_tensors, old_options = (" ".join(part.split()).split(", ") for part in SCHEMAS[name].split("|"))
    assert tensors[: len(old_tensors)] == old_tensors
    assert all("=None" in x for x in tensors[len(old_tensors) :])
    assert set(options) >= set(old_options)


# ---- Functions for frameworks -----------------------------------------------------------------------------------------------

WITHOUT = {"kv_split", "out", "out_dtype", "dtype", "kv_dtype", "return_sabi"}
OFFSETS = {"q_begin", "q_total"}
NAMES = ("block_sparse_attention", "select_and_attend_prefill", "paged_attention", "paged_select_attention", "select_tokens")


def function_of(framework, name):
    pytest.importorskip(framework)
    return getattr(__import__(f"blitz_attn.integrations.{framework}", fromlist=[name]), name)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("framework", ["torch", "jax"])
def test_signatures_are_those_of_the_library(framework, name):
    function = function_of(framework, name)
    offsets = name == "select_tokens" or (framework == "jax" and name == "block_sparse_attention")
    left_out = WITHOUT if offsets else WITHOUT | OFFSETS
    if framework == "torch" and name.startswith("paged"):  # tensors of bytes do not say what they hold
        left_out -= {"kv_dtype"}
    expected = inspect.signature(getattr(blitz_attn, name))
    shown = [x for parameter, x in expected.parameters.items() if parameter not in left_out]
    assert inspect.signature(function) == expected.replace(parameters=shown)


def test_docstrings_name_arguments_that_came_later():
    old = "Adds.\n\n    Parameters\n    ----------\n    x, y : int\n        Terms, as z.\n\n    Returns\n    -------\n    int\n"
    new = "Adds.\n\nParameters\n----------\nx, y : int\n    Terms, as z.\nz, w\n    See `blitz_attn.add`.\n\nReturns\n-------\nint"
    assert naming_all(old, ["x", "y"], "add") == old
    assert naming_all(old, ["x", "z", "y", "w"], "add") == new


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("framework", ["torch", "jax"])
@pytest.mark.parametrize("argument", ["out", "dtype", "indptr", "reads_mask", "return_sabi", "tempo"])
def test_other_keywords_are_refused(framework, name, argument):
    function = function_of(framework, name)
    asarray = __import__("torch").as_tensor if framework == "torch" else __import__("jax").numpy.asarray
    count = {"paged_attention": 5, "paged_select_attention": 6, "select_tokens": 4}.get(name, 3)
    with pytest.raises(TypeError, match=rf"^{name}\(\) got an unexpected keyword argument '{argument}'$"):
        function(*[asarray(np.ones((1, 1, 1, 1), np.int32))] * count, **{argument: None})
