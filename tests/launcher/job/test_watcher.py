"""Reports of the stall check, and questions of the user's: when the ranks are asked where they are,
and what is said then."""

import json

from hvdrun.job.actions import Answer, Look, Say
from hvdrun.job.events import Interrupted, RankLooked, RankRecorded, RankSaid, StacksAsked
from hvdrun.machine.notes import INIT_DONE, STALLED
from tests.launcher.job.histories import TERM, asked, begun, play, seen
from tests.launcher.job.test_ranks import recorded

LATE = (
    b"allreduce 'x' has waited 60 s for rank 2 on b (which has called no collective yet); called by"
    b" ranks 0, 1, 3; do all ranks take the same path through the program?"
)
FRAMES = [["/train.py", 7, "load", ""]]


def reported(at, rank=0, text=LATE):
    return [(at, RankSaid(rank, STALLED, text))]


def stack(at, rank, frames=FRAMES):
    processes = [[100 + rank, 1, "S", 1.0, "python train.py", False, "waits for a lock"]]
    answer = {"at": at, "processes": processes, "frames": frames, "no_frames": ""}
    return [(at, RankLooked(rank, json.dumps(answer).encode()))]


def looks(actions):
    return [(at, a.ranks, a.with_stack) for at, a in actions if isinstance(a, Look)]


def have_boxes(actions):
    return [a.with_box for _, a in actions if isinstance(a, Look)]


def said(actions, kind=Say):
    texts = [(at, action.text) for at, action in actions if isinstance(action, kind)]
    return [(at, text) for at, text in texts if "where the ranks are" in text or kind is Answer]


def test_the_ranks_of_a_report_are_asked_twice_and_shown_once_all_have_answered():
    answers = [each for rank in range(4) for each in seen(10.1, rank) + stack(10.7, rank)]
    answers.sort(key=lambda each: each[0])
    events = begun() + reported(10.0) + answers
    _, actions, _ = play(events)
    assert looks(actions) == [(10.0, (2, 0, 1, 3), False), (10.5, (0, 1, 2, 3), True)]
    assert have_boxes(actions) == [False, True]
    ((at, text),) = said(actions)
    assert at == 10.7
    first, missing, _, waiting, stack_line = text.splitlines()
    assert first == "hvdrun: where the ranks are that allreduce 'x' waits for, and those in it:"
    assert missing.startswith("    rank 2 on b ")
    assert [waiting, stack_line] == ["    ranks 0-1,3 on a, b", "        /train.py:7 in load"]


def test_a_rank_that_gives_no_answer_is_waited_for_five_seconds():
    answers = [each for rank in (0, 1, 3) for each in stack(10.7, rank)]
    _, actions, _ = play(begun() + reported(10.0) + answers)
    ((at, text),) = said(actions)
    assert at == 15.5
    assert "    rank 2 on b: the host does not answer\n    ranks 0-1,3 on a, b\n" in text


def test_a_rank_that_ends_meanwhile_is_not_waited_for():
    answers = [each for rank in (0, 1, 3) for each in stack(10.7, rank)]
    events = begun() + reported(10.0) + answers + asked(11.0, 2)
    _, actions, _ = play(events)
    ((at, text),) = said(actions)
    assert at == 11.0
    assert "rank 2" not in text


def test_reports_that_follow_within_ten_seconds_ask_nobody():
    events = begun() + reported(10.0) + reported(11.0, rank=3) + reported(20.5)
    _, actions, _ = play(events)
    assert [at for at, _ in said(actions)] == [15.5, 26.0]


def test_a_report_that_names_no_rank_asks_all_that_have_started():
    text = b"allreduce 'x' has made no progress for 60 s, after 3 of 10 pieces"
    _, actions, _ = play(begun(ranks=(0, 1, 3)) + reported(10.0, text=text))
    assert looks(actions)[0] == (10.0, (0, 1, 3), False)
    assert said(actions)[0][1].startswith(
        "hvdrun: where the ranks are while allreduce 'x' waits:\n"
    )


def test_where_hvdlite_numbers_the_ranks_in_another_way_all_are_asked():
    """As after hvd.init(comm) with a part of them: nobody is named in place of another one."""
    known = [(1.0, RankSaid(rank, INIT_DONE, b"%d 4" % rank)) for rank in range(3)]
    for data, first in ((b"3 4", (2, 0, 1, 3)), (b"0 2", (0, 1, 2, 3)), (b"3 5", (0, 1, 2, 3))):
        events = begun() + known + [(1.0, RankSaid(3, INIT_DONE, data))] + reported(10.0)
        _, actions, _ = play(events)
        assert looks(actions)[0] == (10.0, first, False)


def test_nothing_is_asked_or_said_while_the_job_is_being_ended():
    _, actions, _ = play([*begun(), (9.0, Interrupted(TERM)), *reported(10.0)])
    assert looks(actions) == []
    _, actions, _ = play([*begun(), *reported(10.0), (10.2, Interrupted(TERM)), *asked(10.3, 0)])
    assert said(actions) == []


def test_who_asks_gets_an_answer_about_all_ranks():
    answers = [each for rank in (0, 1, 3) for each in stack(5.7, rank)]
    events = [*begun(), (5.0, StacksAsked(1)), *answers, *asked(5.8, 2)]
    _, actions, _ = play(events)
    assert said(actions, Answer) == [
        (
            5.8,
            "4 ranks, 1 of which has ended:\n    ranks 0-1,3 on a, b\n        /train.py:7 in load",
        )
    ]
    assert said(actions) == []
    assert have_boxes(actions) == [False, False]


def test_of_two_who_ask_at_once_each_hears_what_a_rank_does_in_half_a_second():
    answers = [
        *seen(5.01, 0, 1.0, "R", frames=None),
        (5.4, StacksAsked(2)),
        *seen(5.41, 0, 1.4, "R", frames=None),
        *seen(5.8, 0, 1.8, "R"),  # the first one's second
        *seen(5.91, 0, 1.9, "R"),
    ]
    _, actions, _ = play([*begun(ranks=(0,)), (5.0, StacksAsked(1)), *answers])
    for (at, text), cpu_s in zip(said(actions, Answer), (0.8, 0.5), strict=True):
        used = f"({cpu_s} s of CPU in the last {cpu_s} s)"
        assert text.splitlines()[1].startswith(f"    rank 0 on a computes {used}"), at


def test_a_first_answer_that_comes_late_is_compared_with_the_second():
    answers = [*seen(5.6, 0, 1.0, "R", by=5.1, frames=None), *seen(6.1, 0, 1.5, "R", by=5.6)]
    _, actions, _ = play([*begun(ranks=(0,)), (5.0, StacksAsked(1)), *answers])
    ((_, text),) = said(actions, Answer)
    assert "computes (0.5 s of CPU in the last 0.5 s)" in text


def test_who_asks_before_a_rank_has_started_is_answered_too():
    _, actions, _ = play([(0.1, StacksAsked(7))])
    ((_, text),) = said(actions, Answer)
    assert text == "4 ranks:"


def box_now(at, rank, names):
    """What the rank has called; only the first of it has ended."""
    return [
        (at, RankRecorded(rank, each.operations, is_running=True))
        for _, each in recorded(at, rank, names, ended=1)
    ]


def test_of_ranks_that_have_answered_the_operations_are_compared():
    events = begun() + reported(10.0)
    for rank in range(4):
        events += box_now(10.7, rank, "ax" if rank == 2 else "ay") + stack(10.7, rank)
    _, actions, _ = play(events)
    ((_, text),) = said(actions)
    assert "    rank 2 called allreduce 'x' where ranks 0-1,3 called allreduce 'y'" in text


def test_a_report_that_follows_while_a_host_does_not_answer_loses_nothing_of_the_first():
    events = begun() + reported(10.0)
    for rank in (0, 1, 2):
        events += box_now(10.7, rank, "ax" if rank == 2 else "ay") + stack(10.7, rank)
    _, actions, _ = play(events + reported(15.2, rank=1))
    (at, text), *_ = said(actions)
    assert at == 15.5
    assert "    rank 2 called allreduce 'x' where ranks 0-1 called allreduce 'y'" in text


def test_what_a_rank_has_sent_for_an_earlier_question_is_not_compared():
    events = begun() + box_now(5.0, 2, "ax") + reported(10.0)
    for rank in (0, 1, 3):
        events += box_now(10.7, rank, "ay") + stack(10.7, rank)
    late = stack(10.8, 2)  # for another question: its box has not come
    for answers in ([], late):
        _, actions, _ = play(events + answers)
        ((_, text),) = said(actions)
        assert "allreduce 'y'" not in text
