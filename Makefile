# `make demo` and `make test` do their own set-up in .venv. PYTHON picks the interpreter (3.11 to 3.13).
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
CXX_SOURCES := $(wildcard csrc/*.cpp csrc/*.h csrc/*.hpp csrc/*.cu csrc/*.cuh)
BENCH_FILES := $(wildcard bench_longctx/*/run.py bench_longctx/*/bench_*.py)
bench_name = bench-$(if $(filter run.py,$(notdir $(1))),$(notdir $(patsubst %/,%,$(dir $(1)))),$(patsubst bench_%.py,%,$(notdir $(1))))
BENCHES := $(sort $(foreach file,$(BENCH_FILES),$(call bench_name,$(file))))

.DEFAULT_GOAL := help
.NOTPARALLEL:
.PHONY: help setup demo doctor test lint format unit interpreter gpu build clean $(BENCHES)

help:
	@echo "make demo         answer questions about a bundled document, KV cache offloaded"
	@echo "make test         lint, types, tests, Triton kernels under the interpreter"
	@echo "make lint         ruff, mypy, clang-format"
	@echo "make format       rewrite the sources with ruff and clang-format"
	@echo "make doctor       what this machine offers, and what is missing"
	@echo "make gpu          the tests that need a CUDA device"
	@echo "make build        sdist and wheel in dist/"
	@echo "make clean        remove .venv, build outputs and caches"
	@for bench in $(BENCHES); do echo "make $$bench  options in ARGS=..."; done

setup: $(STAMP)

$(STAMP): setup.py pyproject.toml constraints.txt $(filter %.cpp %.h %.hpp,$(CXX_SOURCES))
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
		|| { echo "error: Python 3.11 or newer is needed; run: make PYTHON=python3.12" >&2; exit 2; }
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev]'
	@touch $@

demo: $(STAMP)
	@PATH="$(CURDIR)/$(BIN):$$PATH" sh examples/demo.sh

doctor: $(STAMP)
	@$(BIN)/herald doctor

lint: $(STAMP)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(if $(CXX_SOURCES),$(BIN)/clang-format --dry-run --Werror $(CXX_SOURCES))

format: $(STAMP)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .
	$(if $(CXX_SOURCES),$(BIN)/clang-format -i $(CXX_SOURCES))

test: lint interpreter unit

unit: $(STAMP)
	$(BIN)/python -m pytest

# The interpreter is switched on when triton is imported, hence a process of its own.
interpreter: $(STAMP)
	TRITON_INTERPRET=1 HERALD_KERNELS=triton $(BIN)/python -m pytest -m interpreter tests/kernels

gpu: $(STAMP)
	$(BIN)/python -m pytest -m gpu

build: $(STAMP)
	$(BIN)/python -m build

# bench_longctx/NAME/run.py is `make bench-NAME`, bench_longctx/*/bench_NAME.py too; options go in ARGS.
define bench_rule
$(call bench_name,$(1)): $$(STAMP)
	$$(BIN)/python -m $(subst /,.,$(basename $(1))) $$(ARGS)
endef
$(foreach file,$(BENCH_FILES),$(eval $(call bench_rule,$(file))))

clean:
	rm -rf $(VENV) build dist *.egg-info .hypothesis .mypy_cache .ruff_cache .pytest_cache herald/_native*.so
	@# numba's cache lies in there too, and does not notice an edit in a file that a function imports from
	find herald kernels tests bench_longctx -name __pycache__ -type d -prune -exec rm -rf {} +
