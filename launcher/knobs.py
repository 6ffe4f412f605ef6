"""The knobs of the runtime: one row each, read by `hvdlite.config` and by hvdrun's command line.

This module imports nothing, so that hvdrun starts without torch and the table has one home.
A knob's variable is `HVDLITE_` and its name in capitals. The name that Horovod has for the same
thing counts where that variable is not set.
"""

MIB = 1 << 20

LOG_LEVELS = ("trace", "debug", "info", "warning", "error", "fatal")

TRUE_WORDS = ("1", "true", "yes", "on")
FALSE_WORDS = ("0", "false", "no", "off", "")


class Knob:
    """One row of the table.

    kind: 'int', 'bool', 'text' or 'counts' (whole numbers with commas between them).
    unit: a flag's number times this is the variable's number (`--fusion-threshold-mb 25`).
    internal: hvdlite sets it itself; hvdrun neither takes nor forwards it.
    """

    __slots__ = (
        "choices",
        "default",
        "flag",
        "help",
        "horovod",
        "internal",
        "kind",
        "minimum",
        "name",
        "unit",
    )

    def __init__(
        self,
        name: str,
        kind: str,
        default: object,
        help: str,
        horovod: str = "",
        flag: str = "",
        unit: int = 1,
        minimum: int = 0,
        choices: tuple[str, ...] = (),
        internal: bool = False,
    ) -> None:
        self.name = name
        self.kind = kind
        self.default = default
        self.help = help
        self.horovod = horovod
        self.flag = flag
        self.unit = unit
        self.minimum = minimum
        self.choices = choices
        self.internal = internal

    @property
    def variable(self) -> str:
        return "HVDLITE_" + self.name.upper()

    def parse(self, text: str) -> object:
        """The value that `text` stands for. ValueError: a phrase that says what is expected."""
        word = text.strip()
        if self.kind == "bool":
            if word.lower() in TRUE_WORDS:
                return True
            if word.lower() in FALSE_WORDS:
                return False
            raise ValueError("expected 1 or 0")
        if self.kind == "int":
            return self._number(word)
        if self.kind == "counts":
            return tuple(self._number(part.strip()) for part in word.split(",")) if word else ()
        if self.choices and word.lower() not in self.choices:
            raise ValueError("expected one of " + ", ".join(self.choices))
        return word.lower() if self.choices else word

    def _number(self, word: str) -> int:
        digits = word[1:] if word[:1] == "-" else word
        if not (digits.isascii() and digits.isdigit()):
            raise ValueError("expected a whole number")
        number = int(word)
        if number < self.minimum:
            raise ValueError(f"expected at least {self.minimum}")
        return number


KNOBS: tuple[Knob, ...] = (
    Knob(
        "block_bytes",
        "int",
        262144,
        "size of a block of the memory that the ranks of a host share",
        minimum=64,
    ),
    Knob(
        "bucket_bytes",
        "int",
        25 * MIB,
        "gradients of DistributedOptimizer that are reduced together; 0: each alone",
        horovod="HOROVOD_FUSION_THRESHOLD",
        flag="--fusion-threshold-mb",
        unit=MIB,
    ),
    Knob(
        "deterministic",
        "bool",
        False,
        "add in the order of the ranks, whatever the fusion, size or algorithm",
        flag="--deterministic",
    ),
    Knob(
        "event_log",
        "int",
        0,
        "how many of the engine's latest events to keep (for tests and for debugging)",
    ),
    Knob(
        "first_bucket_bytes",
        "int",
        MIB,
        "the same as bucket_bytes for the first bucket, which should start early",
    ),
    Knob(
        "gpu",
        "text",
        "auto",
        "auto: a device per local rank; none: pin nothing; a number: that device",
        flag="--gpu",
    ),
    Knob(
        "host_ranks",
        "counts",
        (),
        "for tests: pretend hosts with so many ranks each, for example 2,2",
        minimum=1,
    ),
    Knob(
        "inline_bytes",
        "int",
        4096,
        "up to this size an operation's payload travels beside its flag",
        minimum=64,
    ),
    Knob(
        "log_level",
        "text",
        "warning",
        "what the runtime says: " + ", ".join(LOG_LEVELS),
        horovod="HOROVOD_LOG_LEVEL",
        flag="--log-level",
        choices=LOG_LEVELS,
    ),
    Knob(
        "piece_bytes",
        "int",
        8 * MIB,
        "larger operations are cut into pieces of this size, so that small ones get through",
        minimum=64,
    ),
    Knob(
        "rank_process",
        "text",
        "",
        "the process that is the rank: what it starts inherits this and is a world of one",
        internal=True,
    ),
    Knob(
        "segment_bytes",
        "int",
        262144,
        "size of a message between hosts: one is on the wire while another is being reduced",
        minimum=64,
    ),
)

WITHOUT_EFFECT: tuple[tuple[str, str, bool, str], ...] = (
    # (flag of horovodrun, its variable, does it take a value, why it does nothing here)
    (
        "--cycle-time-ms",
        "HOROVOD_CYCLE_TIME",
        True,
        "there are no cycles: an operation starts as soon as all ranks have posted it",
    ),
    (
        "--cache-capacity",
        "HOROVOD_CACHE_CAPACITY",
        True,
        "repeated operations are plans, there is no response cache to size",
    ),
    (
        "--hierarchical-allreduce",
        "HOROVOD_HIERARCHICAL_ALLREDUCE",
        False,
        "reductions are always done within each host first",
    ),
    (
        "--no-hierarchical-allreduce",
        "",
        False,
        "reductions are always done within each host first",
    ),
    (
        "--hierarchical-allgather",
        "HOROVOD_HIERARCHICAL_ALLGATHER",
        False,
        "allgather is always done within each host first",
    ),
    (
        "--no-hierarchical-allgather",
        "",
        False,
        "allgather is always done within each host first",
    ),
    (
        "--autotune",
        "HOROVOD_AUTOTUNE",
        False,
        "the algorithm of each size is fixed, so that a training run repeats bitwise",
    ),
    ("--no-autotune", "", False, "there is no autotuning to switch off"),
    ("--autotune-log-file", "HOROVOD_AUTOTUNE_LOG", True, "there is no autotuning"),
    (
        "--autotune-warmup-samples",
        "HOROVOD_AUTOTUNE_WARMUP_SAMPLES",
        True,
        "there is no autotuning",
    ),
    (
        "--autotune-steps-per-sample",
        "HOROVOD_AUTOTUNE_STEPS_PER_SAMPLE",
        True,
        "there is no autotuning",
    ),
    (
        "--autotune-bayes-opt-max-samples",
        "HOROVOD_AUTOTUNE_BAYES_OPT_MAX_SAMPLES",
        True,
        "there is no autotuning",
    ),
    (
        "--autotune-gaussian-process-noise",
        "HOROVOD_AUTOTUNE_GAUSSIAN_PROCESS_NOISE",
        True,
        "there is no autotuning",
    ),
    (
        "--mpi-threads-disable",
        "HOROVOD_MPI_THREADS_DISABLE",
        False,
        "the thread level that MPI was started with decides",
    ),
    ("--no-mpi-threads-disable", "", False, "the thread level that MPI was started with decides"),
    ("--num-nccl-streams", "HOROVOD_NUM_NCCL_STREAMS", True, "NCCL is used through torch"),
    (
        "--thread-affinity",
        "HOROVOD_THREAD_AFFINITY",
        True,
        "hvdlite never changes a process's affinity",
    ),
    ("--gloo-timeout-seconds", "HOROVOD_GLOO_TIMEOUT_SECONDS", True, "there is no Gloo here"),
    ("--log-with-timestamp", "", False, "logging is Python's: set a format there"),
    ("--log-hide-timestamp", "HOROVOD_LOG_HIDE_TIME", False, "logging is Python's"),
    ("--timeline-filename", "HOROVOD_TIMELINE", True, "the timeline is not there yet"),
    (
        "--timeline-mark-cycles",
        "HOROVOD_TIMELINE_MARK_CYCLES",
        False,
        "there are no cycles to mark",
    ),
    ("--no-timeline-mark-cycles", "", False, "there are no cycles to mark"),
    ("--no-stall-check", "HOROVOD_STALL_CHECK_DISABLE", False, "the stall check is not there yet"),
    ("--stall-check", "", False, "the stall check is not there yet"),
    (
        "--stall-check-warning-time-seconds",
        "HOROVOD_STALL_CHECK_TIME_SECONDS",
        True,
        "the stall check is not there yet",
    ),
    (
        "--stall-check-shutdown-time-seconds",
        "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS",
        True,
        "the stall check is not there yet",
    ),
)
