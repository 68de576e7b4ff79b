# make train   the main job: prepares a corpus, trains a small GPT on it, writes a report   (2 to 3 minutes on 2 cores)
# make test    every test that a change must pass
# make nightly  those and the rest: more kinds of runs on ranks, the measuring scripts at work
# make faults  the faults that a run must survive, into benchmarks/results/cpu-faults.json   (two or three minutes on 2 cores)
# make soak    those of random moments with 200 others each, into soak.log   (half an hour; SEED=1234 COUNT=20 repeats a group)
# make test-gpu  the kernels' tests on this machine's GPU, into benchmarks/results/gpu-tests.json (PYTHON: one that has torch)
# make docs    the documentation as a site, into site/
# make pictures  the README's pictures of the terminal and, after `make train`, of the report (with Chromium)
# make check   lint, formatting, types
# make ready   installs what test, docs and check need at once, which is quicker than one by one

PYTHON ?= python3
COUNT  ?= 200
VENV   := .venv
BIN    := $(VENV)/bin
# Python compiles a file when it first imports it: of all those that pip installs and would compile, few are ever imported.
PIP    := $(BIN)/python -m pip --disable-pip-version-check install --quiet --no-compile --constraint constraints.txt
# Installs the packages of these extras by their names: for '.[test]' pip would build handgrad again, which takes seconds.
NAMES  := import sys, tomllib; extras = tomllib.load(sys.stdin.buffer)["project"]["optional-dependencies"]; \
          print(*(package for name in sys.argv[1:] for package in extras[name]), sep="\n")
LIST    = $(VENV)/$(notdir $@).txt
extras  = $(BIN)/python -c '$(NAMES)' $(1) < pyproject.toml > $(LIST) && $(PIP) --requirement $(LIST)
unexport PYTHONDONTWRITEBYTECODE

.PHONY: train test collect nightly faults soak test-gpu docs pictures check ready format clean

train: $(VENV)/.installed
	@$(BIN)/handgrad demo

test: $(VENV)/.installed-test
	@$(BIN)/python -m pytest -n auto --dist loadfile --no-loadscope-reorder

# Python compiles the tests and their libraries when a process first imports them: before `make test` starts several.
collect: $(VENV)/.installed-test
	@$(BIN)/python -m pytest -n 0 --collect-only -q > $(VENV)/collected.txt || { cat $(VENV)/collected.txt; exit 1; }

nightly: $(VENV)/.installed-test
	@$(BIN)/python -m pytest -n auto --dist loadfile --no-loadscope-reorder --nightly

faults: $(VENV)/.installed-test
	@$(BIN)/python -m benchmarks.faults --run

soak: $(VENV)/.installed-test
	@$(BIN)/python -m benchmarks.soak --count $(COUNT) $(SEED:%=--seed %)

test-gpu:
	@$(PYTHON) -m pytest tests/gpu --record benchmarks/results/gpu-tests.json

docs: $(VENV)/.installed-docs
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet
	@echo "site/index.html is the documentation; its search needs a server: $(BIN)/python -m http.server --directory site"

pictures: $(VENV)/.installed-test
	@$(BIN)/python -m tests.terminal_pictures --columns 118 --out docs/terminal.png --demo
	@$(BIN)/python -m tests.screenshots runs/demo/report.html --part 350,920,890 --out docs/report.png

check: $(VENV)/.installed-check
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/pyrefly check

ready: $(VENV)/.installed
	@$(call extras,test docs check)
	@touch $(VENV)/.installed-test $(VENV)/.installed-docs $(VENV)/.installed-check

format: $(VENV)/.installed-check
	@$(BIN)/ruff check --fix .
	@$(BIN)/ruff format .

$(VENV)/.installed: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "handgrad needs Python 3.11 or newer, found $$($(PYTHON) --version); try: make PYTHON=python3.12 $(MAKECMDGOALS)"; exit 64; }
	@echo "setting up $(VENV) (once): pip fetches torch and a few libraries, which may take minutes"
	@$(PYTHON) -m venv $(VENV)
	@$(PIP) --editable .
	@touch $@

$(VENV)/.installed-test: $(VENV)/.installed
	@$(call extras,test)
	@touch $@

$(VENV)/.installed-check: $(VENV)/.installed
	@$(call extras,check)
	@touch $@

$(VENV)/.installed-docs: $(VENV)/.installed
	@$(call extras,docs)
	@touch $@

clean:
	rm -rf $(VENV) build site *.egg-info
