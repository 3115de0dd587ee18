# Everything runs in .venv, which the first command makes. Another Python: make PYTHON=python3.12 ...
PYTHON ?= python3
VENV := .venv
RUN := $(VENV)/bin/python -m
INSTALLED := $(VENV)/.installed
SERVERS := $(VENV)/.servers

.PHONY: help demo test check faults bench install servers
.DEFAULT_GOAL := help

help:
	@echo "make demo    train on real digits, walk 12 queries back through training, show what taught the model"
	@echo "make test    all checks, all tests, all examples in docstrings"
	@echo "make servers a real S3 server (SeaweedFS) for make test, which skips what needs it otherwise"
	@echo "make check   ruff, formatting, types, which room imports which"
	@echo "make faults  kill, break and rerun the whole pipeline, for minutes"
	@echo "make bench   all tables of what it costs, into benchmarks/RESULTS.md (half an hour)"

demo: $(INSTALLED)
	$(VENV)/bin/magic-pipeline run experiments/digits.yaml --show 12
	@echo; echo "Do the scores predict retraining? The ten most influential examples of one query, and ten others, left out one by one:"
	$(VENV)/bin/python benchmarks/leave_one_out.py experiments/digits.yaml
	@$(VENV)/bin/magic-pipeline export experiments/digits.yaml --format png --output digits.png
	@$(VENV)/bin/magic-pipeline report experiments/digits.yaml --output digits_report.html
	@echo; echo "Look at the page digits_report.html, the picture digits.png, and every score's lineage in Dagster:"
	@echo "    $(VENV)/bin/magic-pipeline ui experiments"

# Two tests at a time on two CPUs; a module's tests stay together, for they share what they set up.
test: check
	$(RUN) pytest -n logical --dist loadscope

check: $(INSTALLED)
	$(RUN) ruff check .
	$(RUN) ruff format --check .
	$(RUN) mypy
	$(VENV)/bin/lint-imports

faults: $(INSTALLED)
	$(RUN) tests.faults.campaign --tries 3
	$(RUN) tests.faults.crashes --doubles 20
	@if [ -x $(VENV)/bin/weed ]; then set -x; $(RUN) tests.faults.crashes --storage seaweedfs --stride 5 --doubles 5; \
	  else echo "SeaweedFS is not installed (make servers): its crashes are left out"; fi
	$(RUN) tests.faults.corruption
	$(RUN) tests.faults.zombies --stride 2
	$(RUN) tests.faults.banks --stride 2
	$(RUN) tests.faults.gangs --tries 8
	$(RUN) tests.faults.services
	$(RUN) tests.faults.waves --queries 12 --kills 2

bench: $(INSTALLED)
	$(RUN) benchmarks

install: $(INSTALLED)

servers: $(SERVERS)

# Installs again only when what is to be installed has changed.
$(INSTALLED): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || { \
	  echo "magic_pipeline needs Python 3.11 or newer; '$(PYTHON)' is $$($(PYTHON) --version 2>&1 || true)." >&2; \
	  echo "Name another one: make PYTHON=/path/to/python3.12 $(MAKECMDGOALS)" >&2; exit 1; }
	@$(PYTHON) -m venv $(VENV) || { \
	  echo "'$(PYTHON) -m venv' failed; on Debian and Ubuntu: apt-get install python3-venv" >&2; exit 1; }
	$(RUN) pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@touch $@

$(SERVERS): $(INSTALLED)
	$(RUN) pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[servers]'
	@touch $@
