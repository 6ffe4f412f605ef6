"""The curve in the terminal."""

import doctest

import pytest

from examples import text_plot as module
from examples.text_plot import text_plot


def test_the_docstring_shows_what_is_drawn():
    assert doctest.testmod(module).failed == 0


def test_many_values_are_averaged_into_the_columns_that_fit():
    plot = text_plot([5.0] * 500 + [1.0] * 500, "loss", width=10, height=5)
    title, top, *_, bottom, axis = plot.splitlines()
    assert title == "loss"
    assert top == "  5.00 ┤█████"
    assert bottom == "       ┤██████████"
    assert axis == "  0.00 └──────────"


@pytest.mark.parametrize("values", [[0.0], [0.0, 0.0], [3.5]])
def test_short_and_flat_curves_are_drawn(values):
    assert len(text_plot(values, "loss", height=4).splitlines()) == 6
