# The two commands to know: `make demo` and `make test`. Each does its own set-up.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
PROTOS := $(wildcard proto/prefixmesh/v1/*.proto)

.PHONY: setup demo test test-fast test-deep mutants check format proto wheel clean

setup: $(STAMP)

# torch first and by itself: its CPU build where there is no GPU (see scripts/install).
$(STAMP): pyproject.toml constraints.txt scripts/install
	@bash scripts/install "$(PYTHON)" "$(VENV)"
	@touch $(STAMP)

demo: $(STAMP)
	@$(BIN)/prefixmesh demo $(ARGS)

test: $(STAMP)
	@bash scripts/test_programs
	@$(BIN)/python -m pytest -m "not deep" $(ARGS)

test-fast: $(STAMP)
	@bash scripts/test_programs
	@$(BIN)/python -m pytest -m "not slow and not deep and not cluster" $(ARGS)

test-deep: $(STAMP)
	@$(BIN)/python -m pytest -m "deep" --timeout 3600 $(ARGS)

# Takes the guards of the prefix cache out one by one, and sees the tests fail for each.
mutants: $(STAMP)
	@$(BIN)/python scripts/mutants.py $(ARGS)

check: $(STAMP)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	@bash scripts/proto --check

format: $(STAMP)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

proto: $(STAMP)
	@bash scripts/proto

wheel: $(STAMP)
	$(BIN)/python -m build

clean:
	rm -rf $(VENV) dist .mypy_cache .ruff_cache .pytest_cache .hypothesis
