"""Where ranks were among their operations, as told from what each of them recorded."""

from collections import Counter
from dataclasses import dataclass, field
from itertools import groupby

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hvdrun.reports import last_operations
from hvdrun.reports.black_box import Box, Operation

WORLD = 1


def standings(boxes):
    return last_operations.standings(boxes, len(boxes))


def report(boxes, endings):
    return last_operations.report(boxes, endings, len(boxes))


def summary(boxes, endings):
    return last_operations.summary(boxes, endings, len(boxes))


def orders(boxes):
    return last_operations.orders(boxes, len(boxes))


@dataclass
class Recorder:
    """What one rank records."""

    members: int
    team: int = WORLD
    made: list = field(default_factory=list)
    counts: Counter = field(default_factory=Counter)

    def call(self, name, reached="ended", kind="allreduce", team=None):
        """reached: how far the operation has come on this rank."""
        self.counts[kind, name] += 1
        at = 1000 + 10 * len(self.made)
        steps = ["posted", "matched", "started", "ended"].index(reached.replace("failed", "posted"))
        self.made.append(
            Operation(
                number=len(self.made) + 1,
                team=self.team if team is None else team,
                key=hash((kind, name)) % (1 << 64),
                round=self.counts[kind, name],
                epoch=0,
                kind=kind,
                name=name,
                bytes=12,
                members=self.members if team is None else 2,
                peer=-1,
                posted=at,
                matched=at + 1 if steps > 0 else 0,
                started=at + 2 if steps > 1 else 0,
                ended=at + 3 if steps > 2 or reached == "failed" else 0,
                failed=reached == "failed",
            )
        )
        return self

    def box(self, kept=512):
        return Box(0, tuple(self.made[-kept:]))


def boxes_of(*programs):
    """Each rank's calls, as words: 'a' has ended, 'a:failed', 'a:posted' …"""
    found = {}
    for rank, program in enumerate(programs):
        recorder = Recorder(len(programs))
        for word in program.split():
            recorder.call(*word.split(":"))
        found[rank] = recorder.box()
    return found


CASES = {
    "a rank is killed between two operations": ("a b c:failed", "a b", "a b c:posted"),
    "the same name again and again": ("a a a:posted", "a a"),
    "another operation than the others'": ("a b:posted", "a b:posted", "a b:posted", "a c:posted"),
    "killed while data moved": ("a b:failed", "a b:started"),
    "some have ended what another one has not": ("a b c:posted", "a b:matched"),
    "an older one still waits": ("w:posted a b", "a b"),
    "many at once": ("a b:posted c:posted d:posted e:posted", "a"),
    "nothing has ended": ("a:posted", ""),
    "all are at the same place": ("a b:failed", "a b:failed"),
    "all have ended everything": ("a b", "a b"),
    "nobody has called anything": ("", ""),
    "messages are between two ranks": ("a m:posted:send", "a m:posted:recv"),
    "one rank alone": ("a b:posted",),
}


def of_two_teams():
    """Ranks 0 and 2 have called an operation of their own."""
    recorders = [Recorder(3).call("a") for _ in range(3)]
    for rank in (0, 2):
        recorders[rank].call("of two", "ended" if rank else "posted", team=7)
    return {rank: recorder.box() for rank, recorder in enumerate(recorders)}


def test_the_words_say_where_the_ranks_differ(snapshot):
    left, different = {1: "ended with exit code 0"}, "a x:posted"
    texts = {name: report(boxes_of(*programs), {}) for name, programs in CASES.items()}
    texts["of two ranks one has left"] = report(boxes_of("a b:posted", "a", "a"), left)
    texts["a rank has left"] = report(boxes_of("a b:posted", "a"), left)
    texts["one of two teams differs"] = report(of_two_teams(), {})
    texts["the file: both teams"] = summary(of_two_teams(), {})
    running = boxes_of(different, "a y:posted x:posted z:posted", "a y:posted")
    texts["while the job runs: different operations"] = orders(running)
    for late in ("a", different, "", "a y x:posted"):
        same = boxes_of("a x:posted y:posted", late, "a x:posted y:posted")
        texts[f"while the job runs: {late or 'nothing'}"] = orders(same)
    lines = [line for name, text in texts.items() for line in (f"=== {name}", *text, "")]
    snapshot("last_operations", "\n".join(lines))


def test_a_rank_that_has_joined_is_not_waited_for():
    found = boxes_of("a b", "a j:posted:join")
    assert "has not called" not in "\n".join(report(found, {})).replace("which rank 0 has", "")
    ahead = standings(found)[0].groups[0].ahead
    assert [each.name for each in ahead] == ["b"]
    assert standings(found)[0].lacking[ahead[0].identity] == ()


def test_there_is_a_limit_to_what_is_shown():
    programs = [" ".join(["a", *(f"r{rank}.{i}:posted" for i in range(9))]) for rank in range(20)]
    lines = report(boxes_of(*programs), {})
    assert len(lines) == 6
    assert lines[4] == "    and 17 more groups of ranks"
    assert max(map(len, lines)) < 300
    assert len(summary(boxes_of(*programs), {})) == 22


# ---- ranks that run one program, each up to some place


@st.composite
def histories(draw):
    """A program, how many of its operations each rank has called, and how many entries each keeps:
    those that had called more wait in the first that is lacking."""
    program = draw(st.lists(st.sampled_from("abc"), max_size=30))
    called = draw(st.lists(st.integers(0, len(program)), min_size=2, max_size=5))
    ahead = draw(st.integers(1, 4))  # operations in flight at once
    called = [min(count, min(called) + ahead) for count in called]
    kept = [draw(st.integers(ahead + 1, 40)) for _ in called]
    return program, called, kept


@given(histories())
def test_the_last_common_operation_is_that_of_the_rank_that_came_least_far(history):
    program, called, kept = history
    slowest = min(called)
    boxes = {}
    for rank, count in enumerate(called):
        recorder = Recorder(len(called))
        for place, name in enumerate(program[:count]):
            recorder.call(name, "ended" if place < slowest else "posted")
        boxes[rank] = recorder.box(kept[rank])
    if not any(called):
        assert standings(boxes) == []
        return
    (standing,) = standings(boxes)
    assert (standing.last.number if standing.last else 0) == slowest
    groups = {group.ranks: [each.number for each in group.ahead] for group in standing.groups}
    ranks = sorted(range(len(called)), key=lambda rank: called[rank])
    expected = {
        tuple(sorted(same)): list(range(slowest + 1, count + 1))
        for count, same in groupby(ranks, key=lambda rank: called[rank])
    }
    assert groups == expected
    for group in standing.groups:
        for each in group.ahead:
            lacking = tuple(r for r, count in enumerate(called) if count < each.number)
            assert standing.lacking[each.identity] == lacking
    lines = report(boxes, {})
    assert bool(lines) == (len(set(called)) > 1)


@given(st.permutations("abcdef"), st.permutations("abcdef"), st.integers(0, 6))
def test_the_order_in_which_ranks_call_is_no_difference_once_all_have_ended(first, second, left):
    boxes = boxes_of(" ".join(first), " ".join(second))
    assert not any(standing.tells_more for standing in standings(boxes))
    # One rank lacks some of them: those alone are named, whatever the order.
    lacked = second[:left]
    other = " ".join(name for name in second if name not in lacked)
    words = " ".join(f"{name}:posted" if name in lacked else name for name in first)
    (standing,) = standings(boxes_of(words, other))
    assert {each.name for group in standing.groups for each in group.ahead} == set(lacked)
    assert set(standing.lacking.values()) <= {(1,)}


# ---- what a rank has not kept it may have called


@st.composite
def cut_histories(draw):
    """One program, which all ranks call in its order: how many of it each has called, all but the
    last few of which have ended everywhere, and how many of its latest each has kept."""
    program = draw(st.lists(st.sampled_from("abcdefgh"), min_size=1, max_size=40))
    called = draw(st.lists(st.integers(1, len(program)), min_size=2, max_size=5))
    kept = [draw(st.integers(1, 40)) for _ in called]
    knows_end = [draw(st.integers(0, len(program))) for _ in called]
    return program, called, kept, knows_end


@given(cut_histories())
def test_no_rank_is_said_to_lack_what_it_has_called(history):
    program, called, kept, knows_end = history
    boxes = {}
    for rank, count in enumerate(called):
        recorder = Recorder(len(called))
        for place, name in enumerate(program[:count]):
            has_ended = place < min(*called, knows_end[rank])
            recorder.call(name, "ended" if has_ended else "posted")
        boxes[rank] = recorder.box(kept[rank])
    for standing in standings(boxes):
        numbers = {each.identity: each.number for g in standing.groups for each in g.ahead}
        for key, ranks in standing.lacking.items():
            for rank in ranks:
                assert called[rank] < numbers[key]
        if not any(standing.lacking.values()):
            assert "has not called" not in "\n".join(report(boxes, {}))


def test_a_rank_that_has_kept_only_later_operations_is_not_said_to_lack_earlier_ones():
    slow, fast = Recorder(2), Recorder(2)
    for name in "abcd":
        slow.call(name, "posted")
    for name in "abcdefgh":
        fast.call(name, "ended" if name in "ab" else "posted")
    boxes = {0: slow.box(), 1: fast.box(kept=3)}
    assert "rank 1 has not called" not in "\n".join(report(boxes, {}))
    assert "rank 0 has not called" in "\n".join(report(boxes, {}))


def test_a_waiting_operation_that_is_kept_for_long_does_not_make_the_rest_complete():
    first, second = Recorder(3), Recorder(3)
    for recorder in (first, second):
        recorder.call("waits", "posted").call("x")
    for _ in range(600):
        second.call("of others", team=7)
    boxes = {0: first.box(), 1: Box(0, (second.made[0], *second.made[-511:])), 2: first.box()}
    assert report(boxes, {}) == []


def test_a_rank_of_which_nothing_is_left_of_a_team_is_not_compared_in_it():
    recorders = [Recorder(3).call("of all") for _ in range(3)]
    for _ in range(4):
        recorders[1].call("of two", team=7)
    boxes = {rank: recorder.box(kept=4) for rank, recorder in enumerate(recorders)}
    assert report(boxes, {}) == []
    assert summary(boxes, {})[0].startswith("the last operation that ranks 0,2 have all ended")


@pytest.mark.parametrize(
    ("reached", "is_told"), [("matched", True), ("started", True), ("ended", False)]
)
def test_what_the_ranks_of_one_host_have_matched_another_may_not_have_called(reached, is_told):
    """As the buckets of an optimizer. Boxes are cut, as they are after some steps."""
    recorders = [Recorder(2) for _ in range(2)]
    for recorder in recorders:
        for name in "abcabc":
            recorder.call(name)
    recorders[0].call("a", reached)
    for kept, is_sure in ((3, True), (2, False)):
        boxes = {0: recorders[0].box(kept=4), 1: recorders[1].box(kept=kept)}
        told = "which rank 1 has not called" in "\n".join(report(boxes, {}))
        assert told == (is_told and is_sure)


def test_what_is_not_counted_is_not_compared():
    one, other = Recorder(2), Recorder(2)
    for recorder in (one, other):
        recorder.call("a")
    one.call("b", "posted")
    other.call("b", "posted").made[-1] = other.made[-1]._replace(round=0)
    assert report({0: one.box(), 1: other.box()}, {}) == []
    # That says nothing about another team.
    one.call("c", "posted", team=7)
    other.call("d", "posted", team=7)
    told = report({0: one.box(), 1: other.box()}, {})[-1]
    assert told == "    rank 1 called allreduce 'd' where rank 0 called allreduce 'c'"


def test_members_of_process_sets_are_not_taken_for_all_ranks_when_boxes_are_missing():
    """Ranks 2 and 3 are lost with their host; {0, 2} and {1, 3} are process sets."""
    boxes = {}
    for rank in range(2):
        recorder = Recorder(4)
        recorder.call("a").call("of two", "posted", team=7 + rank)
        boxes[rank] = recorder.box()
    assert last_operations.report(boxes, {}, 4) == []
    assert "of two" not in "\n".join(last_operations.summary(boxes, {}, 4))


@given(
    st.dictionaries(
        st.integers(0, 5),
        st.lists(
            st.builds(
                Operation,
                number=st.integers(1, 9),
                team=st.integers(0, 1),
                key=st.integers(0, 3),
                round=st.integers(0, 2),
                epoch=st.integers(0, 1),
                kind=st.sampled_from(["allreduce", "send", "join"]),
                name=st.text("ab", max_size=2),
                bytes=st.just(0),
                members=st.integers(0, 9),
                peer=st.just(-1),
                posted=st.integers(0, 9),
                matched=st.integers(0, 9),
                started=st.integers(0, 9),
                ended=st.integers(0, 9),
                failed=st.booleans(),
            ),
            max_size=9,
        ),
        max_size=4,
    )
)
def test_whatever_ranks_have_recorded_there_is_a_report_and_a_summary(recorded):
    boxes = {rank: Box(0, tuple(operations)) for rank, operations in recorded.items()}
    assert len(report(boxes, {})) <= 6
    summary(boxes, {})
