# make demo | test | lint | report | rescore | wheel-check. Each sets up its own virtual environment in $(VENV) first.
#
# With an NVIDIA GPU pip takes PyTorch's CUDA build. Without one, several GB of CUDA libraries are kept away: the CPU
# build comes from a folder of wheels where pip is configured with one (PIP_FIND_LINKS), else from PyTorch's CPU index.
# Both can be set by hand, in one line:
#   make setup TORCH=torch==2.13.0+cpu PIP_ARGS="--extra-index-url https://download.pytorch.org/whl/cpu"

SHELL    := /bin/bash
VENV     ?= .venv
PY       := $(VENV)/bin/python
WORKERS  ?= 2
RUNS     ?= runs
CPU_INDEX := https://download.pytorch.org/whl/cpu

# Without a GPU the release is pinned: a CPU build (2.13.0+cpu) then wins over the plain one, and over newer CUDA builds.
ifeq ($(shell command -v nvidia-smi),)
TORCH    ?= torch~=2.13.0
PIP_ARGS ?= $$($(PY) -m pip config list | grep find-links >/dev/null || echo --extra-index-url $(CPU_INDEX))
else
TORCH    ?= torch>=2.6,<3
PIP_ARGS ?=
endif

.PHONY: setup test lint demo report rescore wheel-check clean

setup: $(VENV)/.stamp

# One pip call, so that the torch named here is the torch that everything else is resolved against.
$(VENV)/.stamp: pyproject.toml
	test -x $(PY) || python3 -m venv $(VENV)
	$(PY) -m pip install -q $(PIP_ARGS) "$(strip $(TORCH))" -e ".[dev]"
	touch $@

test: setup
	OMP_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false $(PY) -m pytest -q -n $(WORKERS) --dist loadfile $(PYTEST_ARGS)

lint: setup
	$(PY) -m ruff format --check .
	$(PY) -m ruff check .
	$(PY) -m pyright --pythonpath $(PY) kvbench

demo: setup
	$(PY) -m kvbench.run method=full protocol=blind experiment=demo runs=$(RUNS)
	$(PY) -m kvbench.run -m method=snapkv protocol=blind,aware budget=128 experiment=demo runs=$(RUNS)
	$(PY) -m kvbench.status runs=$(RUNS)
	@echo "Configs, records and summaries are in $(RUNS)/demo/. Same command again: only what is missing is computed."

report: setup
	$(PY) -m kvbench.report runs=$(RUNS)

# Scores of published predictions, recomputed: make rescore PREDICTIONS=folder
rescore: setup
	$(PY) scripts/rescore.py $(PREDICTIONS)

wheel-check: setup
	$(PY) -m pytest -q tests/test_packaging.py

clean:
	rm -rf $(VENV) build dist .pytest_cache .ruff_cache .hypothesis
