# Two commands: `make demo` shows what RunGuard does, `make test` checks everything. Both set up what they need by themselves.
PYTHON ?= python3
NEW := .venv
OLD := .venv-oldest-adk
FRAMEWORKS := .venv-frameworks
OLDEST_FRAMEWORKS := .venv-oldest-frameworks
WORKERS ?= 4  # with those beside, more than two cores can use: many tests wait for a clock or a server
PARALLEL = -n $(WORKERS) --dist worksteal  # a process that is done takes tests from one that is not
BESIDE = -n 2 --dist worksteal
AGAIN := $(MAKE) --no-print-directory  # make runs a line that says MAKE even where it only prints what it would run

# Python keeps what it compiles. Otherwise every test process and every process that a test starts compiles ADK again.
unexport PYTHONDONTWRITEBYTECODE

# What runs on the oldest google-adk: what ADK itself decides, which is its hooks, its runners and what its events hold. `make test-adk` runs all
# that touches ADK on every release.
TOUCH_ADK := tests/adk/install tests/replay/test_same_as_live.py tests/wire/test_gemini_wire.py tests/wire/test_automatic_functions.py \
  $(addprefix tests/adk/test_, budget_plugin.py budgets_live.py compaction.py \
  downgrade_live.py edges.py guarded_model.py inner_runners.py no_harm.py last_answer_live.py \
  limits_live.py live.py nested_handoffs.py own_processes.py prompt_cache_live.py reentries.py remote_agents.py resuming.py scenarios.py settling.py \
  streaming.py termination_branches.py topologies.py versions_page.py withheld_live.py \
  wrapped_models.py)
COVERING := tests/core tests/engine tests/ledger tests/calls tests/reporting tests/adk tests/policy tests/termination tests/wire \
  tests/faults tests/test_background.py

.PHONY: demo test test-beside ready ready-beside test-frameworks coverage faults lint types types-newest types-frameworks bench docs browser clean

demo: $(NEW)/.ready
	@$(NEW)/bin/runguard demo

# Files of the tests are in memory where it has room for them and may hold programs: stores wait for a disk at each write.
MEMORY := $(shell test -w /dev/shm && ! grep -q " /dev/shm .*noexec" /proc/mounts && \
  test "$$(df -Pk /dev/shm | awk 'NR == 2 {print $$4}')" -gt 4000000 && echo /dev/shm)

# The tests on the newest google-adk print as they go. The other environments are made and their tests run beside them,
# and print when both are done.
test:
	@$(MAKE) --no-print-directory --output-sync=target -j4 ready
	@mkdir -p build; \
	TMPDIR=$$(mktemp -d "$${TMPDIR:-$(or $(MEMORY),/tmp)}/runguard-XXXXXX"); export TMPDIR; chmod 755 "$$TMPDIR"; trap 'rm -rf "$$TMPDIR"' EXIT; \
	$(AGAIN) test-beside >build/test-beside.log 2>&1 & beside=$$!; trap 'kill $$beside' INT TERM; \
	echo "== tests on the newest google-adk"; \
	$(NEW)/bin/python -m pytest $(PARALLEL); newest=$$?; \
	wait $$beside; others=$$?; cat build/test-beside.log; test $$newest = 0 && test $$others = 0

test-beside:
	@echo "== types, and the environments of the oldest google-adk and of other frameworks"; \
	$(AGAIN) --output-sync=target -k -j2 ready-beside; made=$$?; \
	echo "== tests on the oldest supported google-adk: what it decides"; \
	$(OLD)/bin/python -m pytest $(BESIDE) $(TOUCH_ADK); oldest=$$?; \
	echo "== tests on LangChain, the OpenAI Agents SDK and Pydantic AI"; \
	$(FRAMEWORKS)/bin/python -m pytest $(BESIDE) tests/frameworks && test $$oldest = 0 && test $$made = 0

# What can run side by side before the tests on the newest google-adk, and what can run beside them.
ready: lint $(NEW)/.compiled browser

ready-beside: $(OLD)/.compiled types-newest types-frameworks

# Compile all that the tests import, once per environment. The processes of a test run would all do it at the same time.
$(NEW)/.compiled: $(NEW)/.ready
	@$(NEW)/bin/python -m pytest --collect-only -q >/dev/null 2>&1; touch $@

$(OLD)/.compiled: $(OLD)/.ready
	@$(OLD)/bin/python -m pytest --collect-only -q $(TOUCH_ADK) >/dev/null 2>&1; touch $@

# All cases on the newest and on the oldest supported versions of the other frameworks; `make test` runs a sample on the newest.
test-frameworks: $(FRAMEWORKS)/.ready $(OLDEST_FRAMEWORKS)/.ready
	@RUNGUARD_FAULTS=long $(FRAMEWORKS)/bin/python -m pytest $(PARALLEL) tests/frameworks
	@RUNGUARD_FAULTS=long $(OLDEST_FRAMEWORKS)/bin/python -m pytest $(PARALLEL) tests/frameworks

# The conformance kit on the newest release of each framework: some adapters depend on what a framework does not promise. It runs once a week.
KIT := $(addprefix tests/frameworks/test_, adk.py langchain.py openai_agents.py pydantic_ai.py strands.py agent_framework.py)
.PHONY: test-newest-frameworks
test-newest-frameworks: $(FRAMEWORKS)/.ready
	@$(NEW)/bin/uv pip install --quiet --upgrade --python $(FRAMEWORKS)/bin/python --editable . --group frameworks
	@$(NEW)/bin/uv pip list --python $(FRAMEWORKS)/bin/python | grep -E "^(google-adk|langchain|langgraph|openai-agents|pydantic-ai|strands|agent-framework)"
	@RUNGUARD_FAULTS=long $(FRAMEWORKS)/bin/python -m pytest $(PARALLEL) $(KIT)

# Branch coverage of core, engine and ledger. Fails under 95 %.
coverage: $(NEW)/.ready
	@rm -rf build/coverage && mkdir -p build/coverage
	@$(NEW)/bin/coverage run -m pytest $(PARALLEL) --timeout 300 $(COVERING); $(NEW)/bin/coverage combine -q && $(NEW)/bin/coverage report

# Every case of every test, every fault that the tests can make, and what must hold at length; `make test` takes a sample.
faults: $(NEW)/.ready $(OLD)/.ready
	@RUNGUARD_FAULTS=long $(NEW)/bin/python -m pytest $(PARALLEL) --timeout 3600
	@RUNGUARD_FAULTS=long $(OLD)/bin/python -m pytest $(PARALLEL) --timeout 3600 tests/faults

lint: $(NEW)/.ready
	@$(NEW)/bin/ruff check . && $(NEW)/bin/ruff format --check .

types: types-newest types-frameworks

types-newest: $(NEW)/.ready
	@$(NEW)/bin/mypy

types-frameworks: $(FRAMEWORKS)/.ready
	@$(FRAMEWORKS)/bin/mypy --config-file mypy-frameworks.ini

docs: $(NEW)/.ready
	@$(NEW)/bin/python docs/words.py
	@$(NEW)/bin/sphinx-build -q -W --keep-going -n docs build/site && echo "build/site/index.html"

# The dashboard is tested in a real Chromium: one that is there, or the system's package, or the one that Playwright brings.
browser: $(NEW)/.ready
	@$(NEW)/bin/python -m tests.cli.dashboard.find_browser

bench: $(NEW)/.ready
	@$(NEW)/bin/python benchmarks/table.py

$(NEW)/.ready: pyproject.toml
	@echo "setting up $(NEW) (once)"
	@$(PYTHON) -m venv $(NEW)
	@$(NEW)/bin/python -m pip install --quiet --disable-pip-version-check uv
	@$(NEW)/bin/uv pip install --quiet --python $(NEW)/bin/python --editable . --group dev
	@touch $@

$(OLD)/.ready: pyproject.toml $(NEW)/.ready
	@echo "setting up $(OLD) (once)"
	@$(NEW)/bin/uv venv --quiet --allow-existing --python $(PYTHON) $(OLD)
	@$(NEW)/bin/uv pip install --quiet --python $(OLD)/bin/python --editable . --group oldest
	@touch $@

$(FRAMEWORKS)/.ready: pyproject.toml $(NEW)/.ready
	@echo "setting up $(FRAMEWORKS) (once)"
	@$(NEW)/bin/uv venv --quiet --allow-existing --python $(PYTHON) $(FRAMEWORKS)
	@$(NEW)/bin/uv pip install --quiet --python $(FRAMEWORKS)/bin/python --editable . --group frameworks
	@touch $@

$(OLDEST_FRAMEWORKS)/.ready: pyproject.toml $(NEW)/.ready
	@echo "setting up $(OLDEST_FRAMEWORKS) (once)"
	@$(NEW)/bin/uv venv --quiet --allow-existing --python $(PYTHON) $(OLDEST_FRAMEWORKS)
	@$(NEW)/bin/uv pip install --quiet --python $(OLDEST_FRAMEWORKS)/bin/python --editable . --group oldest-frameworks
	@touch $@

clean:
	@rm -rf $(NEW) $(OLD) $(FRAMEWORKS) $(OLDEST_FRAMEWORKS) .mypy_cache .pytest_cache .ruff_cache build

# ---- releases and operations ----

.PHONY: release-check lock test-adk test-pythons simulate

# Build, inspect, install into empty environments, run demo and doctor there, compare the public API with the last tag.
release-check: $(NEW)/.ready
	@$(NEW)/bin/python scripts/release_check.py

# Exact versions with hashes of the development environment, for the workflows and the documentation's host.
lock: $(NEW)/.ready
	@$(NEW)/bin/uv pip compile --quiet --universal --upgrade --python-version 3.11 --generate-hashes --no-annotate --no-emit-index-url \
	  --custom-compile-command "make lock" --group pyproject.toml:dev pyproject.toml --output-file locks/dev.txt

# The ADK tests on 2.3, each minor release since, and the newest; ADK="2.7 pre" names others, TESTS="tests/adk/test_edges.py" fewer tests.
test-adk: $(NEW)/.ready
	@$(NEW)/bin/python scripts/test_adk.py $(ADK)

# The frameworks' own tests without the guard, with a no-op and with the guard; SUITES="langchain" and TESTS="tests/…" name fewer. LangChain,
# LangGraph and OpenAI Agents come from PyPI; ADK_TESTS= and PYDANTIC_AI_TESTS= name checkouts. None may fail only with the guard, unless listed.
.PHONY: test-own
test-own: $(NEW)/.ready
	@$(NEW)/bin/python scripts/own_tests.py

# Everything that needs no browser and no documentation, on every supported Python that is installed.
# uv finds those on the PATH and its own; those of pyenv are looked for in its folder.
PYTHONS ?= 3.11 3.12 3.13 3.14
test-pythons: $(NEW)/.ready
	@for python in $(PYTHONS); do \
	  found=$$($(NEW)/bin/uv python find --no-python-downloads $$python 2>/dev/null || \
	    ls -d $${PYENV_ROOT:-$$HOME/.pyenv}/versions/$$python.*/bin/python 2>/dev/null | tail -n 1); \
	  test -n "$$found" || { echo "== no Python $$python here"; continue; }; \
	  echo "== Python $$python: $$found"; \
	  $(NEW)/bin/uv venv --quiet --allow-existing --python $$found .venv-python-$$python && \
	  $(NEW)/bin/uv pip install --quiet --python .venv-python-$$python/bin/python --editable . --group dev && \
	  .venv-python-$$python/bin/python -m pytest $(PARALLEL) --ignore tests/cli/dashboard --ignore tests/docs_site $(TESTS) || exit 1; \
	done

# Alert rules and dashboard on a real Prometheus; installs it from the system's packages when it is missing.
.PHONY: test-operations
test-operations: $(NEW)/.ready
	@command -v prometheus >/dev/null || { apt-get update -qq && apt-get install -y -qq --no-install-recommends prometheus; } >/dev/null
	@$(NEW)/bin/python -m pytest tests/monitoring

# A million steps of the ledgers' simulation; SEED names another run. `make test` plays a few thousand.
SEED ?= 0
simulate: $(NEW)/.ready
	@$(NEW)/bin/python -m tests.kit.simulation 1000000 $(SEED)

# Fuzzers over fingerprints, outcomes, readers and sources; `make test` runs a few seconds of each. SECONDS is for all of them together.
# Coverage guides the search where atheris can be installed; elsewhere the inputs are random.
.PHONY: fuzz
SECONDS ?= 1200
fuzz: $(NEW)/.ready
	@$(NEW)/bin/uv pip install --quiet --python $(NEW)/bin/python "atheris>=3" || echo "no atheris for this Python: inputs are random"
	@$(NEW)/bin/python -m tests.fuzz.play --seconds $(SECONDS) --seed $(SEED)

# Small breaks of the source, and whether the tests notice them. Fails under nine in ten of those that a test reaches.
.PHONY: mutants
MUTANTS ?= 100
mutants: $(NEW)/.ready
	@$(NEW)/bin/python scripts/mutants.py --number $(MUTANTS) --seed $(SEED)

# An hour of work: one run of 100,000 steps, a million sessions, then an ADK app on SQLite until the time is over.
# Fails if memory, threads, descriptors or the store's file grow. `make test` runs short forms.
.PHONY: soak
MINUTES ?= 60
SESSIONS ?= 1000000
STEPS ?= 100000
soak: $(NEW)/.ready
	@$(NEW)/bin/python -m tests.faults.soak --minutes $(MINUTES) --sessions $(SESSIONS) --steps $(STEPS)
