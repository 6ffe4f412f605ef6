"""A curve drawn with characters, for terminals and logs."""

from collections.abc import Sequence
from itertools import pairwise

EIGHTHS = " ▁▂▃▄▅▆▇█"


def text_plot(values: Sequence[float], title: str, width: int = 64, height: int = 8) -> str:
    """Columns of blocks over a zero line; each column is the mean of its share of the values.

    >>> print(text_plot([4, 3, 2, 1], "loss", height=2))
    loss
      4.00 ┤█▄
           ┤███▄
      0.00 └────
    """
    width = min(width, len(values))
    bounds = [len(values) * column // width for column in range(width + 1)]
    columns = [sum(values[start:end]) / (end - start) for start, end in pairwise(bounds)]

    top = max(columns)
    eighths = [round(8 * height * column / top) if top > 0 else 0 for column in columns]
    lines = [title]
    for row in reversed(range(height)):
        label = f"{top:6.2f}" if row == height - 1 else " " * 6
        blocks = "".join(EIGHTHS[min(max(count - 8 * row, 0), 8)] for count in eighths)
        lines.append(f"{label} ┤{blocks}".rstrip())
    lines.append(f"{0:6.2f} └{'─' * width}")
    return "\n".join(lines)
