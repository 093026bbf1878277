# Each target sets up what it needs: .venv with a supported Python and the pinned requirements.
# In your own environment, `python train.py --config configs/kda_cp4.py` starts the same run.

PYTHON_ENV := .venv/bin/python
CONFIG ?= configs/kda_cp4.py
ARGS ?=
RUNS ?= runs
PORT ?= 6006
# Tests never look for an accelerator; a test that compiles for a TPU selects it itself.
# If a worker crashed, its file's other tests would wait forever: stop instead.
TEST := JAX_PLATFORMS=cpu $(PYTHON_ENV) -m pytest -n 2 --dist loadfile --max-worker-restart=0

.PHONY: setup setup-dev train test test-slow test-long test-all lint format tpu-check bench tensorboard requirements

setup:
	@scripts/setup.sh

setup-dev:
	@scripts/setup.sh --dev

train: setup  ## make train ARGS="--config.train.steps=20"
	$(PYTHON_ENV) train.py --config $(CONFIG) $(ARGS)

test: setup-dev  ## the default tests, under 15 minutes on two cores
	$(TEST) -m "not slow" $(ARGS)

test-slow: setup-dev
	$(TEST) -m slow $(ARGS)

test-long: setup-dev  ## the slow tests without faults at random moments, half an hour
	$(TEST) -m "slow and not faults" $(ARGS)

test-all: setup-dev
	$(TEST) $(ARGS)

lint: setup-dev
	$(PYTHON_ENV) -m ruff format --check .
	$(PYTHON_ENV) -m ruff check .
	$(PYTHON_ENV) -m mypy
	$(PYTHON_ENV) scripts/wording.py

format: setup-dev
	$(PYTHON_ENV) -m ruff format .
	$(PYTHON_ENV) -m ruff check --fix .

tpu-check: setup  ## kernels, memory and estimates on this machine's TPU; ARGS=--interpret without one
	$(PYTHON_ENV) -m training.tpu_check $(ARGS)

bench: setup-dev
	$(PYTHON_ENV) -m benchmarks.train_step
	$(PYTHON_ENV) -m benchmarks.carry
	$(PYTHON_ENV) -m benchmarks.kda_cpu
	$(PYTHON_ENV) -m benchmarks.kda_tpu
	$(PYTHON_ENV) -m benchmarks.short_conv_tpu
	$(PYTHON_ENV) -m benchmarks.step_tpu
	$(PYTHON_ENV) -m benchmarks.cp_timeline
	$(PYTHON_ENV) -m benchmarks.plans

tensorboard: setup  ## make tensorboard RUNS=runs PORT=6006
	$(PYTHON_ENV) -m tensorboard.main --logdir $(RUNS) --port $(PORT)

requirements: setup  ## recompile the pinned lists from the direct dependencies
	$(PYTHON_ENV) -m pip install --quiet uv
	$(PYTHON_ENV) -m uv pip compile --quiet --universal --python-version 3.12 --no-emit-index-url \
	  requirements.in -o requirements.txt
	$(PYTHON_ENV) -m uv pip compile --quiet --universal --python-version 3.12 --no-emit-index-url \
	  requirements-dev.in -o requirements-dev.txt
