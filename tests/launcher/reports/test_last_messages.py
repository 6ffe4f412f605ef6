"""Which messages had no other side, as told from what each rank recorded."""

import re
from collections import defaultdict

from hypothesis import given
from hypothesis import strategies as st

from hvdrun.machine.notes import ENTRIES
from hvdrun.reports import last_messages
from hvdrun.reports.black_box import Box, Operation

ANY = -1


class Job:
    """Ranks that post messages, which are matched as the engine does it: in the order in which they
    were posted, by their two ranks and their tag."""

    def __init__(self):
        self.made = defaultdict(list)
        self.waiting = defaultdict(list)

    def send(self, rank, to, tag=0):
        self._post("send", f"to rank {to} with tag {tag}", rank, to, (rank, to, tag), "recv")
        return self

    def recv(self, rank, source, tag=0):
        who = "any rank" if source == ANY else f"rank {source}"
        name = f"from {who} with tag {tag}"
        self._post("recv", name, rank, source, (source, rank, tag), "send")
        return self

    def call(self, *ranks, kind="allreduce"):
        for rank in ranks:
            self._record(kind, "x", rank, ANY, is_matched=True)
        return self

    def _post(self, kind, name, rank, peer, stream, other_kind):
        others = self.waiting[other_kind, stream]
        self._record(kind, name, rank, peer, is_matched=bool(others))
        if others:
            other_rank, place = others.pop(0)
            there = self.made[other_rank]
            there[place] = there[place]._replace(matched=2, started=2, ended=3)
        else:
            self.waiting[kind, stream].append((rank, len(self.made[rank]) - 1))

    def _record(self, kind, name, rank, peer, is_matched):
        made, reached = self.made[rank], 2 if is_matched else 0
        operation = Operation(
            *(len(made) + 1, 7, hash((kind, name, len(made))) % (1 << 64), 1, 0, kind, name, 4, 2),
            *(peer, 1, reached, reached, reached, False),
        )
        made.append(operation)

    def boxes(self, kept=ENTRIES):
        return {rank: Box(0, tuple(made[-kept:])) for rank, made in sorted(self.made.items())}

    def lines(self, kept=ENTRIES):
        return list(last_messages.lines_of(self.boxes(kept)))


def with_a_time_limit():
    """A receive that has failed has taken no message."""
    job = Job().recv(1, 0)
    job.made[1][0] = job.made[1][0]._replace(ended=3, failed=True)
    job.waiting.clear()
    return job.recv(1, 0).send(0, 1).recv(1, 0)


def test_the_words_say_which_messages_had_no_other_side(snapshot):
    forgetful = Job().recv(1, 0).call(*[0] * 40)
    texts = {
        "all have come": Job().send(0, 1).recv(1, 0).recv(0, 1, 3).send(1, 0, 3).call(0, 1).lines(),
        "too little was sent": Job().send(0, 1).recv(1, 0).recv(1, 0).lines(),
        "too much was sent": Job().recv(1, 0).recv(1, 0).send(0, 1).send(0, 1).send(0, 1).lines(),
        "another tag": Job().send(0, 1, 5).recv(1, 0, 6).lines(),
        "a rank that keeps all": forgetful.lines(),
        "one that may have forgotten some": forgetful.lines(kept=32),  # it has ended with 0
        "one of which nothing came": Job().recv(1, 0).lines(),
        "received from any rank": Job().recv(1, ANY).send(0, 1).call(2).lines(),
        "a receive with a time limit before one that waits": with_a_time_limit().lines(),
    }
    lines = [line for name, text in texts.items() for line in (f"=== {name}", *text, "")]
    snapshot("last_messages", "\n".join(lines))


def test_what_has_failed_before_it_was_matched_is_told_and_what_failed_later_is_not():
    job = Job().recv(1, 0).call(0)
    job.made[1][0] = job.made[1][0]._replace(ended=9, failed=True)
    assert len(job.lines()) == 1
    job.made[1][0] = job.made[1][0]._replace(matched=8)
    assert job.lines() == []


def test_the_screen_has_three_and_says_how_many_more():
    job = Job()
    for tag in range(70):
        job.recv(1, 0, tag)
    boxes = job.boxes()
    *shown, last = last_messages.report(boxes)
    assert (len(shown), last) == (3, "and 67 more messages without another side")
    *shown, last = last_messages.report(boxes, last_messages.MOST_IN_FILE)
    assert (len(shown), last) == (64, "and 6 more messages without another side")


def test_a_name_without_a_tag_is_left_out():
    job = Job().recv(1, 0)
    job.made[1][0] = job.made[1][0]._replace(name="whatever a mad rank writes")
    assert job.lines() == []


messages = st.lists(
    st.tuples(
        st.sampled_from(["send", "recv"]), st.integers(0, 2), st.integers(0, 2), st.integers(0, 1)
    ),
    max_size=30,
)
CLAIM = re.compile(
    r"rank (\d)(?:'s send to| waited to receive from) rank (\d) with tag (\d)(.*?)"
    r"(?:, no\. (\d+))?: rank \d has called (?:only (\d+)|no) (send|recv)s? for it"
)


@given(messages)
def test_each_claim_is_true_and_each_lonely_stream_is_told(posted):
    job = Job().call(0, 1, 2)
    for kind, rank, peer, tag in posted:
        getattr(job, kind)(rank, peer, tag)
    lines = job.lines()
    lonely = {key for key, waiting in job.waiting.items() if waiting}
    assert len(lines) == len(lonely)
    for line in lines:
        rank, peer, tag, _, number, others, other_kind = CLAIM.fullmatch(line).groups()
        kind = "send" if other_kind == "recv" else "recv"
        a, b, c = int(rank), int(peer), int(tag)
        assert (kind, (a, b, c) if kind == "send" else (b, a, c)) in lonely
        called = posted.count((other_kind, b, a, c))
        assert called == int(others or 0)
        assert int(number or 1) == called + 1
