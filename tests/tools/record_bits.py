"""The bits of every public function, for a change that must not change any.

    export PYTHONPATH=.:tests/support
    python tests/tools/record_bits.py bits.json             # before
    python tests/tools/record_bits.py bits.json --compare   # after: lists the cases that differ

Each case is a random row of the options of ``klfast check``. A hash covers its results, statistics
and gradients. Each instruction set of the CPU has a process of its own, as have the emulated CUDA
kernels and Triton's interpreter.
"""

import argparse
import hashlib
import json
import os
import random
import subprocess
import sys

from agreement import INTEGERS
from targets import OF_ROLLOUT, TARGETS, serving

from klfast.cli.check.calls import run
from klfast.cli.check.cases import FAMILIES

RUNS = {
    "native-avx512": {"KLFAST_CPU": "avx512"},
    "native-avx2": {"KLFAST_CPU": "avx2"},
    "native-baseline": {"KLFAST_CPU": "baseline"},
    "native-emulated": {},
    "reference": {},
    "triton": {"TRITON_INTERPRET": "1"},
}


def hash_of(tensors):
    digest = hashlib.sha256()
    for name, tensor in tensors.items():
        tensor = tensor.contiguous()
        digest.update(f"{name} {tensor.dtype} {list(tensor.shape)}".encode())
        digest.update(tensor.view(INTEGERS[tensor.element_size()]).numpy().tobytes())
    return digest.hexdigest()[:16]


def record(name, cases):
    """Case -> hash, for ``cases`` cases of each function."""
    target, hashes = TARGETS[name if name in TARGETS else "native"], {}
    with serving(target):
        for family in FAMILIES:
            if family == "rollout" and target not in OF_ROLLOUT.values():
                continue
            for seed in range(cases):
                rng = random.Random(f"{family} {seed}")
                options = FAMILIES[family].options.items()
                row = {option: rng.choice(values) for option, values in options}
                found = run(FAMILIES[family].call(row, seed), target.backend)
                hashes[f"{name} {family} {seed}: {row}"] = hash_of(found)
    return hashes


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("file")
    parser.add_argument("--compare", action="store_true")
    parser.add_argument("--cases", type=int, default=1000, help="of each function in each run")
    parser.add_argument("--runs", nargs="*", default=list(RUNS), choices=RUNS)
    parser.add_argument("--only", help="one run, in this process; prints JSON", choices=RUNS)
    options = parser.parse_args()
    if options.only:
        json.dump(record(options.only, options.cases), sys.stdout)
        return
    hashes = {}
    for name in options.runs:
        cases = options.cases // 20 if name == "triton" else options.cases  # it is slow
        command = [sys.executable, "-W", "ignore", __file__, options.file]
        command += ["--only", name, "--cases", str(cases)]
        done = subprocess.run(
            command, env=os.environ | RUNS[name], check=True, stdout=subprocess.PIPE
        )
        hashes |= json.loads(done.stdout)
    if not options.compare:
        with open(options.file, "w") as file:
            json.dump(hashes, file, indent=0)
        print(f"{len(hashes)} cases")
        return
    with open(options.file) as file:
        before = json.load(file)
    before = {name: h for name, h in before.items() if name.split(" ")[0] in options.runs}
    differ = [name for name in before | hashes if before.get(name) != hashes.get(name)]
    print(*differ[:50], f"{len(differ)} of {len(hashes)} cases differ", sep="\n")
    sys.exit(bool(differ))


if __name__ == "__main__":
    main()
