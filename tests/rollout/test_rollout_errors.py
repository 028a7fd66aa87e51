"""A bad argument raises one error: its name, what it must be, and what it got."""

import math

import pytest
import torch
from refusals import A_TENSOR, POSITIVE, assert_refused, cases

import klfast
from klfast import Rejection
from klfast.args.rejection import OVER, STATISTICS

NAN, INF = math.nan, math.inf
OUTWARD = Rejection("binary_tv", high=0.1, outward_only=True)


TYPES = {
    "weight": ({"weight": 2}, "unknown weight 2; expected one of 'token', 'sequence', 'geometric'"),
    "normalize": ({"normalize": True}, "unknown normalize True; expected one of 'token'"),
    "floor": ({"floor": True}, f"floor {POSITIVE}, got True of type bool"),
    "reject-text": ({"reject": "k3"}, "reject must be a Rejection or a sequence of them, got str"),
    "reject-tuple": (
        {"reject": [("k3", "token")]},
        "reject must be a Rejection or a sequence of them, got tuple",
    ),
    "advantages": ({"advantages": [1.0], "reject": OUTWARD}, f"advantages {A_TENSOR}, got list"),
    **{
        f"group-{normalize}": (
            {"process_group": "world", "normalize": normalize},
            "process_group must be a torch.distributed.ProcessGroup that this process is in, "
            "got 'world'",
        )
        for normalize in (None, "token", "sequence")
    },
    "group-without-weights": (
        {"process_group": 0, "weight": None},
        "process_group must be a torch.distributed.ProcessGroup .*, got 0",
    ),
}
VALUES = {
    "unknown-preset": ({"preset": "IcePop"}, "unknown preset 'IcePop'; .*; did you mean 'icepop'"),
    "beside-a-preset": ({"preset": "icepop", "cap": 0.1}, "cap must be >= floor=0.5, got 0.1"),
    "unknown-weight": (
        {"weight": "tokens"},
        "unknown weight 'tokens'; expected one of 'token', 'sequence', 'geometric'; did you",
    ),
    **{
        f"{argument}-{value}": ({argument: value}, f"{argument} {POSITIVE}, got {value}")
        for argument in ("floor", "cap")
        for value in (0, -1.5, NAN, INF)
    },
    "crossed": ({"floor": 3.0}, "cap must be >= floor=3.0, got 2.0"),
    "floor-without-weights": (
        {"weight": None, "floor": 0.5},
        "floor must be None with weight=None, got 0.5",
    ),
    "twice": (
        {"reject": [Rejection("k3", high=1), Rejection("k3", high=2)]},
        "reject must have each criterion once, got 'k3' over 'token' twice",
    ),
    "no-advantages": (
        {"reject": OUTWARD},
        "advantages must be given for a Rejection with outward_only=True, got None",
    ),
    "advantages-for-nothing": (
        {"advantages": torch.zeros(2, 3)},
        "advantages must be None without a Rejection with outward_only=True, got a tensor",
    ),
    "advantages-shape": (
        {"advantages": torch.zeros(3), "reject": OUTWARD},
        r"advantages must have the shape of logprobs, \[2, 3\], or \[2\], one per sequence, "
        r"got \[3\]",
    ),
}


@pytest.mark.parametrize(("arguments", "error", "message"), cases(TYPES, VALUES))
def test_rollout_correction_refuses(arguments, error, message):
    """These are its own arguments. tests/conformance has its tensors."""
    pair = {"logprobs": torch.zeros(2, 3), "rollout_logprobs": torch.ones(2, 3)}
    assert_refused(klfast.rollout_correction, pair | arguments, error, message)


RULE_TYPES = {
    "statistic": (
        {"statistic": None},
        f"unknown statistic None; expected one of {', '.join(map(repr, STATISTICS))}",
    ),
    "outward_only": ({"outward_only": 1}, "outward_only must be True or False, got 1"),
}
RULE_VALUES = {
    "unknown-over": (
        {"over": "sequence"},
        f"unknown over 'sequence'; expected one of {', '.join(map(repr, OVER))}$",
    ),
    "no-bound": ({"high": None}, "low or high must be given, got neither for 'ratio'"),
    "crossed": ({"low": 2.0, "high": 0.5}, "low must be at most high, got 2.0 > 0.5"),
    "infinite": ({"high": INF}, f"high {POSITIVE}, got inf"),
    "infinite-k1": ({"statistic": "k1", "low": -INF}, "low must be a finite number, got -inf"),
    "outward-sequence": (
        {"over": "seq-max", "outward_only": True},
        "outward_only must go with over='token', got over='seq-max'",
    ),
}


@pytest.mark.parametrize(("arguments", "error", "message"), cases(RULE_TYPES, RULE_VALUES))
def test_rejection_refuses(arguments, error, message):
    assert_refused(Rejection, {"statistic": "ratio", "high": 2.0, **arguments}, error, message)


@pytest.mark.parametrize("statistic", STATISTICS)
def test_bounds_below_0_are_of_signed_statistics_alone(statistic):
    if statistic in ("k1", "difference"):
        assert Rejection(statistic, low=-2, high=-1).bounds == (-2, -1)
        return
    with pytest.raises(ValueError, match=f"low {POSITIVE}, got -2"):
        Rejection(statistic, low=-2)
