# Every target does all that it needs, and nothing twice. PYTHON names the interpreter for .venv.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

.PHONY: help up test unit e2e chaos lint types bench venv venv-dev model clean

help:  ## what there is
	@grep -E '^[a-z0-9-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:[^#]*## / - /'

up: venv model  ## set everything up, start 1P1D, answer one prompt, stop
	$(BIN)/baton up --prompt "Count the number 1, 2, 3"

test: venv-dev model  ## unit tests, then real engines, but for what is long
	$(BIN)/python -m pytest

unit: venv-dev  ## the tests without engines: seconds
	$(BIN)/python -m pytest -m "not e2e"

e2e: venv-dev model  ## all tests on real engines, the long ones too
	$(BIN)/python -m pytest -m e2e

chaos: venv  ## 10,000 requests with every fault in every phase, before fake engines: minutes (SEED=1)
	$(BIN)/python -m baton.sim.chaos --seed $(or $(SEED),1) --requests 10000

lint: venv-dev  ## format and lint
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .

types: venv-dev  ## mypy --strict
	$(BIN)/mypy

bench: venv model  ## start-up, idle cost and hand-off, measured on this machine
	$(BIN)/python bench/startup.py

venv:  ## .venv with what the locks pin
	@$(PYTHON) scripts/bootstrap.py --venv $(VENV)

venv-dev:
	@$(PYTHON) scripts/bootstrap.py --venv $(VENV) --dev

model: venv  ## the embedded model, unpacked
	@$(BIN)/baton model path smollm2-135m-instruct

clean:  ## remove .venv; the model stays in the cache
	rm -rf $(VENV)
