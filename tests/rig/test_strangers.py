"""Other users of the hosts, while a job runs there."""

import contextlib
import signal

import psutil
import pytest

from tests.rig.attack import attack
from tests.rig.conftest import WAITS, job

pytestmark = [pytest.mark.rig, pytest.mark.long]

HOSTS = ("-H", "server1:1,server2:2")


def test_another_user_of_the_hosts_runs_nothing_as_the_owner_of_a_job(rig, hvdrun):
    with attack(rig) as attacker:
        done = hvdrun(*HOSTS, "bash", "-c", "sleep 0.5; echo ok")
    assert attacker.ran_as == set()
    assert done.code == 0, done
    assert sorted(done.stdout.splitlines()) == ["[0] ok", "[1] ok", "[2] ok"], done
    assert len(attacker.tried) == 2  # a name for each host, which did not help


def test_no_command_line_on_any_host_holds_the_secret_of_a_job(rig, python):
    secrets, lines = set(), []
    command = [python.with_name("hvdrun"), *HOSTS, python, "-c", WAITS]
    with job(rig.inside("server1", *command), ranks=3) as running:
        for _, process in rig.members():
            with contextlib.suppress(psutil.Error):
                secrets.add(process.environ().get("HVDRUN_LINK"))
                lines.append(" ".join(process.cmdline()))
        running.send_signal(signal.SIGINT)
        running.wait(60)
    (secret,) = secrets - {None}
    assert any("agent.py host" in line for line in lines)
    assert not [line for line in lines if secret in line]
