"""Which variables the ranks get. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

# Of a process that MPI or Slurm has started; they must not reach what hvdrun starts.
_PER_PROCESS = re.compile(
    r"(OMPI_(?!MCA_)|OMPI_MCA_(PREFIXES|cpu_type|initial_wdir|num_procs|orte_|ess_)"
    r"|PMIX_(?!MCA_)|PMI_|PMI2_|PRTE_(?!MCA_)|OPAL_(?!PREFIX)|HYDI_|MPI_LOCAL|HVDRUN_"
    r"|SLURM_(PROCID|LOCALID|NODEID|TASK_PID|GTIDS|STEP_|STEPID|SRUN_|LAUNCH_|TOPOLOGY_)).*"
)
# Of a host or a login: right where they are set, wrong elsewhere.
_OF_THE_HOST = re.compile(
    r"HOSTNAME|HOST|HOSTTYPE|MACHTYPE|OSTYPE|PWD|OLDPWD|TMPDIR|TMP|TEMP|SHLVL|_|TTY|TERM_.*"
    r"|(XDG|SSH|DBUS)_.*|DISPLAY|XAUTHORITY|WINDOWID|MAIL|HOME|USER|LOGNAME|SHELL|LS_COLORS"
)
# The first is where hvdrun listens; the rest are for hvdrun and mpirun themselves.
LINK = "HVDRUN_LINK"
SSH = "HVDRUN_SSH"
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


def inheritable(environ: Mapping[str, str]) -> dict[str, str]:
    """hvdrun's environment without what belongs to one process."""
    return {name: value for name, value in environ.items() if not _PER_PROCESS.fullmatch(name)}


def forwarded(names: Iterable[str], exports: Iterable[str]) -> tuple[str, ...]:
    """The variables that are named to mpirun, for remote hosts. Sorted, without what a shell
    exports under names that are none (functions)."""
    wanted = {name for name in names if not _OF_THE_HOST.fullmatch(name)} | set(exports)
    return tuple(sorted(n for n in wanted if _NAME.fullmatch(n) and n != SSH))
