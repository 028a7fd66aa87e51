"""What the arms off the policy say: drift, what the correction does, and what it changes."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from statistics import fmean

from lab.arms import ARMS, PARTNER, off_policy
from lab.means import Ending, ending_of, number, rows_by_arm
from lab.settings import Settings
from lab.train import Row


@dataclass(frozen=True)
class Sampled:
    """Sampler and policy: means over all steps of an arm.

    Attributes:
        k3: KL(rollout || policy) in nats per token, by k3.
        worst_k3: that of the worst step.
        ess: effective sample size, a fraction of the tokens.
        outside: fraction of tokens whose weight the correction bounds.
        rejected: fraction of tokens that it rejects.
        plain_error, weighted_error: of the KL to the reference by k1, without weights and with
            them, as a share of the exact KL.
    """

    k3: float
    worst_k3: float
    ess: float
    outside: float
    rejected: float
    plain_error: float
    weighted_error: float


@dataclass(frozen=True)
class Drift(Ending):
    """One arm off the policy, or the one that is the same on it.

    Attributes:
        sampled: None on the policy.
    """

    sampled: Sampled | None


def summarise_drift(rows: Iterable[Row], settings: Settings) -> list[Drift]:
    """The arms off the policy that have made a step, behind their partner on it; or nothing."""
    names = compared(settings)
    found = [_summary(name, own) for name, own in rows_by_arm(rows, names).items() if own]
    return found if any(each.sampled for each in found) else []


def compared(settings: Settings) -> list[str]:
    """The arms off the policy, and before them their partner, if it is in the run."""
    names = off_policy(settings.arms)
    return [PARTNER, *names] if names and PARTNER in settings.arms else names


def _summary(name: str, rows: list[Row]) -> Drift:
    sampled = _sampled(rows) if ARMS[name].is_off_policy else None
    return Drift(**vars(ending_of(name, rows)), sampled=sampled)


def _sampled(rows: list[Row]) -> Sampled:
    def mean(key: str) -> float:
        return fmean(row["rollout"][key] for row in rows)

    return Sampled(
        k3=mean("k3"),
        worst_k3=max(row["rollout"]["k3"] for row in rows),
        ess=mean("ess"),
        outside=mean("outside"),
        rejected=mean("rejected_tokens"),
        plain_error=_error((row["kl_per_sequence_k1"] for row in rows), rows),
        weighted_error=_error((row["rollout"]["weighted_k1"] for row in rows), rows),
    )


def _error(estimates: Iterable[float], rows: list[Row]) -> float:
    """The estimates' sum over that of the exact KL, less 1; 0 where that is 0."""
    exact = sum(row["kl_per_sequence_exact"] for row in rows)
    return sum(estimates) / exact - 1 if exact > 0 else 0.0


def read_drift(drifts: list[Drift], settings: Settings) -> list[str]:
    """The arms in plain words: every statement follows from the numbers, none is pre-written."""
    sentences = [_drifted(d, d.sampled, settings) for d in drifts if d.sampled]
    by_name = {d.name: d for d in drifts}
    if "stale" in by_name and "corrected" in by_name:
        sentences.append(_change(by_name["stale"], by_name["corrected"], by_name.get(PARTNER)))
    return sentences


def _drifted(drift: Drift, sampled: Sampled, settings: Settings) -> str:
    acts = "bounded" if ARMS[drift.name].is_corrected else "would have bounded"
    rejects = "rejected" if ARMS[drift.name].is_corrected else "would have rejected"
    return (
        f"In the arm “{drift.label}” KL(rollout || policy) was {number(sampled.k3)} nats per token "
        f"(k3, mean of {drift.steps} steps; {number(sampled.worst_k3)} in the worst). The "
        f"correction “{settings.correction}” {acts} the weight of {sampled.outside:.1%} of the "
        f"tokens and {rejects} {sampled.rejected:.1%}; its effective sample size was "
        f"{sampled.ess:.0%}. On the sampler's tokens k1 was off the exact KL to the reference "
        f"by {sampled.plain_error:+.1%} without weights, and by {sampled.weighted_error:+.1%} with "
        "them."
    )


def _change(stale: Drift, corrected: Drift, partner: Drift | None) -> str:
    def numbers(drift: Drift) -> str:
        return (
            f"a reward of {drift.reward:.1%} at {number(drift.exact_kl)} nats per sequence (exact) "
            f"and a held-out perplexity of {number(drift.perplexity)}"
        )

    text = (
        f"At the same coefficient, the stale sampler ended with {numbers(stale)}; with the "
        f"correction with {numbers(corrected)}"
    )
    if partner is not None:
        text += f". The arm “{partner.label}”, whose sampler is the policy, had {numbers(partner)}"
    return text + "."
