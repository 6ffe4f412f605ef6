"""Preflight of hosts that do not exist: a stand-in for ssh answers for them, on this machine."""

import os
import re
import signal
import subprocess
import sys
import time

import psutil
import pytest

from hvdrun.command_line.cli import main
from hvdrun.machine.resources import physical_cores
from tests.harness.worlds import ROOT

HOSTS = 8
EDITED_FACTS = ROOT / "tests" / "harness" / "edited_facts.py"


@pytest.fixture
def stand_in(tmp_path, monkeypatch):
    """stand_in(text): a script in ssh's place. $host is the host, $command what to do there."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    (tmp_path / "bin").mkdir()

    def make(text):
        arguments = "for word; do host=$command; command=$word; done"
        script = f"#!/bin/sh\n{arguments}\ncd {tmp_path}\n{text}\n"
        (tmp_path / "bin" / "ssh").write_text(script)
        (tmp_path / "bin" / "ssh").chmod(0o755)

    return make


def hosts(count=HOSTS):
    return ",".join(f"h{i}:1" for i in range(1, count + 1))


def test_all_hosts_are_asked_at_the_same_time(stand_in, capsys):
    # Each waits until all others have begun.
    all_there = f'[ "$(ls begun | wc -l)" = {HOSTS} ]'
    stand_in(
        f"mkdir -p begun; touch begun/$host; for i in $(seq 200); do {all_there} && break;"
        f' sleep 0.05; done; {all_there} && exec sh -c "$command"'
    )
    assert main(["-H", hosts(), "--check"]) == 0
    rows = [line.split()[:3] for line in capsys.readouterr().out.splitlines()]
    assert [row[0] for row in rows if row[1:] == ["ssh", "ok"]] == [
        f"h{i}" for i in range(1, HOSTS + 1)
    ]


def test_what_hvdrun_starts_on_one_host_does_not_inherit_the_secret_of_several(
    stand_in, tmp_path, monkeypatch
):
    monkeypatch.setenv("HVDLITE_RENDEZVOUS_SECRET", 32 * "x")
    stand_in("env > environment; exit 255")
    main(["-H", hosts(1), "true"])
    assert "HVDLITE_RENDEZVOUS_SECRET" not in (tmp_path / "environment").read_text()


def test_the_worst_of_several_failures_is_the_exit_code_and_each_has_its_line(stand_in, capsys):
    stand_in(
        """case $host in
        h1) echo 'ssh: connect to host h1 port 22: Connection refused' >&2; exit 255 ;;
        h2) echo 'sh: python: not found' >&2; exit 127 ;;
        h3) exec sh -c "$command" ;;
        esac"""
    )
    assert main(["-H", hosts(3), "/no/such/program"]) == 70
    said = capsys.readouterr().err.splitlines()
    summary, _, _, *lines = [line for line in said if not line.startswith("hvdrun: waiting ")]
    assert summary == "hvdrun: 3 of 3 hosts are not ready, and nothing was started"
    rows = [re.split(r"  +", line.strip())[:3] for line in lines]
    assert [row for row in rows if row[2] == "failed"] == [
        ["h1", "ssh", "failed"],
        ["h2", "Python", "failed"],
        ["h3", "program", "failed"],
    ]
    stand_in('exec sh -c "$command"')
    assert main(["-H", hosts(1), "/no/such/program"]) == 69


def test_memory_is_for_the_ranks_that_a_host_can_get(stand_in, capsys):
    edit = f"{sys.executable} {EDITED_FACTS} '\"memory_bytes\": [0-9]*' '\"memory_bytes\": 99'"
    stand_in(f'sh -c "$command" | {edit}')
    for words, ranks in (
        (["-H", "h1"], physical_cores()),
        (["-H", "h1:9"], 9),
        (["-H", "h1:9", "-np", "3"], 3),
    ):
        assert main([*words, "-x", "CUDA_VISIBLE_DEVICES=", "--check"]) == 0
        assert f"only 0 MiB are free for {ranks} rank{'s' * (ranks > 1)}" in capsys.readouterr().out


def test_only_hosts_that_will_have_ranks_are_asked(stand_in, capsys, tmp_path):
    stand_in('touch asked-$host; exec sh -c "$command"')
    assert main(["-np", "3", "-H", "h1:2,h2:2,h3:2", "/no/such/program"]) == 69
    assert sorted(path.name for path in tmp_path.glob("asked-*")) == ["asked-h1", "asked-h2"]
    assert main(["-np", "9", "-H", "h4:2", "true"]) == 66
    assert not (tmp_path / "asked-h4").exists()
    # What h5 has is known when it has answered.
    assert main(["-np", "1", "-H", "h5,h6:1", "/no/such/program"]) == 69
    assert (tmp_path / "asked-h6").exists()


def test_who_waits_is_told_for_whom(stand_in, capsys, monkeypatch):
    monkeypatch.setattr("hvdrun.preflight.ask_hosts.DELAY_S", 0.2)
    stand_in('sleep 1; exec sh -c "$command"')
    assert main(["-H", hosts(5), "--check"]) == 0
    said = capsys.readouterr().err
    assert said == "hvdrun: waiting for an answer from h1, h2, h3 and 2 more\n"


def test_an_answer_of_another_hvdrun_is_none(stand_in, capsys):
    edit = f"{sys.executable} {EDITED_FACTS} '.*' '{{}}'"
    stand_in(f'sh -c "$command" | {edit}')
    assert main(["-H", hosts(1), "true"]) == 71
    assert "another version of hvdrun" in capsys.readouterr().err


def test_no_ssh_here_is_said(stand_in, capsys, monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    assert main(["-H", hosts(1), sys.executable]) == 70
    assert "ssh can't be started on this machine: No such file" in capsys.readouterr().err


def test_a_dry_run_asks_no_host_and_says_so(stand_in, capsys, tmp_path):
    stand_in("touch asked")
    assert main(["-H", "h1:1,h2", "--dry-run", "true"]) == 0
    assert "# not asked: h1, h2; " in capsys.readouterr().out
    assert not (tmp_path / "asked").exists()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP], ids=str)
def test_a_signal_ends_preflight_and_what_it_started(stand_in, tmp_path, number):
    stand_in("echo $$ >> pids; echo asked; exec sleep 60")
    hvdrun = subprocess.Popen(
        [sys.executable, "-m", "hvdrun", "-H", hosts(2), "true"], stderr=subprocess.PIPE
    )
    pids = tmp_path / "pids"
    while not pids.exists() or len(pids.read_text().split()) < 2:
        assert hvdrun.poll() is None
        time.sleep(0.01)
    hvdrun.send_signal(number)
    said = hvdrun.communicate(timeout=30)[1].decode().strip()
    name = "Ctrl-C" if number == signal.SIGINT else number.name
    assert said == f"hvdrun: {name}: no rank has been started"
    assert hvdrun.returncode == 128 + number
    left = [int(pid) for pid in pids.read_text().split() if psutil.pid_exists(int(pid))]
    assert not psutil.wait_procs([psutil.Process(pid) for pid in left], timeout=10)[1]


def test_the_end_of_its_terminal_ends_hvdrun_though_nobody_reads_that(stand_in, tmp_path):
    stand_in("touch asked; exec sleep 60")
    terminal, end = os.openpty()
    hvdrun = subprocess.Popen([sys.executable, "-m", "hvdrun", "-H", hosts(1), "true"], stderr=end)
    os.close(end)
    while not (tmp_path / "asked").exists():
        assert hvdrun.poll() is None
        time.sleep(0.01)
    os.close(terminal)
    hvdrun.send_signal(signal.SIGHUP)
    assert hvdrun.wait(timeout=30) == 128 + signal.SIGHUP


def test_a_signal_for_the_ranks_does_not_end_preflight(stand_in, tmp_path):
    stand_in("touch asked; while [ ! -e over ]; do sleep 0.01; done; exit 255")
    hvdrun = subprocess.Popen(
        [sys.executable, "-m", "hvdrun", "-H", hosts(1), "true"], stderr=subprocess.PIPE, text=True
    )
    while not (tmp_path / "asked").exists():
        assert hvdrun.poll() is None
        time.sleep(0.01)
    hvdrun.send_signal(signal.SIGUSR1)
    line = hvdrun.stderr.readline()
    assert line == "hvdrun: SIGUSR1 was not passed on: no rank is running\n"
    (tmp_path / "over").touch()
    hvdrun.communicate(timeout=30)
    assert hvdrun.returncode == 70


def test_the_command_that_asks_names_the_user_the_port_and_the_key(
    stand_in, capsys, tmp_path, monkeypatch
):
    (tmp_path / "hosts").write_text("h1 slots=1 user=ann port=2222\n")
    stand_in('echo "$@" > words; exit 255')
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my key").touch()
    words = ["--hostfile", str(tmp_path / "hosts"), "-i", "my key", "-p", "22", "true"]
    assert main(words) == 70
    said = (tmp_path / "words").read_text()
    assert "-o BatchMode=yes -o ConnectTimeout=10" in said
    assert re.search(r"-p 2222 .*-p 22 -i /.*/my key -l ann h1 ", said)
    assert "ssh-copy-id" not in capsys.readouterr().err
