# onepass from a fresh clone: `make demo` and `make test` set everything up on the way. The rest is for developers;
# `make help` lists it.
PYTHON ?= python3
VENV := .venv
BIN := $(CURDIR)/$(VENV)/bin
export PYTHONPATH := $(CURDIR)/python
export PATH := $(BIN):$(PATH)
export HF_HUB_OFFLINE := 1

.PHONY: demo demo-distributed check test lib build core library whole packages wheel bench bench-instructions sanitize lint docs clean help
export NO_MKDOCS_2_WARNING := 1
# Of 19,000 files most are never imported: Python compiles those that are, once. Where it may not write what it has
# compiled, as in many containers, each process compiles torch again, 4 s of it.
unexport PYTHONDONTWRITEBYTECODE
PIP = $(BIN)/python -m pip install --quiet --no-compile

# ninja shares out its own work: of make's, which `-j` hands on, it would say that it cannot.
BUILD := MAKEFLAGS= cmake --build build
CONFIGURE := cmake -S . -B build -G Ninja -DPython3_EXECUTABLE=$(BIN)/python
# Of a folder that is not there yet; others stay as they are.
NEW = $(if $(wildcard build/CMakeCache.txt),,-DONEPASS_TESTS=OFF -DONEPASS_TORCH=OFF -DONEPASS_LINES=few)

demo: PACKAGES := $(VENV)/demo.stamp
demo: lib  ## a real sentence encoder as it is and fused: errors, times, memory
	$(BIN)/python -m onepass demo

demo-distributed: lib  ## the same of sharded tensors: on two GPUs or more, else in two processes on the CPU
	$(BIN)/python -m onepass demo-distributed

# tests/CMakeLists.txt and the marker `quick` say what is in it.
check: $(VENV)/test.stamp  ## the quick part of the tests, in less than 90 s where all is built
	tools/system-packages tests
	$(CONFIGURE) $(TESTED)
	$(BUILD) --target onepass onepass_autograd check
	$(BIN)/python -m pytest -q -n 2 -m quick

test: PACKAGES := $(VENV)/test.stamp $(VENV)/demo.stamp $(VENV)/train.stamp $(VENV)/docs.stamp
test: build  ## all that CI runs: format, documents, C++ and Python tests
	tools/lint
	$(BIN)/python -m mkdocs build --quiet
	ctest --test-dir build --output-on-failure --parallel 2
	$(BIN)/python -m pytest -q -n 2 --dist loadfile --no-loadscope-reorder --durations 30 --durations-min 10

TESTED := -DONEPASS_TESTS=ON -DONEPASS_TORCH=ON

build: $(VENV)/cmake.stamp
	tools/system-packages tests
	$(TOGETHER) whole packages PACKAGES="$(or $(PACKAGES),$(VENV)/test.stamp)"

# In the same folder as with tests: a new one is configured without them and with few lines.
lib: $(VENV)/cmake.stamp  ## the library alone, in place: `source .venv/bin/activate`
	$(TOGETHER) library packages PACKAGES="$(or $(PACKAGES),$(VENV)/stamp)"

# What needs no torch is built while pip brings torch, and what does while pip brings the rest.
TOGETHER := $(MAKE) --no-print-directory -j 2
core: $(VENV)/cmake.stamp
	$(CONFIGURE) $(NEW)
	$(BUILD) --target onepass_core
library: core $(VENV)/stamp
	$(CONFIGURE) -DONEPASS_TORCH=ON
	$(BUILD) --target onepass onepass_autograd
whole: core $(VENV)/stamp
	$(CONFIGURE) $(TESTED)
	$(BUILD)
packages: $(VENV)/stamp
	$(MAKE) --no-print-directory -j 1 $(PACKAGES)

wheel: $(VENV)/stamp  ## the wheel, in dist/, checked and tried with the oldest torch and the newest
	$(BIN)/python tools/requirements.py wheel | $(PIP) -r /dev/stdin
	$(BIN)/python tools/wheel --test-with 2.10 2.15

bench: PACKAGES := $(VENV)/demo.stamp
bench: lib  ## every pattern beside eager PyTorch, torch.compile and the libraries that are installed
	$(BIN)/python -m onepass bench

bench-instructions: lib  ## instructions of the CPU's kernels, counted by valgrind
	tools/system-packages tests valgrind
	$(CONFIGURE) -DONEPASS_BENCHMARKS=ON -DONEPASS_LINES=all
	$(BUILD) --target instructions
	$(BIN)/python tools/instructions build/bench/instructions --json bench/results/instructions.json

sanitize: lib  ## every CUDA kernel under compute-sanitizer, on a GPU: some two minutes
	$(BIN)/python tools/requirements.py sanitize | $(PIP) -r /dev/stdin
	$(BIN)/python tools/sanitize

lint: $(VENV)/test.stamp  ## format and lint, with clang-tidy, which takes minutes and is not in CI
	tools/system-packages tests clang-tidy
	$(CONFIGURE)
	tools/lint --tidy

docs: lib $(VENV)/docs.stamp  ## what is generated of docs/, and the site of it all, build/site, with warnings as errors
	$(BIN)/python -m onepass docs
	$(BIN)/python -m mkdocs build --quiet

clean:  ## removes what was built
	rm -rf build python/onepass/lib python/onepass/include

help:  ## this list
	@sed -n 's/^\([a-z-]*\):[^=]*## \(.*\)/\1\t\2/p' $(MAKEFILE_LIST) | expand -t 20

# The system's packages first, then Python's. pyproject.toml says what is needed.
$(VENV)/cmake.stamp: pyproject.toml tools/requirements.py tools/system-packages
	tools/system-packages
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) --upgrade pip
	$(BIN)/python tools/requirements.py build | grep -e ^cmake -e ^ninja | $(PIP) -r /dev/stdin
	touch $@

# With the package as it lies here, and its command.
$(VENV)/stamp: $(VENV)/cmake.stamp
	$(BIN)/python tools/requirements.py build dependencies | $(PIP) -r /dev/stdin
	echo $(CURDIR)/python > "$$($(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/onepass.pth"
	printf '#!/bin/sh\nexec "%s" -m onepass "$$@"\n' $(BIN)/python > $(BIN)/onepass
	chmod +x $(BIN)/onepass
	touch $@

$(VENV)/test.stamp: EXTRAS := test lint
$(VENV)/demo.stamp: EXTRAS := demo bench
$(VENV)/train.stamp: EXTRAS := train libraries
$(VENV)/docs.stamp: EXTRAS := docs
$(VENV)/test.stamp $(VENV)/demo.stamp $(VENV)/train.stamp $(VENV)/docs.stamp: $(VENV)/stamp
	$(BIN)/python tools/requirements.py $(EXTRAS) | $(PIP) -r /dev/stdin
	touch $@
