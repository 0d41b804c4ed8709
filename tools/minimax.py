"""Derives every coefficient of include/onepass/lane/coefficients.h and prints that file.

    pip install mpmath
    python tools/minimax.py > include/onepass/lane/coefficients.h

Each function is approximated where math.h evaluates it, by the polynomial or quotient of polynomials whose largest
weighted error is smallest (Remez' exchange), in 40-digit arithmetic. Coefficients are then rounded to the type that
will hold them one at a time, lowest power first, and the rest are fitted again after each: the later ones make good
most of what rounding the earlier ones cost. The error that each comment states is that of the rounded coefficients,
with exact arithmetic; tests/lane/math_test.cc sweeps what the machine's arithmetic adds.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import dataclass

from mpmath import cos, erf, erfc, exp, expm1, log, log1p, lu_solve, matrix, mp, mpf, nstr, pi, sqrt, tanh

mp.dps = 40

Real = mpf
Function = Callable[[Real], Real]


def rounded(value: Real, bits: int) -> Real:
    """The float32 (bits = 32) or float64 (bits = 64) nearest to `value`."""
    if bits == 64:
        return mpf(float(value))
    return mpf(struct.unpack("f", struct.pack("f", float(value)))[0])


@dataclass
class Fit:
    """numerator(x) / denominator(x), coefficients lowest power first, and the largest weighted error."""

    numerator: list[Real]
    denominator: list[Real]
    error: Real


def polynomial(coefficients: list[Real], x: Real) -> Real:
    """The value at x of the polynomial with these coefficients, lowest power first."""
    total = mpf(0)
    for c in reversed(coefficients):
        total = total * x + c
    return total


def extrema(errors: list[Real], count: int) -> list[int]:
    """Indices of `count` errors of alternating sign that include the largest; fewer where there are fewer."""
    found: list[int] = []
    for i, e in enumerate(errors):
        if found and (errors[found[-1]] > 0) == (e > 0):
            if abs(e) > abs(errors[found[-1]]):
                found[-1] = i
        elif e != 0:
            found.append(i)
    while len(found) > count:  # drop from the end that has the smaller error
        found.pop(0 if abs(errors[found[0]]) < abs(errors[found[-1]]) else -1)
    return found


class Approximation:
    """f(x) on (low, high) by a quotient of polynomials, the error weighted by weight(x); denominator[0] is 1."""

    def __init__(
        self, f: Function, low: Real, high: Real, weight: Function, degrees: tuple[int, int], grid: int = 1500
    ):
        """Degrees of numerator and denominator; errors are looked at in `grid` points, closer at the ends."""
        self.degrees = degrees
        middle, half = (mpf(low) + high) / 2, (mpf(high) - low) / 2
        self.x = [middle - half * cos(pi * (2 * i + 1) / (2 * grid)) for i in range(grid)]
        self.f = [f(x) for x in self.x]
        self.w = [abs(weight(x)) for x in self.x]

    def errors(self, numerator: list[Real], denominator: list[Real]) -> list[Real]:
        """The weighted error at each grid point."""
        return [
            w * (polynomial(numerator, x) / polynomial(denominator, x) - f)
            for x, f, w in zip(self.x, self.f, self.w, strict=True)
        ]

    def solve(self, fixed: dict[tuple[int, int], Real], start: Fit | None) -> Fit:
        """Remez' exchange. fixed[0, i] holds numerator coefficient i, fixed[1, i] denominator coefficient i."""
        names = [(part, i) for part in (0, 1) for i in range(self.degrees[part] + 1) if (part, i) not in fixed]
        best = start
        points: list[int] = []
        if start is not None:
            points = extrema(self.errors(start.numerator, start.denominator), len(names) + 1)
        if len(points) < len(names) + 1:
            n = len(names) + 1
            points = [round((1 - cos(pi * i / (n - 1))) / 2 * (len(self.x) - 1)) for i in range(n)]
        denominator = start.denominator if start else [mpf(1)] + [mpf(0)] * self.degrees[1]
        for _ in range(60):
            numerator, denominator = self.interpolate(names, fixed, points, denominator)
            errors = self.errors(numerator, denominator)
            worst = max(abs(e) for e in errors)
            if best is None or worst < best.error or best is start:
                best = Fit(numerator, denominator, worst)
            chosen = extrema(errors, len(names) + 1)
            if len(chosen) < len(names) + 1 or chosen == points:
                break
            points = chosen
        return best

    def interpolate(
        self,
        names: list[tuple[int, int]],
        fixed: dict[tuple[int, int], Real],
        points: list[int],
        denominator: list[Real],
    ) -> tuple[list[Real], list[Real]]:
        """Coefficients whose weighted errors at `points` are equal with alternating sign."""
        for _ in range(40 if self.degrees[1] else 1):
            a, b = matrix(len(points), len(names) + 1), matrix(len(points), 1)
            for row, at in enumerate(points):
                x, f = self.x[at], self.f[at]
                for column, (part, i) in enumerate(names):
                    a[row, column] = x**i if part == 0 else -f * x**i
                a[row, len(names)] = (-1) ** row / self.w[at] * polynomial(denominator, x)
                b[row] = -sum(c * (x**i if part == 0 else -f * x**i) for (part, i), c in fixed.items())
            solution = lu_solve(a, b)
            parts = [[mpf(0)] * (self.degrees[0] + 1), [mpf(0)] * (self.degrees[1] + 1)]
            for (part, i), c in list(fixed.items()) + [(name, solution[k]) for k, name in enumerate(names)]:
                parts[part][i] = c
            change = max(abs(p - q) for p, q in zip(parts[1], denominator, strict=True))
            denominator = parts[1]
            if change < mpf(10) ** -25:
                break
        return parts[0], denominator

    def fit(self, bits: int, fixed: dict[tuple[int, int], Real]) -> Fit:
        """The fit with coefficients of the type with this many bits."""
        fixed = {(1, 0): mpf(1), **fixed}
        fit = self.solve(fixed, None)
        order = sorted((i, part) for part in (0, 1) for i in range(self.degrees[part] + 1) if (part, i) not in fixed)
        for count, (i, part) in enumerate(order):
            fixed[part, i] = rounded((fit.numerator, fit.denominator)[part][i], bits)
            if count + 1 < len(order):
                fit = self.solve(fixed, fit)
        numerator = [fixed[0, i] for i in range(self.degrees[0] + 1)]
        denominator = [fixed[1, i] for i in range(self.degrees[1] + 1)]
        return Fit(numerator, denominator, max(abs(e) for e in self.errors(numerator, denominator)))


# --- the functions of math.h

LN2 = log(2)


def exponential(low: Real, high: Real, degree: int, bits: int) -> Fit:
    """p with exp(r) - 1 = r + r² p(r) on (low, high); relative error of exp(r) - 1."""
    f = Approximation(lambda r: (expm1(r) - r) / r**2, low, high, lambda r: r**2 / expm1(r), (degree, 0))
    return f.fit(bits, {})


def logarithm() -> Fit:
    """p with log(1 + f) = f + f² p(f) on (-1/4, 1/2); relative error of log(1 + f)."""
    low, high = mpf(-1) / 4, mpf(1) / 2
    return Approximation(lambda f: (log1p(f) - f) / f**2, low, high, lambda f: f**2 / log1p(f), (8, 0)).fit(32, {})


def error_function() -> Fit:
    """p with erf(x) = x + x p(x²) for |x| < 0.6; relative error of erf(x)."""
    return Approximation(
        lambda s: erf(sqrt(s)) / sqrt(s) - 1, mpf(0), mpf(36) / 100, lambda s: sqrt(s) / erf(sqrt(s)), (4, 0)
    ).fit(32, {})


def hyperbolic_tangent() -> Fit:
    """p with tanh(x) = x + x³ p(x²) for |x| < 0.7; relative error of tanh(x)."""
    return Approximation(
        lambda s: (tanh(sqrt(s)) / sqrt(s) - 1) / s if s else mpf(-1) / 3,
        mpf(0),
        mpf("0.7") ** 2,
        lambda s: s * sqrt(s) / tanh(sqrt(s)) if s else mpf(0),
        (5, 0),
    ).fit(32, {})


def tail(t: Real) -> Real:
    """Mills' ratio of the normal distribution over sqrt(2 pi): Phi(-t) = exp(-t²/2) tail(t)."""
    return erfc(t / sqrt(2)) / 2 * exp(t * t / 2)


def normal_tail() -> Fit:
    """tail(t) on (0, 13.3), past which Phi(-t) is no normal float32; relative error.

    Exactly 3/4 over 3/2 at 0: with both parts in the middle of a binade, where rounding costs relatively less, the
    largest absolute error of Phi falls from 1.3e-7 (with 1/2 over 1) to 1.1e-7.
    """
    fixed = {(0, 0): mpf(3) / 4, (1, 0): mpf(3) / 2}
    return Approximation(tail, mpf(0), mpf("13.3"), lambda t: 1 / tail(t), (4, 5), grid=800).fit(32, fixed)


SHORT_TAIL_SLOPE = mpf("0.3")


def short_tail(degree: int) -> Fit:
    """p with tail(t) = s p(s), s = 1 / (1 + 0.3 t), on (0, 13.3); relative error. For results of 16 bits."""

    def distance(s: Real) -> Real:
        return (1 / s - 1) / SHORT_TAIL_SLOPE

    low = 1 / (1 + SHORT_TAIL_SLOPE * mpf("13.3"))
    return Approximation(
        lambda s: tail(distance(s)) / s, low, mpf(1), lambda s: s / tail(distance(s)), (degree, 0), grid=800
    ).fit(32, {})


def tail_exponent() -> Fit:
    """p with Phi(-t) = 2^p(t) on (0, 13); relative error of Phi up to 4, then doubled with each 1, up to 32 fold."""

    def weight(t: Real) -> Real:
        return LN2 / min(mpf(2) ** max(t - 4, mpf(0)), mpf(32))

    return Approximation(lambda t: log(erfc(t / sqrt(2)) / 2, 2), mpf(0), mpf(13), weight, (7, 0), grid=800).fit(32, {})


def short_exponential() -> Fit:
    """2^x on [-1/2, 1/2], relative error. For results of 16 bits."""
    return Approximation(lambda x: mpf(2) ** x, mpf(-1) / 2, mpf(1) / 2, lambda x: mpf(2) ** -x, (4, 0), grid=600).fit(
        32, {}
    )


def literal(value: Real, bits: int) -> str:
    """The shortest decimal that reads back as this number of this type."""
    digits = next(d for d in range(1, 18) if rounded(mpf(f"{float(value):.{d}g}"), bits) == value)
    text = f"{float(value):.{digits}g}"
    if "." not in text and "e" not in text:
        text += ".0"
    return text + ("f" if bits == 32 else "")


def split(value: Real, kept: int, bits: int) -> tuple[Real, Real]:
    """value = high + low, where high has `kept` significant bits and low is rounded."""
    scale = mpf(2) ** (kept - 1 - int(mp.floor(log(value, 2))))
    high = mp.floor(value * scale + mpf(1) / 2) / scale
    return high, rounded(value - high, bits)


def array(name: str, values: list[Real], bits: int, comment: str) -> str:
    """A constexpr array, lowest power first, at most 120 columns wide."""
    kind = "float" if bits == 32 else "double"
    lines, line = [], f"constexpr {kind} {name}[] = {{"
    indent = " " * len(line)
    for i, value in enumerate(values):
        item = literal(value, bits) + ("};" if i + 1 == len(values) else ", ")
        if len(line) + len(item) > 120:
            lines.append(line.rstrip())
            line = indent
        line += item
    return "\n".join([f"// {comment}", *lines, line])


def header() -> str:
    """The text of include/onepass/lane/coefficients.h."""
    out = [
        "// Coefficients of the functions in math.h, lowest power first. Written by tools/minimax.py.",
        "#pragma once",
        "",
        "namespace onepass::coefficients {",
        "",
    ]
    for bits, suffix, kept in ((32, "f32", 15), (64, "f64", 32)):
        high, low = split(LN2, kept, bits)
        kind = "float" if bits == 32 else "double"
        out += [
            f"// ln 2 = high + low; high has {kept} significant bits, so that an exponent times high is exact.",
            f"constexpr {kind} kLn2High_{suffix} = {literal(high, bits)}, kLn2Low_{suffix} = {literal(low, bits)};",
        ]
    for name, fit, bits, comment in (
        ("kExpNearest_f32", exponential(-LN2 / 2, LN2 / 2, 4, 32), 32, "exp(r) - 1 = r + r² p(r) for |r| <= ln 2 / 2"),
        ("kExpNearest_f64", exponential(-LN2 / 2, LN2 / 2, 9, 64), 64, "The same"),
        ("kExpBelow_f32", exponential(mpf(0), LN2, 4, 32), 32, "exp(r) - 1 = r + r² p(r) for 0 <= r <= ln 2"),
        ("kExpBelow_f64", exponential(mpf(0), LN2, 9, 64), 64, "The same"),
        ("kLog1p_f32", logarithm(), 32, "log(1 + f) = f + f² p(f) on [-1/4, 1/2]"),
        ("kErf_f32", error_function(), 32, "erf(x) = x + x p(x²) on [-0.6, 0.6]"),
        ("kTanh_f32", hyperbolic_tangent(), 32, "tanh(x) = x + x³ p(x²) on [-0.7, 0.7]"),
    ):
        out += [array(name, fit.numerator, bits, f"{comment}, relative error {nstr(fit.error, 2)}.")]
    fit = normal_tail()
    comment = f"Φ(-t) = exp(-t²/2) p(t) / q(t) on [0, 13.3], relative error {nstr(fit.error, 2)}; exact at 0."
    out += [array("kTailNumerator_f32", fit.numerator, 32, comment)]
    out += [array("kTailDenominator_f32", fit.denominator, 32, "q")]
    fit = short_tail(5)
    slope = f"{float(SHORT_TAIL_SLOPE):g}"
    out += [
        f"// Φ(-t) = exp(-t²/2) s p(s) with s = 1 / (1 + {slope} t) on [0, 13.3], relative error {nstr(fit.error, 2)}.",
        f"constexpr float kShortTailSlope_f32 = {literal(rounded(SHORT_TAIL_SLOPE, 32), 32)};",
        array("kShortTail_f32", fit.numerator, 32, "p").split("\n", 1)[1],
    ]
    fit = tail_exponent()
    comment = f"Φ(-t) = 2^p(t) on [0, 13], relative error {nstr(fit.error, 2)} up to 4, at most 32 times that behind."
    out += [array("kTailExponent_f32", fit.numerator, 32, comment)]
    fit = short_exponential()
    comment = f"2^x on [-1/2, 1/2], relative error {nstr(fit.error, 2)}."
    out += [array("kShortExp2_f32", fit.numerator, 32, comment)]
    out += ["", "}  // namespace onepass::coefficients"]
    return "\n".join(out)


if __name__ == "__main__":
    print(header())
