"""The files that a rank's MPI has in /dev/shm, and in /tmp: removed if the rank leaves without
MPI_Finalize, as MPIs remove them only if a rank ends in good order.

Two ways to know them, so that no file of another job is touched. MPICH derives their names from the
job's name, which its daemon tells the rank before the rank makes a file: so a rank may die as early
as it likes. Other MPIs' files are found among those that the rank has mapped, from a second after
its start.
"""

from __future__ import annotations

import contextlib
import os

from hvdrun.machine.shared_memory import FOLDER, OF_MPI, names_mapped_by


class SharedFiles:
    def __init__(self) -> None:
        self.names: set[str] = set()

    def look(self, pid: int) -> None:
        """Remembers what the process has mapped: after its end that can't be found out."""
        self.names.update(name for name in names_mapped_by(pid) if name.startswith(OF_MPI))

    def remove(self, job: bytes, topology_file: bytes = b"") -> None:
        """`job`: its name in MPI; `topology_file`: of MPI's daemon (see pmi). Or empty."""
        if topology_file.startswith(b"/"):
            with contextlib.suppress(OSError):
                os.unlink(topology_file)
        if job:
            with contextlib.suppress(OSError):
                self.names.update(
                    name for name in os.listdir(FOLDER) if name.startswith(mpichs_names(job))
                )
        for name in self.names:
            with contextlib.suppress(OSError):
                os.unlink(f"{FOLDER}/{name}")


def mpichs_names(job: bytes) -> tuple[str, str]:
    """How the names of this job's files begin, in MPICH 4 and 5: with FNV-1a of the job's name, in
    32 bits. Then comes the number of the host in the job."""
    number = 2166136261
    for byte in job:
        number = (number ^ byte) * 16777619 & 0xFFFFFFFF
    return f"mpich_shm_{number:x}_", f"mpich_vci_{number:x}_"
