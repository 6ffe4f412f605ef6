"""Copies between the GPUs of a host, with a stand-in for torch: there is no GPU here."""

import json
import os
import signal
import sys
import time

import pytest
import torch

from hvdrun.agent import gpu_copies
from hvdrun.command_line.cli import main
from hvdrun.preflight.gpus import judge_copies
from tests.launcher.preflight.test_preflight import EDITED_FACTS

# Three GPUs, of which 0 and 1 reach each other, and 1 and 2. $FAULT: a word, source and target.
TORCH = """
import os, sys, time
uint8 = None
fault, *pair = os.environ["FAULT"].split()
if fault == "absent":
    raise ImportError("no module of that name")
open(os.environ["PID_FILE"], "w").write(str(os.getpid()))
if fault == "slow":
    time.sleep(1000)


class Tensor:
    def __init__(self, data, device="cpu"):
        self.data, self.device = bytearray(data), str(device)

    def to(self, device):
        return Tensor(self.data, device)

    def cpu(self):
        return self.to("cpu")

    def copy_(self, other):
        self.data[:] = other.data
        if [other.device, self.device] == [f"cuda:{d}" for d in pair]:
            # The line of a library that does not end.
            print("a word", end="", flush=True)
            if fault == "hang":
                time.sleep(1000)
            if fault == "fail":
                raise RuntimeError("CUDA error: peer mapping")
            if fault == "wrong" and len(self.data) > 1:
                self.data[-1] = 255  # as it was before


def frombuffer(data, dtype):
    return Tensor(data)


def full(size, value, dtype, device):
    return Tensor(bytes([value]) * size[0], device)


def equal(a, b):
    return a.data == b.data


class cuda:
    device_count = staticmethod(lambda: 1 if fault == "alone" else 3)
    can_device_access_peer = staticmethod(lambda a, b: fault != "apart" and abs(a - b) == 1)
    synchronize = staticmethod(lambda device: None)
"""


@pytest.fixture
def stand_in(tmp_path, monkeypatch):
    """stand_in(fault): a torch whose GPUs have that fault."""
    (tmp_path / "torch.py").write_text(TORCH)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setenv("PID_FILE", str(tmp_path / "pid"))
    return lambda fault: monkeypatch.setenv("FAULT", fault)


def test_the_program_speaks_to_the_real_torch_too():
    for size in gpu_copies.SIZES:
        assert gpu_copies.arrives(torch, size, "cpu", "cpu")


def found(tmp_path, python=sys.executable):
    answer = gpu_copies.copies(python, str(tmp_path), {})
    return judge_copies("server1", json.loads(json.dumps(answer)))


@pytest.mark.parametrize(
    ("fault", "text"),
    [
        ("none", "4 of 4 pairs tried, all bytes arrived"),
        ("apart", "none of its GPUs reaches another one's memory"),
        ("alone", "not tried: torch sees 1 GPUs"),
        ("absent", "not tried: ImportError: no module of that name"),
        ("wrong 1 0", "from GPU 1 to GPU 0: of 4097 bytes not all arrived"),
        ("wrong 1 2", "from GPU 1 to GPU 2: of 4097 bytes not all arrived"),
        ("hang 1 2", "from GPU 1 to GPU 2: the copy hangs, for 3 s so far"),
        (
            "fail 2 1",
            "from GPU 2 to GPU 1: the copy failed: RuntimeError: CUDA error: peer mapping",
        ),
    ],
)
def test_a_pair_whose_copies_do_not_arrive_is_named(stand_in, tmp_path, monkeypatch, fault, text):
    stand_in(fault)
    monkeypatch.setattr(gpu_copies, "PAIR_S", 3.0)
    finding = found(tmp_path)
    assert finding.text == text
    assert bool(finding.failure) == text.startswith("from")
    assert ("NCCL_P2P_DISABLE=1" in finding.remedy) == bool(finding.failure)
    if fault != "absent":  # nothing of it is left
        with pytest.raises(ProcessLookupError):
            os.kill(int((tmp_path / "pid").read_text()), 0)


def test_a_program_that_a_wrapper_has_started_is_ended_too(stand_in, tmp_path, monkeypatch):
    stand_in("hang 1 2")
    monkeypatch.setattr(gpu_copies, "PAIR_S", 3.0)
    wrapper = tmp_path / "python"
    wrapper.write_text(f'#!/bin/sh\n{sys.executable} "$@"\nexit $?\n')
    wrapper.chmod(0o755)
    assert "from GPU 1 to GPU 2: the copy hangs" in found(tmp_path, str(wrapper)).text
    pid = int((tmp_path / "pid").read_text())
    deadline = time.monotonic() + 30
    while is_running(pid) and time.monotonic() < deadline:
        time.sleep(0.01)
    if is_running(pid):
        os.kill(pid, signal.SIGKILL)
        pytest.fail(f"process {pid} was left")


def is_running(pid):
    """A process that nobody has waited for yet has ended."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.parametrize(
    "junk",
    [
        "hvdrun-gpus pairs",
        "hvdrun-gpus wrong",
        "hvdrun-gpus wrong 0 of",
        "hvdrun-gpus right 0 1 2",
        "hvdrun-gpus later 1",
        "a wordhvdrun-gpus begin 0 1",
    ],
)
def test_lines_that_others_have_written_into_hide_no_fault(stand_in, tmp_path, monkeypatch, junk):
    program = tmp_path / "program.py"
    lines = ["hvdrun-gpus pairs 2", junk, "hvdrun-gpus wrong 0 1 4097", "hvdrun-gpus right 1 0"]
    program.write_text(f"print({chr(10).join(lines)!r})")
    monkeypatch.setattr(gpu_copies, "__file__", str(program))
    stand_in("none")
    assert found(tmp_path).text == "from GPU 0 to GPU 1: of 4097 bytes not all arrived"


def test_a_torch_that_does_not_start_and_a_missing_python_are_no_failures(
    stand_in, tmp_path, monkeypatch
):
    stand_in("slow")
    monkeypatch.setattr(gpu_copies, "START_S", 1.0)
    assert found(tmp_path).text == "not tried: no answer within 1 s"
    assert found(tmp_path, "/no/such/python").text.startswith("not tried: /no/such/python: No such")
    assert judge_copies("server1", {"pairs": "many"}).text == "not tried: no answer"


@pytest.mark.parametrize(
    ("words", "code", "hosts"),
    [
        ([], 71, ["localhost"]),
        (["-H", "h1:1,localhost:1"], 71, ["h1", "localhost"]),
        pytest.param(["-x", "NCCL_P2P_DISABLE=1"], 0, [], id="the remedy was taken"),
    ],
)
def test_check_tries_copies_on_each_host_with_several_gpus(
    stand_in, tmp_path, monkeypatch, capsys, words, code, hosts
):
    stand_in("wrong 0 1")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    has_two = f"""{sys.executable} {EDITED_FACTS} '"gpus": [0-9]*' '"gpus": 2'"""
    ssh = f'#!/bin/sh\nfor command; do :; done\nsh -c "$command" | {has_two}\n'
    (tmp_path / "ssh").write_text(ssh)
    (tmp_path / "ssh").chmod(0o755)
    monkeypatch.setattr("hvdrun.agent.probe.gpu_count", lambda visible: 2)
    assert main([*words, "-np", "2", "--check"]) == code
    rows = [line for line in capsys.readouterr().out.splitlines() if "copies between" in line]
    assert [row.split()[0] for row in rows] == hosts
    assert not [row for row in rows if " failed " not in row]
    assert not [row for row in rows if "from GPU 0 to GPU 1: of 4097 bytes" not in row]
