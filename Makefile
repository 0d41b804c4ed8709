# onepass from a fresh clone: `make demo` and `make test` set everything up on the way. The rest is for developers.
PYTHON ?= python3
VENV := .venv
BIN := $(CURDIR)/$(VENV)/bin
export PYTHONPATH := $(CURDIR)/python
export PATH := $(BIN):$(PATH)
export HF_HUB_OFFLINE := 1

.PHONY: demo demo-distributed check test lib build wheel bench bench-instructions sanitize lint docs clean
export NO_MKDOCS_2_WARNING := 1

CONFIGURE := cmake -S . -B build -G Ninja -DPython3_EXECUTABLE=$(BIN)/python

demo: lib $(VENV)/demo.stamp
	$(BIN)/python -m onepass demo

# On two GPUs or more, else in two processes on the CPU.
demo-distributed: lib
	$(BIN)/python -m onepass demo-distributed

# The inner ring, in less than 90 s where all is built: tests/CMakeLists.txt and the marker `quick` say what is in it.
check: $(VENV)/stamp
	$(CONFIGURE) -DONEPASS_TESTS=ON
	cmake --build build --target onepass onepass_autograd check
	$(BIN)/python -m pytest -q -n 2 -m quick

# All that CI runs.
test: build $(VENV)/demo.stamp $(VENV)/train.stamp $(VENV)/docs.stamp
	tools/lint
	$(BIN)/python -m mkdocs build --quiet
	ctest --test-dir build --output-on-failure --parallel 2
	$(BIN)/python -m pytest -q -n 2 --dist loadfile --durations 30 --durations-min 10

build: $(VENV)/stamp
	$(CONFIGURE) -DONEPASS_TESTS=ON
	cmake --build build

# The library alone, in the same folder: a new one is configured without tests.
lib: $(VENV)/stamp
	$(CONFIGURE) $(if $(wildcard build/CMakeCache.txt),,-DONEPASS_TESTS=OFF)
	cmake --build build --target onepass onepass_autograd

# The wheel, in dist/, checked and tried with the oldest torch and the newest.
wheel: $(VENV)/stamp
	$(BIN)/python tools/requirements.py wheel | $(BIN)/python -m pip install --quiet -r /dev/stdin
	$(BIN)/python tools/wheel --test-with 2.10 2.15

bench: lib $(VENV)/demo.stamp
	$(BIN)/python -m onepass bench

# Instructions of the CPU's kernels, counted by valgrind.
bench-instructions: lib
	tools/system-packages valgrind
	$(CONFIGURE) -DONEPASS_BENCHMARKS=ON
	cmake --build build --target instructions
	$(BIN)/python tools/instructions build/bench/instructions --json bench/results/instructions.json

# Every CUDA kernel under compute-sanitizer, on a GPU: some two minutes.
sanitize: lib
	$(BIN)/python tools/requirements.py sanitize | $(BIN)/python -m pip install --quiet -r /dev/stdin
	$(BIN)/python tools/sanitize

# clang-tidy too, which takes minutes and is not in CI.
lint: $(VENV)/stamp
	tools/system-packages clang-tidy
	$(CONFIGURE)
	tools/lint --tidy

# What is generated of docs/, and the site of it all, build/site, with warnings as errors.
docs: lib $(VENV)/docs.stamp
	$(BIN)/python -m onepass docs
	$(BIN)/python -m mkdocs build --quiet

clean:
	rm -rf build python/onepass/lib python/onepass/include

# The system's packages first, then Python's. pyproject.toml says what is needed.
$(VENV)/stamp: pyproject.toml tools/requirements.py tools/system-packages
	tools/system-packages
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python tools/requirements.py build dependencies test lint | $(BIN)/python -m pip install --quiet -r /dev/stdin
	touch $@

$(VENV)/demo.stamp: EXTRAS := demo bench
$(VENV)/train.stamp: EXTRAS := train
$(VENV)/docs.stamp: EXTRAS := docs
$(VENV)/demo.stamp $(VENV)/train.stamp $(VENV)/docs.stamp: $(VENV)/stamp
	$(BIN)/python tools/requirements.py $(EXTRAS) | $(BIN)/python -m pip install --quiet -r /dev/stdin
	touch $@
