# Two commands matter: `make demo` and `make test`. Both make .venv when it is missing or pyproject.toml has changed.
#   PYTHON=python3.12       the interpreter to use (default: python3.11 if there, else the first suitable python3)
#   VENV=folder             where the environment goes (default: .venv); any path, spaces too (but for "compile" on a CPU)
#   TORCH_VERSION=2.13.0    the torch to install
#   DEMO_ARGS=, PYTEST_ARGS=  more arguments, such as DEMO_ARGS="--all" or PYTEST_ARGS="-m slow"

VENV ?= .venv
PYTHON ?=
TORCH_VERSION ?= 2.13.0
export PYTHON TORCH_VERSION

.PHONY: demo test test-ci test-fast lint format docs clean suffix install-demo install-dev install-docs
.DEFAULT_GOAL := demo

demo: install-demo
	"$(VENV)/bin/hf-specdec" demo $(DEMO_ARGS)

# Two threads of one process fight with the neighbours for the cores; one thread in each of several processes does not.
test: install-dev
	OMP_NUM_THREADS=1 "$(VENV)/bin/python" -m pytest -n auto --maxprocesses=8 --dist worksteal $(PYTEST_ARGS)

# What starts many processes, interprets kernels or trains.
test-ci: install-dev
	OMP_NUM_THREADS=1 "$(VENV)/bin/python" -m pytest -n auto --maxprocesses=8 --dist worksteal -m "ci and not slow" $(PYTEST_ARGS)

# The first case of each test that starts no process, trains nothing and takes no seconds: while writing code.
test-fast: install-dev
	OMP_NUM_THREADS=1 "$(VENV)/bin/python" -m pytest -n auto --maxprocesses=8 --dist worksteal --fast $(PYTEST_ARGS)

lint: install-dev
	"$(VENV)/bin/ruff" check .
	git ls-files | xargs -d '\n' "$(VENV)/bin/codespell"
	"$(VENV)/bin/pyright" --pythonpath "$(VENV)/bin/python"

format: install-dev
	"$(VENV)/bin/ruff" check --fix .
	"$(VENV)/bin/ruff" format .

# The script itself sees whether there is anything to do: make cannot name a file whose path has a space.
install-demo install-dev install-docs:
	bash scripts/setup_venv.sh "$(VENV)" $(@:install-%=%)

# The site in site/. Fails on a warning: a dead link or anchor, a page that is in no menu, a docstring that does not fit its function.
docs: install-docs docs/figures/mermaid.min.js
	NO_MKDOCS_2_WARNING=1 "$(VENV)/bin/python" -m mkdocs build --strict

# Diagrams without a network. Where npm is missing, the reader's browser loads the file from a CDN instead.
docs/figures/mermaid.min.js:
	mkdir -p build && npm pack --silent --pack-destination build mermaid@11.17.2 >/dev/null && \
	tar -xzOf build/mermaid-11.17.2.tgz package/dist/mermaid.min.js >$@ && \
	echo "581ed7d74bd9048d0e3a91363927d72ef22942d7722546b27f7cc29e35390eb8  $@" | sha256sum --check --quiet || \
	{ rm -f $@; echo "no npm, or another file than expected: diagrams come from a CDN"; }

suffix:
	bash scripts/setup_venv.sh "$(VENV)" suffix

clean:
	rm -rf "$(VENV)" build dist site *.egg-info .pytest_cache .ruff_cache
