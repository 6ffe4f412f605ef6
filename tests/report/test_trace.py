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


def test_operations_are_read_with_their_states_since_the_first_event(tmp_path):
    made = read(written(tmp_path / "t.json", [*of_two_ranks(), ENDS]))
    assert made.ranks == {0: "rank 0 on host0", 1: "rank 1 on host1"}
    assert [
        (each.rank, each.label, each.posted, each.matched, each.running, each.done)
        for each in made.operations
    ] == [(0, "allreduce x", 0, 30, 40, 60), (1, "allreduce x", 20, 30, 40, 70)]
    assert made.notes == [
        "the file holds no steps of a DistributedOptimizer, so figures of steps are missing"
    ]


def shifted_clock(drift, with_end):
    """Rank 1's clock, that was in step with rank 0's when the timeline started, drifts."""
    made = [title(0), title(1), clock(0, "start", BASE, 0, 0), clock(1, "start", BASE, 5e9, 7)]
    for i in range(100):
        at = 1e4 * i
        times = [at, at + 30, at + 40, at + 60]
        for rank in (0, 1):
            made += events(rank, "x", [BASE + t * (1 + drift * rank) for t in times], i)
    if with_end:
        made += [
            clock(0, "end", BASE + 1e6, 0, 0),
            clock(1, "end", BASE + 1e6, 5e9 + drift * 1e6, 8),
        ]
    return made


@pytest.mark.parametrize("with_end", [True, False])
def test_drift_is_taken_out_whether_measured_at_the_end_or_seen_in_operations(tmp_path, with_end):
    made = read(written(tmp_path / "t.json", shifted_clock(4e-4, with_end)))
    assert made.drift_from == ("measured" if with_end else "operations")
    assert made.drifts[1] == pytest.approx(400, abs=made.errors[1])
    assert made.errors[1] == 8 if with_end else made.errors[1] < 400
    of_1 = [each for each in made.operations if each.rank == 1]
    for i, each in enumerate(of_1):
        assert each.posted == pytest.approx(1e4 * i, abs=made.errors[1])


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        (b"", "it is empty; the job may have ended"),
        (b"\n\n", "it is empty"),
        (b"step 1 loss 3.5\n", "it is no JSON"),
        (b"\x00\xff\x00", "it is no JSON"),
        (b'{"a": 1}', "it is JSON, but no array of trace events"),
        (b"[]\n", "it holds no event of a timeline of hvdlite; make one by hvdrun"),
        (b"[\n]\n", "it holds no event of a timeline"),
        (b'[\n{"ph": "X", "name": "of another program"}\n]\n', "it holds no event of a timeline"),
        (b"[" * 100_000, "it is no JSON"),
    ],
)
def test_what_is_no_timeline_is_told(tmp_path, text, problem):
    path = tmp_path / "t.json"
    path.write_bytes(text)
    with pytest.raises(NotATimeline, match=problem):
        read(str(path))


def test_a_torn_file_of_an_older_version_is_read_up_to_its_end(tmp_path):
    path = tmp_path / "t.json"
    whole = ",\n".join(json.dumps(event) for event in of_two_ranks() if "clock" not in str(event))
    path.write_text(f"[\n{whole},\n" + '{"ph": "b", "na')
    made = read(str(path))
    assert len(made.operations) == 2
    assert made.notes[:2] == [
        "the last event is cut off, as the job was killed in a write",
        "the job ended without stop_timeline(), so the last quarter of a second may be missing",
    ]
    assert "an older version made it" in made.notes[2]


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
    assert made.notes[0] == "10 entries are not events of a timeline and are left out"
    assert len(made.operations) == 2


def test_what_ranks_say_again_and_again_is_one_note(tmp_path):
    about = {"ph": "i", "s": "p", "tid": 0, "ts": BASE}
    lost = {**about, "name": "7 events were lost: too many at once"}
    said = [{**about, "pid": 0, "name": f"note {i}"} for i in range(100)]
    made = [*of_two_ranks(), *[{**lost, "pid": i % 2} for i in range(100)], *said]
    notes = read(written(tmp_path / "t.json", made)).notes
    assert notes[:3] == [
        "rank 0: 350 events were lost: too many at once",
        "rank 1: 350 events were lost: too many at once",
        "rank 0: note 0",
    ]
    assert "and 80 more notes of ranks" in notes
    assert len(notes) < 30


def test_a_file_that_another_program_wrote_again_in_one_line_is_read(tmp_path):
    path = tmp_path / "t.json"
    path.write_text(json.dumps({"traceEvents": of_two_ranks()}))
    assert len(read(str(path)).operations) == 2


def test_operations_that_had_not_ended_are_told(tmp_path):
    made = [title(0), *events(0, "x", (BASE, BASE + 5), 1)]
    found = read(written(tmp_path / "t.json", made))
    assert found.notes[0] == "1 operation had not ended when the file did"
    assert match(found.operations) == []


def test_operations_that_do_not_fit_in_time_do_not_belong_together():
    made = trace([operation(0, "x", (0, 1, 2, 3)), operation(1, "x", (50, 51, 52, 53))], [])
    assert in_line(made, match(made.operations)) == []
    made.errors = {1: 60.0}
    assert len(in_line(made, match(made.operations))) == 1
