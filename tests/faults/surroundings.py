"""Faults of a host, its network or its cgroups, which the table's program makes from outside."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from pathlib import Path

import psutil

from tests.faults.ends import WHERE
from tests.faults.fault import STALL_S, Fault, Job, ends, is_held, waits

FREEZERS = [Path("/sys/fs/cgroup/unified"), Path("/sys/fs/cgroup")]
QUOTAS = [Path("/sys/fs/cgroup/cpu"), Path("/sys/fs/cgroup")]
# The least that there can be: 1 % of a core.
QUOTA_US, PERIOD_US = 1000, 100_000


def _mount(mounts: list[Path]) -> Path | None:
    return next((at for at in mounts if os.access(at / "cgroup.procs", os.W_OK)), None)


def _lacks_freezer() -> str:
    return "" if _mount(FREEZERS[:1]) else "no cgroup of version 2 can be made here"


def _lacks_quota() -> str:
    at = _mount(QUOTAS)
    found = at and any((at / name).exists() for name in ("cpu.cfs_quota_us", "cpu.max"))
    return "" if found else "no cgroup with a CPU quota can be made here"


def _in_group(job: Job, mount: Path | None) -> Path:
    assert mount is not None
    group = mount / f"hvdlite-faults-{job.pid}"
    group.mkdir()

    def remove() -> None:
        end = time.monotonic() + 10
        while (group / "cgroup.procs").read_text() and time.monotonic() < end:
            time.sleep(0.05)
        group.rmdir()

    job.afterwards(remove)
    return group


def freeze(job: Job) -> None:
    group = _in_group(job, _mount(FREEZERS))
    (group / "cgroup.procs").write_text(str(job.pid))
    (group / "cgroup.freeze").write_text("1")
    job.at_end(lambda: _write(group / "cgroup.freeze", "0"))


def throttle(job: Job) -> None:
    group = _in_group(job, _mount(QUOTAS))
    if (group / "cpu.max").exists():
        _write(group / "cpu.max", f"{QUOTA_US} {PERIOD_US}")
    else:
        _write(group / "cpu.cfs_period_us", str(PERIOD_US))
        _write(group / "cpu.cfs_quota_us", str(QUOTA_US))
    _write(group / "cgroup.procs", str(job.pid))


def _write(path: Path, text: str) -> None:
    path.write_text(text)


def stop(job: Job) -> None:
    os.kill(job.pid, signal.SIGSTOP)


def stop_host(job: Job) -> None:
    """All processes of its process space, but for the first one."""
    space = os.readlink(f"/proc/{job.pid}/ns/pid")
    for process in psutil.process_iter():
        try:
            if os.readlink(f"/proc/{process.pid}/ns/pid") == space and not _is_init(process.pid):
                process.suspend()
                job.at_end(lambda process=process: _resume(process))  # type: ignore[misc]
        except (OSError, psutil.Error):
            continue


def _resume(process: psutil.Process) -> None:
    with contextlib.suppress(psutil.Error):
        process.resume()


def _is_init(pid: int) -> bool:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("NSpid:"):
            return line.split()[-1] == "1"
    return False


def _cluster(*words: str):
    def does(job: Job) -> None:
        job.cluster(words[0], job.host, *words[1:])

    return does


def _slow(*options: str):
    def does(job: Job) -> None:
        def restore() -> None:
            job.cluster("slow", job.host)

        job.cluster("slow", job.host, *options)
        job.at_end(restore)

    return does


def lose_packets(job: Job) -> None:
    job.cluster(
        *("exec", job.host, "iptables", "-A", "INPUT", "-p", "tcp", "-m", "statistic"),
        *("--mode", "random", "--probability", "0.6", "-j", "DROP"),
    )

    def restore() -> None:
        job.cluster("exec", job.host, "iptables", "-F", "INPUT")

    job.at_end(restore)


SILENT = (
    r"for {host}, which does not answer|^hvdrun: {host} has given no sign of life"
    r"|^hvdrun: {host} is lost"
)
SLOW_LINK = (r"{host}",)
BIG = """
model = torch.nn.Linear(4, 200_000)
"""

SURROUNDINGS = [
    Fault(
        "SIGSTOP from outside",
        is_held(r"is stopped, for \S+ s now"),
        fault="time.sleep(600)",
        outside=stop,
        limit_s=STALL_S,
    ),
    Fault(
        "a frozen cgroup",
        is_held("is frozen by its cgroup"),
        fault="time.sleep(600)",
        outside=freeze,
        limit_s=STALL_S,
        lacking=_lacks_freezer,
    ),
    Fault(
        "a CPU quota that is used up",
        waits(r"[^\n]*throttle"),
        fault="""
        number = 0
        while True: number += 1  # the line
        """,
        outside=throttle,
        limit_s=STALL_S,
        lacking=_lacks_quota,
        hosts=(1,),
    ),
    Fault(
        "a link that is cut",
        (SILENT,),
        outside=_cluster("cut"),
        limit_s=STALL_S,
        hosts=(3,),
    ),
    Fault(
        "a host without power",
        (SILENT,),
        outside=_cluster("kill"),
        limit_s=STALL_S,
        hosts=(3,),
    ),
    Fault(
        "a host that is rebooted",
        (r"^hvdrun: {host} is lost",),
        outside=_cluster("kill", "--loud"),
        hosts=(3,),
    ),
    Fault(
        "a host whose processes are stopped",
        (SILENT,),
        outside=stop_host,
        limit_s=STALL_S,
        hosts=(3,),
    ),
    Fault(
        "a link of 8 kbit/s",
        SLOW_LINK,
        model=BIG,
        outside=_slow("--rate", "8kbit"),
        limit_s=STALL_S,
        hosts=(3,),
    ),
    Fault(
        "a delay of 3 s",
        SLOW_LINK,
        outside=_slow("--delay", "3s"),
        limit_s=STALL_S,
        hosts=(3,),
    ),
    Fault(
        "a link that loses 60 % of all packets",
        SLOW_LINK,
        outside=lose_packets,
        limit_s=STALL_S,
        hosts=(3,),
    ),
    Fault(
        "SIGKILL from outside",
        ends("was ended by SIGKILL", WHERE),
        fault="time.sleep(600)",
        outside=lambda job: os.kill(job.pid, signal.SIGKILL),
    ),
]
