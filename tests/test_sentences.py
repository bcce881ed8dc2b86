"""Error sentences name the arguments of the function that was called, anywhere in a sentence, and are otherwise unchanged."""

import re

import numpy as np
import pytest

import blitz_attn
from blitz_attn import _core
from blitz_attn._sentences import refusal, rename
from blitz_attn.compat import mslk, torch_bsa
from test_kernels import ROOT, compiler, run

X = np.ones((1, 4, 16, 8), np.float32)
TOKENS_FIRST = np.ones((1, 16, 4, 8), np.float32)
QUERY, CACHE, TABLES = np.ones((1, 4, 8), np.float32), np.ones((2, 4, 2, 8), np.float32), np.array([[0, 1]])
RANGE = "expected a number from -1e+37 to 1e+37 with a float32"
needs_sources = pytest.mark.skipif(not (ROOT / "setup.py").exists(), reason="needs a source checkout")


def refused(function, *args, **options):
    """The exception of a refused call, after a check of its parts."""
    with pytest.raises((TypeError, ValueError)) as caught:
        function(*args, **options)
    parts = caught.value.sentence
    assert "".join(parts) == str(caught.value)
    assert str(caught.value).isprintable()
    assert all(re.fullmatch(r"[\w\[\]]+", name) for name in parts[::2])
    return caught.value


def test_the_core_marks_names_in_sentences():
    error = refused(blitz_attn.block_sparse_attention, X, X[:, :3], X[:, :3])
    assert error.sentence == ("k", ": expected a number of heads that divides ", "q", "'s 4, got 3 in (1, 3, 16, 8)")
    error = refused(blitz_attn.block_sparse_attention, X, X, X, out=X)  # the sentence ends with a name
    assert error.sentence == ("out", ": expected memory of its own, got an array that overlaps ", "q")
    error = refused(_core.read_integer, 2**70, "n")
    assert error.sentence == ("n", f": expected an integer of 64 bits, got {2**70}")


def test_a_sentence_without_names_has_no_parts():
    with pytest.raises(TypeError, match=r"^read_integer\(\) is missing the argument 'name'$") as caught:
        _core.read_integer(1)
    assert not hasattr(caught.value, "sentence")


def test_only_names_are_renamed():
    """A value may look like a name, and may follow the same words, but is not renamed."""
    error = refusal(ValueError, "k", ": expected a text like ", "q", ", got one like q of k")
    rename(error, {"q": "query", "k": "key"})
    assert str(error) == "key: expected a text like query, got one like q of k"
    rename(error, {"query": "Q"})  # a second time, by a caller of the caller
    assert error.sentence == ("key", ": expected a text like ", "Q", ", got one like q of k")


def test_a_sentence_without_parts_begins_with_its_name():
    error = TypeError("k: expected an array, got a list of k: 3")
    rename(error, {"k": "key"})
    assert str(error) == "key: expected an array, got a list of k: 3"


def test_other_exceptions_stay_as_they_are():
    with pytest.raises(UnicodeDecodeError) as caught:
        b"\xff".decode()
    before = caught.value.args
    rename(caught.value, {"q": "query"})
    assert caught.value.args == before


# ---- Names within a sentence, with the names of the function that was called -----------------------------------------


def test_torch_bsa():
    error = refused(torch_bsa.blitz_sparse_attention, X, X, X, num_heads=4, input_layout="BNSD", scale_value=1e300)
    assert str(error) == f"scale_value: {RANGE} query, got 1e+300"


def test_mslk():
    error = refused(mslk.nsa, TOKENS_FIRST, TOKENS_FIRST, TOKENS_FIRST, 4, 2, 4, softmax_scale=1e300)
    assert str(error) == f"softmax_scale: {RANGE} Q, got 1e+300"


def test_mslk_where_python_checks():
    error = refused(mslk.compress_kv, TOKENS_FIRST, TOKENS_FIRST[:, :3], 4)
    assert str(error) == "V: expected the tokens and heads of K (1, 16, 4, 8), got (1, 3, 4, 8)"


def test_torchs_own_attention():
    torch = pytest.importorskip("torch")
    from blitz_attn.integrations.torch import scaled_dot_product_attention

    x = torch.ones(1, 4, 16, 8)
    assert str(refused(scaled_dot_product_attention, x, x, x, scale=1e300)) == f"scale: {RANGE} query, got 1e+300"


def test_jaxs_own_attention():
    jax = pytest.importorskip("jax")
    from blitz_attn.integrations.jax import dot_product_attention

    x = jax.numpy.ones((1, 16, 4, 8))
    assert str(refused(dot_product_attention, x, x, x, scale=2e37)) == f"scale: {RANGE} query, got 2e+37"


def test_the_source_of_a_selection():
    options = {"k": 1, "method": "max"}
    error = refused(blitz_attn.select_blocks, QUERY, CACHE, TABLES, [5], k_scale=np.ones((2, 4, 2), np.float32), **options)
    assert str(error) == "k_scale: expected none with float32 source, got shape (2, 4, 2)"
    error = refused(blitz_attn.select_blocks, QUERY, CACHE.astype(np.int8), TABLES, [5], **options)
    assert str(error) == "k_scale: expected scales of shape (2, 4, 2), (2,) or () for int8 source, got none"


@pytest.mark.parametrize("shape", [(15,), (16, 15), (4, 16, 15), (1, 4, 16, 15)])
def test_a_mask_has_the_shape_that_the_caller_gave(shape):
    error = refused(blitz_attn.block_sparse_attention, X, X, X, attn_mask=np.ones(shape, np.bool_))
    assert str(error) == f"attn_mask: expected shape (1, 4 or 1, 16 or 1, 16 or 1), got {shape}"


# ---- In C -------------------------------------------------------------------------------------------------------------


@needs_sources
def test_every_sentence_in_c_marks_its_name():
    unmarked = re.compile(r'\b(?:ba_fail|arg_fail|PyErr_Format|PyErr_SetString)\([^;"]*?"[\w%\[\]]+: expected[^"]*"')
    found = [(path.name, x) for path in (ROOT / "csrc").rglob("*.[ch]") for x in unmarked.findall(path.read_text(encoding="utf-8"))]
    assert [(name, x) for name, x in found if "scratch:" not in x] == []  # scratch is not an argument


@needs_sources
def test_ba_last_error_is_without_marks_and_cut(tmp_path):
    """Texts without marks are cut at 511 bytes, and texts with marks at the same place."""
    (tmp_path / "main.c").write_text(
        """
#include <stdio.h>
#include "core/status.h"

int main(void) {
    puts(ba_last_error());
    puts(ba_last_marked_error());
    ba_fail(BA_ERROR_VALUE, BA_ARG("%s") ": expected a number like " BA_ARG("q") ", got %d", "k", 3);
    puts(ba_last_error());
    puts(ba_last_marked_error());
    char longer[601];
    snprintf(longer, sizeof longer, "%0600d", 0);
    ba_fail(BA_ERROR_VALUE, BA_ARG("k") ": expected %.494s " BA_ARG("value"), longer);
    puts(ba_last_error());
    puts(ba_last_marked_error());
    ba_fail(BA_ERROR_VALUE, BA_ARG("k") ": expected %s like " BA_ARG("q"), longer);
    puts(ba_last_error());
    puts(ba_last_marked_error());
    return 0;
}
""",
        encoding="utf-8",
    )
    sources = [str(ROOT / "csrc/core" / name) for name in ("status.c", "thread.c")]
    run(*compiler("CC"), "-std=c11", "-D_GNU_SOURCE", "-pthread", f"-I{ROOT}/csrc", "main.c", *sources, "-o", "main", cwd=tmp_path)
    lines = run(str(tmp_path / "main")).splitlines()
    assert lines[:2] == ["no error"] * 2
    assert lines[2:4] == ["k: expected a number like q, got 3", "\1k\2: expected a number like \1q\2, got 3"]
    zeros = "0" * 494  # leaves room for four more letters
    assert lines[4:6] == [f"k: expected {zeros} valu", f"\1k\2: expected {zeros} \1valu"]
    assert lines[6:] == [f"k: expected {zeros}00000", f"\1k\2: expected {zeros}00000"]
    assert len(lines[4]) == len(lines[6]) == 511
