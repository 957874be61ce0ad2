# make up      a real model, two replicas and a gateway on this machine     PORT ADMIN_PORT WORKERS MODEL
# make smoke   checks a running system with the official OpenAI client
# make test    lint, types, import contracts, all tests
# make bench-peers  routers from PyPI and ours over one simulated fleet, within BENCH_MINUTES; docs/routing.md
# make lock    compiles requirements/*.txt anew (needs uv)

PYTHON ?= python3
VENV ?= .venv
PORT ?= 8000
ADMIN_PORT ?= 8001
WORKERS ?= 2
MODEL ?= default
# Where torch comes from, e.g. TORCH_ARGS="--index-url https://download.pytorch.org/whl/cpu"
TORCH_ARGS ?=
# Four processes, also on two cores: half of what tests do is to wait.
PYTEST_ARGS ?= -n 4 --dist loadfile

# Other routers, each in a virtual environment of its own, outside of the checkout.
PEERS ?= $(or $(XDG_CACHE_HOME),$(HOME)/.cache)/warmpath/peers
BENCH_MINUTES ?= 180
BENCH_ARGS ?=

BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
# Made-up text needs no torch.
ENGINE := $(if $(filter simulated,$(MODEL)),,$(VENV)/.torch)

.PHONY: up smoke test lint types contracts tests format bench-peers peers lock clean

up: $(VENV)/.run $(ENGINE)
	@exec $(BIN)/warmpath up --model "$(MODEL)" --port $(PORT) --admin-port $(ADMIN_PORT) --workers $(WORKERS)

smoke: $(VENV)/.dev
	@exec $(BIN)/warmpath smoke

test: lint types contracts tests

lint: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(VENV)/.dev $(VENV)/.torch
	$(BIN)/mypy

contracts: $(VENV)/.dev
	$(BIN)/lint-imports

tests: $(VENV)/.dev $(VENV)/.torch
	OMP_NUM_THREADS=1 $(BIN)/pytest $(PYTEST_ARGS)

format: $(VENV)/.dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench-peers: $(VENV)/.dev peers
	$(BIN)/warmpath bench matrix --peers "$(PEERS)" --budget-min $(BENCH_MINUTES) $(BENCH_ARGS)

# Names and versions are those of loadtest/peers.py.
peers: $(VENV)/.dev
	@$(BIN)/python -m loadtest.peers | while read -r name version; do \
		if [ ! -e "$(PEERS)/$$name/.$$version" ]; then \
			echo "installing $$name $$version into $(PEERS)" && $(PYTHON) -m venv "$(PEERS)/$$name" && \
			"$(PEERS)/$$name/bin/python" -m pip --disable-pip-version-check install -q "$$name==$$version" && \
			touch "$(PEERS)/$$name/.$$version" || exit 1; \
		fi; \
	done

# pyproject.toml is the source; torch stays out of the hashes (requirements/exclude.txt says why).
LOCK := uv pip compile -q --universal --python-version 3.11 --generate-hashes --no-annotate --no-header \
	--override requirements/exclude.txt --extra engine --extra fast --group build --group torch-needs
lock:
	$(LOCK) pyproject.toml -o requirements/run.txt
	$(LOCK) --extra bench --group dev --constraint requirements/run.txt pyproject.toml -o requirements/dev.txt

clean:
	rm -rf $(VENV) .warmpath

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "Warmpath needs Python 3.11 or newer; name one with PYTHON=..." >&2; exit 1; }
	@$(PYTHON) -m venv $(VENV) || { echo "python3 -m venv failed; on Debian: apt install python3-venv" >&2; exit 1; }

$(VENV)/.run: requirements/run.txt pyproject.toml | $(BIN)/python
	@echo "installing the locked dependencies (about 40 MB)"
	@$(PIP) install -q --require-hashes -r requirements/run.txt
	@$(PIP) install -q --no-deps --no-build-isolation -e .
	@touch $@

$(VENV)/.torch: requirements/torch.txt $(VENV)/.run
	@echo "installing torch (200 MB for CPUs; README says how to choose a build)"
	@$(PIP) install $(TORCH_ARGS) -r requirements/torch.txt
	@touch $@

$(VENV)/.dev: requirements/dev.txt $(VENV)/.run
	@echo "installing what the tests need"
	@$(PIP) install -q --require-hashes -r requirements/dev.txt
	@touch $@
