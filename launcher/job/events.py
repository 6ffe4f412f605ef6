"""What happens to a job, as values: the input of `course`, each with the time when it happens."""

from __future__ import annotations

from hvdrun.job.value import Value


class RankStarted(Value):
    """host: over whose connection hvdrun has learnt it; "": the rank runs on hvdrun's machine."""

    rank: int
    host: str = ""


class RankInMpi(Value):
    """The rank has begun MPI_Init. Only some MPIs let the keeper see it."""

    rank: int


class RankLeftMpi(Value):
    """The rank has finished MPI_Finalize."""

    rank: int


class RankSaid(Value):
    """hvdlite in the rank has told its keeper this note (see `machine.notes`): its kind and data.
    Valid in its size; the data is the rank's, and not to be trusted."""

    rank: int
    kind: bytes
    data: bytes = b""


class RankLooked(Value):
    """The keeper's answer about what the rank does, as `machine.looks` packs it."""

    rank: int
    look: bytes


class RankRecorded(Value):
    """The rank's last operations, as its keeper packs them (`agent.rank_box`). is_running: as it
    looked at its stack; else they come before its RankEnded."""

    rank: int
    operations: bytes
    is_running: bool = False


class StacksAsked(Value):
    """Somebody wants to know where the ranks are."""

    asker: int


class MetricsAsked(Value):
    """Somebody wants to know where the time of the ranks' steps goes. as_json: in figures."""

    asker: int
    as_json: bool = False


class RankClosedFiles(Value):
    """The rank runs on and has closed its end of PMI, or of the way for notes; `at` by the clock of
    this host. A program that closes these closes all descriptors that it does not know."""

    rank: int
    at: float


class RankEnded(Value):
    """`how` as the keeper writes it (see frames.EXIT); `at` by the clock of this host."""

    rank: int
    how: str
    at: float


class KeeperGone(Value):
    """The keeper of a rank has ended; a RankEnded may or may not have come before."""

    rank: int
    nonsense: str = ""  # what has come from it that is no message, so that it was hung up on


class KeepersHere(Value):
    """The number of keepers of this host that are connected now."""

    connected: int


class HostConnected(Value):
    """hvdrun has started to connect to another host; ssh has not connected yet."""

    host: str


class HostTalks(Value):
    """The host agent has sent its first message: ssh has connected."""

    host: str


class HostShares(Value):
    """The host is a machine that hvdrun knows by another name, too: its ranks may be told of under
    that one."""

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
    nonsense: str = ""  # what has come from it that is no message, so that hvdrun has hung up


class HostQuiet(Value):
    """The host has given no sign of life for some seconds."""

    host: str
    silent_s: float
    limit_s: float  # after which it is lost


class HostBack(Value):
    """A quiet host has given a sign of life."""

    host: str
    silent_s: float


class HostSilent(Value):
    """The host gave no sign of life for too long. The connection to it is closed."""

    host: str
    silent_s: float
    limit_s: float


class HostGaveUp(Value):
    """The host ends its ranks, as hvdrun was silent for too long; `at` by this host's clock."""

    host: str
    silent_s: float
    at: float


class Paused(Value):
    """hvdrun itself did not run: it was stopped, or this machine was suspended."""

    pause_s: float


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
    node: int = 0  # whose hvdrun got it, where each host runs one (see `rendezvous`)


class ToPassOn(Value):
    """hvdrun got a signal that is for the ranks."""

    number: int


class RankSignalled(Value):
    """A keeper's answer to such a signal: see `agent.signals.pass_on`."""

    rank: int
    request: int
    answer: str


class ToStop(Value):
    """Ctrl-Z."""


class ReaderLeft(Value):
    """hvdrun can't write: its reader is gone (`hvdrun … | head`), or the disk is full."""


class TimePassed(Value):
    """Nothing else has happened until now."""


Event = (
    RankStarted
    | RankInMpi
    | RankLeftMpi
    | RankSaid
    | RankLooked
    | RankRecorded
    | StacksAsked
    | MetricsAsked
    | RankClosedFiles
    | RankEnded
    | KeeperGone
    | KeepersHere
    | HostConnected
    | HostTalks
    | SshSaid
    | HostEnded
    | HostQuiet
    | HostShares
    | HostBack
    | HostSilent
    | HostGaveUp
    | Paused
    | MpirunSaid
    | MpirunOutputEnded
    | MpirunEnded
    | Interrupted
    | ToPassOn
    | RankSignalled
    | ToStop
    | ReaderLeft
    | TimePassed
)
