"""PTX's types, and their arithmetic in exact fractions: what instructions are compared with."""

import math
from fractions import Fraction
from typing import NamedTuple

import numpy as np


class Floating(NamedTuple):
    """Digits of a fraction with the leading one, and the exponents of the least and the greatest
    normal number.
    """

    digits: int
    least: int
    greatest: int
    size: int

    @property
    def limit(self):
        return Fraction(2) ** self.greatest * (2 - Fraction(2) ** (1 - self.digits))


FLOATING = {
    "f16": Floating(11, -14, 15, 2),
    "bf16": Floating(8, -126, 127, 2),
    "f32": Floating(24, -126, 127, 4),
    "f64": Floating(53, -1022, 1023, 8),
}
ROUNDING = {"n": round, "z": math.trunc, "m": math.floor, "p": math.ceil}  # ties to even


def size_of(type_):
    """Bytes: "s32" -> 4, "pred" -> 0."""
    return 0 if type_ == "pred" else int("".join(filter(str.isdigit, type_.split("x")[0]))) // 8


def rounded(number, type_, how="n"):
    """A fraction as the type's number, a float64 that holds it."""
    number = Fraction(number)
    if number == 0:
        return 0.0
    kind = FLOATING[type_]
    exponent = math.frexp(float(number))[1] - 1 if abs(number) < 2**1000 else 1000
    while abs(number) >= Fraction(2) ** (exponent + 1):
        exponent += 1
    while abs(number) < Fraction(2) ** exponent:
        exponent -= 1
    quantum = Fraction(2) ** (max(exponent, kind.least) - kind.digits + 1)
    result = ROUNDING[how](number / quantum) * quantum
    if abs(result) > kind.limit:
        away = {"n": True, "z": False, "m": number < 0, "p": number > 0}[how]
        result = math.inf if away else float(kind.limit)
        return -result if number < 0 else result
    return -float(-result) if number < 0 else float(result)


def exactly(function, type_):
    """Make an instruction that rounds the exact result of a function of fractions once.

    The function gets float64 numbers if an operand is not finite or the result is 0.
    """

    def instruction(*operands):
        if all(map(math.isfinite, operands)):
            try:
                exact = function(*map(Fraction, operands))
            except ZeroDivisionError:
                exact = 0
            if exact != 0:
                return rounded(exact, type_)
        else:  # beside an infinity or NaN, only the sign of a finite number matters
            operands = [math.copysign(1, x) if math.isfinite(x) and x else x for x in operands]
        with np.errstate(all="ignore"):
            return float(function(*map(np.float64, operands)))

    return instruction


def flushed(type_):
    """A subnormal number as a zero of its sign."""
    least = 2.0 ** FLOATING[type_].least

    def flush(number):
        return math.copysign(0.0, number) if abs(number) < least else number

    return flush


def with_flush(instruction, type_):
    """The instruction with .ftz."""
    flush = flushed(type_)
    return lambda *operands: flush(instruction(*map(flush, operands)))


def bits_of(number, type_):
    """A number's bits, as an integer; of an integer, its last bits."""
    if type_ == "pred":
        return int(number)
    size = size_of(type_)
    if type_ not in FLOATING:
        return int(number) & ((1 << 8 * size) - 1)
    if type_ == "bf16":
        return int(np.float32(number).view(np.uint32)) >> 16
    as_float = {2: np.float16, 4: np.float32, 8: np.float64}[size]
    return int(as_float(number).view({2: np.uint16, 4: np.uint32, 8: np.uint64}[size]))


def number_of(bits, type_):
    """The number of bits; halves of bf16 and fp16 as floats."""
    size = size_of(type_)
    if type_ == "bf16":
        return float(np.uint32(bits << 16).view(np.float32))
    if type_ in FLOATING:
        as_bits = {2: np.uint16, 4: np.uint32, 8: np.uint64}[size]
        return float(as_bits(bits).view({2: np.float16, 4: np.float32, 8: np.float64}[size]))
    if type_[0] == "s" and bits >> (8 * size - 1):
        return bits - (1 << 8 * size)
    return bits


def is_same(bits, expected, type_):
    """True if two numbers have the same bits or are both NaN."""
    if type_ in FLOATING and math.isnan(number_of(expected, type_)):
        return math.isnan(number_of(bits, type_))
    return bits == expected
