# Two commands set everything up: `make up` to try it, `make test` to work on it.
VENV ?= .venv
PYTHON ?= python3
BIN = $(VENV)/bin

.PHONY: up test lint bench image-test clean

# Two small engines on this machine with the proxy in front of them. More arguments: make up ARGS="--set listen=..."
up: $(VENV)/.local
	@$(BIN)/splitproxy up --demo $(ARGS)

test: lint
	$(BIN)/python -m pytest $(ARGS)

lint: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# The proxy's own share of the time to the first token, with its parts.
bench: $(VENV)/.dev
	$(BIN)/python -m bench.overhead $(ARGS)

# Builds the image as Docker would and serves a long prompt from it; needs root, buildah and debootstrap.
image-test: $(VENV)/.dev
	PYTHON=$(abspath $(BIN))/python bash tests/image_test.sh

$(VENV)/.local: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[local]'
	@touch $@

$(VENV)/.dev: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[local,dev]'
	@touch $@

clean:
	rm -rf $(VENV) .mypy_cache .pytest_cache .ruff_cache .hypothesis build *.egg-info
