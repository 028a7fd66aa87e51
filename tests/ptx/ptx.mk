# make test-ptx: the tests of the emulator on nvcc's PTX, which an interpreter runs (tests/support/ptx).
#
# Needs nvcc, and no GPU. What nvcc has made is kept in build/ptx, and made again where its sources
# have changed. tests/support/ptx/options.h has the variables of the environment, KLFAST_PTX_...
#   TEST_PTX_OPTIONS=--short     what CI runs: five minutes, of which nvcc takes three or four
#   TEST_PTX_OPTIONS='--parts "sm_80, L4"'; --list lists the parts

.PHONY: test-ptx

test-ptx: $(VENV)/tested
	$(BIN)/python tests/ptx/run.py $(TEST_PTX_OPTIONS)
