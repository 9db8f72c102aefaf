# Every target makes the environment it needs in .venv; `make` alone lists the targets.
PYTHON ?= python3
# of two cores, two workers leave a sixth unused: many tests wait. Three take up to 8 GB
JOBS ?= $(shell awk '/MemTotal/ {print ($$2 < 12000000 ? 2 : 3)}' /proc/meminfo 2>/dev/null || echo 2)
# another machine: SHAKE=1 (weights off by a millionth), BUSY=1 (a core at work), SKEW=5 (the clock jumps), ATEN_CPU_CAPABILITY=default
SHAKEN := $(if $(SHAKE)$(SKEW),PYTHONPATH=$(CURDIR)/tests/support/another_machine)
export SHAKE BUSY SKEW
BIN := .venv/bin
.DEFAULT_GOAL := help
.PHONY: help train test chaos faults lab docs bench study notebooks sync check lock clean clean-env
.DELETE_ON_ERROR:

help: ## this list
	@echo 'CompassRL: make TARGET [PYTHON=python3.12]'
	@awk -F ':.*## ' '/^[a-z-]+:.*## /{printf "  %-10s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

# One environment; a stamp per extra says what is in it and goes stale when the dependencies change.
.venv/.core: pyproject.toml constraints.txt constraints.lock tools/setup_env.py
	@$(PYTHON) tools/setup_env.py report && touch $@
.venv/.dev: .venv/.core
	@$(PYTHON) tools/setup_env.py dev && touch $@
.venv/.engines: .venv/.dev
	@$(PYTHON) tools/setup_env.py dev engines-cpu && touch $@
.venv/.docs: .venv/.engines # tests build the site, too
	@$(PYTHON) tools/setup_env.py docs && touch $@

train: .venv/.core ## a tiny mixture of experts learns by RL on two CPU cores: make train [ARGS="--seed 3"]
	@$(BIN)/compassrl train tiny-cpu $(ARGS)

test: .venv/.docs ## everything, with the real vLLM and Megatron-Core: the suite and every notebook: make test [ARGS="-k losses"]
	@$(BIN)/python -m compileall -q compassrl # once, for the thousand processes of the suite
	@OMP_NUM_THREADS=1 $(SHAKEN) $(BIN)/python -m pytest -n $(JOBS) $(ARGS)

chaos: .venv/.docs ## half an hour and more of kills, full disks, lies and bad input: make chaos [SEED=7] [CHAOS=0.1] [ARGS="-k clock"]
	@CHAOS=$(or $(CHAOS),1) SEED=$(or $(SEED),0) OMP_NUM_THREADS=1 \
	    $(BIN)/python -m pytest -n 2 -m chaos $(ARGS)

faults: .venv/.dev ## plant faults in a copy, one after another; a test must notice each: make faults [ARGS=loop]
	@OMP_NUM_THREADS=1 $(BIN)/python tools/plant.py $(ARGS)

lab: .venv/.engines ## JupyterLab on the notebooks
	@$(BIN)/python tools/fonts.py
	@MATPLOTLIBRC=$(CURDIR)/tools/matplotlibrc $(BIN)/jupyter lab --notebook-dir=nbs $(ARGS)

docs: .venv/.docs ## the site, into _site/
	@$(BIN)/python tools/build_docs.py --out _site

bench: .venv/.engines ## every benchmark, into benchmarks/results/
	@$(BIN)/python tools/run_benchmarks.py $(ARGS)

study: .venv/.dev ## learning runs that are compared, into benchmarks/results/: make study NAME=recipe (an hour or two)
	@test -n "$(NAME)" || { echo 'which one? make study NAME=recipe'; exit 2; }
	@OMP_NUM_THREADS=1 $(BIN)/python tools/run_benchmarks.py $(NAME)

notebooks: .venv/.engines ## run every notebook and store its outputs
	@$(BIN)/python tools/execute_nbs.py $(ARGS)

sync: .venv/.dev ## all that is generated: modules, README, and what follows from nbs/course.yml
	@$(BIN)/python tools/nb.py sync

check: .venv/.engines ## lint, types, architecture, course, links; all that is generated is in sync (a minute or two)
	@TYPES=1 $(BIN)/python -m pytest -q -p no:cacheprovider -k 'not site' tests/test_repository.py \
	    tests/test_architecture.py tests/test_toc.py tests/test_links.py tests/test_types.py

lock: ## the versions that the tests run with anew, plain and with hashes: make lock [ARGS=--upgrade]
	@$(PYTHON) tools/setup_env.py --lock $(ARGS)

clean: ## what was built: site, caches, exported copies
	rm -rf _site _proc _docs build dist .pytest_cache .hypothesis
	find . -name __pycache__ -not -path './.venv/*' -prune -exec rm -rf {} +

clean-env: ## the environments
	rm -rf .venv .venv-*
