# Each target works on a machine with Python 3.10 or newer and make, and nothing else.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check -q

# A machine without a C compiler links with PyPI's ziglang.
LINKER := $(if $(shell command -v cc || command -v clang || command -v gcc),,[zig])

.PHONY: chat test check page bench bench-peers bench-web clean

chat: $(VENV)/installed  ## compile the embedded model for this CPU and talk to it (ARGS="--prompt ...")
	$(BIN)/mlcpipe chat $(ARGS)

# Status 5 of pytest: nothing was selected, which ARGS may mean for one of the two.
test: $(VENV)/installed-dev  ## run the tests on all cores, at most 4, then those that measure time (ARGS="-k name")
	$(BIN)/python -m pytest -n auto --maxprocesses 4 --dist loadfile -m "not alone and not everything" $(ARGS) || test $$? -eq 5
	$(BIN)/python -m pytest -m alone $(ARGS) || test $$? -eq 5

check: $(VENV)/installed-dev  ## lint, types, tests
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(MAKE) test

page:  ## build the chat page (needs Node 20.19 or later); a wheel made afterwards has it in it
	cd apps/chat-web && npm ci --no-audit --no-fund && npm run build

bench: $(VENV)/installed  ## measure the embedded model, or MODEL=path
	$(BIN)/mlcpipe bench $(MODEL) $(ARGS)

bench-peers: $(VENV)/installed-dev  ## side by side with llama.cpp and OpenVINO: see tests/peers/README.md
	$(BIN)/python -m tests.peers.bench_peers $(ARGS)

bench-web: $(VENV)/installed-dev  ## the same in Chromium, with transformers.js and wllama (ARGS="--adapter default" for a GPU)
	$(BIN)/python -m tests.peers.bench_web $(ARGS)

$(VENV)/installed: pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) install -e ".$(LINKER)"
	touch $@

$(VENV)/installed-dev: pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) install -e ".$(LINKER)"
	$(PIP) install -e ".[dev]"
	touch $@ $(VENV)/installed

clean:
	rm -rf $(VENV) build dist .pytest_cache .mypy_cache .ruff_cache
