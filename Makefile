# zbv: `make run` shows everything end to end on this machine, `make test` checks everything.

PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
PIP    := $(BIN)/python -m pip --disable-pip-version-check
ARGS   ?=
MINUTES ?= 10
export PIP_CONSTRAINT := $(CURDIR)/constraints.txt
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help run test tested programs suite lint style scripts types format docs prose bench soak explore gpu torchtitan browser postgres picture \
  pictures openapi freeze clean install

help: ## List the targets
	@grep -hE '^[a-z]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*## /\t/' | expand -t 12

install: $(VENV)/.compiled ## Create .venv with the pinned versions

# Python compiles a module at its first import. Compiling all modules here would take half a minute longer.
$(VENV)/.installed: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "zbv needs Python 3.11 or newer; $(PYTHON) is older. Run: make PYTHON=/path/to/python3.11"; exit 1; }
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) install --quiet --no-compile hatchling editables
	$(PIP) install --quiet --no-compile --no-build-isolation --editable '.[dev]'
	@touch $@

# Without the compiled kernels, the first plan takes one to two minutes longer.
$(VENV)/.compiled: $(VENV)/.installed
	$(BIN)/python -m zbv_solver.commands.warm_up
	@touch $@

run: install ## Plan, train and compare on this machine; ARGS=--exit exits after the summary
	$(BIN)/python -m examples.demo --example examples/train.py $(ARGS)

# Downloads, compilation and tests often wait, so what does not depend on each other runs at the same time.
test: ## Install everything, and run all checks and tests; ARGS go to pytest
	@$(MAKE) --no-print-directory --jobs 4 style types tested

tested: install programs $(VENV)/.collected
	@$(MAKE) --no-print-directory suite

# Otherwise each process of the first suite compiles all tests and all modules that they import.
$(VENV)/.collected: $(VENV)/.installed
	@$(BIN)/python -m pytest --collect-only --quiet >/dev/null || true # the suite reports the error
	@touch $@

programs: # Two recipes, because apt-get runs once at a time.
	@$(MAKE) --no-print-directory browser
	@$(MAKE) --no-print-directory postgres

# One process more than CI has cores, because many tests wait for child processes.
# After a large change of the tests, run `make suite ARGS=--store-durations` and commit tests/durations.json.
suite: install
	$(BIN)/python -m pytest --numprocesses 3 --dist loadfile --no-loadscope-reorder $(ARGS)

docs: install ## Build the documentation site in build/docs
	$(BIN)/python -m sphinx -W --keep-going -q docs build/docs

prose: install ## Find idioms that we avoid; ARGS="--all solver" also lists suspicious ones
	$(BIN)/python tests/docs/prose.py $(ARGS)

bench: install ## Run a benchmark; ARGS="--help" lists them, ARGS="planner benchmarks/public.json" runs one
	$(BIN)/python -m benchmarks $(or $(ARGS),planner benchmarks/proofs.json)

soak: install ## Compare bounds and plans of random problems with exact optima; MINUTES=10, ARGS="--seed 1"
	$(BIN)/python -m benchmarks soak --minutes $(MINUTES) $(ARGS)

# Each round draws other examples. To repeat a failure: HYPOTHESIS_PROFILE=explore, and pytest with the printed seed.
explore: install ## Run property tests with random seeds until one fails or the time is up; MINUTES=10, ARGS=tests/solver
	@end=$$(( $$(date +%s) + 60 * $(MINUTES) )); \
	while [ $$(date +%s) -lt $$end ]; do \
	  seed=$$(od -An -N4 -tu4 /dev/urandom | tr -d ' '); \
	  echo "--hypothesis-seed=$$seed"; \
	  HYPOTHESIS_PROFILE=explore $(BIN)/python -m pytest -q --exitfirst --numprocesses 2 -m hypothesis \
	    --hypothesis-seed=$$seed $(or $(ARGS),tests/solver) || exit 1; \
	done

# The tests run with the torch of $(PYTHON), which fits the machine's driver, in another virtual environment. One made
# from another sees only the packages of the system, so a .pth file adds the folder with torch.
GPU := build/gpu
gpu: $(GPU)/.installed ## Run tests/gpu with the CUDA build of torch of PYTHON=python3; writes build/gpu/report.xml
	$(GPU)/bin/python -m pytest tests/gpu -v -rs --junit-xml=$(GPU)/report.xml $(ARGS)

$(GPU)/.installed: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys, torch; sys.exit(torch.version.cuda is None)' || \
	  { echo "$(PYTHON) has no torch that is built for CUDA. Run: make gpu PYTHON=/path/to/python"; exit 1; }
	test -x $(GPU)/bin/python || $(PYTHON) -m venv --system-site-packages $(GPU)
	$(PYTHON) -c 'import pathlib, torch; print(pathlib.Path(torch.__file__).parents[1])' > \
	  "$$($(GPU)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/torch.pth"
	grep -vE '^(torch|triton|nvidia)' constraints.txt > $(GPU)/constraints.txt
	PIP_CONSTRAINT=$(CURDIR)/$(GPU)/constraints.txt $(GPU)/bin/python -m pip --disable-pip-version-check install \
	  --quiet --no-compile hatchling editables
	PIP_CONSTRAINT=$(CURDIR)/$(GPU)/constraints.txt $(GPU)/bin/python -m pip --disable-pip-version-check install \
	  --quiet --no-compile --no-build-isolation --editable '.[solver,worker]' hypothesis pytest pytest-timeout pytest-xdist
	@touch $@

# torchtitan has many large dependencies, some of other versions than zbv is tested with. So it gets its own virtual
# environment, and `make test` does not include this check.
TITAN := build/torchtitan$(if $(TORCHTITAN),-source)
torchtitan: $(TITAN)/.installed ## Check plans and settings in torchtitan 0.3.0, or in its source with TORCHTITAN=CHECKOUT; downloads 500 MB
	PYTHONPATH=$(if $(TORCHTITAN),$(TORCHTITAN):)tests:. $(TITAN)/bin/python -m support.titan_check

$(TITAN)/.installed: constraints.txt pyproject.toml
	test -x $(TITAN)/bin/python || $(PYTHON) -m venv $(TITAN)
	grep -vE '^(fsspec|huggingface_hub)==' constraints.txt > $(TITAN)/constraints.txt
	PIP_CONSTRAINT=$(CURDIR)/$(TITAN)/constraints.txt $(TITAN)/bin/python -m pip --disable-pip-version-check install \
	  --quiet --no-compile hatchling editables setuptools wheel
	PIP_CONSTRAINT=$(CURDIR)/$(TITAN)/constraints.txt $(TITAN)/bin/python -m pip --disable-pip-version-check install \
	  --quiet --no-compile --no-build-isolation --editable '.[solver,worker]' $(or $(TORCHTITAN),torchtitan==0.3.0) triton \
	  hypothesis # of tests/support/estimates.py
	@touch $@

lint: style types ## Check only style and types

style: $(VENV)/.installed scripts
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/codespell
	$(BIN)/python tests/docs/prose.py

# The scripts of the pages. Only developers need npm: zbv runs without it.
scripts:
	@if command -v npm >/dev/null; then \
	  $(MAKE) --no-print-directory node_modules/.package-lock.json && npm run --silent check; \
	else echo "npm is not installed: the scripts of the pages are not checked"; fi

node_modules/.package-lock.json: package.json package-lock.json
	npm ci --silent --no-audit --no-fund

types: $(VENV)/.installed
	$(BIN)/mypy

format: install ## Format the code
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

# Browser tests need a Chromium. If there is none, install Debian's, preferably the headless one.
browser:
	@command -v chromium-headless-shell chromium chromium-browser google-chrome >/dev/null || { \
	  echo "installing chromium"; \
	  if [ "$$(id -u)" = 0 ]; then SUDO=; else SUDO=sudo; fi; \
	  INSTALL="$$SUDO apt-get -qq install -y --no-install-recommends"; \
	  $$SUDO apt-get -qq update && \
	  { $$INSTALL chromium-headless-shell >/dev/null 2>&1 || $$INSTALL chromium >/dev/null; }; }

# Service tests start their own PostgreSQL server. If none is installed, install Debian's package without the cluster that it
# would create and start.
postgres:
	@ls /usr/lib/postgresql/*/bin/initdb >/dev/null 2>&1 || { \
	  echo "installing postgresql"; \
	  if [ "$$(id -u)" = 0 ]; then SUDO=; else SUDO=sudo; fi; \
	  $$SUDO mkdir -p /etc/postgresql-common/createcluster.d && \
	  echo 'create_main_cluster = false' | \
	    $$SUDO tee /etc/postgresql-common/createcluster.d/zbv.conf >/dev/null && \
	  $$SUDO apt-get -qq update && $$SUDO apt-get -qq install -y --no-install-recommends postgresql >/dev/null && \
	  $$SUDO rm /etc/postgresql-common/createcluster.d/zbv.conf; }

picture: install ## Redraw the README's plan
	$(BIN)/zbv plan examples/readme.json -o build/readme.json
	$(BIN)/zbv export build/readme.json --format svg -o docs/plan.svg

pictures: install browser ## Take the documentation's screenshots again
	PYTHONPATH=tests $(BIN)/python docs/pictures.py

openapi: install ## Regenerate the service's OpenAPI document
	$(BIN)/zbv-service openapi > service/openapi.json

freeze: ## Regenerate constraints.txt from the installed versions
	@{ sed -n '/^#/p' constraints.txt; $(PIP) freeze --exclude-editable | sed 's/+cpu//'; } > constraints.new
	@mv constraints.new constraints.txt

clean: ## Remove everything that make and the tests created
	rm -rf $(VENV) build .mypy_cache .ruff_cache .pytest_cache .hypothesis
