# Everything runs in .venv, made here on first use, and against an *installed* wheel: the source
# folder dynaflow_xla/ lacks frontends/, ffi/ and the engine, so it cannot stand in for it.
# `make help` lists the targets.

PYTHON ?= python3
VENV   ?= .venv
# Optional dependency groups that `make setup` installs.
EXTRAS ?= jax,torch,bench,trace,test,test-torch
# The build takes XLA's FFI headers from this environment's jaxlib; they have to be those of 0.10.
JAX    ?= jax>=0.10,<0.11 jaxlib>=0.10,<0.11
# One version of PyTorch, so that a CPU build of it can be had (the newest may bring CUDA, gigabytes):
# PIP_EXTRA_INDEX_URL=... names PyTorch's own index of CPU builds.
TORCH  ?= torch==2.13.0
PINS   := $(JAX) $(if $(findstring torch,$(EXTRAS)),$(TORCH))
JOBS   ?= $(shell nproc 2>/dev/null || echo 2)
# Test processes of `make test`. Their programs have lanes on all cores: more than a few are no faster.
# Each takes one module of tests after another, in the order of tests/conftest.py.
TEST_JOBS   ?= $(shell n=$$(nproc 2>/dev/null || echo 2); echo $$((n < 4 ? n : 4)))
IN_PARALLEL  = $(if $(filter-out 0 1,$(TEST_JOBS)),-n $(TEST_JOBS) --dist loadscope --no-loadscope-reorder)
PYTEST_ARGS ?=
BENCH_ARGS  ?=
CTEST_ARGS  ?=
CLANG_FORMAT ?= $(CURDIR)/$(VENV)/bin/clang-format

PY      := $(CURDIR)/$(VENV)/bin/python
STAMPS  := $(VENV)/.stamps
CPP     := build/cpp
comma   := ,
LINTED  := $(wildcard dynaflow_xla frontends ffi tests benchmarks examples docs/pictures noxfile.py)

export CMAKE_BUILD_PARALLEL_LEVEL := $(JOBS)
export PIP_DISABLE_PIP_VERSION_CHECK := 1
# A PYTHONPATH or user site of the caller must not shadow what is installed in the environment.
unexport PYTHONPATH
export PYTHONNOUSERSITE := 1

SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DELETE_ON_ERROR:
.DEFAULT_GOAL := help
.PHONY: help setup dev wheel demo bench study bench-engine count-engine bench-pjrt bench-gpu test test-gpu gpu-wheel gpu-all \
        docs test-versions test-wheels lint lint-ruff lint-mypy lint-imports lint-cpp format python312 test-gpu-compile test-gpu-standin standin-results gpu-rehearsal sim-gpu report-xla \
        test-torch-versions test-torch-xla test-frameworks cpp-test cpp-test-tsan cpp-test-asan clean distclean FORCE

help:  ## List the targets
	@sed -nE 's/^([a-z-]+):[^#]*## (.*)/  \1\t\2/p' $(MAKEFILE_LIST) | expand -t 21

# ---- environment ---------------------------------------------------------------------------------

# An existing .venv is kept if it works (it may be hand-made), and rebuilt if it does not: another
# Python version, or a base interpreter that is gone.
$(STAMPS)/venv: FORCE
	@if ! "$(PY)" -c 'import sys, pip; sys.exit(not (3, 11) <= sys.version_info[:2] < (3, 15))' \
	    2>/dev/null; then \
	  "$(PYTHON)" -c 'import sys; sys.exit(0 if (3, 11) <= sys.version_info[:2] < (3, 15) else \
	    f"Python 3.11 to 3.14 is needed, this one is {sys.version.split()[0]}: make PYTHON=...")'; \
	  echo "creating $(VENV)"; "$(PYTHON)" -m venv --clear "$(VENV)"; \
	fi
	@mkdir -p $(STAMPS) && { [ -e $@ ] || touch $@; }

# Changes when the choice of dependencies does.
$(STAMPS)/options.txt: $(STAMPS)/venv FORCE
	@echo '$(EXTRAS) $(PINS)' | cmp -s - $@ || echo '$(EXTRAS) $(PINS)' > $@

# $(call install,GROUPS): installs the build requirements and the named groups of pyproject.toml,
# not the package. One resolution for all, so that no step undoes another's choice.
define install
"$(PY)" -P -c 'import sys, tomllib; \
p = tomllib.load(open("pyproject.toml", "rb")); g = p["project"]; \
r = p["build-system"]["requires"] + g["dependencies"]; \
[r.extend(g["optional-dependencies"][e]) for e in sys.argv[1].split(",") if e]; \
r = [x for x in r if x.split(">")[0] not in ("jax", "jaxlib", "torch")] + sys.argv[2:]; \
print(*r, sep="\n")' '$(1)' $(foreach spec,$(PINS),'$(spec)') > $(STAMPS)/requirements.txt
"$(PY)" -P -m pip install -qq -r $(STAMPS)/requirements.txt
endef

$(STAMPS)/deps: $(STAMPS)/options.txt pyproject.toml
	@echo "installing dependencies ($(EXTRAS))"
	@$(call install,$(EXTRAS))
	@touch $@

$(STAMPS)/deps-dev: $(STAMPS)/options.txt pyproject.toml
	@echo "installing dependencies ($(EXTRAS),dev)"
	@$(call install,$(EXTRAS)$(comma)dev)
	@touch $@

# The list changes when a file appears or goes away, which no file's time would show.
SOURCES := $(shell find dynaflow_xla frontends ffi csrc -type f \
             ! -path '*/__pycache__/*' ! -path 'csrc/tests/*' ! -path 'csrc/bench/*' \
             ! -name '*.pyc' ! -name '*.so' 2>/dev/null | LC_ALL=C sort)
build/sources.txt: FORCE
	@mkdir -p build
	@printf '%s\n' $(SOURCES) | cmp -s - $@ || printf '%s\n' $(SOURCES) > $@

# No build isolation: the objects in build/ stay valid from run to run.
$(STAMPS)/package: $(STAMPS)/deps build/sources.txt $(SOURCES) CMakeLists.txt pyproject.toml
	@echo "building and installing the wheel"
	@"$(PY)" -P -m pip install -q --no-build-isolation --no-deps --force-reinstall .
	@touch $@

setup: $(STAMPS)/package  ## Make .venv and install the package in it, as a wheel

dev: $(STAMPS)/deps $(STAMPS)/deps-dev  ## Install the package editable (Python edits need no rebuild)
	@"$(PY)" -P -m pip install -q --no-build-isolation --no-deps --force-reinstall -e .
	@rm -f $(STAMPS)/package

wheel: $(STAMPS)/venv  ## Build a distributable wheel in dist/ (isolated build)
	@"$(PY)" -P -m pip wheel -q --no-deps -w dist .

# ---- use -----------------------------------------------------------------------------------------

# A script of benchmarks/ puts that folder on sys.path; the repository root is not on it.
demo: setup  ## Run the demonstration
	@"$(PY)" benchmarks/demo.py

bench: setup  ## Run the benchmarks (BENCH_ARGS=...)
	@"$(PY)" benchmarks/run.py $(BENCH_ARGS)

study: setup  ## Measure how well Auto chooses (BENCH_ARGS=...)
	@"$(PY)" benchmarks/studies/auto_study.py $(BENCH_ARGS)

bench-engine: setup  ## Build and run the engine's own benchmark (BENCH_ARGS=...)
	@"$(PY)" -P -m cmake -S csrc -B build/bench -G Ninja -DCMAKE_BUILD_TYPE=Release -DDFX_BUILD_BENCH=ON \
	  -DCMAKE_MAKE_PROGRAM="$(CURDIR)/$(VENV)/bin/ninja" >/dev/null
	@"$(PY)" -P -m cmake --build build/bench -j $(JOBS)
	@"$(PY)" benchmarks/engine/native.py build/bench/dfx_engine_bench $(BENCH_ARGS)

count-engine: $(STAMPS)/deps-dev  ## Count the engine's instructions with valgrind, against the committed count (BENCH_ARGS=--save)
	@mkdir -p build
	$(call cpp_build,-count,Release,,,-DDFX_BUILD_TESTS=OFF -DDFX_BUILD_BENCH=ON)
	@"$(PY)" benchmarks/engine/instructions.py $(CPP)-count/dfx_engine_bench $(BENCH_ARGS)

bench-pjrt: setup $(STAMPS)/deps-dev  ## Measure an XLA executable as an engine step (BENCH_ARGS=...)
	@mkdir -p build
	$(call cpp_build,-bench,Release,,$(pjrt_dir),-DDFX_BUILD_TESTS=OFF -DDFX_BUILD_BENCH=ON)
	@"$(PY)" benchmarks/engine/pjrt_execute.py $(CPP)-bench/dfx_pjrt_bench $(BENCH_ARGS)

# -P keeps the repository root off sys.path; with it, `import dynaflow_xla` would find the sources.
test: setup  ## Run the Python tests against the installed wheel (PYTEST_ARGS=...)
	@"$(PY)" -P -m pytest --durations=10 $(IN_PARALLEL) $(PYTEST_ARGS)

test-sweeps: setup  ## Run the cases of tests with many that `make test` leaves out
	@"$(PY)" -P -m pytest --durations=10 -m "sweep and not slow" $(IN_PARALLEL) $(PYTEST_ARGS)

# JAX_TESTS=/path/to/jax/tests, a checkout of the installed version: JAX's packages do not hold its tests.
test-frameworks: setup  ## JAX's own tests with jax.jit scheduled (JAX_TESTS=...), PyTorch's samples (SUITES= MODES= LIMIT= KEEP=)
	@[ -n '$(JAX_TESTS)' ] || { echo "make test-frameworks JAX_TESTS=/path/to/a/jax/checkout/tests"; exit 1; }
	@"$(PY)" -P -m pip install -q absl-py
	@"$(PY)" -P tests/frameworks/run.py --jax-tests '$(JAX_TESTS)' $(if $(SUITES),--suites $(SUITES)) \
	  $(if $(MODES),--modes $(MODES)) $(if $(LIMIT),--limit $(LIMIT)) $(if $(KEEP),--keep '$(KEEP)') \
	  --out benchmarks/results/frameworks.json --page docs/frameworks.md
	@"$(PY)" -P tests/support/opinfo_sweep.py

# ---- environments of their own: noxfile.py says what they are and where they are kept --------------

# 3.12 is the Python that all versions of JAX have.
PYTHON312 ?= $(shell for v in "" $$(pyenv versions --bare 2>/dev/null | grep '^3[.]12[.]'); do \
    PYENV_VERSION=$$v python3.12 -c 'import sys; print(sys.executable)' 2>/dev/null && break; done)
# Variables of the sessions that are given to make reach them: JAX_VERSIONS, TORCH_VERSIONS, GPU_JAX,
# STANDIN_JAX, STANDIN_TESTS, REHEARSAL_JAX, PARTS,
# TORCH_ENVS, TORCH_XLA_ENV, GPU_ENVS, VERSION_TESTS, PYTEST_ARGS, BENCH_ARGS.
NOX = PYTHON312='$(PYTHON312)' JAX='$(JAX)' IN_PARALLEL='$(IN_PARALLEL)' "$(PY)" -P -m nox --session

python312:
	@echo '$(PYTHON312)'

test-versions: $(STAMPS)/deps-dev  ## Run one wheel under each JAX of JAX_VERSIONS (needs Python 3.12)
	@$(NOX) versions

test-wheels: $(STAMPS)/deps-dev  ## Build a wheel for each Python of WHEEL_PYTHONS and try it where nothing else is installed
	@$(NOX) wheels

test-torch-versions: $(STAMPS)/deps-dev  ## Run one wheel under each torch of TORCH_VERSIONS (5 GB a version)
	@$(NOX) torch_versions

test-torch-xla: $(STAMPS)/deps-dev  ## Run the tests of torch-xla in an environment of their own (torch 2.9.0)
	@$(NOX) torch_xla

test-gpu-standin: $(STAMPS)/deps-dev  ## JAX's CUDA plugin on a stand-in for the driver, no GPU, under each JAX of STANDIN_JAX
	@timeout 1500 env $(NOX) gpu_standin

standin-results: $(STAMPS)/deps-dev  ## The matrix of functions and 10,000 random plans there, as result files (BENCH_ARGS=...)
	@$(NOX) standin_results

gpu-rehearsal: $(STAMPS)/deps-dev  ## Every part of gpu-all on the stand-in, no GPU, with REHEARSAL_JAX (PARTS=...)
	@timeout 1500 env $(NOX) gpu_rehearsal

sim-gpu: $(STAMPS)/deps-dev  ## Simulated times of the GPU benchmark's cases, no GPU, written to docs/sim_gpu.md (BENCH_ARGS=...)
	@$(NOX) sim_gpu

test-gpu-compile: $(STAMPS)/deps-dev  ## Compile for GPUs without one, under each JAX of GPU_JAX, and read the graphs back
	@$(NOX) gpu_compile

report-xla: $(STAMPS)/deps-dev  ## Compile the cases of docs/xla_report.md for a GPU without one, and write the page
	@$(NOX) report_xla

gpu-wheel: $(STAMPS)/deps-dev  ## Build the cp312 wheel, and fetch small ones beside it, to carry to a GPU machine
	@$(NOX) gpu_wheel

# ---- GPU -----------------------------------------------------------------------------------------

# Where the GPU is there may be no network and no .venv: the package comes from the wheels of
# `make gpu-wheel`, carried there in build/gpu/wheels, or is built with that Python's own tools.
GPU_PYTHON ?= python3
GPU_DIR    := $(CURDIR)/build/gpu
GPU_RUN     = cd $(CURDIR) && PYTHONPATH=$(GPU_DIR)/site timeout 480 "$(GPU_PYTHON)"

test-gpu:  ## The GPU suite, with the installed Python (GPU_PYTHON=...); skips without a GPU
	@"$(GPU_PYTHON)" tests/gpu/install.py $(GPU_DIR)/site $(GPU_DIR)/wheels
	@$(GPU_RUN) -P -m pytest tests/gpu -m gpu -p no:cacheprovider -p no:benchmark -o timeout=120 -o timeout_method=thread $(PYTEST_ARGS)

bench-gpu:  ## Benchmarks on a GPU, written to benchmarks/results (BENCH_ARGS=...)
	@"$(GPU_PYTHON)" tests/gpu/install.py $(GPU_DIR)/site $(GPU_DIR)/wheels
	@$(GPU_RUN) benchmarks/gpu/bench.py $(BENCH_ARGS)

# PARTS of: install target tests probes tests-jax sanitizer, beside each other after install; then, as they
# measure, probes-timed bench cores (and by name bench-torch bench-jax bench-ffi, the parts of bench).
gpu-all:  ## All of that and more in one command, each part with a time limit (PARTS=... WITHIN=seconds GPU_OUT=...)
	@"$(GPU_PYTHON)" benchmarks/gpu_all.py --python "$(GPU_PYTHON)" --build $(GPU_DIR) \
	  $(if $(GPU_OUT),--out $(GPU_OUT)) $(if $(PARTS),--parts $(PARTS)) \
	  $(if $(WITHIN),--within $(WITHIN)) $(GPU_ARGS) $(if $(BENCH_ARGS),--bench $(BENCH_ARGS))

# ---- checks --------------------------------------------------------------------------------------

lint: lint-ruff lint-mypy lint-imports lint-cpp  ## ruff, mypy, import-linter, clang-format (-k: do not stop)

lint-ruff: $(STAMPS)/deps-dev
	"$(PY)" -P -m ruff check $(LINTED)
	"$(PY)" -P -m ruff format --check $(LINTED)

# mypy and import-linter see the package as it gets installed: a tree of links. A stand-in for the
# engine's stub makes the result the same whether the engine was built or not.
build/lint: FORCE
	@rm -rf $@ && mkdir -p $@/dynaflow_xla
	@ln -s $(CURDIR)/dynaflow_xla/* $(CURDIR)/frontends $@/dynaflow_xla/
	@rm -f $@/dynaflow_xla/__pycache__
	@mkdir $@/dynaflow_xla/ffi && ln -s $(CURDIR)/ffi/*.py $@/dynaflow_xla/ffi/
	@printf 'from typing import Any\n\ndef __getattr__(name: str) -> Any: ...\n' \
	  > $@/dynaflow_xla/ffi/_engine.pyi

lint-mypy: $(STAMPS)/deps-dev build/lint
	cd build/lint && "$(PY)" -P -m mypy --config-file ../../pyproject.toml \
	  --cache-dir ../../.mypy_cache -p dynaflow_xla
	cd build/lint && "$(PY)" -P -m mypy --config-file= --strict --follow-imports=silent \
	  --cache-dir ../../.mypy_cache/usage ../../tests/support/typed_usage.py

# What `make dev` installs would be found before build/lint, with the whole checkout as a package.
define LINT_IMPORTS
import sys
sys.meta_path = [f for f in sys.meta_path if "Redirecting" not in type(f).__name__]
sys.path.insert(0, ".")
from importlinter.cli import lint_imports_command
lint_imports_command()
endef
export LINT_IMPORTS

lint-imports: $(STAMPS)/deps-dev build/lint
	cd build/lint && "$(PY)" -P -c "$$LINT_IMPORTS" --no-logo --config ../../pyproject.toml \
	  --cache-dir ../../.import_linter_cache

lint-cpp: $(STAMPS)/deps-dev
	find csrc ffi -name '*.cc' -o -name '*.h' | xargs -r "$(CLANG_FORMAT)" --dry-run -Werror

format: $(STAMPS)/deps-dev  ## Rewrite the sources the way `make lint` wants them
	"$(PY)" -P -m ruff check --fix-only -q $(LINTED)
	"$(PY)" -P -m ruff format $(LINTED)
	find csrc ffi -name '*.cc' -o -name '*.h' | xargs -r "$(CLANG_FORMAT)" -i

# The engine and its C++ tests alone, without Python. TSAN needs address randomisation off on kernels
# with wide randomisation; setarch does that where it may.
# Steps that are XLA executables are tested with the CPU plugin of the package xla-cpu-pjrt, except
# under TSAN: it does not see the plugin's own synchronisation.
pjrt_dir = $$("$(PY)" -P -c 'import importlib.util as u; s = u.find_spec("xla_plugins.xla_cpu_pjrt"); \
  print(s.submodule_search_locations[0] if s else "")' 2>/dev/null || true)
SETARCH := $(shell setarch -R true 2>/dev/null && echo setarch -R)
cpp_build = @"$(PY)" -P -m cmake -S csrc -B $(CPP)$(1) -G Ninja -DCMAKE_BUILD_TYPE=$(2) \
    -DCMAKE_MAKE_PROGRAM="$(CURDIR)/$(VENV)/bin/ninja" -DDFX_BUILD_TESTS=ON \
    -DCMAKE_CXX_FLAGS="$(3)" -DDFX_PJRT_DIR="$(4)" $(5) >$(CPP)$(1).log 2>&1 || { cat $(CPP)$(1).log; exit 1; }; \
  "$(PY)" -P -m cmake --build $(CPP)$(1) -j $(JOBS)
cpp_test = @cd $(CPP)$(1) && $(2) "$(CURDIR)/$(VENV)/bin/ctest" --output-on-failure --no-tests=error \
    --timeout 300 $(CTEST_ARGS)
SANITIZE := -fno-omit-frame-pointer -fno-sanitize-recover=all

cpp-test: $(STAMPS)/deps-dev  ## Build and run the C++ tests of the engine (CTEST_ARGS=...)
	@mkdir -p build
	$(call cpp_build,,Release,,$(pjrt_dir))
	$(call cpp_test,,)

cpp-test-tsan: $(STAMPS)/deps-dev  ## The same under ThreadSanitizer
	@mkdir -p build
	$(call cpp_build,-tsan,RelWithDebInfo,$(SANITIZE) -fsanitize=thread)
	$(call cpp_test,-tsan,TSAN_OPTIONS=halt_on_error=1:second_deadlock_stack=1 $(SETARCH))

cpp-test-asan: $(STAMPS)/deps-dev  ## The same under AddressSanitizer and UndefinedBehaviorSanitizer
	@mkdir -p build
	$(call cpp_build,-asan,RelWithDebInfo,$(SANITIZE) -fsanitize=address$(comma)undefined,$(pjrt_dir))
	$(call cpp_test,-asan,UBSAN_OPTIONS=print_stacktrace=1)

# ---- documentation -------------------------------------------------------------------------------

$(STAMPS)/deps-docs: $(STAMPS)/options.txt pyproject.toml
	@echo "installing dependencies ($(EXTRAS),dev,docs)"
	@$(call install,$(EXTRAS)$(comma)dev$(comma)docs)
	@touch $@

docs: $(STAMPS)/deps-docs  ## Build the site of docs/ in build/site; a warning is an error
	@NO_MKDOCS_2_WARNING=1 "$(PY)" -P -m mkdocs build --strict --quiet
	@echo "build/site/index.html"

# ---- cleaning ------------------------------------------------------------------------------------

clean:  ## Remove what was built, keep .venv
	rm -rf build dist out .mypy_cache .ruff_cache .import_linter_cache .pytest_cache .hypothesis
	rm -f $(STAMPS)/package
	find . -path './$(VENV)' -prune -o -name __pycache__ -type d -exec rm -rf {} +

distclean: clean  ## Remove .venv too
	rm -rf "$(VENV)"
