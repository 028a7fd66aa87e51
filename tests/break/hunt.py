"""Counting checks: a check is one comparison, or one bad input that must raise.

A test may hold thousands. Each is counted under its file's category, a failure is kept with the
case that reproduces it, and the test fails at its end with all of them.
"""

from __future__ import annotations

import json
import random
import re
import sys
from pathlib import Path

import torch

COUNTS = Path(__file__).with_name("counts.json")
PAGE = Path(__file__).parents[2] / "CONTRIBUTING.md"
SENTENCE = re.compile(r"(<!-- break -->\n).*?(<!-- end -->)", re.DOTALL)
ERRORS = (ValueError, TypeError, RuntimeError)
SHOWN = 12


class Hunt:
    """The checks of one test."""

    def __init__(self, seed, whole):
        self.random = random.Random(seed)
        self.whole = whole
        self.checks = 0
        self.bad_inputs = 0
        self.failures = []

    def some(self, cases, one_in=10):
        """The cases: all in a whole run, a seeded sample of them (at least one) in a short one."""
        cases = list(cases)
        if self.whole or one_in == 1:
            return cases
        size = max(1, len(cases) // one_in)
        chosen = sorted(self.random.sample(range(len(cases)), min(size, len(cases))))
        return [cases[index] for index in chosen]

    def check(self, holds, *case, got=""):
        self.checks += 1
        if not holds:
            self.failures.append(f"{case} {got}")

    def equal(self, actual, expected, *case):
        """The same Python value."""
        self.check(actual == expected, *case, got=f"got {actual!r}, expected {expected!r}")

    def bits(self, actual, expected, *case):
        """The same tensor, bit for bit; every NaN is like another."""
        same = actual.dtype == expected.dtype and actual.shape == expected.shape
        same = same and torch.equal(actual.isnan(), expected.isnan())
        same = same and torch.equal(actual.nan_to_num(0.0), expected.nan_to_num(0.0))
        same = same and torch.equal(actual.isinf(), expected.isinf())
        self.check(same, *case, got="" if same else f"got {actual}, expected {expected}")

    def close(self, actual, expected, tolerance, *case):
        """Within ``tolerance`` and a rounding to actual's dtype; infinity and NaN where expected.

        Beyond the dtype's largest number the infinity of its sign is right, and so is the number
        beside the border.
        """
        self.checks += 1
        if actual.shape != expected.shape:
            self.failures.append(f"{case} shape {list(actual.shape)} != {list(expected.shape)}")
            return
        wrong = _wrong(actual.detach(), expected, tolerance)
        if wrong.any():
            at = tuple(wrong.nonzero()[0].tolist())
            self.failures.append(
                f"{case} at {list(at)}: got {actual[at].item()!r}, "
                f"expected {expected[at].item()!r} ({int(wrong.sum())} wrong)"
            )

    def refuses(self, call, names, *case):
        """A bad input raises one of three errors, whose message has one of the names."""
        self.checks += 1
        self.bad_inputs += 1
        names = (names,) if isinstance(names, str) else names
        try:
            found = call()
        except ERRORS as error:
            if not any(name in str(error) for name in names):
                self.failures.append(
                    f"{case} {type(error).__name__} names none of {names}: {error}"
                )
        except Exception as error:
            self.failures.append(f"{case} raised {type(error).__name__}: {error}")
        else:
            self.failures.append(f"{case} was accepted: {found!r:.200}")

    def raises(self, call, *case):
        """A call that torch must refuse raises RuntimeError."""
        self.checks += 1
        try:
            call()
        except RuntimeError:
            return
        self.failures.append(f"{case} did not raise")

    def conclude(self):
        if self.failures:
            shown = "\n".join(self.failures[:SHOWN])
            raise AssertionError(f"{len(self.failures)} of {self.checks} checks failed:\n{shown}")


def _wrong(actual, expected, tolerance):
    info = torch.finfo(actual.dtype)
    tolerance = torch.as_tensor(tolerance, dtype=torch.float64).expand(expected.shape)
    found, wanted = actual.double(), expected.double()
    off = (found - wanted).abs()
    allowed = tolerance + wanted.abs() * info.eps + info.smallest_normal
    near_the_border = wanted.abs() + allowed >= info.max
    infinite = torch.where(wanted > 0, found == torch.inf, found == -torch.inf)
    right = torch.where(wanted.isfinite(), off <= allowed, infinite)
    right |= near_the_border & infinite
    return ~torch.where(wanted.isnan(), found.isnan(), right)


def table(counts):
    """Lines of a table: category, checks run, bad inputs tried."""
    width = max(map(len, [*counts, "all"]), default=0)
    rows = [*counts.items(), ("all", totals(counts))]
    lines = [f"{'':{width}}  {'checks run':>12}  {'bad inputs tried':>16}"]
    lines += [f"{name:{width}}  {checks:12,}  {bad:16,}" for name, (checks, bad) in rows]
    return lines


def totals(counts):
    return [sum(column) for column in zip(*counts.values(), strict=True)] or [0, 0]


def sentence():
    """What CONTRIBUTING.md says of the last whole run."""
    counts = json.loads(COUNTS.read_text())
    checks, bad = totals(counts)
    return (
        f"`make test-break` runs {checks:,} checks of {len(counts)} categories: misuse, extreme "
        f"numbers, layouts,\nautograd, threads, the command line. {bad:,} of them are bad inputs, "
        "each of which must raise an error that\nnames the argument.\n"
    )


def write_readme():
    PAGE.write_text(SENTENCE.sub(rf"\g<1>{sentence()}\g<2>", PAGE.read_text()))


if __name__ == "__main__":
    sys.exit(write_readme())
