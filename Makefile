# Needs python3 (3.11 to 3.13) and make. Every target makes the virtual environment when it is missing or out of date.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

.DEFAULT_GOAL := test
.PHONY: venv test test-slow demo bench healed notebooks clean

venv: $(READY)

$(READY): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; (3, 11) <= sys.version_info[:2] <= (3, 13) or sys.exit("python is " \
	  + sys.version.split()[0] + ", it must be 3.11 to 3.13; set PYTHON=python3.11")'
	test -x $(BIN)/pip || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[dev]'
	touch $@

test: $(READY)
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/pytest -n 2 --dist worksteal

test-slow: $(READY)
	$(BIN)/pytest -m slow

demo: $(READY)
	$(BIN)/dinfer demo --out out/demo

bench: $(READY)
	$(BIN)/python benchmarks/kernels.py -o md
	$(BIN)/python benchmarks/replay.py -o md

# Trains smollm2-relu, a ReLU model, out of SmolLM2: four hours on 2 cores with AVX-512. Stopped, it goes on.
healed: $(READY)
	$(BIN)/python examples/heal_relu.py

# Runs each notebook and leaves the results under out/notebooks/, beside the committed ones.
notebooks: $(READY)
	$(BIN)/python -m nbconvert --to notebook --execute --output-dir out/notebooks notebooks/*.ipynb

# Takes away everything that was made except the virtual environment.
clean:
	rm -rf out dist build .hypothesis .mypy_cache .pytest_cache .ruff_cache
	find . -name __pycache__ -not -path './$(VENV)/*' -prune -exec rm -rf {} +
