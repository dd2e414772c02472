# Two commands matter: `make demo` and `make test`. Both make .venv when it is missing or pyproject.toml has changed.
#   PYTHON=python3.12       the interpreter to use (default: python3.11 if there, else the first suitable python3)
#   VENV=folder             where the environment goes (default: .venv)
#   TORCH_VERSION=2.13.0    the torch to install
#   DEMO_ARGS=, PYTEST_ARGS=  more arguments, such as DEMO_ARGS="--max-new-tokens 32" or PYTEST_ARGS="-m slow"

VENV ?= .venv
PYTHON ?=
TORCH_VERSION ?= 2.13.0
export PYTHON TORCH_VERSION

.PHONY: demo test lint format clean
.DEFAULT_GOAL := demo

demo: $(VENV)/.installed-suffix
	$(VENV)/bin/hf-specdec demo $(DEMO_ARGS)

# Two threads of one process fight with the neighbours for the cores; one thread in each of several processes does not.
test: $(VENV)/.installed-dev
	OMP_NUM_THREADS=1 $(VENV)/bin/python -m pytest -n auto --maxprocesses=8 --dist worksteal $(PYTEST_ARGS)

lint: $(VENV)/.installed-dev
	$(VENV)/bin/ruff check .
	$(VENV)/bin/pyright --pythonpath $(VENV)/bin/python

format: $(VENV)/.installed-dev
	$(VENV)/bin/ruff check --fix .
	$(VENV)/bin/ruff format .

$(VENV)/.installed-%: pyproject.toml scripts/setup_venv.sh
	bash scripts/setup_venv.sh "$(VENV)" $*
	touch "$@"

clean:
	rm -rf "$(VENV)" build dist *.egg-info .pytest_cache .ruff_cache
