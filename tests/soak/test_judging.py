"""What the soak finds wrong: each kind of wrong output is found, and a right one is not."""

import dataclasses

import pytest

from tests.soak.drawing import KINDS, Fault, draw
from tests.soak.judging import judge, spans
from tests.soak.running import Played

RIGHT = "[0] right\n[1] right\n[2] right\n[3] right\n"
KILLED = "hvdrun: rank 2 on server2 was ended by SIGKILL (Killed) after 5.2 s"
LATE = (
    "hvdlite: allreduce 'round 7' has waited 8 s for rank {} on {} (which last finished x 8 s ago)"
)


def job(kind="none", victim=-1, **fields):
    fields.setdefault("layout", (2, 2))
    return dataclasses.replace(
        draw(0, 0, kind),
        servers=0,
        options=(),
        start="ssh",
        fault=Fault(kind, victim, host=1),
        **fields,
    )


def wrong(of, *codes, errors="", **played):
    played.setdefault("out", RIGHT)
    return [
        w.partition(":")[0] for w in judge(of, Played(list(codes), errors=errors, **played)).wrong
    ]


def test_a_seed_and_a_number_give_the_same_job_and_all_faults_come():
    jobs = [draw(5, number) for number in range(400)]
    assert jobs == [draw(5, number) for number in range(400)]
    assert {each.fault.kind for each in jobs} == set(KINDS)
    assert all(each.fault.victim < each.size for each in jobs)
    assert all(each.workers > 0 for each in jobs)


def test_a_quiet_job_is_right():
    assert wrong(job(), 0) == []


@pytest.mark.parametrize(
    ("found", "kind"),
    [
        (wrong(job(), 1), "code"),
        (wrong(job(), 0, out="[0] right\n"), "result"),
        (wrong(job(), 0, errors="UCX WARN"), "alarm"),
        (wrong(job(), 0, errors=LATE.format(2, "server2")), "accused"),
        (wrong(job(), 0, left=["server1: file /tmp/x"]), "left"),
        (wrong(job(), late="the job ended not within 3 s"), "late"),
        (wrong(job("SIGKILL", 2), 137, errors=KILLED.replace("rank 2", "rank 3")), "accused"),
        (wrong(job("SIGKILL", 2), 137), "unnamed"),
        (wrong(job("stall", 2), 0, errors=LATE.format(3, "server2")), "accused"),
        (wrong(job("stall", 2), 0), "unnamed"),
        (wrong(job("link cut"), 72, errors="hvdrun: server1 is lost: x"), "accused"),
        (wrong(job("NaN", 2), 1, errors="NumericsError: on rank 1: x"), "unnamed"),
    ],
)
def test_what_is_wrong_is_found(found, kind):
    assert kind in found


@pytest.mark.parametrize(
    ("of", "code", "errors"),
    [
        (job("SIGKILL", 2), 137, KILLED),
        (job("stall", 2), 0, LATE.format(2, "server2")),
        (job("link cut"), 72, "hvdrun: server2 is lost: it has given no sign of life"),
        (job("NaN", 2), 1, "NumericsError: the gradient on rank 2: x"),
        (job("TERM"), 143, "hvdrun: SIGTERM: the 4 ranks have 20 s to end"),
    ],
)
def test_a_fault_that_is_named_rightly_is_right(of, code, errors):
    assert wrong(of, code, errors=errors) == []


@pytest.mark.parametrize(("bound", "is_alarm"), [("least", False), ("most", True)])
def test_how_fast_a_link_is_at_least_accuses_no_host(bound, is_alarm):
    line = f"hvdrun: the link between server1 and server2 gives at {bound} 0.31 Gbit/s"
    of = dataclasses.replace(job(), options=("--summary",))
    assert wrong(of, 0, errors=line) == ["alarm"] * is_alarm


def test_a_rank_that_is_said_not_to_have_called_what_it_has_ended_is_found():
    said = KILLED + "\n    rank 0 went on to allreduce 'round 7', which ranks 1-2 have not called"
    of = job("SIGKILL", 2)
    assert wrong(of, 137, errors=said, rounds={0: 7, 1: 7, 2: 7}) == []
    assert wrong(of, 137, errors=said, rounds={0: 8, 1: 8, 2: 7}) == ["accused"]


def test_a_rank_that_waits_for_the_stopped_one_elsewhere_is_not_accused():
    said = (
        "[2] hvdlite: alltoall 'b' has waited 8 s for rank 0 on server1 (which has been in"
        " broadcast 'a' for 8 s), rank 1 on server1 (which has been in broadcast 'a' for 8 s);"
        " called by rank 2"
    )
    explained = (
        "\n[0] hvdlite: broadcast 'a' has made no progress for 8 s; it waits within the host for"
        " rank 1 on server1 (which has not run for 8 s); all ranks have called it"
    )
    assert wrong(job("stall", 1), 0, errors=said) == ["accused", "unnamed"]
    assert wrong(job("stall", 1), 0, errors=said + explained) == []
    assert wrong(job("stall", 0), 0, errors=said + explained) == ["accused", "accused", "unnamed"]


def test_numbers_in_spans():
    assert spans("0-1,3") == {0, 1, 3}
