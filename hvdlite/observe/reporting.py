"""What the script says of its own progress."""

from __future__ import annotations

from typing import SupportsFloat

import torch

from hvdlite.observe import pulses
from hvdlite.world import world
from hvdrun.for_hvdlite import LONGEST_NAME, MOST_VALUES, is_name


def report_progress(*, step: int | None = None, **values: SupportsFloat) -> None:
    """Gives `hvdrun --monitor` numbers to show: the loss, the learning rate, an accuracy.

    Not collective: any rank may call it, as often as it likes, and hvdrun shows the mean of the
    ranks that do. It only keeps the values, which costs some microseconds; every two seconds the
    rank sends the latest. Only then is a tensor on a GPU read, because this waits for the GPU.
    Without `--monitor` nothing is kept.

    Args:
        step: The script's own number of the step.
        values: Up to 8 numbers by name, or tensors of one element; a name that is not given keeps
            its value. For names with characters other than letters, use a dict:
            `report_progress(**{"val/loss": loss})`.

    Raises:
        TypeError: A value that is no number.
        ValueError: A tensor of more elements, a name that is too long, too many names; before
            `init`.

    Example:
        >>> hvd.report_progress(loss=torch.tensor(0.31), lr=0.1, step=120)
    """
    world.current()
    numbers = {name: _number(name, value) for name, value in values.items()}
    if step is not None and not 0 <= (number := _plain("step", step)) < 1e12:
        raise ValueError(f"report_progress: step={number:g} is no number of a step")
    for name in numbers:
        if not is_name(name):
            raise ValueError(
                f"report_progress: the name {name[: 2 * LONGEST_NAME]!r} is not 1 to {LONGEST_NAME}"
                " printable characters of ASCII"
            )
    active = pulses.current()
    if active is None:
        if len(numbers) > MOST_VALUES:
            raise _too_many(numbers)
        return
    merged = {**active.values, **numbers}
    if len(merged) > MOST_VALUES:
        raise _too_many(merged)
    active.values = merged
    if step is not None:
        active.step = number
    active.tell_if_due()


def _too_many(names: dict[str, pulses.Number]) -> ValueError:
    return ValueError(
        f"report_progress: {len(names)} names ({', '.join(names)});"
        f" up to {MOST_VALUES} can be shown"
    )


def _number(name: str, value: object) -> pulses.Number:
    if not isinstance(value, torch.Tensor):
        return _plain(name, value)
    if value.numel() != 1:
        raise ValueError(
            f"report_progress: {name!r} is a tensor of shape {list(value.shape)}; report one"
            " number, such as its mean"
        )
    if value.is_complex():
        raise TypeError(f"report_progress: {name!r} is a complex number; report a real one")
    # (Detached, a loss keeps no graph alive.)
    return float(value.detach()) if value.device.type == "cpu" else value.detach()


def _plain(name: str, value: object) -> float:
    try:
        if isinstance(value, (str, bytes)):
            raise TypeError
        return float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError, OverflowError):
        raise TypeError(
            f"report_progress: {name!r} is a {type(value).__name__}; report a number, or a"
            " tensor of one element"
        ) from None
