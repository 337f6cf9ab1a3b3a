# make train   environment, install, train the default recipe, end with a sample and a report
# make test    environment, install, the whole suite
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
PYTEST := $(BIN)/python -m pytest -n 2 --dist loadfile

.PHONY: env train test test-fast test-all check docs chromium clean

env: $(READY)

$(READY): pyproject.toml constraints.txt setup.py $(wildcard csrc/*)
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt "setuptools>=77" wheel
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-build-isolation -c constraints.txt -e ".[dev]"
	touch $(READY)

train: env
	$(BIN)/sennit train

test: env chromium
	$(PYTEST) -m "not slow"

test-fast: env
	$(PYTEST) -m "not slow and not heavy"

test-all: env chromium
	$(PYTEST)

check: env
	$(BIN)/ruff check .
	$(BIN)/pyright

docs: env
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

# Page tests look at the report in a real browser; without one they are skipped.
chromium:
	@command -v chromium >/dev/null || command -v chromium-browser >/dev/null || command -v google-chrome >/dev/null \
	  || { test "$$(id -u)" = 0 && command -v apt-get >/dev/null \
	       && apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq chromium >/dev/null; } \
	  || echo "no chromium: page tests will be skipped"

clean:
	rm -rf build dist site *.egg-info .pytest_cache .ruff_cache
