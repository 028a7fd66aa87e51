"""Estimator and KLStats as values: copies, equality, limits that must not be."""

import copy
import dataclasses
import io
import itertools
import math
import pickle
from decimal import Decimal
from fractions import Fraction

import numpy as np
import torch
from controls import FORMULAS

import klfast
from klfast import Estimator, KLStats

CATEGORY = "Estimator and KLStats"
NAN, INF = math.nan, math.inf
NAMES = ("k1", "abs", "k2", "k3", "k3_ref", "r_log_r", "mse", "low_var_kl")
LIMITS = ("importance_cap", "log_ratio_clip", "kl_clip", "linear_tail")
CHOICES = {"gradient": ("value", "k2", "none"), "importance": ("differentiable", "detached")}


def estimators(hunt):
    values = (None, 1, 2.5, Fraction(1, 3), np.float32(0.5))
    pools = (NAMES, *CHOICES.values(), values, (*values, (-1, 2.0)), values, values, (False, True))
    keys = ("name", *CHOICES, "importance_cap", "log_ratio_clip", "kl_clip", "linear_tail")
    for drawn in range(2000 if hunt.whole else 200):
        chosen = [hunt.random.choice(pool) for pool in pools]
        yield drawn, dict(zip((*keys, "clip_weighted"), chosen, strict=True))


def test_copies_are_equal_and_compute_the_same(hunt):
    a, b = torch.randn(2, 3), torch.randn(2, 3)
    old = a + 0.1 * torch.randn(2, 3)
    for drawn, options in estimators(hunt):
        one = Estimator(**options)
        others = (
            Estimator(**options),
            copy.copy(one),
            copy.deepcopy(one),
            pickle.loads(pickle.dumps(one)),
            dataclasses.replace(one),
            Estimator(
                **{field.name: getattr(one, field.name) for field in dataclasses.fields(one)}
            ),
        )
        expected = klfast.kl_penalty(a, b, estimator=one, old_logprobs=old)
        for way, other in enumerate(others):
            hunt.equal(other, one, drawn, options, way)
            hunt.equal(hash(other), hash(one), drawn, options, way)
            hunt.bits(klfast.kl_penalty(a, b, estimator=other, old_logprobs=old), expected, options)
        wide = klfast.kl_penalty(a, b, estimator=one, old_logprobs=old, backend="reference")
        hunt.close(expected, wide.double(), 1e-5 * (1 + wide.abs().max().item()), drawn, options)
        hunt.equal(
            eval(repr(one), {"Estimator": Estimator, "Fraction": Fraction, "np": np}),
            one,
            drawn,
            options,
            "repr",
        )


def test_bad_limits_are_refused(hunt):
    bad_numbers = ("1", b"1", True, 1j, Decimal(1), {}, object(), torch.tensor(1.0), np.ones(2))
    bad_numbers += (NAN, INF, 0, -1, -1e-300, 0.0, 2**5000, Fraction(-1, 3))
    for limit, bad, name in itertools.product(LIMITS, bad_numbers, NAMES):
        hunt.refuses(lambda x=limit, b=bad, n=name: Estimator(n, **{x: b}), limit, name, limit, bad)
    pairs = ((1, 1), (2, 1), (NAN, 1), (1, NAN), (-INF, 1), (1,), (), (1, 2, 3), ("0", 1))
    for bad in (*pairs, (True, 2), (None, 1), [2, 1], [1], (0, 2**5000)):
        hunt.refuses(lambda b=bad: Estimator(log_ratio_clip=b), "log_ratio_clip", bad)
    for bad in ("", "K3", "k4", None, 3, True, b"k3", ["k3"], ("k3",)):
        hunt.refuses(lambda b=bad: Estimator(b), "estimator", bad)
        for argument in CHOICES:
            hunt.refuses(lambda a=argument, b=bad: Estimator(**{a: b}), argument, argument, bad)
    for bad in (None, 1, 0, "True", [], NAN):
        hunt.refuses(lambda b=bad: Estimator(clip_weighted=b), "clip_weighted", bad)
    for field in dataclasses.fields(Estimator):
        try:
            setattr(Estimator(), field.name, None)
        except dataclasses.FrozenInstanceError:
            hunt.check(True)
        else:
            hunt.check(False, field.name, got="was set")


def test_statistics_survive_copies(hunt):
    for shape in ((1, 1), (3, 5), (0, 4), (7,)):
        for dtype in (torch.float32, torch.float64, torch.bfloat16):
            a = torch.randn(shape).to(dtype)
            _, stats = klfast.kl_penalty(a, a + 1, return_stats=True)
            file = io.BytesIO()
            torch.save(stats, file)
            file.seek(0)
            copies = (
                copy.copy(stats),
                copy.deepcopy(stats),
                pickle.loads(pickle.dumps(stats)),
                torch.load(file, weights_only=True),
                KLStats(*stats),
                stats._replace(),
                torch.utils._pytree.tree_map(torch.clone, stats),
            )
            for way, other in enumerate(copies):
                hunt.check(isinstance(other, KLStats), shape, dtype, way, got=type(other))
                for name, one, again in zip(stats._fields, stats, other, strict=True):
                    hunt.bits(again, one, shape, dtype, way, name)
                hunt.bits(other.token_mean(), stats.token_mean(), shape, dtype, way)
                hunt.bits(other.sequence_mean(), stats.sequence_mean(), shape, dtype, way)
                for key, value in other.as_dict().items():
                    hunt.bits(value, stats.as_dict()[key], shape, dtype, way, key)


def test_other_results_survive_copies(hunt):
    rule = klfast.Rejection("k1", "seq-mean", high=1.0)
    for shape, dtype in itertools.product(
        ((1, 1), (3, 5), (0, 4), (7,)), (torch.float32, torch.float64, torch.bfloat16)
    ):
        a = -torch.rand(shape).to(dtype)
        corrected = klfast.rollout_correction(a, a - 1, reject=rule)
        for result in (corrected, corrected.stats, klfast.log_ratio_profile(a, a - 1)):
            file = io.BytesIO()
            torch.save(result, file)
            file.seek(0)
            copies = (
                copy.copy(result),
                copy.deepcopy(result),
                pickle.loads(pickle.dumps(result)),
                torch.load(file, weights_only=True),
            )
            for way, other in enumerate(copies):
                hunt.equal(type(other), type(result), shape, dtype, way)
                leaves = map(torch.utils._pytree.tree_leaves, (other, result))
                for one, again in zip(*leaves, strict=True):
                    hunt.bits(torch.as_tensor(one), torch.as_tensor(again), shape, dtype, way)


def test_statistics_are_sums_of_formulas(hunt):
    for dtype in (torch.float32, torch.float64, torch.float16):
        for _ in range(40 if hunt.whole else 8):
            a, b = torch.randn(3, 7).to(dtype), torch.randn(3, 7).to(dtype)
            mask = torch.rand(3, 7) < 0.6
            _, stats = klfast.kl_penalty(a, b, mask, return_stats=True)
            x = torch.where(mask, a.double() - b.double(), 0.0)
            tolerance = 1e-5 if dtype != torch.float64 else 1e-13
            hunt.close(stats.length, mask.sum(-1).double(), 0, dtype, "length")
            hunt.close(stats.max_abs_log_ratio, x.abs().amax(-1), tolerance, dtype, "max")
            for field, name in (("kl", "k3"), ("k1", "k1"), ("k2", "k2"), ("k3", "k3")):
                wanted = torch.where(mask, FORMULAS[name][0](x), 0.0)
                error = tolerance * (1 + wanted.abs().sum(-1))
                hunt.close(getattr(stats, field), wanted.sum(-1), error, dtype, field)
            hunt.check(not stats.clipped.any() and not stats.nonfinite.any(), dtype, got=stats)
