# `make demo` and `make test` need nothing but Python 3.11+: they make their own virtual environment.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

.PHONY: demo test check docs avalanche examples format benchmark peers clean

demo: $(READY)
	$(BIN)/xkfac demo --output demo-output

test: check
	$(BIN)/pytest -n 2 --dist loadfile

check: docs
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

docs: $(READY)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

# Avalanche brings many packages of its own, so its tests run apart from the others
avalanche: $(READY)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[avalanche]'
	$(BIN)/pytest tests/integrations/test_avalanche.py tests/test_examples.py -k avalanche

examples: $(READY)
	WHOLE_EXAMPLES=1 $(BIN)/pytest -s tests/test_examples.py

format: $(READY)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

benchmark: $(READY)
	$(BIN)/python benchmarks/fisher_error.py

peers:
	$(PYTHON) benchmarks/peers.py

# builds the wheel and uses it in a clean environment; takes minutes, so it is no part of `make test`
.PHONY: wheel
wheel:
	$(PYTHON) tests/packaging/check_wheel.py

# runs the core tests with the lowest versions that pyproject.toml accepts
.PHONY: lowest
lowest:
	$(PYTHON) tests/packaging/check_lowest.py

$(READY): pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "xkfac needs Python 3.11 or newer")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt torch torchvision
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev]'
	touch $(READY)

clean:
	rm -rf $(VENV) .venv-peers demo-output site build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
