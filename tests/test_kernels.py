"""The C side by itself: every kernel against plain arithmetic, each header alone, and a C program that knows the public header only."""

import os
import re
import runpy
import shlex
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path
from unittest import mock

import pytest

import cases

ROOT = Path(__file__).resolve().parent.parent
BUILD = "build/checkkernels"  # apart from the build in place, whose flags may be others
SANITIZED = "-fsanitize" in os.environ.get("BLITZ_ATTN_CFLAGS", "")

pytestmark = pytest.mark.skipif(not (ROOT / "setup.py").exists(), reason="needs a source checkout")


def plain_environment():
    """Without what a sanitizer run sets: it would be loaded into the compiler too."""
    return {name: value for name, value in os.environ.items() if name not in ("LD_PRELOAD", "BLITZ_ATTN_CFLAGS")}


def run(*command, **options):
    """Standard output of a command; its whole output as the failure where it fails."""
    done = subprocess.run(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=plain_environment(), timeout=600, check=False, **options
    )
    assert done.returncode == 0, f"{shlex.join(map(str, command))}\n{done.stdout[-8000:]}"
    return done.stdout


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


@pytest.fixture(scope="module")
def objects(flags):
    """The compiled library and checks: name of the source -> object file."""
    compiler("CC")
    run(sys.executable, "setup.py", "-q", "build_checkkernels", "--build-temp", BUILD, cwd=ROOT)
    return {path.relative_to(ROOT / BUILD).with_suffix("").as_posix(): str(path) for path in (ROOT / BUILD).rglob("*.o")}


def passed(output):
    """Number of kernels that passed, which must be all."""
    count, failed = re.fullmatch(r"(\d+) passed, (\d+) failed", output.splitlines()[-1]).groups()
    assert failed == "0"
    return int(count)


@pytest.mark.skipif(SANITIZED, reason="make asan runs its own build of it")
def test_every_kernel(objects):
    output = run(ROOT / BUILD / "checkkernels")
    assert passed(output) > 0
    listed = re.findall(r"^BA_FAMILY\((\w+), (\w+)\)$", (ROOT / "csrc/kernels/kernels.inc").read_text(encoding="utf-8"), re.MULTILINE)
    assert {("portable", "float64"), ("avx2", "float16"), ("avx512", "float32"), ("avx512_bf16", "bfloat16"), ("amx", "bfloat16")} <= set(listed)
    emulated = [("emulated", dtype) for dtype in ("float32", "float16", "bfloat16")]
    emulated += [("emulated_pairs", "bfloat16"), ("emulated_amx", "bfloat16")]
    for level, dtype in [*(pair for pair in listed if pair[0] in cases.ISA_LEVELS), *emulated]:
        for variant in ("wide", "narrow", "few"):
            assert re.search(rf"^attend_{dtype}_{level} {variant} attend +ok", output, re.MULTILINE), f"{dtype} {level} {variant} was not checked"
    assert not re.search(rf"_({'|'.join(cases.ISA_LEVELS)}) .*skipped", output)


@pytest.mark.skipif("avx2" not in cases.ISA_LEVELS, reason="the CPU has no AVX2")
def test_emulated_wide_kernels_with_avx2_flags(objects, flags, tmp_path):
    """The 16-lane text where the compiler may contract multiply-adds and lower to 8 lanes."""
    wide = tmp_path / "emulated_wide.o"
    run(*compiler("CC"), *flags, "-mavx2", "-mfma", "-mf16c", "-Icsrc", "-c", "tests/emulated_wide.c", "-o", wide, cwd=ROOT)
    others = [path for name, path in objects.items() if name != "tests/emulated_wide"]
    run(*compiler("CC"), "-pthread", wide, *others, "-o", tmp_path / "checkkernels", "-lm")
    assert passed(run(tmp_path / "checkkernels", "emulated")) > 0


def test_bench_names_its_unit(objects):
    output = run(ROOT / BUILD / "checkkernels", "--bench", "attend_float32_portable")
    lines = output.splitlines()
    assert len(lines) == 6  # three ways that queries stand, two head dims
    assert all(re.search(r"dim +(64|128) +[\d.]+ GFLOP/s +[\d.]+ of the level's multiply-adds$", line) for line in lines)


PROGRAM = r"""
#include "blitz_attn.h"
#include <math.h>
#include <stdio.h>
#include <string.h>

enum { H = 2, S = 37, D = 5, BLOCK = 16, COLUMNS = 3 };
static float q[H][S][D], k[S][D], v[S][D], out[H][S][D], lse[H][S];
static const int32_t lists[COLUMNS][2] = {{0, -1}, {1, 0}, {2, 0}};

static ba_tensor tensor(void *data, ba_dtype dtype, int64_t heads, int64_t rows, int64_t columns) {
    ba_tensor t = {data, dtype, 4, {1, heads, rows, columns}, {heads * rows * columns, rows * columns, columns, 1}};
    return t;
}

int main(void) {
    for (int i = 0; i < S; i++)
        for (int d = 0; d < D; d++) {
            for (int h = 0; h < H; h++) q[h][i][d] = (float)sin(h + 7 * i + d);
            k[i][d] = (float)cos(3 * i + d);
            v[i][d] = (float)sin(2 * i + 5 * d);
        }
    ba_block_sparse_args a = BA_BLOCK_SPARSE_ARGS_INIT;
    a.q = tensor(q, BA_FLOAT32, H, S, D);
    a.k = tensor(k, BA_FLOAT32, 1, S, D);
    a.v = tensor(v, BA_FLOAT32, 1, S, D);
    a.out = tensor(out, BA_FLOAT32, H, S, D);
    a.lse = tensor(lse, BA_FLOAT32, H, S, 1);
    a.lse.ndim = 3;
    a.blocks = tensor((void *)(uintptr_t)lists, BA_INT32, 1, COLUMNS, 2);
    a.block_q = a.block_kv = BLOCK;
    a.scale = ba_default_scale(D);
    a.causal = 1;
    ba_tensor out_shape, lse_shape;
    if (ba_block_sparse_check(&a, &out_shape, &lse_shape) != BA_OK || out_shape.dims[1] != H || lse_shape.dims[2] != S) return puts("shapes"), 1;
    if (ba_block_sparse_attention(&a) != BA_OK) return puts(ba_last_error()), 1;
    for (int h = 0; h < H; h++)
        for (int i = 0; i < S; i++) {
            double sum = 0, mean[D] = {0};
            for (int j = 0; j <= i; j++) {
                if (j / BLOCK != lists[i / BLOCK][0] && j / BLOCK != lists[i / BLOCK][1]) continue;
                double score = 0;
                for (int d = 0; d < D; d++) score += (double)q[h][i][d] * k[j][d] * a.scale;
                sum += exp(score);
                for (int d = 0; d < D; d++) mean[d] += exp(score) * v[j][d];
            }
            if (!(fabs(lse[h][i] - log(sum)) < 1e-5)) return printf("lse %d %d: %g %g\n", h, i, lse[h][i], log(sum)), 1;
            for (int d = 0; d < D; d++)
                if (!(fabs(out[h][i][d] - mean[d] / sum) < 1e-5)) return printf("out %d %d %d\n", h, i, d), 1;
        }
    a.k.dims[3] = D - 1;
    if (ba_block_sparse_attention(&a) != BA_ERROR_VALUE || strncmp(ba_last_error(), "k: ", 3) != 0) return puts(ba_last_error()), 1;
    return puts("right"), 0;
}
"""


def test_c_program_with_the_public_header_alone(objects, flags, tmp_path):
    shutil.copy(ROOT / "csrc/blitz_attn.h", tmp_path)
    (tmp_path / "program.c").write_text(PROGRAM, encoding="utf-8")
    run(*compiler("CC"), *flags, "-Werror", "-pedantic", f"-I{tmp_path}", "-c", tmp_path / "program.c", "-o", tmp_path / "program.o")
    library = [path for name, path in objects.items() if name.startswith("csrc/")]
    run(*compiler("CC"), "-pthread", tmp_path / "program.o", *library, "-o", tmp_path / "program", "-lm")
    assert run(tmp_path / "program") == "right\n"


HEADERS = sorted(path.relative_to(ROOT).as_posix() for folder in ("csrc", "tests") for path in (ROOT / folder).rglob("*.h"))
FRAGMENTS = ("csrc/kernels/vec_",)  # parts of vec.h
NEEDS = {"csrc/kernels/vec.h": ["-DBA_LANES=4", "-DBA_SUFFIX=alone"]}  # what the file that includes it must define


@pytest.mark.parametrize("header", [name for name in HEADERS if not name.startswith(FRAGMENTS)])
def test_header_compiles_alone(header, flags, tmp_path):
    source = tmp_path / "alone.c"
    source.write_text(f'#include "{ROOT / header}"\n', encoding="utf-8")
    include = [f"-I{ROOT / 'csrc'}", f"-I{sysconfig.get_path('include')}"]
    run(*compiler("CC"), *flags, "-Werror", *NEEDS.get(header, ()), *include, "-fsyntax-only", source)


def test_public_header_is_cxx_too(tmp_path):
    source = tmp_path / "alone.cpp"
    source.write_text('#include "blitz_attn.h"\nint main() { return ba_get_num_threads() < 0; }\n', encoding="utf-8")
    run(*compiler("CXX"), "-std=c++11", "-Wall", "-Wextra", "-Werror", "-pedantic", f"-I{ROOT / 'csrc'}", "-fsyntax-only", source)
