"""The expected value and gradient of each estimator over a small categorical.

The weights are the sampling probabilities, so a sum over the vocabulary is the expectation. Nothing
is sampled. docs/estimators.md has the table.
"""

import re

import pytest
import readme
import torch

import klfast
from klfast import Estimator
from klfast.formulas.estimators import FORMULAS
from klfast.types.names import ALIASES, NAMES, PLUS

TOKENS = 7

ZERO, REVERSE, FORWARD, OWN = "0", "the reverse KL's", "the forward KL's", "its own expectation's"
VARIATION, CHI_SQUARED, NO_DIVERGENCE = "twice the total variation's", "half of chi-squared's", "-"
HALF_RATIO = "of E[exp(x) (x / 2 - 1 / 4)]"

GRADIENTS = {
    # name: (tokens of the policy, with old_logprobs tokens of any policy)
    "k1": (ZERO, REVERSE),
    "abs": (VARIATION, OWN),
    "k2": (REVERSE, OWN),
    "k3": (FORWARD, REVERSE),
    "k3_ref": (CHI_SQUARED, OWN),
    "r_log_r": (NO_DIVERGENCE, OWN),
    "k1+": (REVERSE, REVERSE),
    "k2+": (REVERSE, REVERSE),
    "k3+": (REVERSE, REVERSE),
}
GRADIENTS |= {alias: GRADIENTS[name] for alias, name in ALIASES.items()}
"""The expected gradient of every name in a loss."""

REWARDS = {
    # name: (the terms of the expected policy gradient, and those that are subtracted)
    "k1": ((REVERSE,), ()),
    "abs": ((OWN,), (VARIATION,)),
    "k2": ((OWN,), (REVERSE,)),
    "k3": ((REVERSE,), (FORWARD,)),
    "k3_ref": ((CHI_SQUARED,), (REVERSE,)),
    "r_log_r": ((HALF_RATIO,), ()),
}
REWARDS |= {name: REWARDS[formula] for name, formula in {**ALIASES, **PLUS}.items()}
"""The expected policy gradient of every name in a reward."""

PAGE = (readme.ROOT / "docs" / "estimators.md").read_text()


class Policies:
    """Three categoricals over the same tokens: pi (with its logits as a leaf), ref and old."""

    def __init__(self, tokens=TOKENS, apart=None):
        self.logits = torch.randn(tokens, dtype=torch.float64, requires_grad=True)
        self.pi = self.logits.log_softmax(-1)
        ref = torch.randn(tokens, dtype=torch.float64)
        self.ref = (ref if apart is None else self.logits.detach() + apart * ref).log_softmax(-1)
        self.old = (self.logits.detach() + 0.5 * torch.randn(tokens).double()).log_softmax(-1)

    def expectation(self, backend, estimator, sampled_from, old_logprobs=None):
        """E of the penalty over tokens from a policy, and its gradient in the logits."""
        value = klfast.kl_penalty(
            self.pi,
            self.ref,
            sampled_from.exp().detach(),
            estimator=estimator,
            reduction="token-sum",
            old_logprobs=old_logprobs,
            backend=backend,
        )
        return self.with_gradient(value) if value.requires_grad else (value, None)

    def with_gradient(self, value):
        (grad,) = torch.autograd.grad(value, self.logits, retain_graph=True)
        return value.detach(), grad

    def policy_gradient(self, backend, estimator):
        """The expected gradient that the KL of ``kl_rewards`` adds to the policy loss."""
        nothing = torch.zeros(len(self.pi), dtype=torch.float64)
        columns = self.pi.detach()[:, None], self.ref[:, None]
        rewards = klfast.kl_rewards(
            nothing, *columns, kl_coef=1.0, estimator=estimator, backend=backend
        )
        return self.with_gradient(-(self.pi.exp().detach() * self.pi * rewards[:, 0]).sum())[1]

    def reverse_kl(self):
        return self.with_gradient((self.pi.exp() * (self.pi - self.ref)).sum())

    def forward_kl(self):
        return self.with_gradient((self.ref.exp() * (self.ref - self.pi)).sum())

    def gradients(self, name):
        """The gradient of every candidate in ``GRADIENTS``, for an estimator's name."""
        pi, ref = self.pi.exp(), self.ref.exp()
        formula = FORMULAS[{**ALIASES, **PLUS}.get(name, name)]
        sums = {
            ZERO: 0 * self.pi.sum(),
            REVERSE: (pi * (self.pi - self.ref)).sum(),
            FORWARD: (ref * (self.ref - self.pi)).sum(),
            VARIATION: (pi - ref).abs().sum(),
            CHI_SQUARED: (pi**2 / ref).sum() / 2,
            HALF_RATIO: (pi**2 / ref * ((self.pi - self.ref) / 2 - 1 / 4)).sum(),
            OWN: (pi * formula(self.pi - self.ref)).sum(),
        }
        return {name: self.with_gradient(value)[1] for name, value in sums.items()}


@pytest.fixture
def policies():
    return Policies()


def assert_equal(actual, expected):
    torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-14)


def matching(policies, name, grad):
    """The name in ``GRADIENTS`` of an expected gradient. Its own expectation's comes last."""
    candidates = policies.gradients(name)
    found = [
        what
        for what, expected in candidates.items()
        if torch.allclose(grad, expected, rtol=1e-12, atol=1e-14)
    ]
    return found[0] if found else NO_DIVERGENCE


def test_the_tables_have_every_name():
    assert GRADIENTS.keys() == REWARDS.keys() == {*NAMES}


@pytest.mark.parametrize("name", NAMES)
def test_the_gradient_of_every_name(backend, policies, name):
    """On-policy without weights. With weights, on- and off-policy give the same."""
    bare, weighted = GRADIENTS[name]
    _, grad = policies.expectation(backend, name, policies.pi)
    assert matching(policies, name, grad) == bare
    for sampled_from in (policies.pi, policies.old):
        _, grad = policies.expectation(backend, name, sampled_from, sampled_from.detach())
        assert matching(policies, name, grad) == weighted


@pytest.mark.parametrize("name", NAMES)
def test_the_policy_gradient_of_every_name_in_a_reward(backend, policies, name):
    added, subtracted = REWARDS[name]
    known = policies.gradients(name)
    expected = sum(known[each] for each in added) - sum(known[each] for each in subtracted)
    torch.testing.assert_close(
        policies.policy_gradient(backend, name), expected, rtol=1e-11, atol=1e-13
    )


def test_the_pages_errors_in_a_reward():
    """Medians of 64 draws over 512 entries that are 0.01 nats apart."""
    table = PAGE.partition("## In the reward")[2].partition("*Errors")[0]
    rows = re.findall(r"^\| `(\w+)`.*\| (\d+)(?: %)? \|$", table, re.MULTILINE)
    assert {name for name, _ in rows} == set(FORMULAS), "docs/estimators.md, In the reward"
    drawn = [Policies(tokens=512, apart=0.142) for _ in range(64)]
    kls = torch.stack([each.reverse_kl()[0] for each in drawn])
    assert kls.median().item() == pytest.approx(0.01, rel=0.1)
    for name, shown in rows:
        errors = [
            (each.policy_gradient("reference", name) - exact).norm() / exact.norm()
            for each in drawn
            for _, exact in [each.reverse_kl()]
        ]
        assert torch.stack(errors).median().item() == pytest.approx(int(shown) / 100, abs=0.03)


@pytest.mark.parametrize("name", ["k1", "k2", "k3"])
def test_a_differentiable_weight_beside_the_gradient_of_k2_is_no_divergence_s(
    backend, policies, name
):
    """A warning says why: k1 and k3 get no divergence's gradient, and k2 its own expectation's."""
    estimator = Estimator(name, gradient="k2")
    for sampled_from in (policies.pi, policies.old):
        _, grad = policies.expectation(backend, estimator, sampled_from, sampled_from.detach())
        assert matching(policies, name, grad) == (OWN if name == "k2" else NO_DIVERGENCE)


@pytest.mark.parametrize("name", ["k1", "k3"])
def test_the_value_is_the_reverse_kl(backend, policies, name):
    """On-policy without weights. With weights, on- and off-policy."""
    expected, _ = policies.reverse_kl()
    assert_equal(policies.expectation(backend, name, policies.pi)[0], expected)
    for sampled_from in (policies.pi, policies.old):
        value, _ = policies.expectation(backend, name, sampled_from, sampled_from)
        assert_equal(value, expected)


def test_of_tokens_of_the_reference_k3_ref_is_the_forward_kl_and_r_log_r_the_reverse(
    backend, policies
):
    for name, expected in (("k3_ref", policies.forward_kl()), ("r_log_r", policies.reverse_kl())):
        found = policies.expectation(backend, name, policies.ref)
        assert_equal(found[0], expected[0])
        assert_equal(found[1], expected[1])
