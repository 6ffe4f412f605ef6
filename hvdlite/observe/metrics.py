"""This rank's figures, for the script itself."""

from __future__ import annotations

from typing import TypedDict

from hvdlite.observe import summary
from hvdlite.world import world


class StepTimes(TypedDict):
    """Seconds of one step: all of it, and its parts."""

    all: float
    computing: float
    data: float
    waited: float


class SentTo(TypedDict):
    """To one other host, given by the lowest of its ranks."""

    rank: int
    bytes: int


class TcpTraffic(TypedDict):
    """Over all connections of this rank between two addresses."""

    local: str
    peer: str
    bytes: int
    busy: float


class Metrics(TypedDict):
    """What `metrics` gives. It can be written as JSON."""

    rank: int
    size: int
    steps: int
    seconds: float
    computing: float
    data: float
    waited: float
    cpu: float
    throttled: float
    last_step: StepTimes
    sent: list[SentTo]
    tcp: list[TcpTraffic]


def metrics() -> Metrics:
    """Where the time of this rank's steps goes. Not collective, and does not block.

    Counts from `init` on if HVDLITE_SUMMARY is 1 (`hvdrun --summary`), else from the first call of
    this function on. Of several optimizers, the one counts whose steps took most of the time, and
    for `last_step` the one that has made most steps lately.

    Returns:
        A dict of numbers, the times in seconds. The first step warms up: all but `steps` counts
        from its end to the end of the last one, and before the second step from when counting began
        until now:

        - `rank`, `size`: this rank, and how many there are
        - `steps`: of the DistributedOptimizer
        - `seconds`: the whole time
        - `data`: the part in which the program waited for a DataLoader
        - `waited`: the part in which it waited for hvdlite: for other ranks, or for communication;
          in the thread that makes the steps, without those of other threads of the script
        - `computing`: the rest
        - `cpu`: the CPU time of all threads of the process
        - `throttled`: the part of its periods, 0 to 1, in which this process's cgroup used up its
          CPU quota; 0 without a quota
        - `last_step`: of the last step alone, `all` of its seconds, `computing`, `data`, `waited`;
          0 before the second step
        - `sent`: one object for each other host to which collectives have sent messages of data:
          `rank`, the lowest on that host, and `bytes`
        - `tcp`: one for each pair of addresses over which this rank has or had TCP connections to
          other hosts, whoever made them: `local`, `peer`, the `bytes` that the peer has
          acknowledged, and `busy`, the seconds in which some were under way, without those in which
          the peer had no room for more; of the connection that was busiest at the time and carried
          256 KiB per step or more, else 0

        The last two have up to 16 objects, those with most bytes.

    Raises:
        ValueError: Before `init`.

    Example:
        On rank 0 of 2:

        >>> figures = hvd.metrics()
        >>> figures["rank"], figures["size"]
        (0, 2)
    """
    active = world.current()
    counted = summary.begun()
    record = counted.record(active.rank, active.size)
    latest = counted.latest()
    _, seconds, waited, data = latest or (0, 0.0, 0.0, 0.0)
    return {
        "rank": active.rank,
        "size": active.size,
        "steps": int(record.steps),
        "seconds": record.seconds,
        "computing": max(0.0, record.seconds - record.data - record.waited),
        "data": record.data,
        "waited": record.waited,
        "cpu": record.cpu,
        "throttled": record.throttled,
        "last_step": {
            "all": seconds,
            "computing": max(0.0, seconds - data - waited),
            "data": data,
            "waited": waited,
        },
        "sent": [{"rank": to, "bytes": int(count)} for to, count in record.sent],
        "tcp": [
            {"local": each.local, "peer": each.peer, "bytes": int(each.bytes), "busy": each.busy}
            for each in record.connections
        ],
    }
