# Everything is built in this folder: .venv (Open MPI), .venv-mpich (MPICH), build/.
PYTHON ?= python3
NP ?= 2
PYTEST_ARGS ?=
# Sanitized code is slow: one world of each shape, and no tensors of gigabytes. It keeps what is freed:
# no measuring of memory.
SANITIZE_TESTS ?= --world 3 --world 2,1,1 --deselect tests/core/collectives/test_large.py \
    --deselect tests/core/engine/test_memory.py

VENV := .venv
VENV_MPICH := .venv-mpich
BIN := $(VENV)/bin
EXTENSION := hvdlite/_core.abi3.so
C_FILES := $(wildcard hvdlite/_core/*/*.c)
C_HEADERS := $(wildcard hvdlite/_core/*/*.h)
C_TEST_FILES := $(wildcard tests/core/*/*.c)
C_TEST_HEADERS := $(wildcard tests/core/*/*.h)
C_STRICT := -std=c11 -O3 -Wall -Wextra -Werror -DPy_LIMITED_API=0x030A0000
PYTHON_INCLUDE = $(shell $(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("include"))')
PIP_INSTALL := -m pip --disable-pip-version-check install --quiet --progress-bar off -c constraints.txt
PACKAGING := setup.cfg pyproject.toml constraints.txt

.DEFAULT_GOAL := help
.PHONY: help demo test test-wide test-rig test-c10d test-gpu test-properties check docs format build clean
.PHONY: fault-table faults soak
.PHONY: bench bench-quick bench-c10d bench-shared bench-gpu bench-instructions tune
.PHONY: sanitize sanitize-address sanitize-thread
.DELETE_ON_ERROR:

help:
	@echo 'make demo       train on handwritten digits with hvdrun, on 2 processes'
	@echo 'make test       the tests, under Open MPI and MPICH (PYTEST_ARGS="-k ring" for some)'
	@echo 'make test-wide  what make test leaves out: the same in more shapes of the world'
	@echo 'make test-rig   hosts that fail in all ways; needs root, sshd and ip'
	@echo 'make fault-table  faults on one rank or host: does hvdrun name the culprit?'
	@echo 'make test-c10d  the tests of torch.distributed that PyTorch ships, on hvdlite'
	@echo 'make test-gpu  what needs a GPU, with an interpreter that has CUDA: PYTHON=/path/to/it'
	@echo 'make test-properties  random programs of collectives, PROGRAMS=20000 of them'
	@echo 'make soak MINUTES=30  random jobs with random faults on the rig; needs root, sshd and ip'
	@echo 'make check      formatters, linters, types, C warnings as errors'
	@echo 'make docs       the documentation as a site: build/site/index.html'
	@echo 'make format     let the formatters change the files'
	@echo 'make bench      compare with torch.distributed and plain MPI, Open MPI and MPICH'
	@echo 'make bench-quick  a look in some two minutes'
	@echo 'make bench-c10d   only operations and steps of torch.distributed, beside Gloo'
	@echo 'make bench-shared  only what is shared, divided or asynchronous, beside its peers'
	@echo 'make bench-gpu    steps and operations on GPUs beside DDP, NCCL and Gloo: PYTHON=/path/to/it'
	@echo 'make bench-instructions  count the instructions of an operation (callgrind)'
	@echo 'make tune HOSTS=server1:1,server2:1  measure which algorithm suits these hosts'
	@echo 'make sanitize   the C core under ASan, UBSan and TSan'
	@echo 'make faults     every allocation, call of MPI and message fails once; 1,000 bits flip'
	@echo 'make build      .venv, .venv-mpich and the C core, nothing run'
	@echo 'make clean      remove what was built'
	@echo 'PYTHON=python3.12 make ... chooses the Python of .venv'

demo: $(VENV)/.installed $(EXTENSION)
	@$(BIN)/hvdrun -np $(NP) $(BIN)/python examples/digits.py

# Some twenty minutes; what is wide is chosen in tests/harness/wide.py and by the marks of the tests.
# Two sessions of pytest at the same time: tests on worlds of ranks, and all others.
test: build
	@$(BIN)/python -m tests.harness.side_by_side -m 'not wide and not long' $(PYTEST_ARGS)

test-wide: build $(VENV)/.frameworks $(VENV)/.manifests
	@$(BIN)/python -m tests.harness.side_by_side -m 'wide and not long' $(PYTEST_ARGS)

# Several hosts at length, with real failures of each: what ssh, the network or a host can do. And
# torchrun, of which each test imports torch five times or more.
test-rig: build $(VENV)/.notebook
	@$(BIN)/python -m tests.harness.side_by_side -m long tests/rig tests/launcher tests/world tests/soak $(PYTEST_ARGS)

# Some forty minutes on two cores: FAULT_ARGS=--help chooses.
FAULT_ARGS ?=
fault-table: build
	@$(BIN)/python -m tests.faults $(FAULT_ARGS)

# Some two minutes: under the names hvdlite and gloo, with 3 and 4 ranks. C10D_ARGS=--help.
C10D_ARGS ?=
test-c10d: $(VENV)/.installed $(EXTENSION)
	@$(BIN)/python -m tests.c10d $(C10D_ARGS)

# Some hundred of them are in make test, the same ones each time; these begin with a random seed.
# They are played in so many shapes of the world:
PROGRAM_TESTS := 54
PROGRAMS ?= 20000
SEED ?= $(shell od -An -N3 -tu4 /dev/urandom | tr -d ' ')
test-properties: build
	@echo 'at least $(PROGRAMS) programs, SEED=$(SEED)'
	@HVDLITE_TEST_PROGRAMS=$$(( ($(PROGRAMS) + $(PROGRAM_TESTS) - 1) / $(PROGRAM_TESTS) )) HVDLITE_TEST_SEED=$(SEED) \
	    $(BIN)/python -m pytest tests/properties -q $(PYTEST_ARGS)

# Random jobs and faults for so long; SEED=… JOB=n plays one of them again. What failed is kept in
# build/soak, with the log.
MINUTES ?= 30
soak: build
	@$(BIN)/python -m tests.soak --minutes $(MINUTES) --seed $(SEED) $(if $(JOB),--job $(JOB))

# Installs nothing: the interpreter has what is needed, or one line says what it lacks.
GPU_ARGS ?=
test-gpu:
	@$(PYTHON) tests/gpu/with_gpu/run.py $(GPU_ARGS)

# Less than a minute. Warnings are errors, also a link that leads nowhere.
docs: $(VENV)/.docs $(EXTENSION)
	@$(BIN)/python -m docs.generator build/site

# Some thirty minutes; writes benchmarks/results and the figures in docs/benchmarks.md.
bench: build
	@$(BIN)/python -m benchmarks --mpich $(VENV_MPICH)/bin/python --page docs/benchmarks.md

bench-quick: $(VENV)/.installed $(EXTENSION)
	@$(BIN)/python -m benchmarks --plan quick --output build/bench-quick

# Some eight minutes; of what `make bench` writes it replaces the figures of torch.distributed.
bench-c10d: build
	@$(BIN)/python -m benchmarks --only c10d --only wrapped --only rig --merge --page docs/benchmarks.md

# Some six minutes; the same for training that shares, divides or does not wait.
SHARED_PARTS = reducescatter sharded copies asynchronous servers
bench-shared: build
	@$(BIN)/python -m benchmarks $(SHARED_PARTS:%=--only %) --mpich $(VENV_MPICH)/bin/python --merge --page docs/benchmarks.md

# Some three minutes; installs nothing, as test-gpu. BENCH_S=20 measures longer.
GPU_BENCH_ARGS ?=
bench-gpu:
	@$(PYTHON) -m benchmarks.gpu $(GPU_BENCH_ARGS)

bench-instructions: $(VENV)/.installed $(EXTENSION)
	@$(BIN)/python -m benchmarks --only instructions --output build/bench-instructions

# The file that HVDLITE_ALGORITHM_TABLE then names; rules for other numbers of hosts stay in it.
TABLE ?= build/algorithms.json
ifeq ($(HOSTS),)
tune:
	@echo 'make tune HOSTS=server1:1,server2:1 [TABLE=$(TABLE)]' >&2; exit 2
else
tune: $(VENV)/.installed $(EXTENSION)
	@mkdir -p $(dir $(TABLE))
	@$(BIN)/hvdrun -H '$(HOSTS)' $(BIN)/python -m hvdlite.tune $(abspath $(TABLE))
	@echo 'written; use it by HVDLITE_ALGORITHM_TABLE=$(abspath $(TABLE))'
endif

build: $(VENV)/.installed $(VENV_MPICH)/.installed $(EXTENSION)

# What the machine lacks is said before anything is made. The constraints keep torch at the version
# that was tested. Without isolation, as a rebuild should not download setuptools each time.
$(VENV)/.installed: $(PACKAGING)
	@tools/check-machine $(PYTHON)
	@echo 'installing into $(VENV) (the first time this downloads PyTorch)'
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(BIN)/python $(PIP_INSTALL) setuptools
	@$(BIN)/python $(PIP_INSTALL) --no-build-isolation -e '.[mpi,test,dev]'
	@touch $@

$(VENV)/.notebook: $(VENV)/.installed
	@echo "installing a notebook's kernel into $(VENV)"
	@$(BIN)/python $(PIP_INSTALL) 'ipykernel; python_version >= "3.11"'
	@touch $@

$(VENV)/.frameworks: $(VENV)/.installed
	@echo 'installing Accelerate, Lightning and Transformers into $(VENV)'
	@# What the extra `frameworks` has, without building the C core once more.
	@$(BIN)/python $(PIP_INSTALL) accelerate lightning transformers
	@touch $@

$(VENV)/.manifests: $(VENV)/.installed
	@echo 'installing the schemas of Kubernetes and Docker Compose into $(VENV)'
	@$(BIN)/python $(PIP_INSTALL) compose-spec kubernetes-validate
	@touch $@

$(VENV)/.docs: $(VENV)/.installed
	@echo 'installing Sphinx into $(VENV)'
	@# What the extra `docs` has, without building the C core once more.
	@$(BIN)/python $(PIP_INSTALL) furo myst-parser sphinx
	@touch $@

# The same tests under the second MPI. A wheel of each MPI in one environment would fight over
# bin/mpiexec. After the extension, as this install writes it too.
$(VENV_MPICH)/.installed: $(PACKAGING) | $(EXTENSION)
	@echo 'installing into $(VENV_MPICH)'
	@test -x $(VENV_MPICH)/bin/python || $(PYTHON) -m venv $(VENV_MPICH)
	@$(VENV_MPICH)/bin/python $(PIP_INSTALL) setuptools
	@$(VENV_MPICH)/bin/python $(PIP_INSTALL) --no-build-isolation -e '.[test]' mpich
	@touch $@

$(EXTENSION): setup.py $(C_FILES) $(C_HEADERS) | $(VENV)/.installed
	@echo 'compiling $@'
	@$(BIN)/python setup.py --quiet build_ext --inplace
	@touch $@

check: $(VENV)/.installed
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	@# The launcher is installed under another name than its folder's; mypy learns it from a link.
	@mkdir -p build/types && ln -sfn ../../launcher build/types/hvdrun
	MYPYPATH=build/types $(BIN)/mypy -p hvdlite -p hvdrun -p tests -p benchmarks -p examples -p docs.generator
	$(BIN)/mypy setup.py
	$(BIN)/clang-format --dry-run --Werror $(C_FILES) $(C_HEADERS) $(C_TEST_FILES) $(C_TEST_HEADERS)
	@echo '$(CC) $(C_STRICT) hvdlite/_core/*/*.c'
	@for source in $(C_FILES) $(C_TEST_FILES); do \
	    $(CC) $(C_STRICT) -I"$(PYTHON_INCLUDE)" -Ihvdlite/_core -c -o /dev/null $$source || exit 1; \
	done

# The core is built once more, with a sanitizer in it, and the ranks of the tests load that one.
# The C++ library comes before torch does, so that the sanitizer finds what to wrap.
sanitize: sanitize-address sanitize-thread

sanitize-address: SANITIZE := -fsanitize=address,undefined -fno-sanitize-recover=undefined
sanitize-address: PRELOAD = $(call runtime,libasan.so) $(call runtime,libubsan.so)
sanitize-address: OPTIONS := ASAN_OPTIONS=detect_leaks=0 UBSAN_OPTIONS=print_stacktrace=1
sanitize-thread: SANITIZE := -fsanitize=thread
sanitize-thread: PRELOAD = $(call runtime,libtsan.so)
# Its shadow memory lies where PMIx wants to map, and UCX may not patch what it has patched.
sanitize-thread: OPTIONS := TSAN_OPTIONS=halt_on_error=1:report_signal_unsafe=0:detect_deadlocks=0:ignore_noninstrumented_modules=1 \
    PMIX_MCA_gds=hash UCX_MEM_EVENTS=n
runtime = $(realpath $(shell $(CC) -print-file-name=$(1)))

sanitize-address sanitize-thread: build
	@echo '== $@: $(SANITIZE)'
	@CFLAGS='$(SANITIZE) -g -fno-omit-frame-pointer -O1' $(BIN)/python setup.py --quiet build_ext \
	    --force --build-lib build/$@ --build-temp build/$@/temp
	@$(OPTIONS) HVDLITE_TEST_CORE=build/$@/$(EXTENSION) HVDLITE_TEST_SANITIZER='$(SANITIZE) -g' \
	    HVDLITE_TEST_PRELOAD='$(PRELOAD) $(call runtime,libstdc++.so)' \
	    $(BIN)/python -m pytest tests/core $(SANITIZE_TESTS) $(PYTEST_ARGS)

# Some ten minutes: each of some 15,000 faults in the core, under ASan and UBSan, and the first ones under real
# MPIs. `make test` plays some.
faults: build
	@HVDLITE_TEST_FAULTS=all HVDLITE_TEST_SANITIZER='-fsanitize=address,undefined -fno-sanitize-recover=undefined -g' \
	    $(BIN)/python -m pytest tests/core/engine/test_faults.py tests/world/test_faults_in_core.py \
	    tests/optimizer/test_flips.py -rP -q $(PYTEST_ARGS)

format: $(VENV)/.installed
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	$(BIN)/clang-format -i $(C_FILES) $(C_HEADERS) $(C_TEST_FILES) $(C_TEST_HEADERS)

clean:
	rm -rf $(VENV) $(VENV_MPICH) build dist *.egg-info hvdlite/*.so
	rm -rf .pytest_cache .ruff_cache .mypy_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
