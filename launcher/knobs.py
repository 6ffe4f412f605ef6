"""The knobs of the runtime: one row each, read by `hvdlite.world.config` and by hvdrun.

A knob's variable is `HVDLITE_` and its name in capitals. The name that Horovod has for the same
thing is used where that variable is not set.
"""

from typing import NamedTuple

MIB = 1 << 20
GIB = 1 << 30
TIB = 1 << 40
LONGEST_S = (1 << 31) - 1  # scripts pass this for never

# Longer numbers are out of every range, and Python refuses to convert thousands of digits.
MOST_DIGITS = 40

# How many characters of a wrong text an error quotes.
SHOWN = 64

# The largest power of two that is a float16: that many ones are added up in that type.
MOST_VIRTUAL_RANKS = 1 << 15

LOG_LEVELS = ("trace", "debug", "info", "warning", "error", "fatal")

TRUE_WORDS = ("1", "true", "yes", "on")
FALSE_WORDS = ("0", "false", "no", "off", "")


class Knob(NamedTuple):
    """One row of the table.

    kind: 'int', 'bool', 'text' or 'counts' (whole numbers with commas between them).
    minimum, maximum: of an int, and of each of the counts. Larger values would have no effect, or
        overflow the core's arithmetic. A text with choices may be a number as well if it has a
        maximum.
    off_flag: of a bool: the flag that means the opposite of `flag`, or of the default.
    unit: a flag's number times this is the variable's number (`--fusion-threshold-mb 25`).
    internal: hvdlite sets it itself, and users do not.
    counted: a word; WORD:N is a value too. Of a bool: with a power of two N up to `maximum`. Of an
        int: with a number as it has itself, and WORD alone says `usual`.
    """

    name: str
    kind: str
    default: object
    help: str
    horovod: str = ""
    flag: str = ""
    unit: int = 1
    minimum: int = 0
    maximum: int = 0
    choices: tuple[str, ...] = ()
    internal: bool = False
    off_flag: str = ""
    counted: str = ""
    usual: int = 0

    @property
    def variable(self) -> str:
        return "HVDLITE_" + self.name.upper()

    def parse(self, text: str) -> object:
        """The value of `text`. Raises ValueError with a phrase that says what was expected."""
        word = text.strip()
        if self.kind == "bool":
            if word.lower() in TRUE_WORDS:
                return True
            if word.lower() in FALSE_WORDS:
                return False
            return self._counted_power(word.lower())
        if self.kind == "int":
            return self._counted_number(word.lower())
        if self.kind == "counts":
            return tuple(self._number(part.strip()) for part in word.split(",")) if word else ()
        if self.choices and word.lower() not in self.choices:
            if self.maximum and word.isascii() and word.isdigit():
                return str(self._number(word))
            also = f", or a whole number from 0 to {self.maximum}" if self.maximum else ""
            raise ValueError("expected one of " + ", ".join(self.choices) + also)
        return word.lower() if self.choices else word

    def parse_variable(self, variable: str, text: str) -> object:
        """The value of `text`, which `variable` has. Raises ValueError with a text that names the
        variable; hvdrun and the ranks say the same."""
        try:
            return self.parse(text)
        except ValueError as error:
            shown = repr(text if len(text) <= SHOWN else text[:SHOWN] + "...")
            raise ValueError(f"{variable}={shown}: {error} ({self.help})") from None

    def _counted_number(self, word: str) -> int | str:
        start, colon, digits = word.partition(":")
        if self.counted and start.strip() == self.counted:
            return f"{self.counted}:{self._number(digits.strip()) if colon else self.usual}"
        return self._number(word)

    def _counted_power(self, word: str) -> str:
        start, _, digits = word.partition(":")
        if self.counted and start.strip() == self.counted:
            number = int(digits) if digits.strip().isdecimal() and len(digits) < MOST_DIGITS else 0
            if 0 < number <= self.maximum and not number & (number - 1):
                return f"{self.counted}:{number}"
        also = f", or {self.counted}:N with a power of two N up to {self.maximum}"
        raise ValueError("expected 1 or 0" + (also if self.counted else ""))

    def _number(self, word: str) -> int:
        digits = word.lstrip("0") or word[-1:]
        if digits.isascii() and digits.isdigit() and len(digits) <= MOST_DIGITS:
            number = int(digits)
            if self.minimum <= number <= self.maximum:
                return number
        each = "whole numbers" if self.kind == "counts" else "a whole number"
        also = f", or {self.counted}:N" if self.counted else ""
        raise ValueError(f"expected {each} from {self.minimum} to {self.maximum}{also}")


def uneven_shares(virtual_ranks: int, ranks: int) -> str:
    """Why so many ranks can't share the virtual ranks evenly; empty where they can."""
    if not virtual_ranks % ranks:
        return ""
    fitting = ", ".join(str(1 << power) for power in range(virtual_ranks.bit_length()))
    return (
        f"HVDLITE_DETERMINISTIC=virtual:{virtual_ranks}: {ranks} ranks can't have the same number"
        f" of the {virtual_ranks} virtual ranks; start one of these numbers: {fitting}"
    )


KNOBS: tuple[Knob, ...] = (
    Knob(
        "algorithm",
        "text",
        "auto",
        "for tests: the algorithm of reductions between hosts, for every size; 16-bit floats and"
        " the deterministic mode always add in one order",
        choices=("auto", "ring", "direct", "recursive_doubling"),
    ),
    Knob(
        "algorithm_table",
        "text",
        "",
        "the file of python -m hvdlite.tune: the algorithm for each size; read by rank 0",
    ),
    Knob(
        "alone",
        "bool",
        False,
        "without an MPI launcher: a world of one process, even if WORLD_SIZE is larger",
    ),
    Knob(
        "as_gloo",
        "bool",
        False,
        "at import torch: torch.distributed's name gloo means hvdlite, for programs and libraries"
        " that take no other name on CPUs",
    ),
    Knob(
        "black_box",
        "bool",
        True,
        "keep each rank's last operations for hvdrun's report on a job that fails",
        off_flag="--no-black-box",
    ),
    Knob(
        "block_bytes",
        "int",
        262144,
        "size of a block of the memory that the ranks of a host share",
        minimum=64,
        maximum=GIB,
    ),
    Knob(
        "bucket_bytes",
        "int",
        -1,
        "size of the buckets in which DistributedOptimizer reduces gradients; 0: each gradient "
        "alone; by default chosen from the gradients' total size",
        horovod="HOROVOD_FUSION_THRESHOLD",
        flag="--fusion-threshold-mb",
        unit=MIB,
        maximum=TIB,
    ),
    Knob(
        "check_numerics",
        "bool",
        False,
        "find NaN and infinite gradients of a DistributedOptimizer before they are reduced; step()"
        " raises an error that names the rank, the parameter and the step",
    ),
    Knob(
        "check_parameters",
        "int",
        0,
        "every N steps of a DistributedOptimizer, compare the ranks' parameters and optimizer state"
        " bit by bit; an error names the first that differs, and the ranks; 0: never; repair:N:"
        " rank 0 warns instead, and a right rank's value is copied",
        maximum=LONGEST_S,
        counted="repair",
        usual=100,
    ),
    Knob(
        "check_shared",
        "bool",
        False,
        "find changes of shared parameters outside a step, load_state_dict or"
        " broadcast_parameters; takes time",
    ),
    Knob(
        "deterministic",
        "bool",
        False,
        "add floats along a tree that depends only on the number of ranks, not on fusion, size,"
        " algorithm or hosts; virtual:N: and DistributedOptimizer trains alike on every number of"
        " ranks that divides N",
        flag="--deterministic",
        counted="virtual",
        maximum=MOST_VIRTUAL_RANKS,
    ),
    Knob(
        "event_log",
        "int",
        0,
        "how many of the engine's latest events to keep (for tests and for debugging)",
        maximum=1 << 24,
    ),
    Knob(
        "fault",
        "text",
        "",
        "for tests: what goes wrong on purpose, and where, as in kill@rank=1,step=30;"
        " delay:0.5@rank=0,operation=allreduce",
    ),
    Knob(
        "first_bucket_bytes",
        "int",
        -1,
        "size of the first bucket, which should start early; by default a quarter of the "
        "others' size",
        maximum=TIB,
    ),
    Knob(
        "gpu",
        "text",
        "auto",
        "the GPU of a rank; auto: one per local rank; none: pin nothing; a number: that device",
        flag="--gpu",
        choices=("auto", "none"),
        maximum=999,
    ),
    Knob(
        "gpu_binding",
        "bool",
        True,
        "bind each rank to the cores and the memory of its GPU's NUMA node",
        off_flag="--no-gpu-binding",
    ),
    Knob(
        "gpu_collectives",
        "text",
        "auto",
        "how GPU tensors travel: nccl, staged (through host memory), or auto: nccl where possible",
        flag="--gpu-collectives",
        choices=("auto", "nccl", "staged"),
    ),
    Knob(
        "host_ranks",
        "counts",
        (),
        "for tests: pretend that the ranks run on several hosts, this many on each, as in 2,2",
        minimum=1,
        maximum=1024,
    ),
    Knob(
        "inline_bytes",
        "int",
        16384,
        "up to this size a payload travels beside its flag; less with many ranks or hosts",
        minimum=64,
        maximum=131072,  # more has no effect
    ),
    Knob(
        "log_level",
        "text",
        "warning",
        "what Python's logger hvdlite shows; info: also the world, the settings, and each rank's"
        " host, cores and GPU; debug: also the algorithms between hosts, and the buckets",
        horovod="HOROVOD_LOG_LEVEL",
        flag="--log-level",
        choices=LOG_LEVELS,
    ),
    Knob(
        "monitored",
        "bool",
        False,
        "tell hvdrun every two seconds how far this rank is, as hvdrun --monitor sets it",
        internal=True,
    ),
    Knob(
        "piece_bytes",
        "int",
        0,
        "larger operations are cut into pieces of this size, so that small ones need not wait; by "
        "default 8 MiB, with several hosts 2 MiB",
        minimum=64,
        maximum=TIB,
    ),
    Knob(
        "rank_process",
        "text",
        "",
        "the rank's process number; processes that it starts inherit it and are worlds of one",
        internal=True,
    ),
    Knob(
        "segment_bytes",
        "int",
        61440,  # below 64 KiB, where Open MPI begins to ask before it sends
        "size of a message between hosts: one is on the wire while another is being reduced",
        minimum=64,
        maximum=GIB,
    ),
    Knob(
        "servers",
        "int",
        0,
        "the number of processes that hold the parameters of hvd.AsyncOptimizer; the others are"
        " workers; rank() and size() count only the workers",
        flag="--servers",
        maximum=999_999,
    ),
    Knob(
        "stall_check_disable",
        "bool",
        False,
        "no warnings about operations that some ranks have not called",
        horovod="HOROVOD_STALL_CHECK_DISABLE",
        flag="--no-stall-check",
        off_flag="--stall-check",
    ),
    Knob(
        "stall_check_time_seconds",
        "int",
        60,
        "report an operation that some ranks have not called after this time; 0: never",
        horovod="HOROVOD_STALL_CHECK_TIME_SECONDS",
        flag="--stall-check-warning-time-seconds",
        maximum=LONGEST_S,
    ),
    Knob(
        "stall_shutdown_time_seconds",
        "int",
        0,
        "fail all operations once one has waited this long for ranks; 0: never",
        horovod="HOROVOD_STALL_SHUTDOWN_TIME_SECONDS",
        flag="--stall-check-shutdown-time-seconds",
        maximum=LONGEST_S,
    ),
    Knob(
        "strict",
        "bool",
        False,
        "raise an error, instead of a warning, if the ranks' parameters differ at the start",
    ),
    Knob(
        "summary",
        "bool",
        False,
        "at the end, say how long a step took, its waiting and communication, and who is slow",
        flag="--summary",
    ),
    Knob(
        "timeline",
        "text",
        "",
        "write a timeline of all operations to this file, in Chrome's format, on rank 0's host",
        horovod="HOROVOD_TIMELINE",
        flag="--timeline-filename",
    ),
)
