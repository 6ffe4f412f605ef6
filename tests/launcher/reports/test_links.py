"""Which link between hosts is slow, from what TCP has carried and for how long it was busy."""

import json
from itertools import permutations

import pytest

from hvdrun.records import FEWEST_STEPS, LEAST_BUSY_S, Connection, Record, Sample
from hvdrun.reports import figures, links, prometheus
from hvdrun.reports.late import compare
from hvdrun.reports.links import LEAST_BYTES, TRAVEL_S, Pair, SlowLink, slow_link
from tests.launcher.reports.test_prometheus import of, read

MIB = 1 << 20


def rated(rates):
    """Pairs of hosts that have sent as much with these rates in Gbit/s, by their letters."""
    return [Pair(*pair, 0, 1e9 / 8, 1 / rate, rate) for pair, rate in rates.items()]


def all_to_all(hosts, rate=0.94, **others):
    return {"".join(pair): rate for pair in permutations(hosts, 2)} | others


def ring(hosts, rate=0.94, **others):
    return {a + b: rate for a, b in zip(hosts, hosts[1:] + hosts[0], strict=True)} | others


# With two others at once, b shares a link of 0.31 Gbit/s.
SLOW_B = dict.fromkeys(("ab", "ba", "bc", "cb"), 0.155)
# Either's link may be slow.
TWO_PAIRS = {"bc": 0.31, "cb": 0.31, "ad": 0.94, "da": 0.94}


@pytest.mark.parametrize(
    ("rates", "hosts", "direction", "gives", "others"),
    [
        (all_to_all("abc", **SLOW_B), ("b",), "both", 0.31, 0.94),
        (all_to_all("abcd", **SLOW_B, bd=0.155, db=0.155), ("b",), "both", 0.465, 0.94),
        (ring("abc", ab=0.31, bc=0.31), ("b",), "both", 0.31, 0.94),
        (ring("abcd", ab=0.31, bc=0.31), ("b",), "both", 0.31, 0.94),
        (all_to_all("abc", ba=0.155, bc=0.155), ("b",), "sends", 0.31, 0.94),
        (all_to_all("abcd", ab=0.1, cb=0.1, db=0.1), ("b",), "receives", 0.3, 0.94),
        (all_to_all("abcd", bc=0.15, cb=0.15), ("b", "c"), "both", 0.15, 0.94),
        (all_to_all("abcd", cb=0.15), ("c", "b"), "sends", 0.15, 0.94),
        (ring("abcd", bc=0.31), ("b", "c"), "sends", 0.31, 0.94),
        (TWO_PAIRS, ("b", "c"), "both", 0.31, 0.94),
        (all_to_all("abc", **SLOW_B, ac=0.7), ("b",), "both", 0.31, 0.82),
    ],
)
def test_the_slow_link_is_named_and_how_fast_the_others_are(rates, hosts, direction, gives, others):
    """Pairs of one host may have shared its link: all that they have sent is its upper bound."""
    expected = SlowLink(hosts, direction, pytest.approx(gives), pytest.approx(others))
    assert slow_link(rated(rates)) == expected


@pytest.mark.parametrize(
    ("rates", "why"),
    [
        ({}, "nothing was sent"),
        (all_to_all("ab", ab=0.1), "two hosts"),
        (all_to_all("abcd"), "alike"),
        (all_to_all("abcd", ab=0.6, ba=0.6), "not clearly slower"),
        (all_to_all("abcdef", ab=0.3, ba=0.3, cd=0.3, dc=0.3), "links of several hosts"),
        (all_to_all("abcd", ab=9.0, ba=9.0), "two are faster, as on one machine"),
        (all_to_all("abcd", ab=0.3, ac=0.5, ad=0.7, ba=0.4, bc=0.8, cb=0.6), "all differ"),
        ({"ab": 0.1, "bc": 0.9}, "too few pairs"),
        (all_to_all("abc", 0.4, ba=0.22, bc=0.22), "its link is as fast, and was shared"),
        (all_to_all("abcd", cb=0.31), "c sent as much to a and d while it was busy with b"),
    ],
)
def test_else_none_is_named(rates, why):
    assert slow_link(rated(rates)) is None, why


def test_a_rate_takes_enough_bytes_and_time():
    rate = 8e-9 * LEAST_BYTES / LEAST_BUSY_S
    assert Pair("a", "b", 0, LEAST_BYTES, LEAST_BUSY_S, rate).gbit_per_s == rate
    assert Pair("a", "b", 0, LEAST_BYTES - 1, LEAST_BUSY_S, rate).gbit_per_s is None
    assert Pair("a", "b", 0, LEAST_BYTES, LEAST_BUSY_S / 2, rate).gbit_per_s is None
    # What the receiver doesn't read counts as under way.
    assert Pair("a", "b", 0, LEAST_BYTES, 1.0, rate / 2, late_s=0.6).gbit_per_s is None
    few = [pair._replace(tcp_bytes=LEAST_BYTES - 1) for pair in rated(all_to_all("abc", **SLOW_B))]
    assert slow_link(few) is None


def test_a_host_is_not_slow_because_the_others_read_slowly():
    """All links give 0.2 Gbit/s, and a and b read 0.16. All bytes, divided by the time in which
    their windows were not full, are 0.7 Gbit/s, which is no rate of any network."""
    slow_readers = all_to_all("abc", 0.16, ac=0.19, bc=0.19)
    pairs = [
        pair._replace(busy_s=1 / 0.7) if pair.receiver != "c" else pair
        for pair in rated(slow_readers)
    ]
    assert slow_link(pairs) is None
    assert {pair.gbit_per_s for pair in pairs if pair.receiver != "c"} == {None}
    # Were these 0.7 a lower bound, c would be accused.
    wrong = all_to_all("abc", 0.7, ac=0.19, bc=0.19)
    assert slow_link(rated(wrong)).hosts == ("c",)


def test_a_link_is_not_slow_if_it_may_only_have_been_late():
    """At a busy time of 5 s, 2 s without reading leave 3 s for the network."""
    rates = all_to_all("abc", **dict.fromkeys(SLOW_B, 0.2))
    in_time = rated(rates)
    assert slow_link(in_time).hosts == ("b",)
    late = [pair._replace(late_s=2.0 * (pair.receiver == "b")) for pair in in_time]
    assert slow_link(late) is None
    # Late as it may be, it was fast at least.
    late = [pair._replace(late_s=9.0 * (pair.receiver == "c")) for pair in in_time]
    assert slow_link(late).hosts == ("b",)


def host_of(rank):
    return f"server{rank + 1}"


def job(rates, waited=0.05, **fields):
    """The records of ranks that wait at least so long in each step of 0.1 s. rates: by the letters
    of the hosts."""
    hosts = sorted({host for pair in rates for host in pair})
    number = {host: rank for rank, host in enumerate(hosts)}
    records = {}
    for host, rank in number.items():
        connections = [
            Connection(
                f"10.0.0.{rank}", f"10.0.0.{number[peer]}", rate * 1e10 / 8, 10.0, rate * 1e9 / 8
            )
            for (sender, peer), rate in rates.items()
            if sender == host
        ]
        records[rank] = Record(
            41,
            4.0,
            40 * waited,
            rank=rank,
            size=len(hosts),
            samples=tuple(Sample(step + 2, 0.1, waited, 0.0) for step in range(40)),
            sent=tuple((number[peer], 3 * MIB) for sender, peer in rates if sender == host),
            connections=(
                *connections,
                Connection("172.17.0.1", "172.17.0.2", 1e9, 1.0, 1e9),  # the same on every host
                Connection(f"10.0.0.{rank}", "192.0.2.1", 1e9, 9.0, 1e9 / 9),  # to a server of data
            ),
            **fields.get(host, {}),
        )
    return records


def verdicts_of(records):
    return links.verdicts(records, compare(records), host_of)


def test_the_verdict_is_one_sentence_with_both_rates():
    (verdict,) = verdicts_of(job(ring("abc", ab=0.31, bc=0.31)))
    assert verdict == "server2's link gives at most 0.31 Gbit/s, the others at least 0.94"
    (verdict,) = verdicts_of(job(all_to_all("abc", ba=0.031, bc=0.031)))
    assert verdict == (
        "server2's link gives at most 0.062 Gbit/s for what it sends, the others at least 0.94"
    )
    (verdict,) = verdicts_of(job(TWO_PAIRS))
    assert verdict == (
        "the link between server2 and server3 gives at most 0.31 Gbit/s, the others at least 0.94"
    )
    (verdict,) = verdicts_of(job(ring("abcd", 23.4, bc=4.0)))
    assert verdict == (
        "the link from server2 to server3 gives at most 4.02 Gbit/s, the others at least 23"
    )


def test_two_hosts_are_told_their_rate_only():
    (verdict,) = verdicts_of(job(all_to_all("ab", ab=0.31)))
    assert verdict == "the link between server1 and server2 gives at least 0.31 Gbit/s"


def test_a_few_steps_tell_nothing_of_a_link():
    def last(number):
        return {
            rank: record._replace(samples=record.samples[-number:])
            for rank, record in job(all_to_all("ab", ab=0.31)).items()
        }

    assert verdicts_of(last(FEWEST_STEPS - 1)) == []
    assert len(verdicts_of(last(FEWEST_STEPS))) == 1


def test_connections_that_take_turns_are_no_faster_than_each_of_them():
    """All links give 1 Gbit/s. Between a and b, four ranks each have used it, by turns."""
    records = job(all_to_all("abc", 1.0))
    turns = {0: "10.0.0.1", 1: "10.0.0.0"}
    for rank, peer in turns.items():
        more = (Connection(f"10.0.0.{rank}", peer, 1e10 / 8, 10.0, 1e9 / 8),) * 3
        records[rank] = records[rank]._replace(connections=records[rank].connections + more)
    pairs = {pair[:2]: pair for pair in links.pairs_of(records, host_of)}
    assert pairs["server1", "server2"].rate == 1.0
    assert pairs["server1", "server2"].tcp_bytes == 4 * pairs["server1", "server3"].tcp_bytes
    assert pairs["server1", "server2"].gbit_per_s is None
    assert verdicts_of(records) == []


def test_what_may_be_the_way_there_and_back_does_not_make_a_link_slow():
    """Each link is busy for 0.6 s, and those of b for 2.4 s: in 40 steps or in 600."""
    records = job(all_to_all("abc"))
    for rank, record in records.items():
        busy = [2.4 if "10.0.0.1" in each[:2] else 0.6 for each in record.connections]
        both = zip(record.connections, busy, strict=True)
        connections = tuple(each._replace(bytes=1e8, busy=s, rate=1e8 / s) for each, s in both)
        records[rank] = record._replace(connections=connections)
    assert len(verdicts_of(records)) == 1
    more = {"steps": 601, "seconds": 60.0, "waited": 30.0}
    records = {rank: record._replace(**more) for rank, record in records.items()}
    assert verdicts_of(records) == []


@pytest.mark.parametrize(
    ("records", "why"),
    [
        (job(all_to_all("abc")), "equal links"),
        (job(all_to_all("abc", **SLOW_B), waited=0.009), "the job does not wait for its links"),
        (
            job(all_to_all("abc", **SLOW_B), b={"periods": 100.0, "stopped": 50.0}),
            "its ranks are throttled",
        ),
    ],
)
def test_no_link_is_named_without_evidence(records, why):
    assert verdicts_of(records) == [], why


def late(records, rank):
    """Of the same job, but this rank sleeps in each step, and the others wait for it."""
    found = {}
    for number, record in records.items():
        waited = 0.05 if number == rank else 0.35
        samples = tuple(Sample(step + 2, 0.4, waited, 0.0) for step in range(40))
        found[number] = record._replace(seconds=16.0, waited=40 * waited, samples=samples)
    return found


def test_a_late_rank_is_not_accused_of_its_link_and_a_slow_link_is_no_late_rank():
    assert verdicts_of(late(job(all_to_all("abc")), 1)) == []
    (verdict,) = verdicts_of(late(job(all_to_all("abc", **SLOW_B)), 2))
    assert verdict.startswith("server2's link ")


def test_programs_get_the_figures_of_each_pair():
    records = job(all_to_all("abc", **SLOW_B))
    whole = json.loads(figures.as_json(records, 3, host_of))["whole"]
    assert whole["links"][:2] == [
        {
            "from": "server1",
            "to": host,
            "bytes": 3 * MIB,
            "tcp_bytes": rate * 1e10 / 8,
            "busy": 10.0,
        }
        | {"gbit_per_s": pytest.approx(rate)}
        for host, rate in (("server2", 0.155), ("server3", 0.94))
    ]
    assert len(whole["links"]) == 6
    slow = SlowLink(("server2",), "both", pytest.approx(0.31, rel=0.01), pytest.approx(0.94))
    assert whole["slow_link"] == slow._asdict() | {"hosts": ["server2"]}
    assert whole["verdicts"][1:] == [
        "server2's link gives at most 0.31 Gbit/s, the others at least 0.94"
    ]
    values = read(prometheus.text_of(records, host_of, {}, 3, is_running=True))
    pair = {"from": "server3", "to": "server2"}
    assert of(values, "sent_bytes_total", **pair) == 3 * MIB
    assert of(values, "tcp_bytes_total", **pair) == 0.155e10 / 8
    assert of(values, "tcp_busy_seconds_total", **pair) == 10.0
    assert of(values, "link_gbit_per_second", **pair) == pytest.approx(0.155)


def test_ranks_of_a_host_are_taken_together_and_within_a_host_there_is_no_link():
    ends = (("10.0.0.1", "10.0.0.2"), ("10.0.0.2", "10.0.0.1"))
    records = {
        rank: Record(
            2,
            1.0,
            0.5,
            rank=rank,
            size=4,
            sent=((0 if rank > 1 else 2, 5.0), (1, 1.0)),
            connections=(Connection(*ends[rank // 2], 10.0, 1.0 + rank, 1e9),),
        )
        for rank in range(4)
    }
    assert links.pairs_of(records, "aabb".__getitem__) == [
        Pair("a", "b", 10.0, 20.0, 2.0, 8.0, TRAVEL_S),
        Pair("b", "a", 12.0, 20.0, 4.0, 8.0, TRAVEL_S),
    ]
