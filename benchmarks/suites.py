"""The suites of cases, by name."""

from benchmarks import linear, logits, step, tokens, topk
from benchmarks.cases import Op, Suite

SUITES: dict[str, Suite] = {
    suite.name: suite
    for suite in (
        tokens.SUITE,
        tokens.OPTIONS_SUITE,
        logits.SUITE,
        topk.SUITE,
        linear.SUITE,
        step.SUITE,
    )
}

OPS: dict[str, Op] = {name: op for suite in SUITES.values() for name, op in suite.ops.items()}
