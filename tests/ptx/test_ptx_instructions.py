"""The PTX interpreter's instructions, by group, against exact arithmetic in Python.

Each instruction runs over many operands in whole warps, which take vector instructions, and again
in every third lane.
"""

import itertools
import math
from fractions import Fraction

import numpy as np
import ptx_run
import ptx_types
import pytest
from ptx_types import bits_of, exactly, flushed, number_of, rounded, size_of, with_flush

pytestmark = pytest.mark.exhaustive  # a minute of the compiler, to test the interpreter itself

NUMPY = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}
LETTER = {1: "rs", 2: "rs", 4: "r", 8: "rd"}
INF, NAN = math.inf, math.nan

FLOATS = {
    "f32": (0.0, 1.0, 1.5, 1 / 3, 3.4e38, 2.0**-126, 1e-40, 2.0**-149, 16777217.0, 0.1, INF, NAN),
    "f64": (0.0, 1.0, 1.5, 1 / 3, 1.7e308, 2.0**-1022, 1e-310, 5e-324, 2.0**53 + 2, 0.1, INF, NAN),
    "bf16": (0.0, 1.0, 1.5, 0.333984375, 3e38, 2.0**-126, 2.0**-133, 257.0, INF, NAN),
    "f16": (0.0, 1.0, 1.5, 0.333, 65504.0, 2.0**-14, 2.0**-24, 2049.0, INF, NAN),
}


def values(type_, few=False):
    """The bits of the operands of an instruction."""
    if type_ == "pred":
        return (0, 1)
    if type_ in FLOATS:
        positive = (*FLOATS[type_][:6], INF, NAN) if few else FLOATS[type_]
        numbers = [*positive, *(-number for number in positive)]
        return tuple(dict.fromkeys(bits_of(rounded_to(number, type_), type_) for number in numbers))
    bits = 8 * size_of(type_)
    top = 1 << (bits - 1)
    numbers = (0, 1, 2, 3, 7, -1, -2, top, top - 1, top + 1, 31, 32, 33, 64, 0x5A5A3C96, 0x01234567)
    numbers = numbers[:10] if few else numbers
    return tuple(dict.fromkeys(number & ((1 << bits) - 1) for number in numbers))


def rounded_to(number, type_):
    return rounded(number, type_) if math.isfinite(number) and number else number


def run(instruction, result, types, operands, every=1):
    """The bits of the results of an instruction over rows of operands.

    If ``every`` is 3, only every third lane runs, and the others keep ones.
    """
    n = len(operands)
    columns = [
        np.array(column, NUMPY[size_of(type_) or 4])
        for column, type_ in zip(zip(*operands, strict=True), types, strict=True)
    ]
    text = ["mad.lo.u32 %r0, %block, 32, %tid;", f"setp.ge.u32 %p0, %r0, {n};", "@%p0 bra done;"]
    names, counts = [], dict.fromkeys(("rs", "r", "rd", "p"), 10)

    def name_of(type_):
        letter = LETTER[size_of(type_)] if type_ != "pred" else "p"
        counts[letter] += 1
        return f"%{letter}{counts[letter]}"

    for i, type_ in enumerate(types):
        name = name_of(type_)
        size = size_of(type_) or 4
        text.append(f"mad.wide.u32 %rd9, %r0, {size}, %rd{i + 1};")
        if type_ == "pred":
            text += ["ld.global.u32 %r9, [%rd9];", f"setp.ne.u32 {name}, %r9, 0;"]
        else:
            kind = "s8" if type_ == "s8" else f"u{8 * size}"
            text.append(f"ld.global.{kind} {name}, [%rd9];")
        names.append(name)
    d = name_of(result)
    size = size_of(result) or 4
    ones = "setp.eq.u32 {d}, 0, 0;" if result == "pred" else f"mov.b{max(8 * size, 16)} {{d}}, -1;"
    text += [
        ones.format(d=d),
        f"rem.u32 %r9, %r0, {every};",
        "setp.eq.u32 %p1, %r9, 0;",
        "@%p1 " + instruction.format(*names, d=d),
        f"mad.wide.u32 %rd9, %r0, {size}, %rd0;",
    ]
    if result == "pred":
        text.append(f"selp.b32 %r9, 1, 0, {d};")
        d = "%r9"
    text += [f"st.global.b{8 * size} [%rd9], {d};", "done:"]
    made = ptx_run.kernel("\n".join(text), parameters=len(types) + 1, registers=24)
    output = np.zeros(n, NUMPY[size])
    ptx_run.launch(made, output, *columns, blocks=-(-n // 32))
    return [int(number) for number in output]


def agrees(instruction, result, types, reference, operands=None):
    """``reference`` maps the operands to the result, all as numbers."""
    if operands is None:
        operands = list(itertools.product(*(values(type_, len(types) > 2) for type_ in types)))
    expected = []
    for row in operands:
        numbers = [
            number_of(bits, type_) if type_ != "pred" else bits
            for bits, type_ in zip(row, types, strict=True)
        ]
        expected.append(bits_of(reference(*numbers), result))
    for every in (1, 3):
        got = run(instruction, result, types, operands, every)
        for i in range(len(operands)):
            if i % every:
                continue
            assert ptx_types.is_same(got[i], expected[i], result), (
                f"{instruction} of {[hex(bits) for bits in operands[i]]}: "
                f"{hex(got[i])}, not {hex(expected[i])}"
            )
        if every == 3 and result != "pred":
            ones = (1 << 8 * size_of(result)) - 1
            assert all(got[i] == ones for i in range(len(operands)) if i % 3)


def truncated(a, b):
    quotient = abs(a) // abs(b)
    return quotient if (a < 0) == (b < 0) else -quotient


INTEGER = {
    "add": lambda a, b: a + b,
    "sub": lambda a, b: a - b,
    "mul.lo": lambda a, b: a * b,
    "min": min,
    "max": max,
    "div": lambda a, b: truncated(a, b) if b else -1,
    "rem": lambda a, b: a - truncated(a, b) * b if b else a,
}


@pytest.mark.parametrize("type_", ["u16", "s16", "u32", "s32", "u64", "s64"])
@pytest.mark.parametrize("name", INTEGER)
def test_integers(name, type_):
    agrees(f"{name}.{type_} {{d}}, {{0}}, {{1}};", type_, (type_, type_), INTEGER[name])


@pytest.mark.parametrize("type_", ["u16", "s16", "u32", "s32", "u64", "s64"])
def test_integers_of_one_or_three_operands(type_):
    agrees(
        f"mad.lo.{type_} {{d}}, {{0}}, {{1}}, {{2}};",
        type_,
        (type_,) * 3,
        lambda a, b, c: a * b + c,
    )
    agrees(f"neg.{type_} {{d}}, {{0}};", type_, (type_,), lambda a: -a)
    if type_[0] == "s":
        agrees(f"abs.{type_} {{d}}, {{0}};", type_, (type_,), abs)


@pytest.mark.parametrize("type_", ["u16", "s16", "u32", "s32"])
def test_products_of_twice_the_width(type_):
    wide = type_[0] + str(2 * int(type_[1:]))
    agrees(f"mul.wide.{type_} {{d}}, {{0}}, {{1}};", wide, (type_, type_), lambda a, b: a * b)
    agrees(
        f"mad.wide.{type_} {{d}}, {{0}}, {{1}}, {{2}};",
        wide,
        (type_, type_, wide),
        lambda a, b, c: a * b + c,
    )


@pytest.mark.parametrize("type_", ["u32", "s32", "u64", "s64"])
def test_upper_halves_of_products(type_):
    agrees(
        f"mul.hi.{type_} {{d}}, {{0}}, {{1}};",
        type_,
        (type_, type_),
        lambda a, b: a * b >> int(type_[1:]),
    )


LOGIC = {"and": lambda a, b: a & b, "or": lambda a, b: a | b, "xor": lambda a, b: a ^ b}


@pytest.mark.parametrize("type_", ["b16", "b32", "b64", "pred"])
def test_logic(type_):
    for name, function in LOGIC.items():
        agrees(f"{name}.{type_} {{d}}, {{0}}, {{1}};", type_, (type_, type_), function)
    invert = (lambda a: 1 - a) if type_ == "pred" else (lambda a: ~a)
    agrees(f"not.{type_} {{d}}, {{0}};", type_, (type_,), invert)
    agrees(f"mov.{type_} {{d}}, {{0}};", type_, (type_,), lambda a: a)
    agrees(
        "selp.b32 {d}, {0}, {1}, {2};", "b32", ("b32", "b32", "pred"), lambda a, b, p: a if p else b
    )


@pytest.mark.parametrize("bits", [16, 32, 64])
def test_shifts(bits):
    """Shifts may exceed the width."""
    agrees(
        f"shl.b{bits} {{d}}, {{0}}, {{1}};",
        f"b{bits}",
        (f"b{bits}", "u32"),
        lambda a, by: a << by if by < 64 else 0,
    )
    for kind in "us":
        type_ = f"{kind}{bits}"
        agrees(
            f"shr.{type_} {{d}}, {{0}}, {{1}};",
            type_,
            (type_, "u32"),
            lambda a, by: a >> min(by, 64),
        )


def test_funnel_shifts():
    def window(a, b):
        return b << 32 | a

    three = ("b32", "b32", "u32")
    agrees(
        "shf.r.wrap.b32 {d}, {0}, {1}, {2};",
        "b32",
        three,
        lambda a, b, by: window(a, b) >> (by & 31),
    )
    agrees(
        "shf.l.wrap.b32 {d}, {0}, {1}, {2};",
        "b32",
        three,
        lambda a, b, by: window(a, b) << (by & 31) >> 32,
    )
    agrees(
        "shf.r.clamp.b32 {d}, {0}, {1}, {2};",
        "b32",
        three,
        lambda a, b, by: window(a, b) >> min(by, 32),
    )
    agrees(
        "shf.l.clamp.b32 {d}, {0}, {1}, {2};",
        "b32",
        three,
        lambda a, b, by: window(a, b) << min(by, 32) >> 32,
    )


FIELDS = list(itertools.product((0, 1, 5, 16, 31, 32, 63, 64, 255, 256), repeat=2))


@pytest.mark.parametrize("type_", ["u32", "s32", "u64", "s64"])
def test_fields(type_):
    bits = int(type_[1:])

    def taken(a, position, length):
        position, length = position & 255, length & 255
        sign = bool(type_[0] == "s" and length and a >> min(position + length - 1, bits - 1) & 1)
        field = [
            a >> (position + k) & 1 if k < length and position + k < bits else sign
            for k in range(bits)
        ]
        return sum(bit << k for k, bit in enumerate(field))

    operands = [(a, *field) for a in values(type_) for field in FIELDS]
    agrees(
        f"bfe.{type_} {{d}}, {{0}}, {{1}}, {{2}};", type_, (type_, "u32", "u32"), taken, operands
    )

    def inserted(a, b, position, length):
        position, length = position & 255, length & 255
        for k in range(min(length, max(bits - position, 0))):
            b = b & ~(1 << (position + k)) | (a >> k & 1) << (position + k)
        return b

    if type_[0] == "u":
        word = f"b{bits}"
        operands = [
            (a, b, *field)
            for a in values(word, True)
            for b in (0, (1 << bits) - 1, 0x5A3C)
            for field in FIELDS
        ]
        agrees(
            f"bfi.{word} {{d}}, {{0}}, {{1}}, {{2}}, {{3}};",
            word,
            (word, word, "u32", "u32"),
            inserted,
            operands,
        )


@pytest.mark.parametrize("bits", [32, 64])
def test_counts_of_bits(bits):
    word = f"b{bits}"
    agrees(f"popc.{word} {{d}}, {{0}};", "u32", (word,), lambda a: bin(a).count("1"))
    agrees(f"clz.{word} {{d}}, {{0}};", "u32", (word,), lambda a: bits - a.bit_length())
    agrees(f"brev.{word} {{d}}, {{0}};", word, (word,), lambda a: int(f"{a:0{bits}b}"[::-1], 2))
    agrees(f"bfind.u{bits} {{d}}, {{0}};", "u32", (f"u{bits}",), lambda a: a.bit_length() - 1)
    agrees(
        f"bfind.s{bits} {{d}}, {{0}};",
        "u32",
        (f"s{bits}",),
        lambda a: (~a if a < 0 else a).bit_length() - 1,
    )


def test_bytes_and_tables():
    def permuted(a, b, selector):
        all_bytes = (b << 32 | a).to_bytes(8, "little")
        result = 0
        for k in range(4):
            choice = selector >> 4 * k & 15
            byte = all_bytes[choice & 7]
            if choice & 8:
                byte = 255 if byte & 128 else 0
            result |= byte << 8 * k
        return result

    selectors = (0x3210, 0x7654, 0x0123, 0x5410, 0xFEDC, 0x8888, 0x4BA9, 0xFFFF3210)
    operands = list(itertools.product((0x80FF7F01, 0x01234567), (0x89ABCDEF,), selectors))
    agrees("prmt.b32 {d}, {0}, {1}, {2};", "b32", ("b32",) * 3, permuted, operands)

    def looked_up(table):
        return lambda a, b, c: sum(
            (table >> ((a >> k & 1) << 2 | (b >> k & 1) << 1 | (c >> k & 1)) & 1) << k
            for k in range(32)
        )

    for table in (0x80, 0xFE, 0x96, 0xCA, 0xE8, 0):
        agrees(
            f"lop3.b32 {{d}}, {{0}}, {{1}}, {{2}}, {table};", "b32", ("b32",) * 3, looked_up(table)
        )


def divided(a, b):
    return a / b


ARITHMETIC = {
    "add.rn": (2, lambda a, b: a + b),
    "add": (2, lambda a, b: a + b),
    "sub.rn": (2, lambda a, b: a - b),
    "mul.rn": (2, lambda a, b: a * b),
    "div.rn": (2, divided),
    "fma.rn": (3, lambda a, b, c: a * b + c),
    "rcp.rn": (1, lambda a: 1 / a),
}


@pytest.mark.parametrize("name", ARITHMETIC)
@pytest.mark.parametrize("type_", ["f32", "f64", "ftz.f32", "bf16", "f16"])
def test_arithmetic_is_rounded_once(name, type_):
    count, function = ARITHMETIC[name]
    kind = type_.split(".")[-1]
    if kind in ("bf16", "f16") and name in ("div.rn", "rcp.rn"):
        return
    reference = exactly(function, kind)
    if type_ != kind:
        reference = with_flush(reference, kind)
    operands = ", ".join(f"{{{i}}}" for i in range(count))
    agrees(f"{name}.{type_} {{d}}, {operands};", kind, (kind,) * count, reference)


def least(a, b):
    if math.isnan(a) or math.isnan(b):
        return b if math.isnan(a) else a
    return min((a, b), key=lambda x: (x, math.copysign(1, x)))


def greatest(a, b):
    return -least(-a, -b)


def nan_of_any(function):
    return lambda a, b: NAN if math.isnan(a) or math.isnan(b) else function(a, b)


@pytest.mark.parametrize("type_", ["f32", "f64", "bf16", "f16"])
def test_extremes_and_signs(type_):
    for name, function in {"min": least, "max": greatest}.items():
        agrees(f"{name}.{type_} {{d}}, {{0}}, {{1}};", type_, (type_, type_), function)
        if type_ != "f64":
            agrees(
                f"{name}.NaN.{type_} {{d}}, {{0}}, {{1}};",
                type_,
                (type_, type_),
                nan_of_any(function),
            )
    agrees(f"neg.{type_} {{d}}, {{0}};", type_, (type_,), lambda a: -a)
    agrees(f"abs.{type_} {{d}}, {{0}};", type_, (type_,), abs)


def test_a_nan_of_arithmetic_has_one_pattern():
    nan = 0x7FC12345
    assert run("add.rn.f32 {d}, {0}, {1};", "f32", ("f32", "f32"), [(nan, 0)]) == [0x7FFFFFFF]
    assert run("max.f32 {d}, {0}, {1};", "f32", ("f32", "f32"), [(nan, nan)]) == [0x7FFFFFFF]
    assert run("mov.f32 {d}, {0};", "f32", ("f32",), [(nan,)]) == [nan]


def test_flushed_extremes_and_signs():
    one = {"abs": abs, "neg": lambda a: -a}
    for name, function in one.items():
        agrees(f"{name}.ftz.f32 {{d}}, {{0}};", "f32", ("f32",), with_flush(function, "f32"))
    for name, function in {"min": least, "max": greatest}.items():
        agrees(
            f"{name}.ftz.f32 {{d}}, {{0}}, {{1}};", "f32", ("f32",) * 2, with_flush(function, "f32")
        )


@pytest.mark.parametrize("type_", ["f32", "f64"])
def test_signs_are_copied(type_):
    code = f"copysign.{type_} {{d}}, {{0}}, {{1}};"
    agrees(code, type_, (type_,) * 2, lambda a, b: math.copysign(b, a))


def test_saturation():
    def to_one(x):
        return 0.0 if math.isnan(x) else min(max(x, 0.0), 1.0) + 0.0

    agrees(
        "add.sat.f32 {d}, {0}, {1};",
        "f32",
        ("f32",) * 2,
        lambda a, b: to_one(exactly(lambda x, y: x + y, "f32")(a, b)),
    )
    agrees("cvt.sat.f32.f32 {d}, {0};", "f32", ("f32",), to_one)


@pytest.mark.parametrize("type_", ["bf16", "f16", "f32"])
def test_pairs(type_):
    size = size_of(type_)
    both = f"b{16 * size}"
    numbers = values(type_, few=True)
    cases = {
        "add.rn": (2, exactly(lambda a, b: a + b, type_)),
        "mul.rn": (2, exactly(lambda a, b: a * b, type_)),
        "fma.rn": (3, exactly(lambda a, b, c: a * b + c, type_)),
        "min": (2, least),
        "max.NaN": (2, nan_of_any(greatest)),
    }
    for name, (count, function) in cases.items():
        if type_ == "f32" and not name.endswith("rn"):  # PTX has no extremes of two floats
            continue
        low = list(itertools.product(numbers, repeat=count))
        high = [operands[::-1] for operands in low]
        words = [
            tuple(b << 8 * size | a for a, b in zip(*pair, strict=True))
            for pair in zip(low, high, strict=True)
        ]
        text = f"{name}.{type_}x2 {{d}}, {', '.join(f'{{{i}}}' for i in range(count))};"
        got = run(text, both, (both,) * count, words)
        for word, *operands in zip(got, low, high, strict=True):
            parts = (word & ((1 << 8 * size) - 1), word >> 8 * size)
            for part, bits in zip(parts, operands, strict=True):
                expected = bits_of(function(*(number_of(each, type_) for each in bits)), type_)
                assert ptx_types.is_same(part, expected, type_), (name, bits)


def test_division_and_reciprocals_of_approximations():
    f32 = "f32"
    for name in ("ex2.approx", "ex2.approx.ftz"):
        flush = flushed(f32) if "ftz" in name else (lambda x: x)

        def power(x, flush=flush):
            x = flush(x)
            if not math.isfinite(x):
                return {INF: INF, -INF: 0.0}.get(x, NAN)
            return flush(rounded(Fraction(2.0 ** min(x, 200.0)) if x > -1000 else 0, f32))

        agrees(f"{name}.f32 {{d}}, {{0}};", f32, (f32,), power)
    one_over = exactly(lambda a: 1 / a, f32)
    agrees("rcp.approx.f32 {d}, {0};", f32, (f32,), one_over)
    agrees("rcp.approx.ftz.f32 {d}, {0};", f32, (f32,), with_flush(one_over, f32))
    agrees("div.full.f32 {d}, {0}, {1};", f32, (f32, f32), exactly(divided, f32))

    def logarithm(x):
        if math.isnan(x) or x < 0:
            return NAN
        return -INF if x == 0 else rounded_to(math.log2(x), f32)

    agrees("lg2.approx.f32 {d}, {0};", f32, (f32,), logarithm)


def test_perturbed_approximations():
    operands = [(bits_of(x, "f32"),) for x in np.linspace(-20, 20, 500).astype(np.float32)]
    exact = run("ex2.approx.ftz.f32 {d}, {0};", "f32", ("f32",), operands)
    ptx_run.set_options(perturb=2)
    try:
        moved = run("ex2.approx.ftz.f32 {d}, {0};", "f32", ("f32",), operands)
        again = run("ex2.approx.ftz.f32 {d}, {0};", "f32", ("f32",), operands)
    finally:
        ptx_run.set_options()
    assert moved == again
    off = {a - b for a, b in zip(moved, exact, strict=True)}
    assert off == {-2, -1, 0, 1, 2}


ORDERED = {
    "eq": lambda a, b: a == b,
    "ne": lambda a, b: a != b,
    "lt": lambda a, b: a < b,
    "le": lambda a, b: a <= b,
    "gt": lambda a, b: a > b,
    "ge": lambda a, b: a >= b,
}


@pytest.mark.parametrize("type_", ["u16", "s16", "u32", "s32", "u64", "s64"])
def test_comparisons_of_integers(type_):
    for name, function in ORDERED.items():
        agrees(f"setp.{name}.{type_} {{d}}, {{0}}, {{1}};", "pred", (type_, type_), function)


@pytest.mark.parametrize("type_", ["f32", "f64", "ftz.f32", "bf16", "f16"])
def test_comparisons_with_nan(type_):
    kind = type_.split(".")[-1]
    flush = flushed(kind) if type_ != kind else (lambda x: x)

    def unordered(a, b):
        return math.isnan(a) or math.isnan(b)

    for name, function in ORDERED.items():
        agrees(
            f"setp.{name}.{type_} {{d}}, {{0}}, {{1}};",
            "pred",
            (kind, kind),
            lambda a, b, f=function: not unordered(a, b) and f(flush(a), flush(b)),
        )
        agrees(
            f"setp.{name}u.{type_} {{d}}, {{0}}, {{1}};",
            "pred",
            (kind, kind),
            lambda a, b, f=function: unordered(a, b) or f(flush(a), flush(b)),
        )
    agrees(
        f"setp.num.{type_} {{d}}, {{0}}, {{1}};",
        "pred",
        (kind, kind),
        lambda a, b: not unordered(a, b),
    )
    agrees(f"setp.nan.{type_} {{d}}, {{0}}, {{1}};", "pred", (kind, kind), unordered)


INTEGERS = ("u8", "s8", "u16", "s16", "u32", "s32", "u64", "s64")


@pytest.mark.parametrize("to", INTEGERS)
@pytest.mark.parametrize("from_", INTEGERS)
def test_conversions_of_integers(from_, to):
    result = to if size_of(to) > 1 else f"{to[0]}16"  # extended to its register
    agrees(
        f"cvt.{to}.{from_} {{d}}, {{0}};", result, (from_,), lambda a: number_of(bits_of(a, to), to)
    )


@pytest.mark.parametrize("from_", ["u16", "s16", "u32", "s32", "u64", "s64"])
@pytest.mark.parametrize("to", FLOATS)
def test_conversions_to_floats(from_, to):
    agrees(f"cvt.rn.{to}.{from_} {{d}}, {{0}};", to, (from_,), lambda a: rounded(a, to))


@pytest.mark.parametrize("how", "nzmp")
@pytest.mark.parametrize("from_", FLOATS)
@pytest.mark.parametrize("to", ["u16", "s16", "u32", "s32", "u64", "s64"])
def test_conversions_to_integers(from_, to, how):
    """A number out of range becomes the nearest number in range."""
    bits = 8 * size_of(to)
    low, high = (-(1 << bits - 1), (1 << bits - 1) - 1) if to[0] == "s" else (0, (1 << bits) - 1)

    def converted(x):
        if math.isnan(x):
            return 1 << bits - 1 if from_ == "f64" or bits == 64 else 0
        if math.isinf(x):
            return high if x > 0 else low
        return min(max(ptx_types.ROUNDING[how](Fraction(x)), low), high)

    numbers = [0.5, 1.5, 2.5, -0.5, -1.5, 0.99, -0.99, 32767.4, 65535.6, 2147483520.0, 4294967040.0]
    operands = [*values(from_), *(bits_of(rounded(x, from_), from_) for x in numbers)]
    agrees(
        f"cvt.r{how}i.{to}.{from_} {{d}}, {{0}};",
        to,
        (from_,),
        converted,
        [(bits,) for bits in operands],
    )


def to_float(to, how="n"):
    return lambda x: rounded(x, to, how) if math.isfinite(x) and x else x


NARROWED = {
    "f64": (
        1 + 2.0**-24,
        1 + 3 * 2.0**-24,
        1 + 2.0**-24 + 2.0**-50,
        1e-45,
        7e-46,
        3.4028236e38,
        1e300,
        2.0**-150,
        65519.99,
        65520.0,
        2.0**-25,
        2.0**-25 * (1 + 2.0**-40),
    ),
    "f32": (
        1 + 2.0**-8,
        1 + 3 * 2.0**-8,
        1 + 2.0**-8 + 2.0**-23,
        65519.99,
        65520.0,
        65504.0,
        2.0**-25,
        2.0**-24 * 1.5,
        2.0**-14 * 0.9997,
        1 + 2.0**-11,
        1 + 3 * 2.0**-11,
        3.3961776e38,
        3.3895314e38,
    ),
}


@pytest.mark.parametrize(("from_", "to"), list(itertools.permutations(FLOATS, 2)))
def test_conversions_of_floats(from_, to):
    if "64" in from_ + to and "16" in from_ + to and from_ == "f64" and to == "bf16":
        return  # PTX has none
    rounds = ptx_types.FLOATING[to].digits < ptx_types.FLOATING[from_].digits
    rounds |= {from_, to} == {"bf16", "f16"}
    extra = [
        bits_of(sign * rounded(x, from_), from_)
        for x in NARROWED.get(from_, ())
        for sign in (1, -1)
    ]
    operands = [(bits,) for bits in (*values(from_), *extra)]
    rounding = ".rn" if rounds else ""
    agrees(f"cvt{rounding}.{to}.{from_} {{d}}, {{0}};", to, (from_,), to_float(to), operands)
    if (from_, to) == ("f64", "f32"):
        for how in "zmp":
            agrees(f"cvt.r{how}.f32.f64 {{d}}, {{0}};", to, (from_,), to_float(to, how), operands)


@pytest.mark.parametrize("type_", ["f32", "f64"])
@pytest.mark.parametrize("how", "nzmp")
def test_integral_parts(type_, how):
    numbers = [sign * x for x in (0.5, 1.5, 2.5, 0.49, 8388609.0, 1e20) for sign in (1, -1)]
    operands = [(bits,) for bits in (*values(type_), *(bits_of(x, type_) for x in numbers))]

    def part(x):
        return math.copysign(float(ptx_types.ROUNDING[how](x)), x) if math.isfinite(x) else x

    agrees(f"cvt.r{how}i.{type_}.{type_} {{d}}, {{0}};", type_, (type_,), part, operands)


@pytest.mark.parametrize("type_", ["bf16", "f16"])
def test_two_floats_are_packed(type_):
    """The first operand becomes the upper half."""
    numbers = [(a, b) for a in values("f32") for b in (bits_of(1.25, "f32"), bits_of(-0.1, "f32"))]
    got = run(f"cvt.rn.{type_}x2.f32 {{d}}, {{0}}, {{1}};", "b32", ("f32", "f32"), numbers)
    for word, (a, b) in zip(got, numbers, strict=True):
        high, low = (bits_of(to_float(type_)(number_of(x, "f32")), type_) for x in (a, b))
        assert ptx_types.is_same(word >> 16, high, type_)
        assert ptx_types.is_same(word & 0xFFFF, low, type_)


def test_vectors_of_registers():
    pack = "mov.b64 {d}, {{{0}, {1}}};"
    agrees(pack, "b64", ("b32", "b32"), lambda a, b: b << 32 | a)
    agrees("mov.b32 {d}, {{{0}, {1}}};", "b32", ("b16", "b16"), lambda a, b: b << 16 | a)
    agrees("mov.b64 {{_, {d}}}, {0};", "b32", ("b64",), lambda a: a >> 32)
    agrees("mov.b32 {{{d}, _}}, {0};", "b16", ("b32",), lambda a: a & 0xFFFF)


LANES = list(range(32))


def of_lanes(instruction, result="b32", operand="b32", numbers=None):
    """An instruction over one warp: lane i has the number 3 i + 1."""
    numbers = [3 * i + 1 for i in LANES] if numbers is None else numbers
    return run(instruction, result, (operand,), [(number,) for number in numbers])


SHUFFLES = {
    ("up", 3, 0): [i - 3 if i >= 3 else i for i in LANES],
    ("down", 5, 31): [i + 5 if i + 5 <= 31 else i for i in LANES],
    ("bfly", 16, 31): [i ^ 16 for i in LANES],
    ("bfly", 1, 31): [i ^ 1 for i in LANES],
    ("idx", 9, 31): [9] * 32,
    ("idx", 2, 0x181F): [i & 24 | 2 for i in LANES],  # in segments of 8 lanes
    ("down", 1, 0x181F): [i + 1 if i % 8 < 7 else i for i in LANES],
    ("up", 2, 0x1800): [i - 2 if i % 8 >= 2 else i for i in LANES],
}


@pytest.mark.parametrize("mode", SHUFFLES, ids=str)
def test_shuffles(mode):
    name, by, limits = mode
    expected = [3 * i + 1 for i in SHUFFLES[mode]]
    assert of_lanes(f"shfl.sync.{name}.b32 {{d}}, {{0}}, {by}, {limits}, -1;") == expected
    # A predicate says whether the lane asked for is inside.
    inside = of_lanes(f"shfl.sync.{name}.b32 %r20|{{d}}, {{0}}, {by}, {limits}, -1;", "pred")
    own = [
        by != 0 and source == i and not (name == "idx" and i & 31 == source)
        for i, source in enumerate(SHUFFLES[mode])
    ]
    assert inside == [int(not each) for each in own]


@pytest.mark.parametrize("count", [1, 2, 4])
def test_matrices(count):
    """Lane i gets two of the eight numbers in row i // 4. Lane i // 4 has the row's address."""
    numbers, registers = np.arange(count * 64, dtype=np.uint16), [f"%r{k}" for k in range(count)]
    given, got = ptx_run.aligned(count * 64, np.uint16), ptx_run.aligned(count * 32, np.uint32)
    given[:] = numbers
    stores = "".join(f"st.global.u32 [%rd1 + {128 * k}], %r{k};\n" for k in range(count))
    made = ptx_run.kernel(
        "mul.wide.u32 %rd2, %tid, 16;\nadd.u64 %rd0, %rd0, %rd2;\ncvt.u32.u64 %r5, %rd2;\n"
        f"setp.lt.u32 %p0, %tid, {8 * count};\nmov.u32 %r7, tile;\nadd.u32 %r7, %r7, %r5;\n"
        "@%p0 ld.global.v4.u32 {%r0, %r1, %r2, %r3}, [%rd0];\n"
        "@%p0 st.shared.v4.u32 [%r7], {%r0, %r1, %r2, %r3};\nbar.sync 0;\n"
        f"ldmatrix.sync.aligned.m8n8.x{count}.shared.b16 {{{', '.join(registers)}}}, [%r7];\n"
        f"mul.wide.u32 %rd3, %tid, 4;\nadd.u64 %rd1, %rd1, %rd3;\n{stores}",
        parameters=2,
        variables=".shared .align 16 .b8 tile[512];",
    )
    ptx_run.launch(made, given, got)
    assert got.view(np.uint16).tolist() == numbers.tolist()


def test_reductions():
    numbers = [(0x9E3779B9 * (i + 1)) & 0xFFFFFFFF for i in LANES]
    signed = [number_of(bits, "s32") for bits in numbers]
    cases = {
        "add.u32": sum(numbers) & 0xFFFFFFFF,
        "min.u32": min(numbers),
        "max.u32": max(numbers),
        "min.s32": min(signed) & 0xFFFFFFFF,
        "max.s32": max(signed) & 0xFFFFFFFF,
        "and.b32": int(np.bitwise_and.reduce(np.array(numbers, np.uint32))),
        "or.b32": int(np.bitwise_or.reduce(np.array(numbers, np.uint32))),
        "xor.b32": int(np.bitwise_xor.reduce(np.array(numbers, np.uint32))),
    }
    for name, expected in cases.items():
        got = of_lanes(f"redux.sync.{name} {{d}}, {{0}}, -1;", numbers=numbers)
        assert got == [expected] * 32


@pytest.mark.parametrize("votes", [0, 1 << 7, 0xFFFF0000, 0xFFFFFFFF, 0xFFFFFFFE], ids=hex)
def test_votes(votes):
    bits = [votes >> i & 1 for i in LANES]
    for name, yes in {
        "any": votes != 0,
        "all": votes == 0xFFFFFFFF,
        "uni": votes in (0, 0xFFFFFFFF),
    }.items():
        got = of_lanes(f"vote.sync.{name}.pred {{d}}, {{0}}, -1;", "pred", "pred", bits)
        assert got == [int(yes)] * 32
    ballot = of_lanes("vote.sync.ballot.b32 {d}, {0}, -1;", "b32", "pred", bits)
    assert ballot == [votes] * 32
    negated = of_lanes("vote.sync.ballot.b32 {d}, !{0}, -1;", "b32", "pred", bits)
    assert negated == [~votes & 0xFFFFFFFF] * 32


def test_elections():
    """One lane is elected, and it is another one among other lanes."""
    elected = of_lanes("elect.sync _|{d}, -1;", "pred")
    assert sum(elected) == 1
    some = run("elect.sync _|{d}, 1227133513;", "pred", ("b32",), [(0,)] * 32, every=3)
    assert sum(some[::3]) == 1
    assert some[::3] != elected[::3]


@pytest.mark.parametrize("size", [1, 2, 4, 8])
def test_loads_extend_to_their_register(size):
    array = np.arange(250, 250 + 32 * size, dtype=np.uint8).view(NUMPY[size])
    wide = {1: "16", 2: "32", 4: "64", 8: "64"}[size]
    register = {"16": "%rs1", "32": "%r1", "64": "%rd2"}[wide]
    for kind in "us":
        made = ptx_run.kernel(
            f"mad.wide.u32 %rd1, %tid, {size}, %rd0;\n"
            f"ld.global.{kind}{8 * size} {register}, [%rd1];\n"
            f"mad.wide.u32 %rd3, %tid, {int(wide) // 8}, %rd4;\n"
            f"st.global.b{wide} [%rd3], {register};",
            parameters=5,
        )
        out = np.zeros(32, NUMPY[int(wide) // 8])
        ptx_run.launch(made, array, 0, 0, 0, out)
        type_ = f"{kind}{8 * size}"
        expected = [bits_of(number_of(int(x), type_), f"{kind}{wide}") for x in array]
        assert [int(x) for x in out] == expected
