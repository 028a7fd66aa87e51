"""Infinities, NaN, 0 and the largest numbers in each input give the same on every backend.

A target is compared with the reference on the same tensors: values, gradients, masks, statistics,
and what watchers say of the statistics. The bad number is in one token, alone in the batch or
beside finite tokens.
"""

import itertools
import math
from dataclasses import replace

import pytest
import torch
from families import VARIANTS, every, served
from targets import TARGETS

import klfast
from klfast.cli.check.cases import FAMILIES
from klfast.cli.check.compare import OF_LOGITS, found_by, truth_of, wrong_of
from klfast.formulas.sequences import per_token

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.filterwarnings("ignore:klfast.[a-z_]+. [a-z_]+ must hold log-probs"),
    pytest.mark.filterwarnings("ignore:.*(mean KL|KL is over|skipped a KL|got statistics)"),
]
every_target = pytest.mark.parametrize("target", [name for name in TARGETS if name != "reference"])

NUMBERS = {"-inf": -math.inf, "inf": math.inf, "nan": math.nan, "0": 0.0, "max": 1.0, "min": -1.0}
"""The last two are in units of the greatest number of an input's dtype."""
HEADS = ("hidden", "weight", "bias", "ref_hidden", "ref_weight", "ref_bias")
HEADROOM = 2.0**-10
"""The largest of ``FACTORS`` are so much smaller, so that a matmul does not overflow."""
FACTORS = (*HEADS, "weights")
"""Inputs whose numbers, or whose products with gradients, are summed in matmuls."""
CHECKED = ("mask", "temperature", "coef", "kl_coef", "normalizer")
"""Inputs in which bad numbers raise."""


def inputs_of(call):
    """The names of the inputs that may hold bad numbers."""
    floats = (n for n, t in call.tensors.items() if t.is_floating_point() and t.numel())
    return [name for name in floats if name not in CHECKED]


def is_of_tokens(call, name):
    """True if an input has a number or a row for each token."""
    return call.tensors[name].shape[: call.kept.dim()] == call.kept.shape


def poisoned(call, name, number, is_alone):
    """The call with a number in the first kept token: in its first entry, or in the head's."""
    tensor, token = call.tensors[name].clone(), tuple(call.kept.nonzero()[0].tolist())
    at = token if is_of_tokens(call, name) else token[:-1]
    if name == "weights" and tensor.shape != call.kept.shape and "cu_seqlens" in call.tensors:
        at = (int((call.tensors["cu_seqlens"] <= token[0]).sum()) - 1,)  # the token's sequence
    factor = 1.0
    if number in ("max", "min"):
        factor = torch.finfo(tensor.dtype).max * (HEADROOM if name in FACTORS else 1)
    tensor[at + (0,) * (tensor.dim() - len(at))] = factor * NUMBERS[number]
    tensors, kept = call.tensors | {name: tensor}, call.kept
    if is_alone:
        kept = torch.zeros_like(call.kept)
        kept[token] = True
        mask = call.tensors.get("mask", kept)
        tensors["mask"] = torch.where(kept, mask, torch.zeros_like(mask))
    return replace(call, tensors=tensors, kept=kept)


def said_by_watchers(values):
    """The results of a stop, a monitor, an alarm and a learning rate for each KL of statistics."""
    names = klfast.KLStats._fields
    if f"stats.{names[0]}" not in values:
        return None
    stats = klfast.KLStats(*(values[f"stats.{name}"] for name in names))
    said = {}
    for kl, limit in itertools.product(("kl", "k1", "k2", "k3"), (1e-30, 1e10)):
        if kl != "kl" and stats.k1.isnan().all():
            continue  # of a divergence without token_ids
        parameter = torch.nn.Parameter(torch.zeros(()))
        rate = klfast.KLAdaptiveLR(torch.optim.SGD([parameter], lr=1.0), limit)
        rate.step(stats, kl=kl)
        watchers = (
            klfast.KLEarlyStop(limit),
            klfast.KLMonitor(limit, min_updates=1),
            klfast.KLDriftAlarm(limit),
        )
        said[kl, limit] = [watcher.update(stats, kl=kl) for watcher in watchers]
        said[kl, limit] += [watcher.skipped for watcher in (*watchers, rate)]
        said[kl, limit] += rate.get_last_lr()
    return said


def off_the_reference(target, call):
    """The results of a target that are not the reference's."""
    backend, device, _ = TARGETS[target]
    right = found_by(replace(call, memory="dense"), "reference")
    found = found_by(call, backend, torch.device(device))
    truth = truth_of(call)
    # An entry of a gradient is a sum of products of probabilities, whose errors are the promise's,
    # and of numbers of heads.
    finite = (call.tensors[name].nan_to_num(0, 0, 0) for name in HEADS if name in call.tensors)
    off = OF_LOGITS * max([1.0, *(float(t.abs().max()) for t in finite)]) * call.words
    allowed = {
        name: tolerance + off * name.startswith("gradient")
        for name, tolerance in truth.allowed.items()
    }
    values = dict(right.values)
    for name, may_be_nan in nan_somewhere(call, values).items():
        if name in values and name in found.values:
            got, expected = found.values[name], values[name]
            values[name] = torch.where(may_be_nan & (got.isnan() | expected.isnan()), got, expected)
    wrong = wrong_of(truth._replace(values=values, allowed=allowed), found)
    said, expected = said_by_watchers(found.values), said_by_watchers(right.values)
    return wrong if said == expected else [*wrong, (said, expected)]


def nan_somewhere(call, values):
    """The results that are NaN on one backend and may be a number on another, and where.

    A kernel reads both models of a token at a time. A NaN divergence may spoil the log-probs and
    the entropy of either. A weight that may be differentiated has the gradient w (f + f'). Autograd
    adds w f and w f', which may be infinities. An infinite number in ``weights`` multiplies each
    term of a derivative in autograd, and their sum in kernels.
    """
    may_be_nan = of_infinite_weights(call)
    if call.function in ("kl_divergence", "linear_kl_divergence"):
        options = {**call.options, "reduction": "none"}
        options.pop("normalizer", None)
        tensors = {n: t for n, t in call.tensors.items() if n not in ("normalizer", "weights")}
        one = replace(call, tensors=tensors, options=options, leaves=(), memory="dense")
        is_nan = found_by(one, "reference").values["kl"].isnan()
        names = [n for n in ("logprobs", "ref_logprobs", "entropy") if n in values]
        return may_be_nan | {n: per_entry(is_nan, values[n]) for n in names}
    estimator = call.options.get("estimator")
    if estimator and "old_logprobs" in call.tensors and estimator.importance == "differentiable":
        bad = torch.stack([call.tensors[n] for n in call.tensors if n.endswith("logprobs")])
        is_bad = ~(bad.double().abs() < 80).all(0)  # beyond which e^x is infinite in fp32
        for name in call.leaves:
            of_weights = may_be_nan.get(f"gradient of {name}", torch.tensor(False))
            may_be_nan[f"gradient of {name}"] = is_bad | of_weights
    return may_be_nan


def per_entry(of_tokens, like):
    """Booleans of tokens that broadcast to a result of their entries."""
    return of_tokens[(...,) + (None,) * (like.dim() - of_tokens.dim())]


def of_infinite_weights(call):
    """The gradients of tokens whose weight is infinite, and of heads beside such tokens."""
    if "weights" not in call.tensors:
        return {}
    weights = call.tensors["weights"]
    if weights.shape != call.kept.shape:
        weights = weights.view(-1, 1)
    of_each = per_token(weights, call.kept, call.tensors.get("cu_seqlens"))
    is_bad = of_each.float().isinf() & call.kept  # the arithmetic is in fp32
    return {
        f"gradient of {name}": per_entry(is_bad, call.tensors[name])
        if is_of_tokens(call, name)
        else is_bad.any()
        for name in call.leaves
    }


@pytest.mark.grid
@every_target
@every([(family, name) for family, variants in VARIANTS.items() for name in variants])
@pytest.mark.parametrize("number", NUMBERS)
def test_a_bad_number_is_the_same_everywhere(target, of, number, monkeypatch):
    family, variant = of
    row = {name: values[0] for name, values in FAMILIES[family].options.items()}
    row |= {"dtypes": (torch.float32, torch.float32), **VARIANTS[family][variant]}
    if "loss" in row:
        row["loss"] = "likelihood"  # others make NaN of large numbers, which raises
    call = FAMILIES[family].call(row, seed=0)
    wrong = {}
    with served(target, family):
        for name, is_alone in itertools.product(inputs_of(call), (False, True)):
            bad = poisoned(call, name, number, is_alone)
            if name == "weights" and NUMBERS[number] < 0:
                backend, device, _ = TARGETS[target]
                monkeypatch.setenv("KLFAST_CHECK", "1")  # a GPU needs to be asked
                with pytest.raises(ValueError, match=r"weights must be >= 0 .* got -"):
                    found_by(bad, backend, torch.device(device))
            elif faults := off_the_reference(target, bad):
                wrong[name, is_alone] = faults
    assert not wrong
