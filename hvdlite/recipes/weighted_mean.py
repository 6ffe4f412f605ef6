"""The weighted mean of float64 numbers, rounded once.

A float64 is a fraction a / 2**s with integers a and s. Sums and products of such fractions are
again such fractions, so Python's integers hold sum(w·x) and sum(w) without rounding, and their
quotient is the float64 nearest to the true mean. It does not depend on how the samples were dealt
to ranks, nor on their order.
"""

from __future__ import annotations

import math

Fraction2 = tuple[int, int]  # a, s: the number a / 2**s
State = tuple[Fraction2, Fraction2, float]


class WeightedMean:
    """sum(w·x) / sum(w) of the pairs added to it."""

    def __init__(self, state: State = ((0, 0), (0, 0), 0.0)) -> None:
        """state: that of another, to start from."""
        # Of the finite ones: sum(w·x), sum(w). Then the sum of the values that are infinite or NaN.
        self._total, self._weight, self._not_finite = state

    def add(self, value: float, weight: float) -> None:
        """weight: finite, at least 0. With 0 the value does not count, NaN neither."""
        if weight == 0:
            return
        exact = _exact(weight)
        self._weight = _plus(self._weight, exact)
        if math.isfinite(value):
            self._total = _plus(self._total, _times(exact, _exact(value)))
        else:
            self._not_finite += value

    def merge(self, state: State) -> None:
        """Adds all pairs of another."""
        total, weight, not_finite = state
        self._total = _plus(self._total, total)
        self._weight = _plus(self._weight, weight)
        self._not_finite += not_finite

    def state(self) -> State:
        return self._total, self._weight, self._not_finite

    def result(self) -> float:
        """NaN where all weights are 0, and where a value was; infinite where one was."""
        (total, total_shift), (weight, weight_shift) = self._total, self._weight
        if self._not_finite != 0:
            return self._not_finite
        if weight == 0:
            return math.nan
        shift = weight_shift - total_shift
        # Python divides integers with one rounding. A mean is between two float64: no overflow.
        return (total << max(shift, 0)) / (weight << max(-shift, 0))


def _exact(number: float) -> Fraction2:
    numerator, denominator = number.as_integer_ratio()
    return numerator, denominator.bit_length() - 1


def _times(one: Fraction2, other: Fraction2) -> Fraction2:
    return one[0] * other[0], one[1] + other[1]


def _plus(one: Fraction2, other: Fraction2) -> Fraction2:
    if one[1] < other[1]:
        one, other = other, one
    return one[0] + (other[0] << (one[1] - other[1])), one[1]
