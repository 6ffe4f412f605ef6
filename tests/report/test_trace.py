"""What is read from a timeline's file, also from a bad one."""

import json

import pytest

from hvdlite.report.trace import NotATimeline, in_line, match, read
from tests.report.timelines import clock, events, operation, title, trace, written

BASE = 1.7e15
ENDS = {"ph": "i", "s": "p", "name": "the timeline ends", "pid": 0, "tid": 0, "ts": BASE + 9e6}


def of_two_ranks():
    made = [title(0), title(1), *(clock(rank, "start", BASE, 0, 0) for rank in (0, 1))]
    made += events(0, "x", (BASE, BASE + 30, BASE + 40, BASE + 60), 1)
    return made + events(1, "x", (BASE + 20, BASE + 30, BASE + 40, BASE + 70), 1)


def test_operations_are_read(tmp_path):
    made = read(written(tmp_path / "t.json", [*of_two_ranks(), ENDS]))
    assert made.ranks == {0: "rank 0 on host0", 1: "rank 1 on host1"}
    assert [
        (each.rank, each.label, each.posted - BASE, each.done - BASE) for each in made.operations
    ] == [(0, "allreduce x", 0, 60), (1, "allreduce x", 20, 70)]
    assert made.notes == [
        "the file holds no steps of a DistributedOptimizer, so figures of steps are missing"
    ]


def test_the_drift_of_a_clock_that_the_operations_show_is_taken_out(tmp_path):
    """Rank 1's clock was in step with rank 0's when the timeline started."""
    drift = 4e-4
    made = [title(0), title(1), clock(0, "start", BASE, 0, 0), clock(1, "start", BASE, 5e9, 7)]
    for i in range(100):
        at = 1e4 * i
        for rank in (0, 1):
            times = [BASE + t * (1 + drift * rank) for t in (at, at + 30, at + 40, at + 60)]
            made += events(rank, "x", times, i)
    found = read(written(tmp_path / "t.json", made))
    assert found.errors[0] == 0
    assert 7 <= found.errors[1] < 400
    of_1 = [each for each in found.operations if each.rank == 1]
    for i, each in enumerate(of_1):
        assert each.posted - BASE == pytest.approx(1e4 * i, abs=found.errors[1])


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        (b"", "it is empty; the job may have ended"),
        (b"\n\n", "it is empty"),
        (b"step 1 loss 3.5\n", "it is no timeline as hvdlite writes them"),
        (b"\x00\xff\x00", "it is no timeline"),
        (b"[]\n", "it is no timeline"),
        (b"[\n]\n", "it holds no event of a timeline"),
        (b'[\n{"ph": "X", "name": "of another program"}\n]\n', "it holds no event of a timeline"),
        (b"[\n" + b"[" * 100_000, "it holds no event of a timeline of hvdlite; make one by"),
    ],
)
def test_what_is_no_timeline_is_told(tmp_path, text, problem):
    path = tmp_path / "t.json"
    path.write_bytes(text)
    with pytest.raises(NotATimeline, match=problem):
        read(str(path))


def test_a_torn_file_is_read_up_to_its_end(tmp_path):
    path = tmp_path / "t.json"
    whole = ",\n".join(json.dumps(event) for event in of_two_ranks())
    path.write_text(f"[\n{whole},\n" + '{"ph": "b", "na')
    made = read(str(path))
    assert len(made.operations) == 2
    assert made.notes[:2] == [
        "lines that are no events of a timeline: 1",
        "the job ended without stop_timeline(), so the last quarter of a second may be missing",
    ]


def test_entries_that_are_no_events_are_counted(tmp_path):
    bad = [
        {},
        [],
        None,
        7,
        {"ph": "b", "pid": "x"},
        {"ph": "b", "pid": 0, "id": "0.0.5", "ts": float("nan"), "cat": "a", "name": "a b"},
        {"ph": "b", "pid": 0, "id": "0.0.5", "ts": 1e300, "cat": "a", "name": "b"},
        {"ph": "X", "pid": 0, "cat": "STEP", "name": "x", "ts": 1, "dur": [], "args": {}},
        {"ph": "M", "pid": 0, "name": "process_name", "args": {}},
        {"ph": "M", "pid": True, "name": "process_name", "args": {"name": "x"}},
    ]
    made = read(written(tmp_path / "t.json", of_two_ranks() + bad))
    assert made.notes[0] == "lines that are no events of a timeline: 10"
    assert len(made.operations) == 2


def test_what_ranks_say_again_and_again_is_one_note(tmp_path):
    about = {"ph": "i", "s": "p", "tid": 0, "ts": BASE}
    lost = {**about, "name": "7 events were lost: too many at once"}
    said = [{**about, "pid": 0, "name": f"note {i}"} for i in range(100)] * 2
    made = [*of_two_ranks(), *[{**lost, "pid": i % 2} for i in range(100)], *said]
    notes = read(written(tmp_path / "t.json", made)).notes
    assert notes[:3] == [
        "rank 0: 350 events were lost: too many at once",
        "rank 1: 350 events were lost: too many at once",
        "rank 0: note 0",
    ]
    assert len(notes) < 30


def test_operations_that_had_not_ended_are_told(tmp_path):
    made = [title(0), *events(0, "x", (BASE, BASE + 5), 1)]
    found = read(written(tmp_path / "t.json", made))
    assert found.notes[0] == "operations that had not ended when the file did: 1"
    assert match(found.operations) == []


def test_operations_that_do_not_fit_in_time_do_not_belong_together():
    made = trace([operation(0, "x", 0, 3), operation(1, "x", 50, 53)], [])
    assert in_line(made, match(made.operations)) == []
    made.errors = {1: 60.0}
    assert len(in_line(made, match(made.operations))) == 1
