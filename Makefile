# Everything from a bare clone: each target sets up what it needs, once.
#
#   make train       train the default model on this machine
#   make test        linters, types and all tests; as root on Debian on a real Slurm of its own
#   make test-quick  what one process can show, in a few minutes: no Slurm, and ranks only as a smoke test
#   make test-long   whole matrices and long fuzzing runs, of which make test draws a part (hours)
#   make test-gpu    layouts and techniques on the GPUs of this machine, of which one is enough (docs/gpu.md)
#   make mutations   seed faults into copies of the project, one at a time, and see which test notices (about an hour)
#   make campaign    break a run on Slurm at random moments for an hour, and compare what comes out (CAMPAIGN="--minutes 10")
#   make docs        the pages of docs/ as HTML and man pages, in build/docs
#   make lint        linters and types only
#   make slurm-up    the Slurm cluster to develop against; make slurm-down stops it
#   make wheel       wheel and source distribution in dist/
#   make clean       remove what was built; the virtual environment stays
#
# PyPI's torch for Linux carries CUDA. To download less on a machine without a GPU, name PyTorch's CPU index in
# PIP_EXTRA_INDEX_URL.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP_INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check
# Of the releases that pyproject.toml allows, the newest that all tests have passed on (docs/testing.md).
TORCH := 'torch<2.14'
SLURM_SHAPE := --nodes 4 --cpus-per-node 8 --switches 2
TEST_PACKAGES := charliecloud podman crun runc uidmap mmdebstrap chromium hdf5-tools hwloc-nox lmod openmpi-bin libopenmpi3 python3-h5py-mpi python3-mpi4py shellcheck prometheus prometheus-node-exporter
SHELL_FILES := .ci/run $(wildcard hpc_train/launch/slurm/*.sh) $(addprefix slurm/,health-check prolog epilog job-script) $(wildcard slurm/devcluster/hooks/*)

# A cluster of the tests' own, so that one in use for development is left alone.
TEST_CLUSTER := HPC_TRAIN_DEV_CLUSTER=/var/lib/hpc_train-test-cluster

# With it set, each process that a test starts would compile this package anew, which takes most of a second.
export PYTHONDONTWRITEBYTECODE :=

# The Slurm tests mostly wait: the others run beside them (tests/conftest.py), with a process a core.
SIDE_BY_SIDE := -n $(shell expr $$(nproc) + 1) --no-loadscope-reorder

# By path, so that the rest is not even collected, which takes longer than many of these.
QUICK := $(addprefix tests/,cluster data models placement schedules traffic \
	$(addprefix checkpoint/test_,$(addsuffix .py,checkpoint_bad_input checkpoint_verify fault_table format_document \
		fused_staging hostile_entries layouts_strips load_workers round_trip sequence small_tensors streaming \
		writer_groups)) \
	$(addprefix config/test_,$(addsuffix .py,compose degrees hybrid plan_settings run_file secrets)) \
	$(addprefix launch/test_,$(addsuffix .py,dependencies ended_for_memory job_environment job_spec partitions \
		slurm_answers state_of_a_run sweep_ledger sweep_points sweep_results)) \
	$(addprefix parallel/test_,$(addsuffix .py,pipeline_rules tensor_shards refusals support_table)) \
	$(addprefix planner/test_,$(addsuffix .py,batch_laws bill discrepancy failure_logs goodput memory_model reliability \
		run_tables sharding_rule space step_model switches)) \
	$(addprefix runtime/test_,$(addsuffix .py,identity network plan views)) \
	$(addprefix training/test_,$(addsuffix .py,mfu noise_scale progress records schedule)) \
	test_messages.py test_terminal.py test_testing.py)

# What needs no more of this process than that it starts ranks.
ON_GPUS := $(addprefix tests/parallel/test_,$(addsuffix .py,adamw_8bit adapter_base adapters async_tensor attention_choice \
	batch_norm chunked_loss communication compile compression context custom_models ddp_options device_waits dropout \
	expert_loads float8 float8_gather fp16 hf_adapters hf_models loose_sync matrix matrix_bf16 moving_state named_inputs \
	offload optimizers overlapped_saves packed_documents parity pipeline precision recompute sharded_optimizers tensor \
	tensor_parts weight_average windows zero))

.NOTPARALLEL:
.PHONY: train test test-quick test-long test-gpu mutations campaign test-packages lint slurm-up slurm-down docs wheel clean

train: $(VENV)/train.stamp
	$(BIN)/hpc-train train

# Whatever Debian packages can be installed are installed; where they cannot, the tests say what they lack.
ON_DEBIAN := [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null

# Start a cluster for what follows, and stop it however that ends.
define WITH_CLUSTER
if $(ON_DEBIAN); then \
	export $(TEST_CLUSTER); \
	slurm/dev-cluster down || exit; \
	trap 'slurm/dev-cluster down' EXIT; \
	trap 'exit 130' INT TERM HUP; \
	slurm/dev-cluster up $(SLURM_SHAPE) || exit; \
fi
endef

test: test-packages lint
	@$(WITH_CLUSTER); $(BIN)/pytest $(SIDE_BY_SIDE)

test-quick: $(VENV)/test.stamp
	$(BIN)/pytest $(SIDE_BY_SIDE) --timeout 120 $(QUICK)

test-long: test-packages $(VENV)/test.stamp
	$(PIP_INSTALL) -e '.[lm-eval]' $(TORCH)
	@$(WITH_CLUSTER); $(BIN)/pytest $(SIDE_BY_SIDE) -m long

test-packages:
	@if $(ON_DEBIAN); then slurm/dev-cluster install $(TEST_PACKAGES); fi

test-gpu: $(VENV)/test.stamp
	HPC_TRAIN_TEST_DEVICE=cuda $(BIN)/pytest $(SIDE_BY_SIDE) -m "long or not long" --timeout 900 $(ON_GPUS)

mutations: test-packages $(VENV)/test.stamp
	$(BIN)/python tests/mutations/run_mutations.py

campaign: SLURM_SHAPE := --nodes 5 --cpus-per-node 8 --switches 2
campaign: test-packages $(VENV)/test.stamp
	@$(WITH_CLUSTER); $(BIN)/python tests/slurm/campaign.py $(CAMPAIGN)

lint: $(VENV)/test.stamp
	$(BIN)/ruff check . slurm/dev-cluster
	$(BIN)/ruff format --check . slurm/dev-cluster
	$(BIN)/mypy
	MYPYPATH=slurm $(BIN)/mypy -p devcluster
	if command -v shellcheck >/dev/null; then shellcheck $(SHELL_FILES); fi

slurm-up:
	slurm/dev-cluster up $(SLURM_SHAPE)
	@echo 'now: eval "$$(slurm/dev-cluster env)"'

slurm-down:
	slurm/dev-cluster down

docs: $(VENV)/test.stamp
	$(BIN)/python docs/generate.py
	$(BIN)/sphinx-build -q -W -b html docs build/docs/html
	$(BIN)/sphinx-build -q -b man docs build/docs/man

wheel: $(VENV)/test.stamp
	$(BIN)/python -m build --outdir dist

clean:
	rm -rf build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -not -path './$(VENV)/*' -prune -exec rm -rf {} +

# A stamp newer than pyproject.toml makes the second run immediate.
$(VENV)/train.stamp: pyproject.toml | $(BIN)/python
	$(PIP_INSTALL) -e . $(TORCH)
	@touch $@

$(VENV)/test.stamp: pyproject.toml | $(BIN)/python
	$(PIP_INSTALL) -e '.[test]' $(TORCH)
	@touch $@ $(VENV)/train.stamp

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and \
		"hpc_train needs Python 3.11 or newer, $(PYTHON) is " + sys.version.split()[0] + ": make PYTHON=python3.x")'
	@$(PYTHON) -c 'import ensurepip' 2>/dev/null || slurm/dev-cluster install python3-venv
	$(PYTHON) -m venv --clear $(VENV)
