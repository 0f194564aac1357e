# The commands of the README. Everything runs from a virtual environment of its own, .venv; nothing on the host is changed by a testbed.
PYTHON ?= python3
SCENARIO ?= smoke
PORT ?= 8000
ARGS ?=
CLOCK ?= virtual
POLICIES ?= prfaas,static,naive
BASELINE ?= git:HEAD
SUITE ?= quick
LAUNCHER ?= namespaces
WITH ?=
BIN := .venv/bin

.DEFAULT_GOAL := help
.PHONY: help setup setup-compose setup-test testbed load down chaos gate test lint fast

help:
	@echo "make testbed   set up, start SCENARIO=$(SCENARIO), replay its load over the shaped link, report, and leave it up"
	@echo "               (LAUNCHER=compose: in containers; WITH=grafana,prometheus,locust beside them)"
	@echo "make load      another load on the testbed that is up       (ARGS='--load-fraction 0.8')"
	@echo "make down      stop it and remove everything of it"
	@echo "make chaos     faults, in virtual time: prfaas under test, static and naive beside it   (CLOCK=wire: a short part, on the wire)"
	@echo "make test      set up with all test dependencies, and run the tests"
	@echo "make lint      ruff and mypy"
	@echo "make gate      is the scheduler better, the same or worse than BASELINE=$(BASELINE)? in virtual time   (SUITE=full)"
	@echo "make fast      compile virtual time's innermost modules (same results, about 1.6 times as fast; needs a C compiler)"
	@echo "make setup     only the virtual environment"

# The stamps hold what was installed, so a second call finds the first.
.venv/.core: pyproject.toml
	@./setup.sh core "$(PYTHON)"
.venv/.compose: pyproject.toml
	@./setup.sh compose "$(PYTHON)"
.venv/.fast: pyproject.toml
	@./setup.sh fast "$(PYTHON)"
.venv/.test: pyproject.toml
	@./setup.sh test "$(PYTHON)"

setup: .venv/.core
setup-compose: .venv/.compose
setup-test: .venv/.test

testbed: $(if $(filter compose,$(LAUNCHER)),setup-compose,setup)
	@$(if $(WITH),$(BIN)/prfaas up $(SCENARIO) --port $(PORT) --launcher $(LAUNCHER) --with $(WITH))
	@$(BIN)/prfaas run $(SCENARIO) --keep --port $(PORT) --launcher $(LAUNCHER) $(ARGS)

load: setup
	@$(BIN)/prfaas load $(ARGS)

down: setup
	@$(BIN)/prfaas down

chaos: $(if $(filter compose,$(LAUNCHER)),setup-compose,setup)
	@$(BIN)/prfaas chaos --clock $(CLOCK) --policy $(POLICIES) --port $(PORT) --launcher $(LAUNCHER) $(ARGS)

gate: setup
	@$(BIN)/prfaas gate --baseline $(BASELINE) --candidate prfaas --suite $(SUITE) $(ARGS)

# Real time passes in many tests, and what fails beside others may only have been late: it is tried again, once, alone, and both are told.
once_more = || { [ $$? -eq 1 ] && echo "once more, alone, what has failed:" && $(BIN)/python -m pytest --last-failed --last-failed-no-failures none --maxfail 5 $(1); }

test: setup-test
ifeq ($(ARGS),)
	$(BIN)/python -m pytest --numprocesses 2 --dist loadfile -m "not measures and not docker" $(call once_more,-m "not measures and not docker")
	$(BIN)/python -m pytest -m "measures or docker" $(call once_more,-m "measures or docker")
else
	$(BIN)/python -m pytest $(ARGS)
endif

lint: setup-test
	$(BIN)/ruff check .
	$(BIN)/mypy

fast: .venv/.fast
	@$(BIN)/python -m testbed.fast_build build
