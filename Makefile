# Every target sets up what it needs in .venv and is quick if nothing has changed. Only python3, make and sh are needed.
PYTHON ?= python3
GROUP ?= core
INSTALL = @$(PYTHON) scripts/install.py
# Each test computes on one thread: on small tensors, a second thread costs more than it saves, and the processes that
# tests start would compete for the cores. Bytecode is kept even if the shell forbids it, because tests start many
# processes, and otherwise each process would compile every module again.
# `make test` skips, with a reason, the tests of several processes. `make test-dist` runs these tests, one at a time.
# `make check` reads the code and the documentation; the commands of the documentation are executed by `make test`.
TEST_ENVIRONMENT = OMP_NUM_THREADS=1 MKL_NUM_THREADS=1 PYTHONDONTWRITEBYTECODE=

.DEFAULT_GOAL := help
.NOTPARALLEL:
.PHONY: help install demo test test-dist test-slow check audit distributed rivals format clean

help: ## Show this list
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/  make \1|\2/p' Makefile | awk -F'|' '{ printf "%-20s %s\n", $$1, $$2 }'
	@echo "  Another Python:    make demo PYTHON=python3.12"

install: ## Make .venv with the core packages (GROUP=demo, dev, distributed or ray for more)
	$(INSTALL) $(GROUP) --command "make install"

demo: ## Run the demo: synthetic world, training, evaluation, export, server, scores, report.html
	$(INSTALL) demo --command "make demo"
	@.venv/bin/tackboard demo

test: ## Run the tests (under ten minutes on two cores)
	$(INSTALL) dev --command "make test"
	@TACKBOARD_LEAVE_OUT=dist $(TEST_ENVIRONMENT) .venv/bin/python -m pytest -q --numprocesses 2 --dist loadfile

test-dist: ## Run the tests of training in several processes, with TorchRec (under eight minutes)
	$(INSTALL) dev --command "make test-dist"
	$(INSTALL) distributed --command "make test-dist"
	@$(TEST_ENVIRONMENT) .venv/bin/python -m pytest -q -m "dist and not slow and not gpu"

test-slow: ## Run the long tests: a kill at every instant, slow pages of the documentation
	$(INSTALL) dev --command "make test-slow"
	@$(TEST_ENVIRONMENT) .venv/bin/python -m pytest -q -m "slow and not gpu" --numprocesses 2 --dist loadfile

check: ## Check lint, format, types, import contract, rules, documentation
	$(INSTALL) dev --command "make check"
	@.venv/bin/ruff check
	@.venv/bin/ruff format --check
	@.venv/bin/mypy
	@.venv/bin/lint-imports --no-cache --no-logo
	@$(TEST_ENVIRONMENT) .venv/bin/python -m pytest -q tests/rules -m rule

audit: ## List what is installed: versions, licences, hashes, known vulnerabilities
	$(INSTALL) dev --command "make audit"
	@.venv/bin/python scripts/audit.py

distributed: ## Add TorchRec and FBGEMM to .venv
	$(INSTALL) distributed --command "make distributed"

rivals: ## Install the libraries that `tackboard bench features` and `bench loader` compare with, apart from .venv
	$(INSTALL) core --command "make rivals"
	@.venv/bin/python scripts/install_rivals.py

format: ## Format the code and apply the safe fixes of the linter
	$(INSTALL) dev --command "make format"
	@.venv/bin/ruff format
	@.venv/bin/ruff check --fix

clean: ## Remove .venv, .rivals, caches and the demo's files
	rm -rf .venv .rivals .cache .mypy_cache .ruff_cache .pytest_cache .import_linter_cache .hypothesis demo
