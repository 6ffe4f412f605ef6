"""What happens to a job, as values: the input of `course`, each with the time when it happens."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class RankStarted:
    """host: over whose connection hvdrun has learnt it; "": the rank runs on hvdrun's machine."""

    rank: int
    host: str = ""


@dataclass(slots=True)
class RankInMpi:
    """The rank has begun MPI_Init. Only some MPIs let the keeper see it."""

    rank: int


@dataclass(slots=True)
class RankLeftMpi:
    """The rank has finished MPI_Finalize."""

    rank: int


@dataclass(slots=True)
class RankSaid:
    """hvdlite in the rank has told its keeper this note (see `machine.notes`): its kind and data.
    Valid in its size; the data is the rank's, and not to be trusted."""

    rank: int
    kind: bytes
    data: bytes = b""


@dataclass(slots=True)
class RankLooked:
    """The keeper's answer about what the rank does, as `machine.looks` packs it."""

    rank: int
    look: bytes


@dataclass(slots=True)
class RankRecorded:
    """The rank's last operations, as its keeper packs them (`agent.rank.notes`). is_running: as it
    looked at its stack; else they come before its RankEnded."""

    rank: int
    operations: bytes
    is_running: bool = False


@dataclass(slots=True)
class StacksAsked:
    """Somebody wants to know where the ranks are."""

    asker: int


@dataclass(slots=True)
class MetricsAsked:
    """Somebody wants to know where the time of the ranks' steps goes. as_json: in figures."""

    asker: int
    as_json: bool = False


@dataclass(slots=True)
class RankClosedFiles:
    """The rank runs on and has closed its end of PMI, or of the way for notes; `at` by the clock of
    this host. A program that closes these closes all descriptors that it does not know."""

    rank: int
    at: float


@dataclass(slots=True)
class RankEnded:
    """`how` as the keeper writes it (see frames.EXIT); `at` by the clock of this host."""

    rank: int
    how: str
    at: float


@dataclass(slots=True)
class KeeperGone:
    """The keeper of a rank has ended; a RankEnded may or may not have come before."""

    rank: int
    nonsense: str = ""  # what has come from it that is no message, so that it was hung up on


@dataclass(slots=True)
class KeepersHere:
    """The number of keepers of this host that are connected now."""

    connected: int


@dataclass(slots=True)
class HostConnected:
    """hvdrun has started to connect to another host; ssh has not connected yet."""

    host: str


@dataclass(slots=True)
class HostTalks:
    """The host agent has sent its first message: ssh has connected."""

    host: str


@dataclass(slots=True)
class HostShares:
    """The host is a machine that hvdrun knows by another name, too: its ranks may be told of under
    that one."""

    host: str


@dataclass(slots=True)
class SshSaid:
    """ssh (or srun in its place) or the remote shell wrote this to stderr."""

    host: str
    text: bytes


@dataclass(slots=True)
class HostEnded:
    """The connection to the host has ended."""

    host: str
    refused: str = ""  # why the host agent can't run ranks there
    daemon_status: int | None = None  # MPI's daemon's exit code, once everything there has ended
    daemon_said: bytes = b""  # or the login shell, if the host agent has not started
    nonsense: str = ""  # what has come from it that is no message, so that hvdrun has hung up


@dataclass(slots=True)
class HostQuiet:
    """The host has given no sign of life for some seconds."""

    host: str
    silent_s: float
    limit_s: float  # after which it is lost


@dataclass(slots=True)
class HostBack:
    """A quiet host has given a sign of life."""

    host: str
    silent_s: float


@dataclass(slots=True)
class HostSilent:
    """The host gave no sign of life for too long. The connection to it is closed."""

    host: str
    silent_s: float
    limit_s: float


@dataclass(slots=True)
class HostGaveUp:
    """The host ends its ranks, as hvdrun was silent for too long; `at` by this host's clock."""

    host: str
    silent_s: float
    at: float


@dataclass(slots=True)
class Paused:
    """hvdrun itself did not run: it was stopped, or this machine was suspended."""

    pause_s: float


@dataclass(slots=True)
class MpirunSaid:
    """mpirun or one of its daemons wrote this."""

    text: bytes


@dataclass(slots=True)
class MpirunOutputEnded:
    """No process has mpirun's output open any more."""


@dataclass(slots=True)
class MpirunEnded:
    code: int  # -n: by signal n


@dataclass(slots=True)
class Interrupted:
    """Ctrl-C, or a signal like it."""

    number: int
    node: int = 0  # whose hvdrun got it, where each host runs one (see `rendezvous`)


@dataclass(slots=True)
class ToPassOn:
    """hvdrun got a signal that is for the ranks."""

    number: int


@dataclass(slots=True)
class RankSignalled:
    """A keeper's answer to such a signal: see `agent.signals.pass_on`."""

    rank: int
    request: int
    answer: str


@dataclass(slots=True)
class ToStop:
    """Ctrl-Z."""


@dataclass(slots=True)
class ReaderLeft:
    """hvdrun can't write: its reader is gone (`hvdrun … | head`), or the disk is full."""


@dataclass(slots=True)
class TimePassed:
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
