"""What happens to a job, as values: the input of `course`, each with the time when it happens."""

from __future__ import annotations

from hvdrun.job.value import Value


class RankStarted(Value):
    rank: int


class RankInMpi(Value):
    """The rank has begun MPI_Init. Only some MPIs let the keeper see it."""

    rank: int


class RankLeftMpi(Value):
    """The rank has finished MPI_Finalize."""

    rank: int


class RankEnded(Value):
    """`how` as the keeper writes it (see frames.EXIT); `at` by the clock of this host."""

    rank: int
    how: str
    at: float


class KeeperGone(Value):
    """The keeper of a rank has ended; a RankEnded may or may not have come before."""

    rank: int


class KeepersHere(Value):
    """The number of keepers of this host that are connected now."""

    connected: int


class HostConnected(Value):
    """hvdrun has started to connect to another host; ssh has not connected yet."""

    host: str


class HostTalks(Value):
    """The host agent has sent its first message: ssh has connected."""

    host: str


class SshSaid(Value):
    """ssh (or srun in its place) or the remote shell wrote this to stderr."""

    host: str
    text: bytes


class HostEnded(Value):
    """The connection to the host has ended."""

    host: str
    refused: str = ""  # why the host agent can't run ranks there
    daemon_status: int | None = None  # MPI's daemon's exit code, once everything there has ended
    daemon_said: bytes = b""  # or the login shell, if the host agent has not started


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
    """hvdrun can't write: its reader is gone (`hvdrun … | head`), or the disk is full."""


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
