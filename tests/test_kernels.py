"""The C code by itself: every kernel against plain arithmetic, each header compiled alone, and a C program that includes only the public header."""

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
COVERED = "--coverage" in os.environ.get("BLITZ_ATTN_CFLAGS", "")
# The folder of objects. Usually it is the folder of the build in place, which saves half of the compiling. Under make coverage it is that
# of the build with coverage, so that code that C programs run counts, too. A build with sanitizers has a folder of its own.
BUILD = "build/checkkernels" if SANITIZED else "build/coverage/temp" if COVERED else "build/temp"
SILENCE = 600  # seconds without a line after which a program counts as stuck

pytestmark = pytest.mark.skipif(not (ROOT / "setup.py").exists(), reason="needs a source checkout")


def plain_environment():
    """The environment without the variables of a run under sanitizers, because the compiler would load the sanitizers, too."""
    left_out = ("LD_PRELOAD", "BLITZ_ATTN_CFLAGS") if SANITIZED else ()
    return {name: value for name, value in os.environ.items() if name not in left_out}


def run(*command, environment=None, **options):
    """Output of a command. If the command fails, the test fails with the last 8000 characters of the output."""
    env = {**plain_environment(), **(environment or {})}
    done = subprocess.run(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=env, timeout=3000, check=False, **options
    )
    assert done.returncode == 0, f"{shlex.join(map(str, command))}\n{done.stdout[-8000:]}"
    return done.stdout


def run_shown(show, *command):
    """Output of a program that prints a line for each of its checks. Shows some lines, and kills a program that is silent for SILENCE."""
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
    return [*command, "--coverage"] if COVERED else command


@pytest.fixture(scope="module")
def flags():
    """The compiler flags that setup.py uses for all files."""
    pytest.importorskip("setuptools")
    before = Path.cwd()
    try:
        with mock.patch("setuptools.setup"):
            return runpy.run_path(str(ROOT / "setup.py"))["COMMON_FLAGS"]
    finally:
        os.chdir(before)


def objects_in(folder):
    """A dictionary from the name of a source to its object file. Objects whose source no longer exists are left out."""
    found = {path.relative_to(ROOT / folder).with_suffix("").as_posix(): str(path) for path in (ROOT / folder).rglob("*.o")}
    return {name: path for name, path in found.items() if (ROOT / name).with_suffix(".c").exists() and not name.startswith("csrc/python")}


@pytest.fixture(scope="module")
def objects(flags):
    """The compiled library and kernel checks, as a dictionary from the name of a source to its object file."""
    compiler("CC")
    run(sys.executable, "setup.py", "-q", "build_checkkernels", "--build-temp", BUILD, cwd=ROOT)
    return objects_in(BUILD)


def passed(output):
    """The number of checks that passed. Asserts that none failed."""
    count, failed = re.fullmatch(r"(\d+) passed, (\d+) failed", output.splitlines()[-1]).groups()
    assert failed == "0"
    return int(count)


def listed(kind):
    """(level, dtype) of the lines BA_<kind>(level, dtype) of kernels.inc."""
    text = (ROOT / "csrc/kernels/kernels.inc").read_text(encoding="utf-8")
    return re.findall(rf"^BA_{kind}\((\w+), (\w+)\)$", text, re.MULTILINE)


def sample(one_in):
    """Arguments of checkkernels for one case in `one_in`, drawn by SAMPLE_SEED, or for all cases with SAMPLE_SEED=all."""
    return [] if sampling.ALL else ["--sample", str(one_in * sampling.ONE_IN), sampling.SEED]


def names_of(level):
    """Arguments of checkkernels for one level: a part of its kernels' names, and after a dash parts of names to leave out, because the
    names of other levels may contain the name of this level."""
    others = [f"_{name}" for name in blitz_attn.isa_levels() if name != level and f"_{level}" in f"_{name}"]
    return [f"_{level}", *(f"-{other}" for other in others)]


def assert_all_checked(output, level):
    """Assert that a report lists every kernel of a level as right."""
    assert passed(output) > 0
    for dtype in [dtype for at, dtype in listed("FAMILY") if at == level]:
        split = level.endswith("amx") and dtype != "bfloat16"  # few queries run on vectors
        for variant in ("wide", "narrow") if split else ("wide", "narrow", "few"):
            assert re.search(rf"^attend_{dtype}_{level} {variant} attend +ok", output, re.MULTILINE), (
                f"{dtype} {level} {variant} was not checked"
            )
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
        assert re.search(rf"^cache_{dtype}_{level}_l2 (few)? attend +ok", output, re.MULTILINE), f"cache {dtype} {level}_l2 was not checked"
    assert "skipped" not in output


@pytest.mark.skipif(SANITIZED, reason="make asan runs its own build of it")
@pytest.mark.whole
@pytest.mark.parametrize("level", cases.ISA_LEVELS)
def test_every_kernel_is_right(level, objects, show):
    assert_all_checked(run_shown(show, ROOT / BUILD / "checkkernels", *sample(8), *names_of(level)), level)


# Builds that need no CPU with the level: every level as plain C; avx512 as plain C that the compiler may contract to multiply-adds and lower from
# 16 lanes to 8; and the released code of amx, whose tile instructions are carried out by a signal handler.
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
@pytest.mark.skipif(SANITIZED or COVERED, reason="a build without sanitizers and coverage")
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


EXAMPLE = ROOT / "examples/c/attention.c"  # compares its results with plain arithmetic in double, and fails if they differ too much


def build_program(compile_command, objects, flags, folder):
    """The example, built from only the public headers and the library's objects."""
    for header in ("blitz_attn.h", "blitz_attn_types.h"):
        shutil.copy(ROOT / "csrc" / header, folder)
    run(*compile_command, *flags, "-Werror", "-pedantic", f"-I{folder}", "-c", EXAMPLE, "-o", folder / "program.o")
    library = [path for name, path in objects.items() if name.startswith("csrc/")]
    run(*compile_command, "-pthread", folder / "program.o", *library, "-o", folder / "program", "-lm")
    return folder / "program"


@pytest.mark.parametrize("level", cases.ISA_LEVELS)
def test_c_program_with_the_public_header_alone(level, objects, flags, tmp_path):
    program = build_program(compiler("CC"), objects, flags, tmp_path)
    assert run(program, environment={"BLITZ_ATTN_ISA": level}).count("largest difference") == 2


# ---- aarch64, cross-built and emulated ----------------------------------------------------------------------------

CROSS_COMPILER = "aarch64-linux-gnu-gcc"
CROSS_LIBRARIES = Path("/usr/aarch64-linux-gnu")
EMULATOR = "qemu-aarch64"
# The first two levels run on cortex-a57, which has no extensions: they may use only instructions that every CPU of the architecture has.
CROSS_LEVELS = {"portable": "cortex-a57", "neon": "cortex-a57", "neon_bf16": "max"}
CROSS_BUILD = "build/aarch64"
CROSS_BUILD_ENVIRONMENT = {
    "CC": CROSS_COMPILER,
    "BLITZ_ATTN_CFLAGS": "",
    "BLITZ_ATTN_LEVELS": "",
}  # all levels, even if the build in place has fewer


@pytest.fixture(scope="module")
def cross_objects():
    """The library and kernel checks for aarch64, as in `objects`. Skips the test without the tools, unless BLITZ_ATTN_NEED_AARCH64 is set."""
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
        reports = list(
            pool.map(lambda level: emulate(CROSS_LEVELS[level], ROOT / CROSS_BUILD / "checkkernels", *sample(8), level), CROSS_LEVELS)
        )
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
        checks += [f"cache_{dtype}_{level} (few)? attend" for dtype in caches]
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
        assert emulate(cpu, program, environment={"BLITZ_ATTN_ISA": level}).count("largest difference") == 2


# ---- Headers ------------------------------------------------------------------------------------------------------

HEADERS = sorted(path.relative_to(ROOT).as_posix() for folder in ("csrc", "tests") for path in (ROOT / folder).rglob("*.h"))
FRAGMENTS = ("csrc/kernels/vec/vec_",)  # parts of vec/vec.h
NEEDS = {
    "csrc/kernels/vec/vec.h": ["-DBA_LANES=4", "-DBA_SUFFIX=alone"],
    "csrc/kernels/traits.h": ["-DBA_TRAITS_AVX2"],
}  # macros that the including file must define


@pytest.mark.parametrize("header", [name for name in HEADERS if not name.startswith(FRAGMENTS)])
def test_header_compiles_alone(header, flags, tmp_path):
    source = tmp_path / "alone.c"
    source.write_text(f'#include "{ROOT / header}"\n', encoding="utf-8")
    include = [f"-I{ROOT / 'csrc'}", f"-I{sysconfig.get_path('include')}"]
    run(*compiler("CC"), *flags, "-Werror", *NEEDS.get(header, ()), *include, "-fsyntax-only", source)
