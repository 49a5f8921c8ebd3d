# Every target does all set-up by itself; what is done is skipped. Python: make PYTHON=python3.12 …
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
TORCH ?= torch==2.13.0
PACKAGES := g++ cmake ninja-build pkg-config liburing-dev libzstd-dev libhtscodecs-dev libxxhash-dev python3-dev python3-venv
NATIVE := CMakeLists.txt pyproject.toml $(shell find core bindings -name '*.cpp' -o -name '*.h' -o -name CMakeLists.txt)

export OMP_NUM_THREADS ?= 2

.PHONY: all demo test check crash strike mutations bench bench-peers sanitize arm clean
all: $(VENV)/.native

demo: $(VENV)/.native
	$(BIN)/holdfast demo

test: $(VENV)/.native
	$(BIN)/python -m pytest

check: $(VENV)/.native build/core/.built
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	ctest --test-dir build/core --output-on-failure

crash: $(VENV)/.native
	$(BIN)/python tests/crash/kill_loop.py --kills 1000

strike: $(VENV)/.native
	$(BIN)/python tests/crash/background_loop.py --times 100

mutations: $(VENV)/.native
	$(BIN)/python -m tests.unit.mutations --trials 10000

bench: $(VENV)/.native
	$(BIN)/python benchmarks/save_load.py

# What bench compares with. Nothing that is installed changes; who cannot be installed is named, and left out.
bench-peers: $(VENV)/.native $(VENV)/.installed
	-scripts/install-packages libaio-dev fio
	@{ sed '/^#/d' benchmarks/requirements.txt; echo --no-deps bytecheckpoint==0.0.2; } | while read -r peer; do \
	  $(BIN)/python -m pip install -q --disable-pip-version-check --no-build-isolation -c $(VENV)/.installed $$peer \
	    || echo "bench-peers: $$peer cannot be installed; the benchmark skips it"; \
	done

$(VENV)/.installed: $(VENV)/.python
	$(BIN)/python -m pip list --format=freeze --exclude holdfast > $@

# The core alone, with warnings as errors; then under ASan + UBSan.
build/core/.built: $(VENV)/.system $(NATIVE) $(shell find core/tests -type f)
	cmake -S . -B build/core -G Ninja -DCMAKE_BUILD_TYPE=Release
	cmake --build build/core -j2
	@touch $@

sanitize: $(VENV)/.system
	cmake -S . -B build/asan -G Ninja -DCMAKE_BUILD_TYPE=RelWithDebInfo -DHOLDFAST_SANITIZE=address,undefined
	cmake --build build/asan -j2
	ctest --test-dir build/asan --output-on-failure

# The codecs as a machine of ARM's runs them, which QEMU plays: the same bytes as here.
CODEC_TESTS := checksum compact entropy excp lossless machines replay
arm: $(VENV)/.system
	scripts/install-packages g++-aarch64-linux-gnu qemu-user-static
	cmake -S . -B build/arm -G Ninja -DCMAKE_BUILD_TYPE=Release -DCMAKE_TOOLCHAIN_FILE=core/aarch64.cmake
	cmake --build build/arm -j2 --target $(CODEC_TESTS:%=%_test)
	ctest --test-dir build/arm --output-on-failure -R '^($(subst $() ,|,$(CODEC_TESTS)))$$'

# System packages: through apt as root, else the command to run.
$(VENV)/.system: scripts/install-packages Makefile
	scripts/install-packages $(PACKAGES)
	@mkdir -p $(VENV) && touch $@

# torch first: whatever else wants it must find the CPU build in place.
$(VENV)/.python: $(VENV)/.system pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -q --disable-pip-version-check "$(TORCH)"
	$(BIN)/python -m pip install -q --disable-pip-version-check "scikit-build-core>=0.11" "nanobind>=2.5" $(shell $(PYTHON) scripts/dev-requirements)
	@touch $@

$(VENV)/.native: $(VENV)/.python $(NATIVE)
	$(BIN)/python -m pip install -q --disable-pip-version-check --no-build-isolation --no-deps -e .
	@touch $@

clean:
	rm -rf build $(VENV) demo-out
