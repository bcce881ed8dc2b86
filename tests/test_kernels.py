"""The C side by itself: every kernel against plain arithmetic, each header alone, and a C program that knows the public header only."""

import os
import platform
import re
import runpy
import shlex
import shutil
import subprocess
import sys
import sysconfig
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Timer
from unittest import mock

import pytest

import blitz_attn
import cases
import sampling

ROOT = Path(__file__).resolve().parent.parent
SANITIZED = "-fsanitize" in os.environ.get("BLITZ_ATTN_CFLAGS", "")
# The objects of the build in place, which are half of the work; apart from it where its flags are not those of a release.
INSTRUMENTED = SANITIZED or "--coverage" in os.environ.get("BLITZ_ATTN_CFLAGS", "")
BUILD = "build/checkkernels" if INSTRUMENTED else "build/temp"
SILENCE = 600  # seconds without a line after which a program is taken for stuck

pytestmark = pytest.mark.skipif(not (ROOT / "setup.py").exists(), reason="needs a source checkout")


def plain_environment():
    """Without what an instrumented run sets: it would be loaded into the compiler too."""
    left_out = ("LD_PRELOAD", "BLITZ_ATTN_CFLAGS") if INSTRUMENTED else ()
    return {name: value for name, value in os.environ.items() if name not in left_out}


def run(*command, environment=None, **options):
    """Standard output of a command; its whole output as the failure where it fails."""
    env = {**plain_environment(), **(environment or {})}
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=env, timeout=3000, check=False, **options)
    assert done.returncode == 0, f"{shlex.join(map(str, command))}\n{done.stdout[-8000:]}"
    return done.stdout


def run_shown(show, *command):
    """Standard output of a program that prints a line for each of its checks. A line in a while is shown, and silence ends it."""
    lines, shown = [], time.monotonic()
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=plain_environment()) as process:
        while True:
            watch = Timer(SILENCE, process.kill)
            watch.start()
            line = process.stdout.readline()
            watch.cancel()
            if not line:
                break
            lines.append(line)
            if time.monotonic() - shown > 10:
                show(f"kernel checks: {len(lines)} done, now behind {' '.join(line.split()[:2])}")
                shown = time.monotonic()
    assert process.returncode == 0, f"{shlex.join(map(str, command))}\n{''.join(lines)[-8000:]}"
    return "".join(lines)


def compiler(name):
    """The command of the C (``CC``) or C++ (``CXX``) compiler."""
    command = shlex.split(os.environ.get(name) or {"CC": sysconfig.get_config_var("CC") or "cc", "CXX": "g++"}[name])[:1]
    if not shutil.which(command[0]):
        pytest.skip(f"no compiler {command[0]}")
    return command


@pytest.fixture(scope="module")
def flags():
    """What setup.py compiles with: its flags of all files."""
    pytest.importorskip("setuptools")
    before = Path.cwd()
    try:
        with mock.patch("setuptools.setup"):
            return runpy.run_path(str(ROOT / "setup.py"))["COMMON_FLAGS"]
    finally:
        os.chdir(before)


def objects_in(folder):
    """Name of a source -> its object file. Objects of sources that have gone are left out."""
    found = {path.relative_to(ROOT / folder).with_suffix("").as_posix(): str(path) for path in (ROOT / folder).rglob("*.o")}
    return {name: path for name, path in found.items() if (ROOT / name).with_suffix(".c").exists() and not name.startswith("csrc/python")}


@pytest.fixture(scope="module")
def objects(flags):
    """The compiled library and checks: name of the source -> object file."""
    compiler("CC")
    run(sys.executable, "setup.py", "-q", "build_checkkernels", "--build-temp", BUILD, cwd=ROOT)
    return objects_in(BUILD)


def passed(output):
    """Number of kernels that passed, which must be all."""
    count, failed = re.fullmatch(r"(\d+) passed, (\d+) failed", output.splitlines()[-1]).groups()
    assert failed == "0"
    return int(count)


def listed(kind):
    """(level, dtype) of the lines BA_<kind>(level, dtype) of kernels.inc."""
    text = (ROOT / "csrc/kernels/kernels.inc").read_text(encoding="utf-8")
    return re.findall(rf"^BA_{kind}\((\w+), (\w+)\)$", text, re.MULTILINE)


def sample(one_in):
    """Arguments of checkkernels: one case in so many, which SAMPLE_SEED draws, or all where it says so."""
    return [] if sampling.ALL else ["--sample", str(one_in * sampling.ONE_IN), sampling.SEED]


def names_of(level):
    """Arguments of checkkernels for one level: a part of its kernels' names, and after a dash parts of other levels' names that have it too."""
    others = [f"_{name}" for name in blitz_attn.isa_levels() if name != level and f"_{level}" in f"_{name}"]
    return [f"_{level}", *(f"-{other}" for other in others)]


def test_every_level_has_its_families():
    assert {
        ("portable", "float64"),
        ("avx2", "float16"),
        ("avx512", "float32"),
        ("avx512_bf16", "bfloat16"),
        ("amx", "float32"),
        ("amx", "float16"),
        ("amx", "bfloat16"),
        ("neon", "float16"),
        ("neon_bf16", "bfloat16"),
    } <= set(listed("FAMILY"))


def assert_all_checked(output, level):
    """That a report has every kernel of a level, right."""
    assert passed(output) > 0
    for dtype in [dtype for at, dtype in listed("FAMILY") if at == level]:
        split = level.endswith("amx") and dtype != "bfloat16"  # few queries are left to vectors
        for variant in ("wide", "narrow") if split else ("wide", "narrow", "few"):
            assert re.search(rf"^attend_{dtype}_{level} {variant} attend +ok", output, re.MULTILINE), f"{dtype} {level} {variant} was not checked"
        if (level, dtype) in listed("FAMILY_L2"):
            assert re.search(rf"^attend_{dtype}_{level}_l2 few attend +ok", output, re.MULTILINE), f"few {dtype} {level}_l2 was not checked"
    for kv_dtype in ["float8_e4m3"] if level in ("avx512_bf16", "amx") else []:
        name = f"attend_bfloat16_{level}_over_{kv_dtype}"
        assert re.search(rf"^{name} few attend +ok", output, re.MULTILINE), f"{name} was not checked"
    for kv_dtype in ("int8", "float8_e4m3") if level in ("avx512_bf16", "amx") else ():
        for variant in ("wide", "narrow"):
            name = f"attend_bfloat16_{level}_over_{kv_dtype} {variant}"
            assert re.search(rf"^{name} attend +ok", output, re.MULTILINE), f"{name} was not checked"
    for dtype in [dtype for at, dtype in listed("CACHE_L2") if at == level]:
        assert re.search(rf"^cache_{dtype}_{level}_l2 few attend +ok", output, re.MULTILINE), f"cache {dtype} {level}_l2 was not checked"
    assert "skipped" not in output


@pytest.mark.skipif(SANITIZED, reason="make asan runs its own build of it")
@pytest.mark.whole
@pytest.mark.parametrize("level", cases.ISA_LEVELS)
def test_every_kernel_is_right(level, objects, show):
    assert_all_checked(run_shown(show, ROOT / BUILD / "checkkernels", *sample(8), *names_of(level)), level)


# Builds for CPUs that lack a level: every level as plain C, by itself and where the compiler may contract multiply-adds and lower 16 lanes to 8; and
# the level amx as released, whose instructions of tiles a signal handler carries out.
BUILDS = {
    "plain": ("build/emulated/temp", blitz_attn.isa_levels(), {"BLITZ_ATTN_EMULATED": "1"}),
    "contracted": (
        "build/contracted/temp",
        ["avx512"],
        {"BLITZ_ATTN_EMULATED": "1", "BLITZ_ATTN_LEVELS": "avx512", "BLITZ_ATTN_CFLAGS": "-mavx2 -mfma -mf16c"},
    ),
    "trapped": ("build/tiles/temp", ["amx"], {"BLITZ_ATTN_LEVELS": "", "BLITZ_ATTN_CFLAGS": "-DBA_TILE_TRAPS -DBA_NO_SMALL_CALLS"}),
}


@pytest.mark.long
@pytest.mark.skipif(INSTRUMENTED, reason="a build without sanitizers and the like")
@pytest.mark.parametrize("build", BUILDS)
def test_every_kernel_of_other_cpus(build, show):
    if build == "contracted" and platform.machine() not in ("x86_64", "AMD64"):
        pytest.skip("the flags are those of x86-64")
    if build == "trapped" and (sys.platform != "linux" or "avx512_bf16" not in blitz_attn.isa_levels(available=True)):
        pytest.skip("needs Linux, and a CPU with avx512_bf16")
    pytest.importorskip("setuptools")
    folder, levels, environment = BUILDS[build]
    command = [sys.executable, "setup.py", "-q", "build_checkkernels", "--build-temp", folder]
    run(*command, cwd=ROOT, environment={"BLITZ_ATTN_CFLAGS": "", **environment})
    names = [] if build == "plain" else [name for level in levels for name in names_of(level)]
    output = run_shown(show, ROOT / folder / "checkkernels", *sample(8), *names)
    for level in levels:
        assert_all_checked(output, level)


def test_bench_names_its_unit(objects):
    output = run(ROOT / BUILD / "checkkernels", "--bench", "attend_float32_portable")
    lines = output.splitlines()
    assert len(lines) == 8  # four ways that queries stand, two head dims
    assert all(re.search(r"dim +(64|128) +[\d.]+ GFLOP/s +[\d.]+ of the level's multiply-adds$", line) for line in lines)


PROGRAM = r"""
#include "blitz_attn.h"
#include <math.h>
#include <stdio.h>
#include <string.h>

enum { H = 2, S = 203, D = 21, BLOCK = 32, COLUMNS = 7 };
static float q[H][S][D], k[S][D], v[S][D], out[H][S][D], lse[H][S];
static uint16_t q16[H][S][D], k16[S][D], v16[S][D], out16[H][S][D];
static int32_t lists[COLUMNS][2];

static ba_tensor tensor(void *data, ba_dtype dtype, int64_t heads, int64_t rows, int64_t columns) {
    ba_tensor t = {data, dtype, 4, {1, heads, rows, columns}, {heads * rows * columns, rows * columns, columns, 1}};
    return t;
}

/* A number of few bits, the same in float32 and bfloat16. */
static float put(uint16_t *to, double value) {
    uint32_t bits;
    float x = (float)value;
    memcpy(&bits, &x, sizeof bits);
    *to = (uint16_t)(bits >> 16);
    bits &= 0xffff0000u;
    memcpy(&x, &bits, sizeof x);
    return x;
}

static float widened(uint16_t bits) {
    const uint32_t wide = (uint32_t)bits << 16;
    float x;
    memcpy(&x, &wide, sizeof x);
    return x;
}

/* Every output against double arithmetic. */
static int check(const ba_block_sparse_args *a, double tolerance) {
    ba_tensor out_shape, lse_shape;
    if (ba_block_sparse_check(a, &out_shape, &lse_shape) != BA_OK || out_shape.dims[1] != H || lse_shape.dims[2] != S) return puts("shapes"), 1;
    if (ba_block_sparse_attention(a) != BA_OK) return puts(ba_last_error()), 1;
    for (int h = 0; h < H; h++)
        for (int i = 0; i < S; i++) {
            double sum = 0, mean[D] = {0};
            for (int j = 0; j <= i; j++) {
                if (j / BLOCK != lists[i / BLOCK][0] && j / BLOCK != lists[i / BLOCK][1]) continue;
                double score = 0;
                for (int d = 0; d < D; d++) score += (double)q[h][i][d] * k[j][d] * ba_default_scale(D);
                sum += exp(score);
                for (int d = 0; d < D; d++) mean[d] += exp(score) * v[j][d];
            }
            if (!(fabs(lse[h][i] - log(sum)) < 1e-5)) return printf("lse %d %d: %g %g\n", h, i, lse[h][i], log(sum)), 1;
            for (int d = 0; d < D; d++) {
                const double got = a->out.dtype == BA_FLOAT32 ? out[h][i][d] : widened(out16[h][i][d]);
                if (!(fabs(got - mean[d] / sum) < tolerance)) return printf("out %d %d %d: %g %g\n", h, i, d, got, mean[d] / sum), 1;
            }
        }
    return 0;
}

int main(void) {
    for (int i = 0; i < S; i++)
        for (int d = 0; d < D; d++) {
            for (int h = 0; h < H; h++) q[h][i][d] = put(&q16[h][i][d], sin(h + 7 * i + d));
            k[i][d] = put(&k16[i][d], cos(3 * i + d));
            v[i][d] = put(&v16[i][d], sin(2 * i + 5 * d));
        }
    for (int i = 0; i < COLUMNS; i++) {
        lists[i][0] = i;
        lists[i][1] = i / 2 < i ? i / 2 : -1;
    }
    memset(out, 0xff, sizeof out);
    memset(out16, 0xff, sizeof out16);
    ba_block_sparse_args a = ba_block_sparse_args_init();
    a.lse = tensor(lse, BA_FLOAT32, H, S, 1);
    a.lse.ndim = 3;
    a.blocks = tensor(lists, BA_INT32, 1, COLUMNS, 2);
    a.block_q = a.block_kv = BLOCK;
    a.causal = 1;
    for (int narrow = 0; narrow < 2; narrow++) {
        const ba_dtype dtype = narrow ? BA_BFLOAT16 : BA_FLOAT32;
        memset(lse, 0xff, sizeof lse);
        a.q = tensor(narrow ? (void *)q16 : q, dtype, H, S, D);
        a.k = tensor(narrow ? (void *)k16 : k, dtype, 1, S, D);
        a.v = tensor(narrow ? (void *)v16 : v, dtype, 1, S, D);
        a.out = tensor(narrow ? (void *)out16 : out, dtype, H, S, D);
        if (check(&a, narrow ? 0x1p-8 : 1e-5)) return 1;
    }
    a.scale = 0; /* a number like any other: all keys that a query sees weigh the same */
    memset(out16, 0xff, sizeof out16);
    if (ba_block_sparse_attention(&a) != BA_OK || !(fabs(lse[0][S - 1] - log(2 * BLOCK - (COLUMNS * BLOCK - S))) < 1e-5)) return puts("scale 0"), 1;
    a.scale = INFINITY;
    if (ba_block_sparse_attention(&a) != BA_ERROR_VALUE || strncmp(ba_last_error(), "scale: ", 7) != 0) return puts(ba_last_error()), 1;
    a.scale = NAN;
    a.k.dims[3] = D - 1;
    if (ba_block_sparse_attention(&a) != BA_ERROR_VALUE || strncmp(ba_last_error(), "k: ", 3) != 0) return puts(ba_last_error()), 1;
    return printf("right at %s\n", ba_isa_name(ba_isa_active())), 0;
}
"""


def build_program(compile_command, objects, flags, folder):
    """PROGRAM, with the public headers and the library's objects and nothing else."""
    for header in ("blitz_attn.h", "blitz_attn_types.h"):
        shutil.copy(ROOT / "csrc" / header, folder)
    (folder / "program.c").write_text(PROGRAM, encoding="utf-8")
    run(*compile_command, *flags, "-Werror", "-pedantic", f"-I{folder}", "-c", folder / "program.c", "-o", folder / "program.o")
    library = [path for name, path in objects.items() if name.startswith("csrc/")]
    run(*compile_command, "-pthread", folder / "program.o", *library, "-o", folder / "program", "-lm")
    return folder / "program"


@pytest.mark.parametrize("level", cases.ISA_LEVELS)
def test_c_program_with_the_public_header_alone(level, objects, flags, tmp_path):
    program = build_program(compiler("CC"), objects, flags, tmp_path)
    assert run(program, environment={"BLITZ_ATTN_ISA": level}) == f"right at {level}\n"


# ---- aarch64, cross-built and emulated ----------------------------------------------------------------------------

CROSS_COMPILER = "aarch64-linux-gnu-gcc"
CROSS_LIBRARIES = Path("/usr/aarch64-linux-gnu")
EMULATOR = "qemu-aarch64"
# cortex-a57 has no extension: what the first levels may use is what every CPU of the architecture has.
CROSS_LEVELS = {"portable": "cortex-a57", "neon": "cortex-a57", "neon_bf16": "max"}
CROSS_BUILD = "build/aarch64"
CROSS_BUILD_ENVIRONMENT = {"CC": CROSS_COMPILER, "BLITZ_ATTN_CFLAGS": "", "BLITZ_ATTN_LEVELS": ""}  # all levels, whichever the build in place has


@pytest.fixture(scope="module")
def cross_objects():
    """The library and checks for aarch64: name of the source -> object file. Skips without the tools, unless BLITZ_ATTN_NEED_AARCH64 is set."""
    if platform.machine() in ("aarch64", "arm64"):
        pytest.skip("this is aarch64: test_every_kernel_is_right checks its levels")
    missing = [tool for tool in (CROSS_COMPILER, EMULATOR) if not shutil.which(tool)]
    if missing:
        (pytest.fail if os.environ.get("BLITZ_ATTN_NEED_AARCH64") else pytest.skip)(
            f"no {' and no '.join(missing)} (Debian: gcc-aarch64-linux-gnu libc6-dev-arm64-cross qemu-user)"
        )
    pytest.importorskip("setuptools")
    run(sys.executable, "setup.py", "-q", "build_checkkernels", "--build-temp", CROSS_BUILD, cwd=ROOT, environment=CROSS_BUILD_ENVIRONMENT)
    return objects_in(CROSS_BUILD)


def emulate(cpu, *command, **options):
    return run(EMULATOR, "-L", CROSS_LIBRARIES, "-cpu", cpu, *command, **options)


@pytest.mark.long
def test_every_aarch64_kernel(cross_objects):
    with ThreadPoolExecutor() as pool:
        reports = list(pool.map(lambda level: emulate(CROSS_LEVELS[level], ROOT / CROSS_BUILD / "checkkernels", *sample(8), level), CROSS_LEVELS))
    for level, output in zip(CROSS_LEVELS, reports, strict=True):
        passed(output)
        assert not re.search(rf"_{level} .*skipped", output)
        families = [dtype for at, dtype in listed("FAMILY") if at == level]
        caches = [dtype for at, dtype in listed("CACHE") if at == level]
        if level != "neon_bf16":
            assert {"float32", "float16", "bfloat16"} <= set(families)
            assert {"float32", "float16", "bfloat16", "int8", "float8_e4m3"} <= set(caches)
        checks = [f"attend_{dtype}_{level} {variant} attend" for dtype in families for variant in ("wide", "narrow", "few")]
        checks += [f"attend_{dtype}_{level}  merge_row" for dtype in families]
        checks += [f"cache_{dtype}_{level} few attend" for dtype in caches]
        checks += ["dispatch  tables"]
        if level != "neon_bf16":  # the gradients and the probe are those of neon
            checks += [f"attend_{dtype}_{level}  add_rows" for dtype in families]
            checks += [f"probe_{level}  flops and read"]
        for check in checks:
            assert re.search(rf"^{check} +ok ", output, re.MULTILINE), f"{check}: was not checked"


@pytest.mark.long
def test_c_program_on_aarch64(cross_objects, flags, tmp_path):
    program = build_program([CROSS_COMPILER], cross_objects, flags, tmp_path)
    for level, cpu in CROSS_LEVELS.items():
        assert emulate(cpu, program, environment={"BLITZ_ATTN_ISA": level}) == f"right at {level}\n"
    environment = {"BLITZ_ATTN_ISA": "neon_bf16"}
    assert emulate("cortex-a57", program, environment=environment) == "right at neon\n"  # which has no more


# ---- Headers ------------------------------------------------------------------------------------------------------

HEADERS = sorted(path.relative_to(ROOT).as_posix() for folder in ("csrc", "tests") for path in (ROOT / folder).rglob("*.h"))
FRAGMENTS = ("csrc/kernels/vec/vec_",)  # parts of vec/vec.h
NEEDS = {"csrc/kernels/vec/vec.h": ["-DBA_LANES=4", "-DBA_SUFFIX=alone"], "csrc/kernels/traits.h": ["-DBA_TRAITS_AVX2"]}  # what the file that includes it must define


@pytest.mark.parametrize("header", [name for name in HEADERS if not name.startswith(FRAGMENTS)])
def test_header_compiles_alone(header, flags, tmp_path):
    source = tmp_path / "alone.c"
    source.write_text(f'#include "{ROOT / header}"\n', encoding="utf-8")
    include = [f"-I{ROOT / 'csrc'}", f"-I{sysconfig.get_path('include')}"]
    run(*compiler("CC"), *flags, "-Werror", *NEEDS.get(header, ()), *include, "-fsyntax-only", source)


CXX_PROGRAM = """
#include "blitz_attn.h"

int main() {
    ba_block_sparse_args a = ba_block_sparse_args_init();
    ba_block_sparse_backward_args g = ba_block_sparse_backward_args_init();
    ba_paged_args p = ba_paged_args_init();
    const ba_select_prefill_args s = ba_select_prefill_args_init();
    const ba_nsa_select_args n = ba_nsa_select_args_init();
    a.causal = 1;
    g.forward = a;
    p.batch = s.pool_q + n.batch;
    return ba_block_sparse_attention(&a) == BA_OK || ba_block_sparse_attention_backward(&g) == BA_OK || ba_paged_attention(&p) == BA_OK;
}
"""


@pytest.mark.parametrize("standard", ["c++11", "c++17"])
def test_public_header_is_cxx_too(standard, tmp_path):
    source = tmp_path / "alone.cpp"
    source.write_text(CXX_PROGRAM, encoding="utf-8")
    run(*compiler("CXX"), f"-std={standard}", "-Wall", "-Wextra", "-Wpedantic", "-Werror", f"-I{ROOT / 'csrc'}", "-fsyntax-only", source)
