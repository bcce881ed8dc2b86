"""The library for C programs: the files that make install-lib installs, the functions that the library exports, and the example, compiled
as its comment says. Also calls with NULL and other values that the package never passes, and calls while another thread
changes the level."""

import os
import re
import shlex
import shutil
import sys

import pytest

import blitz_attn
from test_kernels import BUILD, EXAMPLE, ROOT, SANITIZED, compiler, run

HEADER = ROOT / "csrc/blitz_attn.h"
WARNINGS = ["-Wall", "-Wextra", "-Wpedantic", "-Werror"]

pytestmark = [
    pytest.mark.skipif(not (ROOT / "setup.py").exists(), reason="needs a source checkout"),
    pytest.mark.skipif(SANITIZED, reason="links objects without sanitizers"),
    pytest.mark.skipif(sys.platform == "darwin", reason="make lib builds a shared library for systems with ELF files only"),
]


def declared():
    """(result type, name, parameters) of each function in the header."""
    text = re.sub(r"/\*.*?\*/", "", HEADER.read_text(encoding="utf-8"), flags=re.DOTALL)
    found = re.findall(r"^BA_API ([\w *]+?)(\w+)\(([^)]*)\);", text, re.MULTILINE)
    return [(result.strip(), name, parameters) for result, name, parameters in found]


def contents(folder):
    """A dictionary from the name of every file below a folder to its bytes."""
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if not path.is_dir()}


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    """The folder PREFIX, in which make install-lib has installed the library. The library's objects are from the build in place."""
    pytest.importorskip("setuptools")
    compiler("CC")
    if not shutil.which("make"):
        pytest.skip("no make")
    folder = tmp_path_factory.mktemp("library")
    built, prefix, stage = folder / "built", folder / "usr", folder / "stage"
    levels = {"BLITZ_ATTN_LEVELS": os.environ.get("BLITZ_ATTN_LEVELS", "native")}  # the levels of make build
    run(sys.executable, "setup.py", "-q", "build_library", "--build-temp", BUILD, "--build-lib", built, cwd=ROOT, environment=levels)
    install = ["make", "-s", "install-lib", f"LIB={built}", f"PREFIX={prefix}"]
    no_jobs = {"MAKEFLAGS": "", "MAKELEVEL": "", "DESTDIR": ""}
    run(*install, cwd=ROOT, environment=no_jobs)
    run(*install, f"DESTDIR={stage}", cwd=ROOT, environment=no_jobs)
    staged = stage / prefix.relative_to("/")
    assert contents(prefix) == contents(staged)  # no file names DESTDIR
    return prefix


def test_what_is_installed(installed):
    version = re.search(r'BA_VERSION "((\d+\.\d+)\.\d+)"', HEADER.read_text(encoding="utf-8"))
    shared = {f"lib/libblitz_attn.so{suffix}" for suffix in ("", f".{version[2]}", f".{version[1]}")}
    assert set(contents(installed)) == {
        "include/blitz_attn.h",
        "include/blitz_attn_types.h",
        "lib/libblitz_attn.a",
        "lib/pkgconfig/blitz_attn.pc",
        *shared,
    }
    assert (installed / "lib/libblitz_attn.so").resolve().name == f"libblitz_attn.so.{version[1]}"


def test_the_shared_library_exports_the_header_and_nothing_else(installed):
    if not shutil.which("nm"):
        pytest.skip("no nm")
    exported = [line.split()[-1] for line in run("nm", "-D", "--defined-only", installed / "lib/libblitz_attn.so").splitlines()]
    gcov = ("__gcov_", "mangle_path")  # symbols of make coverage
    assert sorted(name for name in exported if not name.startswith(gcov)) == sorted(name for _, name, _ in declared())


def test_no_two_sources_have_one_name():
    """The static library would lose one of two such sources: an archive replaces a member by a later one of the same name."""
    names = sorted(path.name for folder in ("core", "kernels", "ops") for path in (ROOT / "csrc" / folder).rglob("*.c"))
    assert names == sorted(set(names))


def run_linked(installed, program):
    return run(program, environment={"LD_LIBRARY_PATH": str(installed / "lib")})


def commands(installed):
    """The two commands in the example's comment, with this compiler and all warnings. Without pkg-config, its output is filled in."""
    found = re.findall(r"^ \*     cc (.+)$", EXAMPLE.read_text(encoding="utf-8"), re.MULTILINE)
    assert len(found) == 2
    if not shutil.which("pkg-config"):
        said = {"--cflags": f"-I{installed}/include", "--libs": f"-L{installed}/lib -lblitz_attn", "--variable=libdir": f"{installed}/lib"}
        answer = r"\$\(pkg-config (.+?) blitz_attn\)"
        found = [re.sub(answer, lambda words: " ".join(said[word] for word in words[1].split()), line) for line in found]
    return [f"{shlex.join([*compiler('CC'), '-std=c11', *WARNINGS])} {line}" for line in found]


@pytest.mark.parametrize("kind", ["shared", "static"])
def test_the_example_compiles_as_it_says_and_finds_itself_right(kind, installed, tmp_path):
    command = commands(installed)[kind == "static"]
    shutil.copy(EXAMPLE, tmp_path)
    run("sh", "-c", command, cwd=tmp_path, environment={"PKG_CONFIG_PATH": str(installed / "lib/pkgconfig")})
    if shutil.which("nm"):
        needs = "U ba_block_sparse_attention" in run("nm", tmp_path / "attention")
        assert needs == (kind == "shared")
    output = run_linked(installed, tmp_path / "attention")
    assert re.fullmatch(r"block-sparse attention: largest difference \d\.\de-\d+\npaged decode: largest difference \d\.\de-\d+\n", output)


def build(installed, folder, command, source):
    """Compile a program and link it with the shared library."""
    (folder / source[0]).write_text(source[1], encoding="utf-8")
    run(*command, *WARNINGS, f"-I{installed}/include", source[0], "-o", "program", f"-L{installed}/lib", "-lblitz_attn", "-lm", cwd=folder)
    return folder / "program"


@pytest.mark.parametrize("standard", ["c++11", "c++17"])
def test_a_cxx_program(standard, installed, tmp_path):
    text = """
#include <blitz_attn.h>
#include <cstdio>

int main() {
    float x[] = {1, 2, 3, 4}, out[4] = {};
    ba_tensor t = {};
    t.dtype = BA_FLOAT32;
    t.ndim = 4;
    for (int i = 0; i < 3; i++) t.dims[i] = t.strides[i] = 1;
    t.dims[3] = 4;
    t.strides[3] = 1;
    t.data = x;
    ba_block_sparse_backward_args g = ba_block_sparse_backward_args_init();
    const ba_paged_args p = ba_paged_args_init();
    const ba_select_prefill_args s = ba_select_prefill_args_init();
    const ba_nsa_select_args n = ba_nsa_select_args_init();
    ba_block_sparse_args a = ba_block_sparse_args_init();
    a.q = a.k = a.v = a.out = t;
    a.out.data = out;
    g.forward = a;
    if (s.pool_q != 1 || p.batch != n.batch) return std::puts("usual values"), 1;
    if (ba_block_sparse_attention(&a) != BA_OK) return std::puts(ba_last_error()), 1;
    return out[0] == 1 && out[3] == 4 ? 0 : 1;
}
"""
    run_linked(installed, build(installed, tmp_path, [*compiler("CXX"), f"-std={standard}"], ("program.cpp", text)))


def null_calls():
    """(parameter, call) for each parameter that points to a struct. The call passes NULL for it, and zeros for all others."""
    for result, name, parameters in declared():
        if result != "ba_status":
            continue
        types = [re.fullmatch(r"(?:const )?(\w+ \*?)(\w+)", parameter.strip()).groups() for parameter in parameters.split(",")]
        pointers = [parameter for kind, parameter in types if re.fullmatch(r"ba_\w+ \*", kind)]
        for null in pointers:
            if (name, null) != ("ba_append_kv", "v"):  # NULL is valid there, and means no values
                values = [f"&zero.{kind[:-2]}" if parameter in pointers and parameter != null else "0" for kind, parameter in types]
                yield null, f"{name}({', '.join(values)})"


def test_null_is_refused_with_a_sentence(installed, tmp_path):
    calls = list(null_calls())
    functions = {call.partition("(")[0] for _, call in calls}
    assert {"ba_block_sparse_attention", "ba_paged_check", "ba_merge_states", "ba_quantize_kv", "ba_gate_backward"} < functions
    assert len(functions) == 19
    structs = sorted({kind for _, call in calls for kind in re.findall(r"&zero\.(\w+)", call)})
    zero = " ".join(f"{kind} {kind};" for kind in structs)
    text = ["#include <blitz_attn.h>", "#include <stdio.h>", f"static struct {{ {zero} }} zero;", "int main(void) {"]
    text += [f'    {{ const int refused = {call} == BA_ERROR_VALUE; printf("%d %s\\n", refused, ba_last_error()); }}' for _, call in calls]
    program = build(installed, tmp_path, compiler("CC"), ("program.c", "\n".join([*text, "    return 0;", "}", ""])))
    lines = run_linked(installed, program).splitlines()
    assert lines == [f"1 {parameter}: expected a pointer, got NULL" for parameter, _ in calls]


PRELUDE = """
#define _XOPEN_SOURCE 700
#include <blitz_attn.h>
#include <inttypes.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static inline void report(ba_status status) { printf("%d %s\\n", status, status == BA_OK ? "" : ba_last_error()); }
"""


def output_of(installed, folder, text):
    """The lines that a C program prints. Its source is PRELUDE and `text`."""
    command = [*compiler("CC"), "-std=c11", "-pthread"]
    return run_linked(installed, build(installed, folder, command, ("program.c", PRELUDE + text))).splitlines()


def test_the_level_may_change_while_calls_run(installed, tmp_path):
    """A call uses one level from beginning to end. With quantised caches, some families read rows in a form that other families do not write."""
    text = """
enum { QUERIES = 8, HEADS = 4, TOKENS = 32, DIM = 16, OUT = QUERIES * HEADS * DIM };
static _Atomic int done;
static void *change_the_level(void *unused) {
    while (!done) {
        ba_isa_set_cap(BA_ISA_PORTABLE);
        ba_isa_set_cap(BA_ISA_COUNT - 1);
    }
    return unused;
}

int main(void) {
    uint16_t q[OUT];
    int8_t k[TOKENS * DIM], v[TOKENS * DIM];
    float out[OUT], wanted[BA_ISA_COUNT][OUT], scale = 0.01f;
    int32_t table[1] = {0};
    int64_t length = TOKENS, queries[] = {0, QUERIES};
    for (int i = 0; i < OUT; i++) q[i] = (uint16_t)(0x3f00 + i * 37 % 128 + (i % 2 << 15));
    for (int i = 0; i < TOKENS * DIM; i++) {
        k[i] = (int8_t)(i * 53 % 255 - 127);
        v[i] = (int8_t)(i * 91 % 255 - 127);
    }
    ba_paged_args a = ba_paged_args_init();
    a.q = ba_contiguous(q, BA_BFLOAT16, 3, (int64_t[]){QUERIES, HEADS, DIM});
    a.k_cache = ba_contiguous(k, BA_INT8, 4, (int64_t[]){1, TOKENS, 1, DIM});
    a.v_cache = ba_contiguous(v, BA_INT8, 4, (int64_t[]){1, TOKENS, 1, DIM});
    a.k_scale = a.v_scale = ba_contiguous(&scale, BA_FLOAT32, 0, NULL);
    a.block_tables = ba_contiguous(table, BA_INT32, 2, (int64_t[]){1, 1});
    a.seq_lens = &length;
    a.cu_q = queries;
    a.batch = a.num_threads = a.unrounded = 1;
    for (int level = 0; level < BA_ISA_COUNT; level++) {
        ba_isa_set_cap((ba_isa)level);
        a.out = ba_contiguous(wanted[level], BA_FLOAT32, 3, (int64_t[]){QUERIES, HEADS, DIM});
        if (ba_paged_attention(&a) != BA_OK) return 1;
    }
    a.out.data = out;
    pthread_t changer;
    pthread_create(&changer, NULL, change_the_level, NULL);
    int wrong = 0;
    for (int call = 0; call < CALLS; call++) {
        if (ba_paged_attention(&a) != BA_OK) return 1;
        int right = 0;
        for (int level = 0; level < BA_ISA_COUNT; level++) right |= !memcmp(out, wanted[level], sizeof out);
        wrong += !right;
    }
    done = 1;
    pthread_join(changer, NULL);
    printf("%d\\n", wrong);
    return 0;
}
"""
    assert output_of(installed, tmp_path, text.replace("CALLS", "50000")) == ["0"]


@pytest.mark.skipif(sys.platform != "linux", reason="counts threads in /proc, and stands in for a function of glibc or musl")
@pytest.mark.parametrize("refused", [False, True])
def test_no_threads_where_forks_cannot_be_handled(refused, installed, tmp_path):
    """Without the handler, a forked child would wait for workers that it does not have."""
    refusal = """
int pthread_atfork(void (*a)(void), void (*b)(void), void (*c)(void)) { return a || b || c ? 12 : 0; }
int __register_atfork(void (*a)(void), void (*b)(void), void (*c)(void), void *d) { return d || a || b || c ? 12 : 0; }
"""
    text = """
#include <dirent.h>
enum { TOKENS = 1024, DIM = 64 };
static float x[TOKENS * DIM], out[2][TOKENS * DIM];

int main(void) {
    for (int i = 0; i < TOKENS * DIM; i++) x[i] = (float)(i * 37 % 128 - 64) / 64;
    ba_block_sparse_args a = ba_block_sparse_args_init();
    a.q = a.k = a.v = ba_contiguous(x, BA_FLOAT32, 4, (int64_t[]){1, 1, TOKENS, DIM});
    for (int i = 0; i < 2; i++) {
        a.out = ba_contiguous(out[i], BA_FLOAT32, 4, (int64_t[]){1, 1, TOKENS, DIM});
        a.num_threads = i ? 3 : 1;
        report(ba_block_sparse_attention(&a));
    }
    int threads = -2; /* without . and .. */
    DIR *tasks = opendir("/proc/self/task");
    while (readdir(tasks)) threads++;
    printf("%d threads, %d\\n", threads, memcmp(out[0], out[1], sizeof out[0]));
    return 0;
}
"""
    lines = output_of(installed, tmp_path, (refusal if refused else "") + text)
    assert lines == ["0 ", "0 ", f"{1 if refused else 3} threads, 0"]


def test_numbers_without_a_name(installed, tmp_path):
    text = """
int main(void) {
    for (int n = 0; n < BA_DTYPE_COUNT; n++) printf("%s %d ", ba_dtype_name((ba_dtype)n), (int)ba_dtype_size((ba_dtype)n));
    const int wrong[] = {-1, BA_DTYPE_COUNT, 99, 1 << 30};
    for (int i = 0; i < 4; i++) {
        const char *name = "none";
        ba_isa level;
        printf("\\n%s %d %s %s %d", ba_dtype_name((ba_dtype)wrong[i]), (int)ba_dtype_size((ba_dtype)wrong[i]), ba_layout_name((ba_layout)wrong[i]),
               ba_isa_name((ba_isa)wrong[i]), ba_kernel_info((ba_isa)wrong[i], 0, &name, &level));
    }
    printf("\\n%d", ba_isa_parse("toy"));
    return 0;
}
"""
    sizes = "float32 4 float16 2 bfloat16 2 float64 8 uint16 2 int16 2 int32 4 int64 8 int8 1 float8_e4m3 1 bool 1 q8_0 1 q4_0 1 q4_1 1 "
    assert output_of(installed, tmp_path, text) == [sizes, *["unknown 0 unknown unknown 0"] * 4, "-1"]


def test_contiguous_tensors(installed, tmp_path):
    """Strides are those of contiguous rows. Unchecked sizes may overflow without harm, and too many axes are refused with the argument's name."""
    text = """
int main(void) {
    const int64_t dims[5] = {2, 3, 4, 5, 6}, large[4] = {INT64_MAX, INT64_MAX, INT64_MAX, -1};
    for (int n = 0; n < 5; n++) {
        const ba_tensor t = ba_contiguous(dims, BA_INT16, n, dims);
        printf("%d %d %d:", t.data == (void *)dims, t.dtype == BA_INT16, t.ndim);
        for (int i = 0; i < n; i++) printf(" %d/%d", (int)t.dims[i], (int)t.strides[i]);
        puts("");
    }
    ba_block_sparse_args a = ba_block_sparse_args_init();
    a.q = a.k = a.v = a.out = ba_contiguous(dims, BA_FLOAT32, 5, dims);
    report(ba_block_sparse_attention(&a));
    a.q = a.k = a.v = a.out = ba_contiguous(dims, BA_FLOAT32, 4, large);
    printf("%d\\n", ba_block_sparse_attention(&a) != BA_OK);
    return 0;
}
"""
    assert output_of(installed, tmp_path, text) == [
        "1 1 0:", "1 1 1: 2/1", "1 1 2: 2/3 3/1", "1 1 3: 2/12 3/4 4/1", "1 1 4: 2/60 3/20 4/5 5/1",
        "2 q: expected shape (B, H, Sq, D) for layout BNSD, got 5 axes", "1",
    ]  # fmt: skip


def test_a_cap_above_the_level_of_the_cpu(installed, tmp_path):
    text = """
int main(void) {
    ba_isa_set_cap(BA_ISA_COUNT - 2);
    printf("%s\\n%s\\n%s\\n", ba_isa_name(ba_isa_detected()), ba_isa_name(BA_ISA_COUNT - 2), ba_isa_note());
    return 0;
}
"""
    detected, cap, note = output_of(installed, tmp_path, text)
    levels = blitz_attn.isa_levels()
    if levels.index(detected) < levels.index(cap):
        assert note == f"{detected}: the highest in use on this CPU; the cap {cap} is above it"
    else:
        assert note.startswith(f"{cap}: ")


def test_a_program_that_has_all_keys_keeps_its_values(installed, tmp_path):
    """Each thread frees its scratch memory when it ends, by a key of pthreads. If no key is left, the library uses none of the program's keys."""
    text = """
static pthread_key_t keys[1 << 16];
static int count, changed;

static void *attend(void *unused) {
    float x[4] = {1, 2, 3, 4}, out[4];
    for (int i = 0; i < count; i++) pthread_setspecific(keys[i], &keys[i]);
    ba_block_sparse_args a = ba_block_sparse_args_init();
    a.q = a.k = a.v = a.out = ba_contiguous(x, BA_FLOAT32, 4, (int64_t[]){1, 1, 1, 4});
    a.out.data = out;
    a.num_threads = 1;
    for (int call = 0; call < 2; call++) changed += ba_block_sparse_attention(&a) != BA_OK || out[3] != 4;
    for (int i = 0; i < count; i++) changed += pthread_getspecific(keys[i]) != &keys[i];
    return unused;
}

int main(void) {
    pthread_t thread;
    while (count < 1 << 16 && pthread_key_create(&keys[count], NULL) == 0) count++;
    pthread_create(&thread, NULL, attend, NULL);
    pthread_join(thread, NULL);
    printf("%d %d\\n", count > 0, changed);
    return 0;
}
"""
    assert output_of(installed, tmp_path, text) == ["1 0"]


# Valid arguments for every function that WRONG calls.
VALID = """
#define array(data, dtype, ...) ba_contiguous(data, dtype, sizeof(int64_t[]){__VA_ARGS__} / sizeof(int64_t), (int64_t[]){__VA_ARGS__})
static float x[64], y[64], sinks[2];
static int32_t pages[2] = {1, 0}, summary_page[1];
static int64_t lengths[2] = {8, 8}, slots[1], kept[1025], far[3] = {0, INT64_MAX, -2}, wide[2] = {-2, INT64_MAX}, zero[2];
static double density[1] = {0.5};
static ba_tensor shapes[3], k, keep, lists, out, lse, rows, bytes, scale;
static ba_block_sparse_args a;
static ba_block_sparse_backward_args g;
static ba_paged_args p, w;
static ba_select_prefill_args s;
static ba_select_args c;
static ba_quest_metadata_args m;

static void valid(void) {
    a = ba_block_sparse_args_init();
    a.q = a.k = a.v = a.out = array(x, BA_FLOAT32, 1, 2, 2, 4);
    a.out.data = y;
    g = ba_block_sparse_backward_args_init();
    g.forward = a;
    g.forward.out = g.dout = a.q;
    g.forward.lse = array(x, BA_FLOAT32, 1, 2, 2);
    g.dq = g.dk = g.dv = a.out;
    g.dk.data = y + 16;
    g.dv.data = y + 32;
    p = ba_paged_args_init();
    p.q = p.out = array(x, BA_FLOAT32, 1, 1, 4);
    p.out.data = y;
    p.k_cache = p.v_cache = array(x, BA_FLOAT32, 2, 4, 1, 4);
    p.v_cache.data = x + 32;
    p.block_tables = array(pages, BA_INT32, 1, 2);
    p.seq_lens = lengths;
    p.batch = 1;
    w = p;
    w.k_cache.data = y;
    w.v_cache.data = y + 32;
    k = array(x, BA_FLOAT32, 1, 1, 4);
    s = ba_select_prefill_args_init();
    s.call = a;
    s.budgets = array(density, BA_FLOAT64, 1);
    s.kept = array(y, BA_INT64, 1, 2, 1, 1);
    s.counts = array(y + 8, BA_INT32, 1, 2, 1);
    c = (ba_select_args){.method = BA_SELECT_MAX, .q = p.q, .a = p.k_cache, .tables = p.block_tables, .seq_lens = lengths, .batch = 1};
    c.page_size = 4;
    c.selected = array(y, BA_INT32, 1, 1, 1);
    m = (ba_quest_metadata_args){.k_cache = p.k_cache, .block_tables = p.block_tables, .end = lengths, .batch = 1};
    m.metadata_tables = array(summary_page, BA_INT32, 1, 1);
    m.maxblocks = array(y, BA_FLOAT32, 1, 2, 1, 4);
    keep = array(kept, BA_INT64, 1, 1, 1, 1);
    lists = array(y, BA_INT32, 1, 1, 1, 1);
    slots[0] = 0;
    memset(kept, 0, sizeof kept);
    kept[0] = 1;
    out = a.out;
    lse = array(y + 32, BA_FLOAT32, 1, 2, 2);
    rows = array(x, BA_FLOAT32, 2, 4);
    bytes = array(y, BA_INT8, 2, 4);
    scale = array(y + 32, BA_FLOAT32, 2);
}
"""

CALLS = {
    "a": "ba_block_sparse_attention(&a)",
    "a shapes": "ba_block_sparse_check(&a, &shapes[0], &shapes[1])",
    "g": "ba_block_sparse_attention_backward(&g)",
    "g shapes": "ba_block_sparse_backward_check(&g, &shapes[0], &shapes[1], &shapes[2])",
    "p": "ba_paged_attention(&p)",
    "p shapes": "ba_paged_check(&p, &shapes[0], &shapes[1])",
    "w": "ba_append_kv(&k, &k, NULL, &w)",
    "w slots": "ba_append_kv(&k, &k, slots, &w)",
    "s": "ba_select_prefill(&s)",
    "c": "ba_select_blocks(&c)",
    "m": "ba_quest_metadata(&m)",
    "lists": "ba_list_kept(&keep, &lists)",
    "merge": "ba_merge_states(1, &a.q, &g.forward.lse, &out, &lse)",
    "quantize": "ba_quantize_kv(&rows, &bytes, &scale, 1)",
}
WRONG = [  # call, changes, sentence; from Python, earlier checks would refuse these calls
    ("a", "a.q.ndim = -1", "q: expected shape (B, H, Sq, D) for layout BNSD, got -1 axes"),
    ("a", "a.q.dtype = BA_INT8", "q: expected float32, float16, bfloat16 or float64, got int8"),
    ("a", "a.q.strides[3] = 2", "q: expected a contiguous last axis, got stride 2 elements"),
    ("a", "a.q.dims[2] = -1", "q: expected no negative axis, got shape (1, 2, -1, 4)"),
    ("a", "a.q.data = NULL", "q: expected an array, got none"),
    ("a", "a.layout = (ba_layout)9", "layout: expected BNSD, BSND, BSH or TND, got 9"),
    ("a", "a.sinks = sinks; a.routed = 1", "sinks: expected none with routed lists, got some"),
    ("a", "a.kv_ranges = array(x, BA_FLOAT32, 2, 2)", "kv_ranges: expected int32 or int64, got float32"),
    ("a", "a.attn_mask = array(x, BA_INT8, 2, 2)",
     "attn_mask: expected bool, float32, float16, bfloat16 or float64, got int8"),
    ("a", "a.attn_mask = array(x, BA_BOOL, 2, 2); a.attn_mask.ndim = 7",
     "attn_mask: expected shape (1, 2 or 1, 2 or 1, 2 or 1), got 7 axes"),
    ("a", "a.blocks = array(x, BA_FLOAT32, 1, 1, 1, 1)", "sabi: expected uint16, int16, int32 or int64, got float32"),
    ("a shapes", "a.window[0] = -2", "window: expected token counts of at least 0, or -1 for no bound, got (-2, -1)"),
    ("g shapes", "g.dout.dtype = BA_BFLOAT16", "dout: expected dtype float32, got bfloat16"),
    ("a", "a.layout = BA_TND; a.q = a.k = a.v = array(x, BA_FLOAT32, 1, 2, 4)",
     "cu_seqlens_q: expected cumulative lengths (B + 1,) from 0 to 1 with packed arrays, got none"),
    ("a", "a.layout = BA_BSH; a.q = array(x, BA_FLOAT32, 1, 2, 4)",
     "num_heads: expected the number of heads in the last axis for layout BSH, got 0"),
    ("g", "g.forward.unrounded = 1", "unrounded: expected 0 where out is an input, got 1"),
    ("g", "g.forward.lse.ndim = 0, g.forward.lse.data = NULL", "lse: expected shape (1, 2, 2), got none"),
    ("g", "g.dalibi_slopes = y", "dalibi_slopes: expected none without alibi_slopes, got some"),
    ("g", "g.dattn_mask = array(y, BA_FLOAT32, 2, 2)", "dattn_mask: expected none without attn_mask, got some"),
    ("g", "g.dattn_mask = g.forward.attn_mask = array(y, BA_BOOL, 2, 2)",
     "dattn_mask: expected none where attn_mask is of bool, got some"),
    ("p", "p.k_cache.dtype = p.v_cache.dtype = BA_INT32",
     "k_cache: expected float32, float16, bfloat16, float64, int8, float8_e4m3, q8_0, q4_0 or q4_1, got int32"),
    ("p", "p.kv_layout = (ba_kv_layout)2", "kv_layout: expected NHD or HND, got 2"),
    ("p", "p.block_tables.dtype = BA_FLOAT32", "block_tables: expected int32 or int64, got float32"),
    ("p", "p.seq_lens = NULL", "seq_lens: expected one length per request, got none"),
    ("p", "p.batch = -1", "seq_lens: expected one length for each of q's 1 requests, got -1"),
    ("p shapes", "p.window = -2", "window: expected a token count of at least 0, or -1 for no bound, got -2"),
    ("p", "p.cu_q = far + 1", "cu_q: expected 0 at [0], got 9223372036854775807"),
    ("p", "p.selected_counts = lengths", "selected_counts: expected none without selected, got some"),
    ("p", "p.selected = array(x, BA_FLOAT32, 1, 1, 1)", "selected: expected int16, int32 or int64, got float32"),
    ("w", "w.cu_q = far", "q_lens: expected 0 to seq_lens[0] = 8, got 9223372036854775807 at [0]"),
    ("w", "w.cu_q = wide", "cu_q: expected 0 at [0], got -2"),
    ("w", "w.cu_q = far; w.batch = 2; w.block_tables.dims[0] = 2; w.block_tables.dims[1] = 1; w.seq_lens = zero; w.q_begin = zero",
     "cu_q: expected numbers that rise by at most 2**63 - 1, got -2 after 9223372036854775807"),
    ("w", "w.batch = -1", "batch: expected at least 0 requests, got -1"),
    ("w", "w.q_begin = zero", "q_begin: expected none, since the tokens that are written are the last ones of their requests, got some"),
    ("w slots", "slots[0] = 8", "slot_mapping: expected slots from 0 to 7, or -1 for none, got 8 at [0]"),
    ("s", "s.chooser = (ba_chooser)9", "chooser: expected pooled, antidiagonal, sampled_rows, vertical_slash or given, got 9"),
    ("s", "s.term = (ba_chooser_term)9", "term: expected mean, bound or both, got 9"),
    ("s", "s.budget = (ba_budget)9", "budget: expected density, top_p, threshold or top_k, got 9"),
    ("s", "s.budgets.dtype = BA_FLOAT32", "density: expected float64, got float32"),
    ("c", "c.method = (ba_select_method)9", "method: expected quest, mean or max, got 9"),
    ("c", "c.cu_q = far; c.q.ndim = 2", "query: expected shape (T, H, D), got (1, 1)"),
    ("c", "c.seq_lens = NULL", "seq_lens: expected one length per request, got none"),
    ("m", "m.k_cache.dims[1] = 1025", "k_cache: expected pages of at most 1024 tokens, got (2, 1025, 1, 4)"),
    ("m", "m.block_tables.dtype = BA_FLOAT32", "block_tables: expected int32 or int64, got float32"),
    ("lists", "keep.dtype = BA_INT32", "kept: expected int64 (B, lists, rows, words), got (1, 1, 1, 1)"),
    ("lists", "lists.dtype = BA_INT8", "sabi: expected uint16, int16, int32 or int64, got int8"),
    ("lists", "lists.dims[2] = 2", "sabi: expected lists of (1, 1, 1, 1), got (1, 1, 2, 1)"),
    ("lists", "kept[0] = 3", "sabi: expected at least 2 places per row, got 1"),
    ("lists", "kept[1024] = 1; keep.dims[3] = 1025; lists.dims[3] = 2; lists.dtype = BA_UINT16",
     "sabi: expected a dtype that holds column 65536, got uint16"),
    ("merge", "out.dims[2] = 1", "out: expected shape (1, 2, 2, 4) like outs[0], got (1, 2, 1, 4)"),
    ("merge", "lse.dtype = BA_FLOAT64", "lse: expected dtype float32 with outs[0] of 32 bits or fewer, got float64"),
    ("quantize", "bytes.dtype = BA_FLOAT32", "values: expected int8, float8_e4m3, q8_0, q4_0 or q4_1, got float32"),
]  # fmt: skip


def test_what_only_c_programs_can_pass_is_refused_by_its_sentence(installed, tmp_path):
    """Each call is made first with valid arguments, and then with a wrong one."""
    rows = [(name, "", "") for name in CALLS] + WRONG
    body = "".join(f"    valid();\n    {changes};\n    report({CALLS[name]});\n" for name, changes, _ in rows)
    lines = output_of(installed, tmp_path, f"{VALID}\nint main(void) {{\n{body}    return 0;\n}}\n")
    assert [line.partition(" ")[2] for line in lines] == [sentence for *_, sentence in rows]
