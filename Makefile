# A fresh clone needs only Python >= 3.11 with venv, a C compiler for the odd source distribution, and a package index.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
# 3 processes on 2 cores: the tests start servers and trainers of their own, and wait for some of them.
WORKERS ?= 3
# Libraries of models for tests/trainer/test_peers.py, without what they depend on. fuxictr 1.2.2, the last with its models, says it is for 3.6.
PEERS := deepctr-torch fuxictr torchfm

.PHONY: golden venv demo test test-full test-matrix test-stores flink flink-stop test-flink lint bench clean

venv: $(VENV)/.ready

$(VENV)/.ready: setup.py constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet --constraint constraints.txt torch
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev]'
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --no-deps --ignore-requires-python $(PEERS)
	touch $@

demo: venv
	$(BIN)/python benchmarks/demo.py --out demo

# All that CI runs, or some of it: make test T=tests/cache/test_rows.py, make test T="tests/cache -k parity"
test: venv
	$(BIN)/python -m pytest -q -rfEs --durations=40 -m "not full" $(or $(T),-n $(WORKERS) --dist worksteal)

# Write tests/golden/data anew, where a format or an answer is meant to change: look at the diff before the commit.
golden: venv
	$(BIN)/python tests/golden/golden.py

# Every grid. A run that was broken off goes on where it stopped: --stepwise remembers the first test that has not passed.
test-full: venv
	$(BIN)/python -m pytest -q -rfEs --stepwise
	$(MAKE) test-stores

# The suite, and the tests that act on running work, again and again, also slow or busy; goes on where it stopped. 4 hours on 2 cores.
test-matrix: venv
	$(BIN)/python tests/matrix.py --workers $(WORKERS)

# The store's tests on every server that can be had, or on those named: make test-stores SERVERS=redis-server
SERVERS ?= $(shell $(BIN)/python -c 'from foreload.cache.client.local_server import available; print(*available())')
STORE_TESTS := tests/cache tests/test_bad_store.py tests/trainer/test_lost_shards.py tests/trainer/test_scrub_command.py

test-stores: venv
	for server in $(SERVERS); do \
	  FORELOAD_LOCAL_SERVER=$$server $(BIN)/python -m pytest -q -m "not full" -n $(WORKERS) --dist loadfile $(STORE_TESTS) || exit; \
	done

# A Flink cluster on this machine, to try `prepare` on one (docs/flink.md). Needs Java and Maven.
flink: venv
	$(BIN)/python deploy/flink/cluster.py start

flink-stop: venv
	$(BIN)/python deploy/flink/cluster.py stop

# All tests on a Flink cluster, of which `make test` has one.
test-flink: venv
	$(BIN)/python -m pytest -q -rfEs tests/pipelines/test_flink.py

lint: venv
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports --no-cache
	$(BIN)/mypy
	$(BIN)/python -m pytest -q tests/trainer/test_imports.py

# About an hour on 2 cores; QUICK=1 for one that takes minutes and only shows that all of it works, ALL=1 for every script, ONLY=step,links for some.
# MACHINE names this one's pages in docs/benchmarks/.
bench: venv
	$(BIN)/python benchmarks/run_all.py $(if $(QUICK),--quick --docs build/docs) $(if $(ALL),--all) \
	  $(if $(ONLY),--only $(ONLY)) $(if $(MACHINE),--machine $(MACHINE))

clean:
	rm -rf build demo .mypy_cache .pytest_cache .ruff_cache .hypothesis
