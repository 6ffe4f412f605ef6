"""How fast the links between hosts are, and whether one of them is slow. Pure.

A rate is that of TCP connections while they were busy, as the sender's kernel counts it
(hvdlite/observe/links.py). For a part of that the receiver had no room: full; bytes may go through
in that part, too. For no longer than a rank is awaited, its kernel may keep others busy with what
it does not read. Several connections may use a link at the same time or in turns, which
the kernel does not tell. So a rate is only known between two bounds:

    bytes / busy of any one  <=  rate  <=  bytes of all / (busy - full of the busiest - late)

late: how long the sender waited for the receiver.

A wrong name is worse than none. So a link is named slow only if enough has gone over it, if at its
fastest it is clearly slower than the others at their slowest, if these are alike, and if the job
spends its time on communication.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import combinations
from math import inf
from statistics import median
from typing import TYPE_CHECKING, Literal, NamedTuple

from hvdrun.records import FEWEST_STEPS, LEAST_BUSY_S, THROTTLED, Record

if TYPE_CHECKING:
    from hvdrun.reports.late import Arrivals

# What bounds of a rate take. Programs get a rate whose upper bound is no more than so many times
# the lower one.
LEAST_BYTES = 16 << 20
WIDEST = 2.0
# A connection is also busy while bytes and acknowledgements travel: for so long in each step.
TRAVEL_S = 0.001
# A link is slow if its rate is below this part of the others' median; these must not be.
SLOW_PART = 0.6
# And it matters if communication takes this part of a step.
COMMUNICATION_PART = 0.1

HostOf = Callable[[int], str]
Direction = Literal["both", "sends", "receives"]


class Pair(NamedTuple):
    """What has gone from a host to another one. bytes: of collectives' messages; tcp_bytes: over
    all of the ranks' TCP connections, of which the busiest was busy for busy_s while the receiver
    had room; rate: of the fastest of them, in Gbit/s, in all of its busy time; late_s: how long
    they may have been busy without the network."""

    sender: str
    receiver: str
    bytes: float = 0.0
    tcp_bytes: float = 0.0
    busy_s: float = 0.0
    rate: float = 0.0
    late_s: float = 0.0

    @property
    def has_bounds(self) -> bool:
        return self.tcp_bytes >= LEAST_BYTES and self.busy_s >= LEAST_BUSY_S

    @property
    def gbit_per_s(self) -> float | None:
        """The lower bound. None: too little was sent to tell, or the receiver was too late."""
        is_known = self.has_bounds and _most([self]) <= WIDEST * self.rate
        return self.rate if is_known else None


class SlowLink(NamedTuple):
    """hosts: the one whose link is slow to all others, or the two between which it is; direction:
    in which, seen from the first. Its upper bound, and the others' lower one."""

    hosts: tuple[str, ...]
    direction: Direction
    gbit_per_s: float
    others_gbit_per_s: float


def pairs_of(records: Mapping[int, Record], host_of: HostOf) -> list[Pair]:
    """Ascending. records: by the launcher's number of the rank."""
    hosts = {
        record.rank if record.size else number: host_of(number)
        for number, record in records.items()
    }
    places = _places(records, host_of)
    found: dict[tuple[str, str], Pair] = {}
    for number, record in records.items():
        sender = host_of(number)
        for rank, count in record.sent:
            if (receiver := hosts.get(rank, sender)) != sender:
                old = found.get((sender, receiver), Pair(sender, receiver))
                found[sender, receiver] = old._replace(bytes=old.bytes + count)
        for each in record.connections:
            if (receiver := places.get(each.peer, sender)) != sender:
                old = found.get((sender, receiver), Pair(sender, receiver))
                found[sender, receiver] = old._replace(
                    tcp_bytes=old.tcp_bytes + each.bytes,
                    busy_s=max(old.busy_s, each.busy),
                    rate=max(old.rate, 8e-9 * each.rate),
                )
    waits = _waits(records, host_of)
    return sorted(
        each._replace(late_s=_late_s(waits[each.sender], waits[each.receiver]))
        for each in found.values()
    )


class _Waits(NamedTuple):
    """What the rank of a host that arrives last in a step waited: in all steps, and by step, as far
    as that is known."""

    steps: float
    all_s: float
    by_step: Mapping[int, float]


def _waits(records: Mapping[int, Record], host_of: HostOf) -> dict[str, _Waits]:
    of_host: dict[str, list[Record]] = {}
    for number, record in records.items():
        of_host.setdefault(host_of(number), []).append(record)
    found = {}
    for host, theirs in of_host.items():
        samples = [{each.step: each.waited for each in record.samples} for record in theirs]
        steps = set.intersection(*map(set, samples))
        found[host] = _Waits(
            max(record.steps for record in theirs) - 1,
            min(record.waited for record in theirs),
            {step: min(waited[step] for waited in samples) for step in steps},
        )
    return found


def _late_s(sender: _Waits, receiver: _Waits) -> float:
    """By how much the receiver was later than the sender, all in all, and how long was the way."""
    travel_s = TRAVEL_S * sender.steps
    steps = sender.by_step.keys() & receiver.by_step.keys()
    if not steps:
        return max(0.0, sender.all_s - receiver.all_s) + travel_s
    late = sum(max(0.0, sender.by_step[step] - receiver.by_step[step]) for step in steps)
    return late / len(steps) * sender.steps + travel_s


def _places(records: Mapping[int, Record], host_of: HostOf) -> dict[str, str]:
    """The host of each address, where only one has it."""
    found: dict[str, set[str]] = {}
    for number, record in records.items():
        for each in record.connections:
            found.setdefault(each.local, set()).add(host_of(number))
    return {address: hosts.pop() for address, hosts in found.items() if len(hosts) == 1}


def verdicts(
    records: Mapping[int, Record], found: Sequence[Arrivals] | None, host_of: HostOf
) -> list[str]:
    """In words; nothing if no link is slow. found: what `late.compare` finds in the records."""
    if not takes_time(records, found):
        return []
    pairs = pairs_of(records, host_of)
    if slow := slow_link(pairs, throttled_hosts(records, host_of)):
        return [_words(slow)]
    rates = [rate for pair in pairs if (rate := pair.gbit_per_s) is not None]
    names = sorted({host_of(number) for number in records})
    if len(names) == 2 and rates:  # with which there is nothing to compare
        return [f"the link between {' and '.join(names)} gives at least {_gbit(min(rates))} Gbit/s"]
    return []


def _words(slow: SlowLink) -> str:
    gives = f"gives at most {_gbit(slow.gbit_per_s)} Gbit/s"
    others = f"the others at least {_gbit(slow.others_gbit_per_s)}"
    if len(slow.hosts) == 2:
        words = "from {} to {}" if slow.direction == "sends" else "between {} and {}"
        return f"the link {words.format(*slow.hosts)} {gives}, {others}"
    way = {"both": "", "sends": " for what it sends", "receives": " for what it receives"}
    return f"{slow.hosts[0]}'s link {gives}{way[slow.direction]}, {others}"


def takes_time(records: Mapping[int, Record], found: Sequence[Arrivals] | None) -> bool:
    """Whether communication matters to the job, as far as enough steps show."""
    for each in found or ():
        if each.steps < FEWEST_STEPS:
            continue
        step_s = median(records[rank].seconds / (records[rank].steps - 1) for rank in each.ranks)
        if each.communication_s > 0 and each.communication_s >= COMMUNICATION_PART * step_s:
            return True
    return False


def throttled_hosts(records: Mapping[int, Record], host_of: HostOf) -> set[str]:
    """A host whose ranks lack CPU time is not accused of a slow link."""
    return {host_of(rank) for rank, each in records.items() if each.throttled >= THROTTLED}


def slow_link(pairs: Iterable[Pair], excused: Iterable[str] = ()) -> SlowLink | None:
    """The link that is slower than the others, which are alike. Of two hosts there is none, nor if
    several links are slow that are not those of one host."""
    rated = [pair for pair in pairs if pair.has_bounds]
    hosts = sorted({host for pair in rated for host in pair[:2]})
    if len(hosts) < 3:
        return None
    slow = _slow_host(rated, hosts) or _slow_pair(rated, hosts)
    return None if slow is None or {*slow.hosts} & {*excused} else slow


def _slow_host(rated: Sequence[Pair], hosts: Iterable[str]) -> SlowLink | None:
    for host in hosts:
        sends = [pair for pair in rated if pair.sender == host]
        receives = [pair for pair in rated if pair.receiver == host]
        ways: tuple[tuple[Direction, list[Pair]], ...] = (
            ("both", [*sends, *receives]),
            ("sends", sends),
            ("receives", receives),
        )
        if len({end for pair in ways[0][1] for end in pair[:2]}) < 3:
            continue  # with one other host: either's link may be slow
        for direction, theirs in ways:
            if not _are_slow(theirs, rated, 2):
                continue
            others = [pair for pair in rated if host not in pair[:2]]
            others = others or [pair for pair in rated if pair not in theirs]
            shared = [each for each in (sends, receives) if {*each} & {*theirs}]
            # Its pairs may have shared its link while those of others had theirs alone.
            rate, others_rate = max(map(_most, shared)), _link_rate(others)
            if rate < SLOW_PART * others_rate:
                return SlowLink((host,), direction, rate, others_rate)
    return None


def _slow_pair(rated: Sequence[Pair], hosts: Iterable[str]) -> SlowLink | None:
    for names in combinations(hosts, 2):
        between = [pair for pair in rated if {*pair[:2]} == {*names}]
        for theirs in (between, *([pair] for pair in between)):
            others = [_rate([pair]) for pair in rated if pair not in theirs]
            if len(others) < 2 or not _are_slow(theirs, rated, len(theirs)):
                continue
            # While they were busy, the hosts' links may have been so with other pairs.
            if max(_shared_most(pair, rated) for pair in theirs) < SLOW_PART * median(others):
                rate = max(_most([pair]) for pair in theirs)
                is_both = theirs == between and len(between) == 2
                hosts_in_order = names if is_both else theirs[0][:2]
                return SlowLink(
                    hosts_in_order, "both" if is_both else "sends", rate, median(others)
                )
    return None


def _shared_most(pair: Pair, rated: Iterable[Pair]) -> float:
    """The upper bound of the rate of its hosts' links, had these been the limit."""
    sent, received = (
        sum(8e-9 * each.tcp_bytes for each in rated if each[end] == pair[end]) for end in (0, 1)
    )
    busy_s = pair.busy_s - pair.late_s
    return max(sent, received) / busy_s if busy_s > 0 else inf


def _are_slow(theirs: Sequence[Pair], rated: Iterable[Pair], fewest: int) -> bool:
    """No other is slow, none of these is known to be fast, and so many are known to be slow: one
    pair alone may be slow because of either host."""
    others = [pair for pair in rated if pair not in theirs]
    if not others or not theirs:
        return False
    least = SLOW_PART * median(_rate([pair]) for pair in others)
    slow = [pair for pair in theirs if _most([pair]) < least]
    is_any_fast = any(_rate([pair]) >= least for pair in theirs)
    return len(slow) >= fewest and not is_any_fast and least <= min(_most([p]) for p in others)


def _rate(pairs: Iterable[Pair]) -> float:
    """In Gbit/s, of the link that all of these pairs use. The lower bound."""
    return max(pair.rate for pair in pairs)


def _most(pairs: Sequence[Pair]) -> float:
    """The upper bound of it, which may be infinite."""
    busy_s = max(pair.busy_s - pair.late_s for pair in pairs)
    return sum(8e-9 * pair.tcp_bytes for pair in pairs) / busy_s if busy_s > 0 else inf


def _link_rate(pairs: Sequence[Pair]) -> float:
    """That of most hosts' links, which send to several others at once, and receive."""
    shared = [
        [pair for pair in pairs if pair[end] == host]
        for end in (0, 1)
        for host in sorted({pair[end] for pair in pairs})
    ]
    return median(map(_rate, shared))


def _gbit(rate: float) -> str:
    return f"{rate:.{0 if rate >= 10 else 2 if rate >= 0.1 else 3}f}"
