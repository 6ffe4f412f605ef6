# This line is skipped by `python -x`: an option that some launchers put before ours.
"""What hvdrun runs beside each rank and on each remote host: `python -I -S agent.py ROLE …`.

    hvdrun ─ mpirun ─┬─ shim ─ keeper ─ COMMAND         a rank on this host
       │             └─ ssh ┄┄┄ host agent ┐            (role `ssh`, which becomes ssh)
       └─── both ends of ssh are hvdrun's  │
                                 MPI's daemon ─ shim ─ keeper ─ COMMAND     a rank over there

- `ssh` stands in ssh's place: it hands the ends of the connection to hvdrun and becomes ssh, so
  that each remote host costs one connection, MPI's and hvdrun's in one.
- `host` starts MPI's daemon on a remote host, and looks after the ranks there as hvdrun does here.
- `rank` is what MPI takes for the program. It divides in two: the shim, which MPI sees and may
  kill, and the keeper, out of MPI's reach, whose child is the user's command. So a rank that fails
  is reported before MPI hears of it, in the same way under every MPI. The command gets the rank's
  share of the host's cores; as `unbound-rank` those that MPI has given it.
- `probe` answers what preflight asks of a host before anything is started.

The keepers find their supervisor (hvdrun, or the host agent) by the job's secret in HVDRUN_LINK
(see `peers`), and without it they end. Where it is not set the roles do what is done without
hvdrun: `rank` becomes the command, `ssh` becomes ssh.

The agents run without site-packages and import little: 15 ms of each rank's start.
"""

import os
import sys
import types


def main() -> None:
    # The package has another name where it is not installed, and its __init__ is not for us.
    package = types.ModuleType("hvdrun")
    package.__path__ = [os.path.dirname(os.path.dirname(os.path.abspath(__file__)))]
    sys.modules["hvdrun"] = package
    role, arguments = sys.argv[1], sys.argv[2:]
    if role in ("rank", "unbound-rank"):
        from hvdrun.agent import keeper

        keeper.main(arguments, bound=role == "rank")
    if role == "probe":
        from hvdrun.agent import probe

        probe.main(arguments)
    from hvdrun.agent import host_agent

    if role == "ssh":
        host_agent.ssh_main(arguments)
    host_agent.host_main(arguments)


if __name__ == "__main__":
    main()
