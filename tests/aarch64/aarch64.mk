# make test-aarch64: the tests of the CPU kernels on an emulated aarch64 processor.
#
# Debian's Python for aarch64 and torch's wheel for it lie in build/aarch64 and run under qemu. setup.py
# runs there too; what it calls, ninja and a compiler for aarch64, are programs of this machine, which
# qemu lets run as they are. The processor is one without SVE, which neither torch nor klfast may need.
#   AARCH64_CXX, QEMU     other programs than those of Debian's packages
#   AARCH64_NAMES="native and not emulated"     also what takes longest there
#   AARCH64_MARK=exhaustive     the rest of the grids

AARCH64 := $(CURDIR)/build/aarch64
AARCH64_CXX ?= aarch64-linux-gnu-g++
QEMU ?= qemu-aarch64
AARCH64_NAMES ?= native and not emulated and not vocabular and not first_look and not bits_and
AARCH64_MARK ?= not exhaustive
AARCH64_PYTHON := QEMU_CPU=neoverse-n1 QEMU_LD_PREFIX=$(AARCH64)/debian PYTHONSAFEPATH=1 \
  PYTHONPATH=$(AARCH64)/installed:$(AARCH64)/site-packages $(QEMU) $(AARCH64)/debian/usr/bin/python3
# In folders of its own: it installs nothing on this machine.
AARCH64_APT := apt-get -qq -o APT::Architecture=arm64 -o APT::Architectures=arm64 -o APT::Sandbox::User=root \
  -o Dir::State=$(AARCH64)/apt/state -o Dir::State::status=/dev/null -o Dir::Cache=$(AARCH64)/apt/cache
AARCH64_PENALTY := $(patsubst %,tests/penalty/test_%.py,accuracy determinism limits \
  masking reductions rewards stats) tests/conformance/test_numbers.py
AARCH64_LOGITS := $(patsubst %,tests/logits/test_logits_%.py,accuracy determinism extreme infinite masking \
  stats temperatures)
AARCH64_ROLLOUT := $(patsubst %,tests/rollout/test_rollout_%.py,by_hand masking oracle)

.PHONY: aarch64-tools test-aarch64 test-aarch64-tokens test-aarch64-logits

# Two processes: the import of torch alone takes half a minute there.
test-aarch64: $(AARCH64)/built
	$(MAKE) --no-print-directory --jobs 2 test-aarch64-tokens test-aarch64-logits

test-aarch64-tokens: AARCH64_TESTS := $(AARCH64_PENALTY) $(AARCH64_ROLLOUT)
test-aarch64-logits: AARCH64_TESTS := $(AARCH64_LOGITS)
test-aarch64-tokens test-aarch64-logits:
	$(AARCH64_PYTHON) -m pytest -q -p no:cacheprovider -m "$(AARCH64_MARK)" -k "$(AARCH64_NAMES)" $(AARCH64_TESTS)

aarch64-tools:
	@for tool in $(firstword $(AARCH64_CXX)) $(QEMU) apt-get dpkg-deb; do \
	  command -v $$tool > /dev/null && continue; \
	  echo "make test-aarch64 needs $$tool: apt-get install g++-aarch64-linux-gnu qemu-user, or name others by AARCH64_CXX and QEMU" >&2; \
	  exit 1; \
	done

# Python and all that it links to, in a folder.
$(AARCH64)/debian/done: | aarch64-tools
	rm -rf $(@D) $(AARCH64)/apt
	mkdir -p $(@D) $(AARCH64)/apt/state/lists/partial $(AARCH64)/apt/cache/archives/partial
	$(AARCH64_APT) update
	$(AARCH64_APT) install --yes --no-install-recommends --download-only python3-dev libstdc++6
	for package in $(AARCH64)/apt/cache/archives/*.deb; do dpkg-deb --extract $$package $(@D) || exit 1; done
	rm -rf $(AARCH64)/apt
	touch $@

$(AARCH64)/site-packages/done: tests/aarch64/requirements.txt $(AARCH64)/debian/done $(VENV)/torch
	rm -rf $(@D)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --no-compile --target $(@D) \
	  --platform manylinux_2_28_aarch64 --platform manylinux_2_17_aarch64 --platform any --only-binary :all: \
	  --python-version $$($(AARCH64_PYTHON) -c 'import platform; print(platform.python_version())') --requirement $<
	touch $@

# The header of Debian's configuration of Python lies among those of libc, of which the compiler has its own.
$(AARCH64)/built: $(AARCH64)/site-packages/done $(BUILD_INPUTS) $(shell find klfast -name '*.py') | aarch64-tools
	rm -rf $(AARCH64)/installed
	PATH="$(CURDIR)/$(BIN):$$PATH" CXX="$(AARCH64_CXX) -idirafter $(AARCH64)/debian/usr/include" \
	  $(AARCH64_PYTHON) setup.py --quiet build --build-base $(AARCH64)/build --build-lib $(AARCH64)/installed
	touch $@
