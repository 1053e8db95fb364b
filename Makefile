# zbv: `make run` shows everything end to end on this machine, `make test` checks everything.

PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
PIP    := $(BIN)/python -m pip --disable-pip-version-check
ARGS   ?=
MINUTES ?= 10
export PIP_CONSTRAINT := $(CURDIR)/constraints.txt

.DEFAULT_GOAL := help
.PHONY: help run test soak suite lint style scripts types format browser postgres picture pictures openapi freeze clean install

help: ## Show the targets
	@grep -hE '^[a-z]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*## /\t/' | expand -t 12

install: $(VENV)/.installed ## Set up .venv with the pinned versions

$(VENV)/.installed: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "zbv needs Python 3.11 or newer; $(PYTHON) is older. Run: make PYTHON=/path/to/python3.11"; exit 1; }
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) install --quiet hatchling editables
	$(PIP) install --quiet --no-build-isolation --editable '.[dev]'
	$(BIN)/python -m zbv_solver.commands.warm_up
	@touch $@

run: install ## Plan, train and compare on this machine; ARGS=--exit stops after the summary
	$(BIN)/python -m zbv_worker.demo.run $(ARGS)

# Types are checked beside the tests, which often wait: together they take little longer than the tests alone.
test: install browser postgres style ## Run all checks and tests; ARGS go to pytest
	@$(MAKE) --no-print-directory --jobs 2 types suite

# One process more than there are cores: many tests wait for processes of their own.
suite: install
	$(BIN)/python -m pytest --numprocesses 3 --dist loadfile --no-loadscope-reorder $(ARGS)

soak: install ## Compare bounds and plans of random problems with exact optima; MINUTES=10, ARGS="--seed 1"
	$(BIN)/python -m benchmarks.soak --minutes $(MINUTES) $(ARGS)

lint: style types ## Check style and types only

style: install scripts
	$(BIN)/ruff check
	$(BIN)/ruff format --check

# The scripts of the pages. Only developers need npm: zbv runs without it.
scripts:
	@if command -v npm >/dev/null; then \
	  $(MAKE) --no-print-directory node_modules/.package-lock.json && npm run --silent check; \
	else echo "npm is not installed: the scripts of the pages are not checked"; fi

node_modules/.package-lock.json: package.json package-lock.json
	npm ci --silent --no-audit --no-fund

types: install
	$(BIN)/mypy

format: install ## Rewrite the code in the project's format
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

# Browser tests drive a Chromium; where there is none, Debian's is installed, if possible the one without windows.
browser:
	@command -v chromium-headless-shell chromium chromium-browser google-chrome >/dev/null || { \
	  echo "installing chromium"; \
	  if [ "$$(id -u)" = 0 ]; then SUDO=; else SUDO=sudo; fi; \
	  INSTALL="$$SUDO apt-get -qq install -y --no-install-recommends"; \
	  $$SUDO apt-get -qq update && \
	  { $$INSTALL chromium-headless-shell >/dev/null 2>&1 || $$INSTALL chromium >/dev/null; }; }

# Service tests start a PostgreSQL server of their own; Debian's is installed where there is none, and the cluster
# that its package would make and start is left out.
postgres:
	@ls /usr/lib/postgresql/*/bin/initdb >/dev/null 2>&1 || { \
	  echo "installing postgresql"; \
	  if [ "$$(id -u)" = 0 ]; then SUDO=; else SUDO=sudo; fi; \
	  $$SUDO mkdir -p /etc/postgresql-common/createcluster.d && \
	  echo 'create_main_cluster = false' | \
	    $$SUDO tee /etc/postgresql-common/createcluster.d/zbv.conf >/dev/null && \
	  $$SUDO apt-get -qq update && $$SUDO apt-get -qq install -y --no-install-recommends postgresql >/dev/null && \
	  $$SUDO rm /etc/postgresql-common/createcluster.d/zbv.conf; }

picture: install ## Draw the README's plan again
	$(BIN)/zbv plan examples/readme.json -o build/readme.json
	$(BIN)/zbv export build/readme.json --format svg -o docs/plan.svg

pictures: install browser ## Take the README's pictures of the pages again
	cd tests && ../$(BIN)/python -m web.pictures ../docs

openapi: install ## Write the service's OpenAPI document again
	$(BIN)/zbv-service openapi > service/openapi.json

freeze: ## Write constraints.txt again from what is installed
	@{ sed -n '/^#/p' constraints.txt; $(PIP) freeze --exclude-editable | sed 's/+cpu//'; } > constraints.new
	@mv constraints.new constraints.txt

clean: ## Remove what make and the tests made
	rm -rf $(VENV) node_modules build artifacts .mypy_cache .ruff_cache .pytest_cache .hypothesis
