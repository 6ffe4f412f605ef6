"""What happens to a job, as values: the input of `course`, each with the time when it happens."""

from __future__ import annotations

from hvdrun.job.value import Value


class RankStarted(Value):
    rank: int


class RankInMpi(Value):
    """The rank has begun MPI_Init. Only some MPIs let the keeper see it."""

    rank: int


class RankLeftMpi(Value):
    """The rank has ended MPI_Finalize."""

    rank: int


class RankEnded(Value):
    """`how` in the words of the keeper (see frames.EXIT); `at` by the clock of this host."""

    rank: int
    how: str
    at: float


class KeeperGone(Value):
    """The keeper of a rank has ended, with or without a RankEnded before."""

    rank: int


class KeepersHere(Value):
    """So many keepers of this host are connected now."""

    connected: int


class HostConnected(Value):
    """The connection to another host begins; ssh is not through yet."""

    host: str


class HostTalks(Value):
    """The host agent speaks: ssh has got through."""

    host: str


class SshSaid(Value):
    """On its stderr: ssh, the remote shell, or srun in ssh's place."""

    host: str
    text: bytes


class HostEnded(Value):
    """The connection to the host has ended."""

    host: str
    refused: str = ""  # why nobody can look after the ranks there
    daemon_status: int | None = None  # exit code of MPI's daemon, once all has ended there
    daemon_said: bytes = b""


class HostSilent(Value):
    """The host gave no sign of life for too long. The connection to it is closed."""

    host: str


class MpirunSaid(Value):
    """mpirun or one of its daemons wrote this."""

    text: bytes


class MpirunOutputEnded(Value):
    """No process has mpirun's output open any more."""


class MpirunEnded(Value):
    code: int  # -n: by signal n


class Interrupted(Value):
    """Ctrl-C, or a signal like it."""

    number: int


class ReaderLeft(Value):
    """Nobody reads what hvdrun writes (`hvdrun … | head`), or the disk is full."""


class TimePassed(Value):
    """Nothing else has happened until now."""


Event = (
    RankStarted
    | RankInMpi
    | RankLeftMpi
    | RankEnded
    | KeeperGone
    | KeepersHere
    | HostConnected
    | HostTalks
    | SshSaid
    | HostEnded
    | HostSilent
    | MpirunSaid
    | MpirunOutputEnded
    | MpirunEnded
    | Interrupted
    | ReaderLeft
    | TimePassed
)
