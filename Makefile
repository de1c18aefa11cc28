# Each target works on a machine with Python 3.10 or newer and make, and nothing else.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check -q

# With LOCKED=1 an environment has the versions of LOCK, whose hashes pip compares, and not the newest. LOCK leaves out
# torch, whose build for CPUs is another file: pyproject.toml pins it, and its metadata what it brings along for GPUs.
LOCK := .ci/requirements.lock
LOCK_FLAGS := --universal --python-version 3.11 --generate-hashes --no-annotate --no-header --no-emit-package torch
FIRST := pyproject.toml $(if $(LOCKED),$(VENV)/locked)
INSTALL := $(PIP) install $(if $(LOCKED),--no-build-isolation) -e

# A machine without a C compiler links with PyPI's ziglang.
LINKER := $(if $(shell command -v cc || command -v clang || command -v gcc),,[zig])

# Tests start Python hundreds of times: where this is set, each start compiles what it imports.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: chat test test-full test-both test-everything test-optimized bench-check lint check check-gpu docs page wheel wheels lock bench bench-peers bench-native bench-web quality clean

chat: $(VENV)/installed  ## compile the embedded model for this CPU and talk to it (ARGS="--prompt ...")
	@$(BIN)/mlcpipe chat $(ARGS); code=$$?; printf '%s\n' '' 'Next, in this folder:' '    . $(BIN)/activate' \
	  '    mlcpipe chat hf://Qwen/Qwen3-0.6B    # a model of the hub; a folder or a GGUF file works too' \
	  '    mlcpipe serve                        # a page and the APIs at http://127.0.0.1:8000/' >&2; exit $$code

# Tiers: tests/tiers.py. Worksteal: a worker that is done takes half of what another has left.
PYTEST := $(BIN)/python -m pytest
PARALLEL := -n auto --maxprocesses 4 --dist worksteal

test: $(VENV)/installed-dev  ## the tests for every change (ARGS="-k name")
	$(PYTEST) $(PARALLEL) -m "not (full or alone or everything)" $(ARGS)

test-full: $(VENV)/installed-dev  ## the tests that `make test` leaves out
	$(PYTEST) $(PARALLEL) -m "full and not (alone or everything)" $(ARGS)

test-both: $(VENV)/installed-dev  ## these two as one run, as CI does: what they share is made once
	$(PYTEST) $(PARALLEL) -m "not (alone or everything)" $(ARGS)

test-everything: $(VENV)/installed-dev  ## all combinations of what the others test in part: hours
	MLCPIPE_TEST_OPTIMIZED=1 $(PYTEST) $(PARALLEL) -m everything $(ARGS)

test-optimized: $(VENV)/installed-dev  ## models and kernels of `make test` and `make test-full`, with LLVM's optimizations
	MLCPIPE_TEST_OPTIMIZED=1 $(PYTEST) $(PARALLEL) -m "not (alone or everything)" tests/models tests/native tests/kernels/test_cpu_cases.py $(ARGS)

bench-check: $(VENV)/installed-dev  ## the tests that compare times, one after the other, on a quiet machine
	$(PYTEST) -m alone $(ARGS)

lint: $(VENV)/installed-dev  ## style and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

check: lint test  ## before every commit

check-gpu: $(VENV)/installed-gpu  ## check and measure every GPU of this machine: under nine minutes, one JSON, a table
	$(BIN)/python -m bench.check_gpu $(ARGS)

docs: $(VENV)/installed-docs  ## build the documentation into build/site; a broken link is an error
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict -q

PAGE := mlcpipe/server/page_files
page:  ## build the chat page (needs Node 20.19 or later), and what `mlcpipe serve` sends of it; a wheel made afterwards has both
	cd apps/chat-web && npm ci --no-audit --no-fund && npm run build
	rm -rf $(PAGE) && cp -R apps/chat-web/dist $(PAGE) && rm $(PAGE)/sw.js $(PAGE)/assets/worker-*

wheel: page $(VENV)/installed-dev  ## the release, in dist/ (LOCKED=1)
	$(PIP) wheel --no-deps --no-build-isolation -w dist .

wheels: page $(VENV)/installed-dev  ## the release with wheels for Linux, whose native code is compiled (wheels/build.py; LOCKED=1)
	$(PIP) wheel --no-deps --no-build-isolation -w dist .
	$(BIN)/python -m wheels.build

lock:  ## write .ci/requirements.lock: versions stay where pyproject.toml allows them (ARGS=--upgrade: the newest)
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) install uv
	mkdir -p build && echo 'torch; sys_platform == "never"' > build/override.txt
	$(BIN)/uv pip compile -q pyproject.toml .ci/lock.in --extra dev --extra docs --override build/override.txt $(LOCK_FLAGS) -o $(LOCK) $(ARGS)

bench: $(VENV)/installed  ## measure the embedded model, or MODEL=path
	$(BIN)/mlcpipe bench $(MODEL) $(ARGS)

bench-peers: $(VENV)/installed-dev  ## side by side with llama.cpp and OpenVINO: see bench/README.md
	$(BIN)/python -m bench.bench_peers $(ARGS)

bench-native: $(VENV)/installed-dev  ## the native runtime beside Python's engine and llama.cpp; its size, memory and instructions
	$(BIN)/python -m bench.bench_peers --runtimes native,llama.cpp --quantizations q4f16_1 --rows prefill-16,prefill-512,decode-0,decode-1024,load,memory-2048 $(ARGS)
	$(BIN)/python -m bench.bench_native
	$(BIN)/python -m bench.bench_native_serving

bench-web: $(VENV)/installed-dev  ## the same in Chromium, with transformers.js and wllama (ARGS="--adapter default" for a GPU)
	$(BIN)/python -m bench.bench_web $(ARGS)

quality: $(VENV)/installed-dev  ## methods of quantization side by side on the ruler, RULER=folder (apps/demo_model/ruler.py)
	$(BIN)/python -m bench.bench_quality $(or $(RULER),ruler) $(ARGS)

$(VENV)/locked: $(LOCK)
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) install --require-hashes --no-deps -r $(LOCK)
	touch $@

$(VENV)/installed: $(FIRST)
	@echo "installing into $(VENV): 540 MB$(if $(LINKER), and 410 MB for a linker), a minute or more"
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(INSTALL) ".$(LINKER)"
	@touch $@

$(VENV)/installed-dev: $(FIRST)
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(INSTALL) ".$(LINKER)"
	$(INSTALL) ".[dev]"
	touch $@ $(VENV)/installed

$(VENV)/installed-gpu: $(FIRST)
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(INSTALL) ".$(LINKER)"
	$(INSTALL) ".[cuda]"
	touch $@

$(VENV)/installed-docs: $(FIRST)
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(INSTALL) ".[docs]"
	touch $@

clean:
	rm -rf $(VENV) build dist .pytest_cache .mypy_cache .ruff_cache
