"""What each estimator's value and gradient estimate, in expectation over a small categorical.

With the sampling probabilities as weights, a sum over the vocabulary is the expectation itself:
nothing here is sampled. design.md section 2 is the table.
"""

import pytest
import torch

import klfast
from klfast import Estimator

TOKENS = 7


class Policies:
    """Three categoricals over the same tokens: pi (with its logits as a leaf), ref and old."""

    def __init__(self):
        self.logits = torch.randn(TOKENS, dtype=torch.float64, requires_grad=True)
        self.pi = self.logits.log_softmax(-1)
        self.ref = torch.randn(TOKENS, dtype=torch.float64).log_softmax(-1)
        self.old = (self.logits.detach() + 0.5 * torch.randn(TOKENS).double()).log_softmax(-1)

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

    def reverse_kl(self):
        return self.with_gradient((self.pi.exp() * (self.pi - self.ref)).sum())

    def forward_kl(self):
        return self.with_gradient((self.ref.exp() * (self.ref - self.pi)).sum())


@pytest.fixture
def policies():
    return Policies()


def assert_equal(actual, expected):
    torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-14)


def test_k1_on_policy_is_the_reverse_kl_with_gradient_0(backend, policies):
    value, grad = policies.expectation(backend, "k1", policies.pi)
    assert_equal(value, policies.reverse_kl()[0])
    assert_equal(grad, torch.zeros(TOKENS, dtype=torch.float64))


def test_k2_on_policy_has_the_gradient_of_the_reverse_kl(backend, policies):
    value, grad = policies.expectation(backend, "k2", policies.pi)
    assert_equal(grad, policies.reverse_kl()[1])
    assert not torch.isclose(value, policies.reverse_kl()[0], rtol=1e-3)  # it is biased


def test_k3_on_policy_is_the_reverse_kl_with_the_gradient_of_the_forward_kl(backend, policies):
    value, grad = policies.expectation(backend, "k3", policies.pi)
    assert_equal(value, policies.reverse_kl()[0])
    assert_equal(grad, policies.forward_kl()[1])


@pytest.mark.parametrize("name", ["k1", "k3", "k3_ref"])
def test_gradient_k2_makes_any_estimator_follow_the_reverse_kl_on_policy(backend, policies, name):
    _, grad = policies.expectation(backend, Estimator(name, gradient="k2"), policies.pi)
    assert_equal(grad, policies.reverse_kl()[1])


@pytest.mark.parametrize("policy", ["pi", "old"], ids=["on-policy", "off-policy"])
@pytest.mark.parametrize("name", ["k1", "k3"])
def test_differentiable_importance_is_the_reverse_kl_and_its_gradient(
    backend, policies, name, policy
):
    sampled_from = getattr(policies, policy)
    value, grad = policies.expectation(backend, name, sampled_from, sampled_from)
    assert_equal(value, policies.reverse_kl()[0])
    assert_equal(grad, policies.reverse_kl()[1])


@pytest.mark.parametrize("policy", ["pi", "old"], ids=["on-policy", "off-policy"])
@pytest.mark.parametrize("name", ["k2", "k3"])
def test_detached_importance_k2_has_the_gradient_of_the_reverse_kl(backend, policies, name, policy):
    """And so has k3 with the gradient of k2."""
    sampled_from = getattr(policies, policy)
    estimator = Estimator(name, gradient="k2", importance="detached")
    if name == "k2":
        estimator = Estimator("k2", importance="detached")
    _, grad = policies.expectation(backend, estimator, sampled_from, sampled_from)
    assert_equal(grad, policies.reverse_kl()[1])


def test_detached_importance_k1_and_k3_keep_their_gradients_off_policy(backend, policies):
    estimator = Estimator("k1", importance="detached")
    value, grad = policies.expectation(backend, estimator, policies.old, policies.old)
    assert_equal(value, policies.reverse_kl()[0])
    assert_equal(grad, torch.zeros(TOKENS, dtype=torch.float64))
    estimator = Estimator("k3", importance="detached")
    value, grad = policies.expectation(backend, estimator, policies.old, policies.old)
    assert_equal(value, policies.reverse_kl()[0])
    assert_equal(grad, policies.forward_kl()[1])


def test_off_policy_without_weights_nothing_holds(backend, policies):
    """The control of this file: with the weights left out, the same sums miss by far."""
    value, grad = policies.expectation(backend, "k3", policies.old)
    assert not torch.isclose(value, policies.reverse_kl()[0], rtol=1e-3)
    assert not torch.allclose(grad, policies.forward_kl()[1], rtol=1e-3)


def test_k3_ref_from_the_reference_is_the_forward_kl_and_its_gradient(backend, policies):
    value, grad = policies.expectation(backend, "k3_ref", policies.ref)
    assert_equal(value, policies.forward_kl()[0])
    assert_equal(grad, policies.forward_kl()[1])


def test_k3_ref_on_policy_is_chi_squared_less_kl(backend, policies):
    value, _ = policies.expectation(backend, "k3_ref", policies.pi)
    pi, ref = policies.pi.exp().detach(), policies.ref.exp()
    assert_equal(value, (pi**2 / ref).sum() - 1 - policies.reverse_kl()[0])


def test_r_log_r_from_the_reference_is_the_reverse_kl_and_its_gradient(backend, policies):
    value, grad = policies.expectation(backend, "r_log_r", policies.ref)
    assert_equal(value, policies.reverse_kl()[0])
    assert_equal(grad, policies.reverse_kl()[1])
