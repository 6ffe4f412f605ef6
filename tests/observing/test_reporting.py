"""What a script reports of its progress, and what a rank tells hvdrun of it."""

import pytest
import torch

import hvdlite as hvd
from hvdlite.observe import pulses
from hvdlite.world.telling import launcher_link
from hvdrun.pulse import Pulse, parse
from tests.harness.uncounted import uncounted


@pytest.fixture
def alone():
    hvd.init()
    yield
    hvd.shutdown()


@pytest.fixture
def sent(alone, monkeypatch):
    """Makes the pulse that this rank sends now."""
    notes = []
    monkeypatch.setattr(launcher_link, "tell", lambda kind, data: notes.append(data))
    progress = {"steps": 7, "seconds": 3.5, "waited": 1.0, "data": 0.5, "all_steps": 9}
    shown = pulses.Pulses(2, lambda: progress)
    shown._tell_at = float("inf")
    monkeypatch.setattr(pulses, "_pulses", shown)

    def tell():
        shown.tell(11.0)
        return parse(notes.pop())

    return tell


def test_a_pulse_has_the_latest_value_of_each_name(sent):
    assert sent() == Pulse(11, 7, 3.5, 1, 0.5, all_steps=9)
    hvd.report_progress(loss=torch.tensor(0.5, requires_grad=True), lr=1, step=3)
    hvd.report_progress(loss=torch.tensor([0.25], dtype=torch.float16))
    assert sent() == Pulse(11, 7, 3.5, 1, 0.5, 3, {"loss": 0.25, "lr": 1.0}, all_steps=9)


def test_a_tensor_on_a_device_is_read_only_when_a_pulse_is_sent(sent):
    # (The meta device stands for a GPU: to read a tensor there is an error.)
    hvd.report_progress(loss=torch.tensor(1.0, device="meta", requires_grad=True))
    assert not pulses.current().values["loss"].requires_grad
    with pytest.raises(RuntimeError):
        sent()
    pulses.current().values["loss"] = torch.tensor(0.5)
    assert sent().values == {"loss": 0.5}


def test_a_value_that_was_changed_in_place_afterwards_counts_as_it_was_reported(sent):
    total = torch.tensor(2.0)
    hvd.report_progress(total=total)
    total.zero_()
    assert sent().values == {"total": 2.0}


@pytest.mark.parametrize("monitored", [True, False])
@pytest.mark.parametrize(
    ("values", "error", "words"),
    [
        ({"loss": "0.5"}, TypeError, "'loss' is a str; report a number"),
        ({"loss": None}, TypeError, "'loss' is a NoneType"),
        ({"loss": torch.ones(3)}, ValueError, r"'loss' is a tensor of shape \[3\]"),
        ({"loss": torch.tensor(1j)}, TypeError, "complex"),
        ({"": 1}, ValueError, "the name ''"),
        ({"\x1b[2J": 1}, ValueError, "printable"),
        ({"x" * 33: 1}, ValueError, "1 to 32 printable"),
        ({f"v{n}": 1 for n in range(9)}, ValueError, "9 names .* up to 8"),
        ({"step": -1}, ValueError, "step=-1"),
        ({"step": float("nan")}, ValueError, "step=nan"),
        ({"step": "one"}, TypeError, "'step' is a str"),
    ],
)
def test_what_is_no_number_is_an_error_with_and_without_a_monitor(
    request, monitored, values, error, words
):
    request.getfixturevalue("sent" if monitored else "alone")
    with pytest.raises(error, match=f"report_progress: .*{words}"):
        hvd.report_progress(**values)


def test_names_that_come_one_by_one_are_counted_together(sent):
    for number in range(8):
        hvd.report_progress(**{f"v{number}": number})
    with pytest.raises(ValueError, match="9 names"):
        hvd.report_progress(one_more=1)
    assert len(sent().values) == 8


def test_there_is_nothing_to_report_to_before_init():
    with uncounted(), pytest.raises(ValueError, match="init"):
        hvd.report_progress(loss=1)


def reports():
    hvd.init()
    hvd.report_progress(loss=1.0)
    return pulses.current() is None


@pytest.mark.ranks(2)
def test_a_rank_that_nobody_monitors_keeps_nothing(world):
    assert world.run(reports) == [True, True]
