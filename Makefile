# `make demo` and `make test` set up what they need in .venv. PYTHON, W8A8_BACKEND and VLLM_VERSION are read there.
export HF_HUB_OFFLINE := 1
VENV := .venv/bin
# Files of tests run on so many processes.
JOBS := 2
PYTEST = $(VENV)/python -m pytest -n $(JOBS) --dist loadfile

.DEFAULT_GOAL := help
.PHONY: help setup demo test aot report docs dist lint format clean

help:  ## shows this
	@sed -n 's/^\([a-z]*\):.*## \(.*\)/  make \1\t\2/p' $(MAKEFILE_LIST)

setup:  ## makes .venv: vLLM (CPU build where there is no NVIDIA GPU), the plugin, the tests' tools
	@python3 scripts/setup_env.py

demo: setup  ## converts SmolLM2-135M to W8A8, serves it, asks it a question
	@$(VENV)/python scripts/demo.py

test:  ## runs the tests, the plugin's also with an older vLLM; those that need a GPU skip themselves where there is none
	@python3 scripts/setup_env.py --tests
	@$(PYTEST) $(ARGS)
	@$(if $(ARGS),,for folder in .venv/vllm-*; do [ -d $$folder ] || continue; \
		echo "The plugin's tests with $$folder"; PYTHONPATH=$$folder $(PYTEST) tests/plugin || exit 1; done)

aot: setup  ## compiles all kernels for all GPUs that they are for, without a GPU
	@$(VENV)/python -m pytest tests/kernels/test_aot.py --aot-full $(ARGS)

report:  ## writes the tables and plots of figures in README and docs from benchmarks/results
	@$(or $(wildcard $(VENV)/python),python3) benchmarks/report.py

docs:  ## writes the page of environment variables and builds the documentation into site/
	@python3 scripts/setup_env.py --docs
	@$(VENV)/python scripts/env_page.py
	@NO_MKDOCS_2_WARNING=1 $(VENV)/mkdocs build --strict --quiet

dist: setup  ## builds sdist and wheel into dist/ and checks their metadata
	@$(VENV)/python -m pip install --quiet --disable-pip-version-check build twine
	@rm -rf build dist
	@$(VENV)/python -m build --outdir dist .
	@$(VENV)/python -m twine check --strict dist/*

lint: setup  ## checks style, changes nothing
	@$(VENV)/ruff check .
	@$(VENV)/ruff format --check .

format: setup  ## formats the code
	@$(VENV)/ruff check --fix .
	@$(VENV)/ruff format .

clean:  ## removes .venv, the demo's files and caches
	rm -rf .venv .demo build dist site *.egg-info .pytest_cache .ruff_cache
