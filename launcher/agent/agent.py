# This line is skipped by `python -x`: an option that some launchers put before ours.
"""The agent, beside each rank and on each remote host: `python -I -S agent.py ROLE …`.

    hvdrun ─┬─ mpirun ─┬─ shim ─ keeper ─ COMMAND       a rank on this host
            │          └─ role `ssh`, which waits for MPI's daemon over there
            └─ ssh ┄┄┄ host agent ─ MPI's daemon ─ shim ─ keeper ─ COMMAND    a rank over there

- `ssh` runs in ssh's place: it has hvdrun start MPI's daemon over its own connection to the host,
  and waits for the end. So hvdrun has one connection to each remote host.
- `host` answers preflight's question to a remote host, starts MPI's daemon there, and supervises
  the ranks as hvdrun does here.
- `rank` is the program that MPI starts. It forks: the shim is the process that MPI sees and may
  kill; the keeper, out of MPI's reach, is the parent of the user's command. So hvdrun reports a
  rank that fails before MPI notices, in the same way under every MPI. The command gets the rank's
  share of the host's cores; with `unbound-rank` it keeps the cores that MPI has given it.
  `verbose-rank` is as `rank`, and says where its GPU is.
- `reach` stands in ssh's place where each host has started hvdrun itself (see `rendezvous`).

The keepers find their supervisor (hvdrun, or the host agent) by the job's name in HVDRUN_LINK
(see `peers`); if it does not answer, they end. If the variable is not set, `rank` becomes the
command and `ssh` becomes ssh, as without hvdrun.

The agents run without site-packages, and each role imports only what it needs.
"""

import os
import sys
import types


def main() -> None:
    # In a source tree the package's folder has another name; and its __init__ is not needed.
    package = types.ModuleType("hvdrun")
    package.__path__ = [os.path.dirname(os.path.dirname(os.path.abspath(__file__)))]
    sys.modules["hvdrun"] = package
    role, arguments = sys.argv[1], sys.argv[2:]
    if role.endswith("rank"):
        from hvdrun.agent.rank import shim

        shim.main(arguments, role)
    if role in ("ssh", "reach"):
        from hvdrun.agent import ssh

        (ssh.main if role == "ssh" else ssh.reach)(arguments)
    from hvdrun.agent import host_agent

    host_agent.main(arguments)


if __name__ == "__main__":
    main()
