"""The library for C programs: what make install-lib installs and what it exports, the example compiled as its comment says, and what only C
programs can do: pass NULL and other numbers that the package never passes, and change the level while other threads compute."""

import os
import re
import shlex
import shutil
import sys

import pytest

from test_kernels import BUILD, EXAMPLE, INSTRUMENTED, ROOT, compiler, run

HEADER = ROOT / "csrc/blitz_attn.h"
WARNINGS = ["-Wall", "-Wextra", "-Wpedantic", "-Werror"]

pytestmark = [
    pytest.mark.skipif(not (ROOT / "setup.py").exists(), reason="needs a source checkout"),
    pytest.mark.skipif(INSTRUMENTED, reason="links the objects of a release build"),
    pytest.mark.skipif(sys.platform == "darwin", reason="make lib builds a shared library for systems with ELF files only"),
]


def declared():
    """(result, name, parameters) of each function of the header."""
    text = re.sub(r"/\*.*?\*/", "", HEADER.read_text(encoding="utf-8"), flags=re.DOTALL)
    found = re.findall(r"^BA_API ([\w *]+?)(\w+)\(([^)]*)\);", text, re.MULTILINE)
    return [(result.strip(), name, parameters) for result, name, parameters in found]


def contents(folder):
    """Name -> bytes of every file below a folder."""
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if not path.is_dir()}


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    """The folder that the library is installed in: PREFIX of make install-lib. It is made of the objects of the build in place."""
    pytest.importorskip("setuptools")
    compiler("CC")
    if not shutil.which("make"):
        pytest.skip("no make")
    folder = tmp_path_factory.mktemp("library")
    built, prefix, stage = folder / "built", folder / "usr", folder / "stage"
    levels = {"BLITZ_ATTN_LEVELS": os.environ.get("BLITZ_ATTN_LEVELS", "native")}  # as make build has them
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
    assert sorted(exported) == sorted(name for _, name, _ in declared())


def test_no_two_sources_have_one_name():
    """The static library would lose one of them: an archive replaces a member by a later one of the same name."""
    names = sorted(path.name for folder in ("core", "kernels", "ops") for path in (ROOT / "csrc" / folder).rglob("*.c"))
    assert names == sorted(set(names))


def run_linked(installed, program):
    return run(program, environment={"LD_LIBRARY_PATH": str(installed / "lib")})


def commands(installed):
    """The two commands in the example's comment, with this compiler and all warnings; without pkg-config with what it would say."""
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
    """A program that is linked with the shared library."""
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
    """(parameter, call) of each function with NULL for one of its pointers to structs; all else is zero."""
    for result, name, parameters in declared():
        if result != "ba_status":
            continue
        types = [re.fullmatch(r"(?:const )?(\w+ \*?)(\w+)", parameter.strip()).groups() for parameter in parameters.split(",")]
        pointers = [parameter for kind, parameter in types if re.fullmatch(r"ba_\w+ \*", kind)]
        for null in pointers:
            if (name, null) != ("ba_append_kv", "v"):  # where NULL says that there are no values
                values = [f"&zero.{kind[:-2]}" if parameter in pointers and parameter != null else "0" for kind, parameter in types]
                yield null, f"{name}({', '.join(values)})"


def test_null_is_refused_with_a_sentence(installed, tmp_path):
    calls = list(null_calls())
    functions = {call.partition("(")[0] for _, call in calls}
    assert {"ba_block_sparse_attention", "ba_paged_check", "ba_merge_states", "ba_quantize_kv", "ba_gate_backward"} < functions
    assert len(functions) == 18
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
    """The lines that a C program prints. It begins with PRELUDE."""
    command = [*compiler("CC"), "-std=c11", "-pthread"]
    return run_linked(installed, build(installed, folder, command, ("program.c", PRELUDE + text))).splitlines()


def test_the_level_may_change_while_calls_run(installed, tmp_path):
    """A call uses one level from its beginning to its end: with quantised caches, families of some levels read rows that others do not make."""
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


def test_numbers_that_are_no_name(installed, tmp_path):
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
    sizes = "float32 4 float16 2 bfloat16 2 float64 8 uint16 2 int16 2 int32 4 int64 8 int8 1 float8_e4m3 1 bool 1 "
    assert output_of(installed, tmp_path, text) == [sizes, *["unknown 0 unknown unknown 0"] * 4, "-1"]


def test_contiguous_tensors(installed, tmp_path):
    """Strides of rows; sizes that nobody has checked overflow without harm; more axes than there may be are refused by name."""
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


def test_a_program_that_has_all_keys_keeps_its_values(installed, tmp_path):
    """Each thread frees its scratch memory when it ends, by a key of pthreads. Where none is left, no key of the program stands in for it."""
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
