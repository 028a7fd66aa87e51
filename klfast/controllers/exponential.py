"""The exponential of fp64 tensors, with the bits of ``math.exp``.

``torch.exp`` differs from ``math.exp`` in the last bit of one value in twenty on a CPU, and in
others on a GPU. This is the C library's algorithm in IEEE operations, which every device rounds
alike: with ``k = round(128 x / ln 2)`` and ``r = x - k ln 2 / 128``,
``exp(x) = 2**(k / 128) * exp(r)``, the first factor from a table, the second a polynomial.

Source of the algorithm and its constants: S. Nagy's exp of Arm's optimized routines (2018), which
is that of glibc since 2.28, of musl and of bionic. glibc contracts products and sums to fused ones
where the processor has them; ``_is_fused`` looks which of the two this process has. Beside another
C library (macOS, Windows) the last bit may differ from ``math.exp``.

Subnormal results (x < -708) may differ in the last bit too, and so may anything that
``torch.compile`` makes for a GPU, where the compiler fuses products and sums as it likes.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from decimal import Decimal, localcontext

import torch
from torch import Tensor

Fma = Callable[[Tensor, "Tensor | float", "Tensor | float"], Tensor]

_BITS = 7
_N = 1 << _BITS
_N_OVER_LN2 = float.fromhex("0x1.71547652b82fep0") * _N
_LN2_OVER_N = float.fromhex("0x1.62e42fefa0000p-8"), float.fromhex("0x1.cf79abc9e3b39p-47")
_POLYNOMIAL = tuple(
    map(
        float.fromhex,
        (
            "0x1.ffffffffffdbdp-2",
            "0x1.555555555543cp-3",
            "0x1.55555cf172b91p-5",
            "0x1.1111167a4d017p-7",
        ),
    )
)
"""Coefficients of r**2 to r**5."""

_HIGHEST, _LOWEST = 709.782712893384, -745.1332191019412
"""exp is inf above, and 0 below."""

_SPLITTER = 2.0**27 + 1
_PROBES = (-0.8742, 0.663, -2.6883, 0.4592, -2.1423, 1.6849)
"""Arguments whose exponentials differ between fused and separate products and sums."""


@functools.cache
def _powers() -> tuple[list[float], list[float]]:
    """2**(i/128) for i < 128, and the relative error of its rounding."""
    powers, tails = [], []
    with localcontext() as context:
        context.prec = 60
        for i in range(_N):
            exact = Decimal(2) ** (Decimal(i) / _N)
            rounded = float(exact)
            powers.append(rounded)
            tails.append(float((exact - Decimal(rounded)) / Decimal(rounded)))
    return powers, tails


def _split(a: Tensor | float) -> tuple[Tensor | float, Tensor | float]:
    """Halves of 26 bits with the sum a (Veltkamp)."""
    scaled = a * _SPLITTER
    high = scaled - (scaled - a)
    return high, a - high


def _fused(a: Tensor, b: Tensor | float, c: Tensor | float) -> Tensor:
    """The sum a * b + c, rounded once: both operations' errors (Dekker, Knuth) are added."""
    product = a * b
    (a_high, a_low), (b_high, b_low) = _split(a), _split(b)
    rest = a_low * b_low - (((product - a_high * b_high) - a_low * b_high) - a_high * b_low)
    total = product + c
    of_c = total - product
    error = (product - (total - of_c)) + (c - of_c)
    return total + (error + rest)


def _separate(a: Tensor, b: Tensor | float, c: Tensor | float) -> Tensor:
    """The sum a * b + c, rounded twice."""
    return a * b + c


def _two_to(exponent: Tensor) -> Tensor:
    """2**exponent for int64 between -1022 and 1023, by its bits."""
    return ((exponent + 1023) << 52).view(torch.float64)


class Exponential:
    """The exponential of fp64 tensors on one device; the choice and the table are made once."""

    def __init__(self, device: torch.device, fma: Fma | None = None) -> None:
        self._fma = fma or (_fused if _is_fused() else _separate)
        powers, tails = _powers()
        self._powers = torch.tensor(powers, dtype=torch.float64, device=device)
        self._tails = torch.tensor(tails, dtype=torch.float64, device=device)

    def __call__(self, x: Tensor) -> Tensor:
        """The exponential of x; inf above 709.78, 0 below -745.13."""
        fma = self._fma
        inside = x.clamp(_LOWEST, _HIGHEST)
        k = torch.round(inside * _N_OVER_LN2)
        high, low = _LN2_OVER_N
        r = fma(k, -low, inside - k * high)  # k * high is exact: high ends in zeros
        whole = k.to(torch.int64)
        # index_select: a 0-dim index would be read on the host.
        at = (whole & (_N - 1)).reshape(-1)
        power = self._powers.index_select(0, at).reshape(x.shape)
        tail = self._tails.index_select(0, at).reshape(x.shape)
        c2, c3, c4, c5 = _POLYNOMIAL
        square = r * r
        rest = fma(square, fma(r, c3, c2), tail + r)
        rest = fma(square * square, fma(r, c5, c4), rest)
        # glibc uses power * rest twice where a result may be subnormal, and so does not fuse it.
        near = torch.where(x <= -512, power + power * rest, fma(power, rest, power))
        exponent = whole >> _BITS
        half = exponent >> 1
        result = near * _two_to(half) * _two_to(exponent - half)
        return torch.where(x > _HIGHEST, math.inf, torch.where(x < _LOWEST, 0.0, result))


@functools.cache
def _is_fused() -> bool:
    """Whether ``math.exp`` fuses products and sums in this process."""
    cpu = torch.device("cpu")
    probes = torch.tensor(_PROBES, dtype=torch.float64, device=cpu)
    return Exponential(cpu, _separate)(probes).tolist() != [math.exp(x) for x in _PROBES]
