"""Which ranks have not called a collective on CUDA tensors that others wait in.

NCCL runs these, not the engine, whose stall check does not see them. NCCL's backend counts the
collectives of a group that this rank has called, which all of its ranks call in one order. A thread
of the group looks at this rank's count, and writes it into the group's Store if it stands still;
the group's first rank then compares the counts. If none has changed for as long as the stall check
waits, it reports the ranks that are behind, in the words of the engine's stall check, so that
hvdrun shows where the ranks are. In a job that goes on, nothing is written and nothing read.
"""

from __future__ import annotations

import atexit
import contextlib
import itertools
import json
import os
import threading
import time
from collections.abc import Sequence, Set
from typing import Any

from torch._C import _distributed_c10d as c10d

from hvdlite.world import world
from hvdlite.world.teams.team import Team
from hvdlite.world.telling import launcher_link

# So often does the thread look while the stall check waits.
LOOKS = 4
STOP_S = 1.0
MOST_NAMED = 8


class Calls:
    """The counts of one group.

    nccl: has `_get_sequence_number_for_group`. hosts: the host's name by member.
    """

    def __init__(
        self, team: Team, nccl: Any, store: Any, name: str, hosts: Sequence[str], patience_s: float
    ) -> None:
        self._team, self._nccl, self._name, self._hosts = team, nccl, name, hosts
        self._patience_s = patience_s
        self._shared = store
        self._store: Any = None
        self._own = -1
        self._is_written = False
        self._counts: list[int] = []
        self._since = 0.0
        self._reported = -1
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._run, name="hvdlite CUDA calls", daemon=True)

    def start(self) -> None:
        _running.add(self)
        self._thread.start()

    def _run(self) -> None:
        while not self._ending.wait(self._patience_s / LOOKS):
            try:
                text = self.look(time.monotonic())
            except Exception:  # the Store has ended with its server
                return
            if text is not None:
                launcher_link.report_stall(text)

    def look(self, now: float) -> str | None:
        """Writes this rank's count if it stands still, and compares. Returns a new report."""
        if self._store is None:
            # Another connection: threads that share one wait for each other.
            self._store = self._shared.clone()
        own, before = int(self._nccl._get_sequence_number_for_group()), self._own
        if own != before:
            # Nothing is written: this rank's last look may come after the Store's server has ended,
            # of which torch would print a trace.
            self._own, self._counts, self._is_written = own, [], False
            return None
        if not self._is_written:
            self._store.set(f"calls/{self._team.rank}", str(own))
            self._is_written = True
        if self._team.rank:
            return None
        counts = [own, *map(self._count_of, range(1, self._team.size))]
        if counts != self._counts:
            self._counts, self._since = counts, now
        least, waited_s = min(counts), now - self._since
        if least == max(counts) or waited_s < self._patience_s or least == self._reported:
            return None
        self._reported = least
        return self._report(least, waited_s)

    def _count_of(self, member: int) -> int:
        key = f"calls/{member}"
        return int(self._store.get(key)) if self._store.check([key]) else 0

    def _report(self, least: int, waited_s: float) -> str:
        """The collective number `least` + 1 has not been called by all."""
        behind = [member for member, count in enumerate(self._counts) if count == least]
        named = [f"rank {self._team.ranks[m]} on {self._hosts[m]}" for m in behind[:MOST_NAMED]]
        if len(behind) > MOST_NAMED:
            named.append(f"{len(behind) - MOST_NAMED} more")
        called = sorted(
            self._team.ranks[member] for member, count in enumerate(self._counts) if count > least
        )
        kind = _kind_of(self._name, least + 1)
        return (
            f"{kind} {least + 1} of group '{self._name}' on CUDA tensors has waited "
            f"{waited_s:.0f} s for {', '.join(named)}; called by "
            f"rank{'s' if len(called) > 1 else ''} {_rows(called)}; "
            "do all ranks take the same path through the program?"
        )


# Those with a thread in this process.
_running: set[Calls] = set()


def stop(some: Set[Calls]) -> None:
    """Ends their threads, all within one time."""
    ended = _running & some
    _running.difference_update(ended)
    for calls in ended:
        calls._ending.set()
    until = time.monotonic() + STOP_S
    for calls in ended:
        calls._thread.join(max(0.0, until - time.monotonic()))


atexit.register(stop, _running)  # before the interpreter ends threads that are in C++
os.register_at_fork(after_in_child=_running.clear)  # a lock of theirs may be held for ever


def _kind_of(group: str, number: int) -> str:
    """From NCCL's flight recorder, where it still has the operation. Only for a report, as it asks
    CUDA for the state of what has not ended."""
    dump = getattr(c10d, "_dump_nccl_trace_json", None)
    with contextlib.suppress(Exception):  # another torch may write it in another form
        trace = json.loads(dump(includeCollectives=True, onlyActive=True)) if dump else {}
        for entry in trace.get("entries", ()):
            is_it = (entry["process_group"][0], entry["collective_seq_id"]) == (group, number)
            if is_it and not entry["is_p2p"]:
                return str(entry["profiling_name"]).rpartition(":")[2]
    return "collective"


def _rows(ranks: Sequence[int]) -> str:
    """Ascending ones: '0, 2-4'."""
    numbered = itertools.groupby(enumerate(ranks), lambda pair: pair[1] - pair[0])
    rows = [[rank for _, rank in row] for _, row in numbered]
    return ", ".join(f"{row[0]}-{row[-1]}" if len(row) > 1 else f"{row[0]}" for row in rows)


def begin(team: Team, nccl: Any, store: Any, name: str) -> Calls | None:
    """From now on the collectives of this group on CUDA tensors are counted. None: they are not."""
    active = world.active
    # An older torch counts batches of sends and receives with the collectives.
    counts = hasattr(c10d, "_dump_fr_trace_json")
    if active is None or store is None or team.size == 1 or not counts:
        return None
    patience_s = float(active.config.stall_check_time_seconds)
    if active.config.stall_check_disable or patience_s <= 0:
        return None
    places = zip(active.placement.hosts, active.placement.host_names, strict=True)
    host_of = {rank: name for ranks, name in places for rank in ranks}
    hosts = [host_of[rank] for rank in team.ranks]
    calls = Calls(team, nccl, store, name, hosts, patience_s)
    calls.start()
    return calls
