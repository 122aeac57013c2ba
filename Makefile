# Every target makes its own environment: nothing has to be installed by hand.
PYTHON ?= python3
VENV := .venv
BENCH_VENV := .venv-bench
PEERS := kronfluence bergson dattri traker pydvl captum
PIP_FLAGS := --quiet --disable-pip-version-check -c constraints.txt

# What `make reproduce` makes, and how: see `python -m reproduction --help`.
NAME ?= all
PROFILE ?= quick

.PHONY: help demo reproduce test test-slow test-faults docs docs-run dist matrix audit check format bench gpu-check peers browser clean

help:
	@echo "make demo       train two small models, ask them questions, write the pages (minutes)"
	@echo "make reproduce  the paper's tables and figures, into runs/reproduction-PROFILE (minutes; NAME=figure1 PROFILE=quick)"
	@echo "make test       the test suite (minutes)"
	@echo "make test-slow  the tests that need minutes each or downloaded weights"
	@echo "make test-faults  runs killed at every file operation, files damaged in every way, long fuzzing; prints counts (hours)"
	@echo "make check      lint, types, import contracts"
	@echo "make docs       the documentation site, into docs/_build/html; warnings are errors"
	@echo "make docs-run   run the code of the site's pages again, and keep what it prints and draws (minutes)"
	@echo "make dist       wheel and source archive, checked, the wheel tried in an environment of its own"
	@echo "make matrix     a quick part of the tests on every Python that is here, with the oldest and the newest torch"
	@echo "make audit      known vulnerabilities of the pinned dependencies, and their licences"
	@echo "make bench      speed, memory and agreement with retraining"
	@echo "make gpu-check  whether all of it works on this machine's GPU, once, with a verdict"
	@echo "make peers      agreement of other libraries with retraining, over dampings (hours)"

demo: $(VENV)/.installed
	$(VENV)/bin/whence demo --output demo

reproduce: $(VENV)/.installed
	$(VENV)/bin/python -m reproduction $(NAME) --profile $(PROFILE)

test: $(VENV)/.installed browser
	$(VENV)/bin/python -m pytest

test-slow: $(VENV)/.installed
	$(VENV)/bin/python -m pytest -m slow -n 0

test-faults: $(VENV)/.installed
	OMP_NUM_THREADS=1 $(VENV)/bin/python tests/faults --results benchmarks/results/faults.json
	$(VENV)/bin/python -m pytest -m faults -n 0 --hypothesis-show-statistics tests

docs: $(VENV)/.installed
	rm -rf docs/_build
	$(VENV)/bin/python -m sphinx -W --keep-going -q -b html docs docs/_build/html
	$(VENV)/bin/python -m docs.site docs/_build/html

docs-run: $(VENV)/.installed
	OMP_NUM_THREADS=1 $(VENV)/bin/python -m docs.run $(PAGE)

# The wheel is tried in an environment of its own, as a newcomer would: the README's commands, on a model of their own.
dist: $(VENV)/.installed
	rm -rf dist .venv-dist
	$(VENV)/bin/python -m build --outdir dist --no-isolation
	$(VENV)/bin/python -m twine check --strict dist/*
	$(PYTHON) -m venv .venv-dist
	.venv-dist/bin/python -m pip install $(PIP_FLAGS) "$$(ls dist/*.whl)[hf]"
	cd .venv-dist && PYTHONPATH= ../$(VENV)/bin/python ../tests/newcomer.py newcomer "$$PWD/bin/whence"

matrix:
	$(PYTHON) tests/matrix.py

# A dependency that no database was asked about is not a safe one: what could not be checked is counted.
audit: $(VENV)/.installed .venv-audit/.installed
	.venv-audit/bin/pip-licenses --python=$(VENV)/bin/python --order=license
	@.venv-audit/bin/pip-audit --no-deps --disable-pip -r constraints.txt >.venv-audit/found.txt 2>&1; code=$$?; \
	cat .venv-audit/found.txt; skipped=$$(grep -c "could not be audited" .venv-audit/found.txt); \
	echo "$$skipped of $$(grep -c == constraints.txt) dependencies could not be checked: no database knew them or was reachable"; \
	exit $$code

check: $(VENV)/.installed
	$(VENV)/bin/ruff check
	$(VENV)/bin/ruff format --check
	$(VENV)/bin/mypy
	$(VENV)/bin/lint-imports

format: $(VENV)/.installed
	$(VENV)/bin/ruff check --fix
	$(VENV)/bin/ruff format

bench: $(BENCH_VENV)/.installed
	$(BENCH_VENV)/bin/python -m benchmarks.products
	$(BENCH_VENV)/bin/python -m benchmarks.memory
	$(BENCH_VENV)/bin/python -m benchmarks.scoring
	$(BENCH_VENV)/bin/python -m benchmarks.datamodeling

gpu-check: $(VENV)/.installed
	$(VENV)/bin/python -m benchmarks.gpu_check

# Every peer is asked in an environment of its own; what it answered is judged in ours.
peers: $(VENV)/.installed $(PEERS:%=.venv-%/.installed)
	set -e; for peer in $(PEERS); do for way in --check --mislabels ""; do \
	  OMP_NUM_THREADS=1 .venv-$$peer/bin/python -m benchmarks.peers.$$peer $$way; done; done
	OMP_NUM_THREADS=1 $(VENV)/bin/python -m benchmarks.peers.plain
	OMP_NUM_THREADS=1 $(VENV)/bin/python -m benchmarks.peers.ours
	$(VENV)/bin/python -m benchmarks.peers
	$(VENV)/bin/python -m benchmarks.mislabels peers
	$(VENV)/bin/python -m benchmarks.peers.interleaved
	$(VENV)/bin/python -m benchmarks.peers.page

# Pages are tested in a real browser. Where it is missing and may be installed, it is.
browser:
	@if ! command -v chromium >/dev/null || ! command -v chromedriver >/dev/null; then \
	  if [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
	    apt-get update -qq && apt-get install -y -qq --no-install-recommends chromium chromium-driver >/dev/null; \
	  else echo "chromium and chromedriver are missing: the tests of the pages will be skipped"; fi; fi

$(VENV)/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(VENV)/bin/python -m pip install $(PIP_FLAGS) -e '.[dev]'
	touch $@

.venv-audit/.installed:
	$(PYTHON) -m venv .venv-audit
	.venv-audit/bin/python -m pip install --quiet --disable-pip-version-check pip-audit pip-licenses
	touch $@

# curvlinops depends on torchvision only through backpack, which does not need it; installing it would
# replace torch. So what is used of it is listed by hand and installed without its dependencies.
$(BENCH_VENV)/.installed: pyproject.toml constraints.txt benchmarks/requirements.txt
	$(PYTHON) -m venv $(BENCH_VENV)
	$(BENCH_VENV)/bin/python -m pip install $(PIP_FLAGS) -e '.[dev]'
	$(BENCH_VENV)/bin/python -m pip install $(PIP_FLAGS) --no-deps -r benchmarks/requirements.txt
	touch $@

$(PEERS:%=.venv-%/.installed): .venv-%/.installed: pyproject.toml constraints.txt benchmarks/peers/%.txt
	$(PYTHON) -m venv .venv-$*
	.venv-$*/bin/python -m pip install $(PIP_FLAGS) -e '.[demo]'
	.venv-$*/bin/python -m pip install $(PIP_FLAGS) --no-deps -r benchmarks/peers/$*.txt
	touch $@

clean:
	rm -rf $(VENV) $(BENCH_VENV) .venv-audit .venv-dist .venv-matrix dist docs/_build $(PEERS:%=.venv-%) .mypy_cache .ruff_cache .pytest_cache .import_linter_cache
