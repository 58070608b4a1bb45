# Two commands matter: `make demo` and `make test`. Everything runs inside .venv.
PYTHON ?= python3
VENV   ?= .venv
# Where torch comes from. Empty: PyPI, whose plain build on Linux is CUDA, gigabytes. Left out: the
# CPU build on a Linux without a CUDA device, else PyPI. Examples:
#   make demo TORCH_INDEX=https://download.pytorch.org/whl/cu130
#   make demo TORCH_INDEX=
CPU_INDEX := https://download.pytorch.org/whl/cpu
ifeq ($(origin TORCH_INDEX),undefined)
CHOSEN := yes
CUDA := $(shell test -e /dev/nvidia0 && echo yes || nvidia-smi -L 2>/dev/null | head -1)
TORCH_INDEX := $(if $(filter Linux,$(shell uname -s)),$(if $(CUDA),,$(CPU_INDEX)))
endif
CONSTRAINTS ?= constraints.txt
WORKERS ?= 2

BIN    := $(VENV)/bin
PIP    := $(BIN)/pip install --disable-pip-version-check -q -c $(CONSTRAINTS)
# Hundreds of megabytes to gigabytes: pip shows what it fetches.
TORCH  := $(BIN)/pip install --disable-pip-version-check -c $(CONSTRAINTS) torch
# Whether an index that nobody named can be reached; pip itself would try it long for each package.
ANSWERS := $(BIN)/python -c 'import sys, urllib.request as r; r.urlopen(sys.argv[1], timeout=10)'
DEMO   := out/demo
# Tokens of TEXT that are scored; 100,000 of them take minutes.
TOKENS ?= 8192
OWN    := {self: true, samples: 64, length: 256}
TEXTS   = evaluation.texts=[$(OWN), {text: "$(abspath $(TEXT))", max_tokens: $(TOKENS)}]

.PHONY: help demo test test-long test-interop test-gpu test-peers formats-matrix export-matrix lint types contracts format wheel clean

help:
	@echo "make demo          compress the embedded model and show what it cost (TEXT=file: there too, TOKENS=8192 of it)"
	@echo "make test          the whole quick suite (2 cores, under 6 minutes)"
	@echo "make test-interop  open our output with other projects' light loaders"
	@echo "make test-peers    heavy peers (vLLM, llama.cpp from its source); see benchmarks/peers/README.md"
	@echo "make formats-matrix  make the table method by format of docs/formats.md anew"
	@echo "make export-matrix  make the tables of what is exported where, of docs/export.md, anew"
	@echo "make test-gpu      on a machine with CUDA"
	@echo "make test-long     the long randomised sets"
	@echo "make lint types contracts"
	@echo "make wheel         for this platform, with the kernels of every instruction set, in dist/"

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/.torch: $(CONSTRAINTS) | $(BIN)/python
	@echo "installing torch from $(or $(TORCH_INDEX),PyPI)$(if $(CHOSEN), ($(if $(CUDA),a CUDA device is here,no CUDA device is here); TORCH_INDEX=URL takes another build)); minutes where it is not cached yet"
	@index='$(TORCH_INDEX)'; \
	if [ -n '$(CHOSEN)' ] && [ -n "$$index" ] && ! $(ANSWERS) "$$index/torch/" 2>/dev/null; then \
	  echo "it does not answer: torch is PyPI's"; index=; fi; \
	set -x; $(TORCH) $${index:+--index-url "$$index"}
	@touch $@

$(VENV)/.base: pyproject.toml $(VENV)/.torch
	$(PIP) -e .
	@touch $@

$(VENV)/.dev: pyproject.toml $(VENV)/.torch
	$(PIP) -e '.[dev]'
	@touch $@ $(VENV)/.base

$(VENV)/.interop: $(VENV)/.dev
	$(PIP) -e '.[dev,interop]'
	@touch $@

# TEXT=file.txt measures on the first TOKENS tokens of that text too.
demo: $(VENV)/.base
	@mkdir -p $(dir $(DEMO)) && rm -rf $(DEMO).partial $(DEMO).publishing $(DEMO).replaced
	$(if $(TEXT),@echo "of $(TEXT) about $(TOKENS) tokens are measured; TOKENS=N changes that")
	$(BIN)/compress-model run demo --model examples/tale-6m --out $(DEMO) --overwrite$(if $(TEXT), --set '$(TEXTS)')

# Bytecode is kept, whatever the environment says: without it every worker of every run rewrites the
# asserts of all tests anew, 7 of 18 s of processor time that collecting them takes.
test: $(VENV)/.dev
	PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=1 $(BIN)/pytest -q -n $(WORKERS) -m "not interop and not peers and not long and not gpu"

test-long: $(VENV)/.dev
	$(BIN)/pytest -q -m long

test-interop: $(VENV)/.interop
	PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=1 $(BIN)/pytest -q -n $(WORKERS) -m interop

test-gpu: $(VENV)/.dev
	$(BIN)/pytest -q -m gpu

test-peers: $(VENV)/.dev
	$(BIN)/pytest -q -m peers

formats-matrix: $(VENV)/.interop
	OMP_NUM_THREADS=1 $(BIN)/python -m benchmarks.matrix.run

export-matrix: $(VENV)/.interop
	OMP_NUM_THREADS=1 $(BIN)/python -m benchmarks.export.matrix

lint: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(VENV)/.dev
	$(BIN)/mypy

contracts: $(VENV)/.dev
	$(BIN)/lint-imports

format: $(VENV)/.dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

wheel: $(VENV)/.dev
	rm -rf dist && $(BIN)/python -m build --no-isolation --wheel --outdir dist .
	$(BIN)/python -m compress_kernels.cpu.wheel dist/*-py3-none-any.whl

clean:
	rm -rf $(VENV) out build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache
