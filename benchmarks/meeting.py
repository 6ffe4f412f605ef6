"""Measures a job on several hosts from start to exit: over ssh, beside the same command on every
host while no sshd answers (TF_CONFIG).

    python -m benchmarks.meeting [--rounds 7] [--hosts 4]

The hosts are network namespaces of this machine, whose cores they share: where every host runs an
hvdrun, all of these load on the same cores. The two ways take turns; sshd is stopped for the
second, so that it would be noticed if anything still needed it.
"""

import json
import secrets
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import click

from benchmarks.rig import Rig, lacking, rig

PORT = 29717
LIMIT_S = 60.0
PROGRAM = [sys.executable, "-c", "from mpi4py import MPI; MPI.COMM_WORLD.Barrier()"]
HVDRUN = str(Path(sys.executable).with_name("hvdrun"))


def over_ssh(hosts: Rig, count: int, cold: list[str]) -> None:
    subprocess.run(
        hosts.command_on([1] * count, [HVDRUN, *cold, *PROGRAM]),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        check=True,
        timeout=LIMIT_S,
    )


def everywhere(hosts: Rig, count: int, secret: Path, cold: list[str]) -> None:
    """Like a platform: starts all hosts at once, and waits for all."""
    cluster = {"worker": [f"server{number + 1}:{PORT}" for number in range(count)]}
    started = []
    for number in range(count):
        config = json.dumps({"cluster": cluster, "task": {"type": "worker", "index": number}})
        words = ["env", f"TF_CONFIG={config}", HVDRUN, "-np", str(count), *cold]
        words += ["--rendezvous-secret-file", str(secret), *PROGRAM]
        started.append(
            subprocess.Popen(
                hosts.inside(number, words), stdin=subprocess.DEVNULL, stderr=subprocess.PIPE
            )
        )
    for process in started:
        _, said = process.communicate(timeout=LIMIT_S)
        if process.returncode:
            raise click.ClickException(said.decode())


@click.command()
@click.option("--rounds", default=7, show_default=True)
@click.option("--hosts", "count", default=4, show_default=True)
def main(rounds: int, count: int) -> None:
    """Prints the median of each way, and their difference."""
    if reason := lacking():
        raise click.ClickException(reason)
    with tempfile.TemporaryDirectory() as folder, rig(Path(folder), count) as hosts:
        secret = Path(folder, "share", "secret")
        secret.write_text(secrets.token_hex(32))
        secret.chmod(0o600)
        for what, cold in (("hosts known", []), ("hosts asked anew", ["--disable-cache"])):
            took: dict[str, list[float]] = {"over ssh": [], "same command": []}
            for number in range(rounds + 1):
                for way, times in took.items():
                    if way == "same command":
                        hosts.signal_sshd("STOP")
                    begin = time.perf_counter()
                    if way == "over ssh":
                        over_ssh(hosts, count, cold)
                    else:
                        everywhere(hosts, count, secret, cold)
                    if number:  # the first round fills the caches
                        times.append(time.perf_counter() - begin)
                    if way == "same command":
                        hosts.signal_sshd("CONT")
            median = {way: statistics.median(times) for way, times in took.items()}
            shown = ", ".join(f"{way} {seconds:.2f} s" for way, seconds in median.items())
            more = median["same command"] - median["over ssh"]
            click.echo(f"{count} hosts, {what}: {shown}, difference {more:+.2f} s")


if __name__ == "__main__":
    main()
