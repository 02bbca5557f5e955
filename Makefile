# Every target works on a fresh machine with Python 3.11 or newer and make: `make help` lists them.

SHELL := /bin/sh
.DEFAULT_GOAL := help

UV_VERSION := 0.13.9
PYTHON ?= $(shell for p in python3.11 python3.12 python3.13 python3.14 python3 python; do \
	"$$p" -c 'import ensurepip, sys, venv; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1 \
	&& { command -v "$$p"; break; }; done)

VENV := .venv
BIN := $(VENV)/bin
UV := $(BIN)/uv
# --no-config and --system-certs: neither a stray uv.toml nor a private certificate authority decides what is installed.
UV_FLAGS := --quiet --no-config --system-certs

.PHONY: help demo demo-once test bench lint lock clean

help:  ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## /{printf "  make %-10s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

demo: $(VENV)/.runtime  ## set up, start everything on this machine, and let a scripted agent propose calls
	@exec $(BIN)/python manage.py demo

demo-once: $(VENV)/.runtime  ## the same without a person; exit 0 only if every call ended as expected
	@exec $(BIN)/python manage.py demo --once

test: $(VENV)/.dev  ## the whole test suite, on an embedded server unless DATABASE_URL is set
	$(BIN)/python -m pytest $(ARGS)

bench: $(VENV)/.dev  ## measure side by side in one run, into bench/results/
	$(BIN)/python -m bench $(ARGS)

lint: $(VENV)/.dev  ## style, types, import contracts, missing migrations, system checks, OpenAPI drift
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache
	@# In a directory of its own: looking must not make a database or a key here.
	d=$$(mktemp -d) && trap 'rm -rf "$$d"' EXIT && export DEXSITE_DATA_DIR="$$d" && set -e; \
	$(BIN)/python manage.py makemigrations --check --dry-run; \
	DEBUG=off HTTPS=on $(BIN)/python manage.py check --deploy --fail-level WARNING; \
	$(BIN)/python manage.py spectacular --validate --fail-on-warn >"$$d/openapi.yaml"; \
	diff -u docs/openapi.yaml "$$d/openapi.yaml" \
		|| { echo 'docs/openapi.yaml is behind: manage.py spectacular --file docs/openapi.yaml' >&2; exit 1; }

lock: $(UV)  ## renew the two lock files from pyproject.toml (no index or host is written to them)
	$(UV) pip compile $(UV_FLAGS) pyproject.toml --extra embedded --universal --generate-hashes --python-version 3.11 \
		--no-emit-index-url --custom-compile-command 'make lock' $(ARGS) -o requirements.lock
	$(UV) pip compile $(UV_FLAGS) pyproject.toml --extra embedded --group dev --universal --generate-hashes \
		--python-version 3.11 --no-emit-index-url --custom-compile-command 'make lock' -c requirements.lock $(ARGS) \
		-o requirements-dev.lock

clean:  ## remove the virtual environment and every cache (never the data directory)
	rm -rf $(VENV) .pytest_cache .ruff_cache .mypy_cache .import_linter_cache .hypothesis staticfiles
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(UV):
	@test -n '$(PYTHON)' || { echo 'make: Python 3.11 or newer with its venv module is needed, and none was found' \
		'(install it, or say where: make PYTHON=/path/to/python3)' >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check uv==$(UV_VERSION)

$(VENV)/.runtime: requirements.lock | $(UV)
	$(UV) pip sync $(UV_FLAGS) --compile-bytecode --python $(BIN)/python requirements.lock
	@touch $@

# Renewing the runtime set removes the development set, so the latter depends on both locks.
$(VENV)/.dev: requirements.lock requirements-dev.lock | $(UV)
	$(UV) pip sync $(UV_FLAGS) --compile-bytecode --python $(BIN)/python requirements-dev.lock
	@touch $(VENV)/.runtime $@
