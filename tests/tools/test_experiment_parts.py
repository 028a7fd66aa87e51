"""The experiment's parts: sampling, KL step, errors of estimators, code to copy."""

import pytest
import torch

import klfast
from lab.model import GPT, continuation_logits, sample
from lab.reading import recipe
from lab.settings import ARMS, Settings, on_policy
from lab.train import estimator, token_errors


@pytest.fixture
def model():
    gpt = GPT(vocabulary=20, context=12, layers=2, width=16, heads=2)
    gpt.initialise(torch.Generator().manual_seed(0))
    return gpt


@pytest.mark.parametrize("group", [1, 4])
def test_cached_sampling_draws_from_the_model(model, group):
    """A prompt is read once for all its completions, which changes no logits."""
    count = 400 // group
    prompts = torch.randint(20, (count, 4), generator=torch.Generator().manual_seed(1))
    drawn, again = (
        sample(model, prompts, 8, torch.Generator().manual_seed(2), group) for _ in range(2)
    )
    assert drawn.shape == (400, 8)
    assert torch.equal(drawn, again)

    caches = model.new_caches(400)
    ids = torch.cat([prompts.repeat_interleave(group, 0), drawn], 1)
    stepwise = [model(ids[:, :4], 0, caches)[:, -1]]
    stepwise += [model(ids[:, t : t + 1], t, caches)[:, 0] for t in range(4, 11)]
    chosen = torch.stack(stepwise, 1).log_softmax(-1).gather(-1, drawn[..., None])[..., 0]
    logprobs = klfast.token_logprobs(continuation_logits(model, prompts, drawn), drawn)
    torch.testing.assert_close(chosen, logprobs)


def test_errors_are_summed_over_tokens_alike_in_exact_kl():
    exact = torch.tensor([[0.03, 0.3, 0.04], [0.0, 0.035, 7.0]])
    mask = torch.tensor([[1, 1, 1], [1, 0, 1]]).bool()
    logprobs = -torch.rand(2, 3, generator=torch.Generator().manual_seed(0))
    ref_logprobs = -torch.rand(2, 3, generator=torch.Generator().manual_seed(1))
    errors = token_errors(exact, logprobs, ref_logprobs, mask)
    assert errors["low"] == [0.02, 0.2, 5.0]
    assert errors["tokens"] == [2, 1, 1]
    assert errors["exact"] == pytest.approx([0.07, 0.3, 7.0])
    x = logprobs - ref_logprobs
    for name, estimate in (("k1", x), ("k2", x * x / 2), ("k3", torch.expm1(-x) + x)):
        error = (estimate - exact).tolist()
        in_bins = [[error[0][0], error[0][2]], [error[0][1]], [error[1][2]]]
        assert errors[name] == pytest.approx([sum(e) for e in in_bins], rel=1e-5)
        squares = [sum(e * e for e in own) for own in in_bins]
        assert errors[f"{name}_squared"] == pytest.approx(squares, rel=1e-5)


UNUSUAL = Settings(target=3.5, init_coef=0.07, horizon=123.0, gain=0.3, low_coef=0.02, clip=2.5)


@pytest.mark.parametrize("name", on_policy(ARMS))
@pytest.mark.parametrize("settings", [Settings(), UNUSUAL], ids=["defaults", "unusual"])
def test_what_to_copy_runs_and_takes_the_runs_step(name, settings):
    logprobs = -torch.rand(4, 9, dtype=torch.float64)
    given = {
        "logprobs": logprobs.clone().requires_grad_(),
        "ref_logprobs": logprobs - 0.3 * torch.randn(4, 9, dtype=torch.float64),
        "mask": torch.arange(9) < torch.tensor([[9], [4], [1], [6]]),
        "policy_loss": 0.0,
    }
    exec(recipe(name, settings), given)
    ran = ARMS[name].controller(settings)
    expected, stats = klfast.kl_penalty(
        given["logprobs"],
        given["ref_logprobs"],
        given["mask"],
        estimator=estimator(settings),
        reduction="seq-mean-token-sum",
        coef=ran.value,
        return_stats=True,
    )
    ran.update(stats)
    assert given["loss"] == expected
    assert given["estimator"] == estimator(settings)
    assert type(given["controller"]) is type(ran)
    for kl in (0.1, 5.0, 50.0, 6.0):
        ran.update(kl, settings.batch)
        given["controller"].update(kl, settings.batch)
    assert given["controller"].state_dict() == ran.state_dict()
