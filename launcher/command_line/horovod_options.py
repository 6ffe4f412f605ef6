"""Options of Horovod's launcher that hvdrun takes though they have no effect here, or can't be
honoured."""

from __future__ import annotations

WITHOUT_EFFECT: tuple[tuple[str, str, str, str], ...] = (
    # (flag of horovodrun, its variable, the type of its value, why it has no effect here)
    (
        "--cycle-time-ms",
        "HOROVOD_CYCLE_TIME",
        "float",
        "there are no cycles: an operation starts as soon as all ranks have posted it",
    ),
    (
        "--cache-capacity",
        "HOROVOD_CACHE_CAPACITY",
        "int",
        "there is no response cache: repeated operations reuse a plan",
    ),
    (
        "--hierarchical-allreduce",
        "HOROVOD_HIERARCHICAL_ALLREDUCE",
        "",
        "reductions are always done within each host first",
    ),
    (
        "--no-hierarchical-allreduce",
        "",
        "",
        "reductions are always done within each host first",
    ),
    (
        "--hierarchical-allgather",
        "HOROVOD_HIERARCHICAL_ALLGATHER",
        "",
        "allgather is always done within each host first",
    ),
    (
        "--no-hierarchical-allgather",
        "",
        "",
        "allgather is always done within each host first",
    ),
    (
        "--autotune",
        "HOROVOD_AUTOTUNE",
        "",
        "the algorithm of each size is fixed, so that a training run repeats bitwise",
    ),
    ("--no-autotune", "", "", "there is no autotuning to switch off"),
    ("--autotune-log-file", "HOROVOD_AUTOTUNE_LOG", "text", "there is no autotuning"),
    (
        "--autotune-warmup-samples",
        "HOROVOD_AUTOTUNE_WARMUP_SAMPLES",
        "int",
        "there is no autotuning",
    ),
    (
        "--autotune-steps-per-sample",
        "HOROVOD_AUTOTUNE_STEPS_PER_SAMPLE",
        "int",
        "there is no autotuning",
    ),
    (
        "--autotune-bayes-opt-max-samples",
        "HOROVOD_AUTOTUNE_BAYES_OPT_MAX_SAMPLES",
        "int",
        "there is no autotuning",
    ),
    (
        "--autotune-gaussian-process-noise",
        "HOROVOD_AUTOTUNE_GAUSSIAN_PROCESS_NOISE",
        "float",
        "there is no autotuning",
    ),
    (
        "--mpi-threads-disable",
        "HOROVOD_MPI_THREADS_DISABLE",
        "",
        "the thread level that MPI was started with decides",
    ),
    ("--no-mpi-threads-disable", "", "", "the thread level that MPI was started with decides"),
    ("--num-nccl-streams", "HOROVOD_NUM_NCCL_STREAMS", "int", "NCCL is used through torch"),
    (
        "--thread-affinity",
        "HOROVOD_THREAD_AFFINITY",
        "int",
        "hvdrun gives each rank its share of the cores; see --binding-args",
    ),
    ("--gloo-timeout-seconds", "HOROVOD_GLOO_TIMEOUT_SECONDS", "int", "there is no Gloo here"),
    ("--log-with-timestamp", "", "", "logging is Python's: set a format there"),
    ("--log-hide-timestamp", "HOROVOD_LOG_HIDE_TIME", "", "logging is Python's"),
    (
        "--timeline-mark-cycles",
        "HOROVOD_TIMELINE_MARK_CYCLES",
        "",
        "there are no cycles to mark",
    ),
    ("--no-timeline-mark-cycles", "", "", "there are no cycles to mark"),
    ("--no-log-hide-timestamp", "", "", "logging is Python's"),
    ("--log-without-timestamp", "", "", "logging is Python's"),
    (
        "--torus-allreduce",
        "HOROVOD_TORUS_ALLREDUCE",
        "",
        "it chooses an algorithm of NCCL's, and hvdlite chooses the algorithm itself",
    ),
    (
        "--no-torus-allreduce",
        "",
        "",
        "it chooses an algorithm of NCCL's, and hvdlite chooses the algorithm itself",
    ),
    ("--gloo", "", "", "the ranks always run on MPI"),
    ("--use-gloo", "", "", "the ranks always run on MPI"),
    ("--use-mpi", "", "", "the ranks always run on MPI; --mpi NAME chooses which one"),
    ("--communication", "", "text", "the ranks always run on MPI"),
    ("--tcp", "", "", "MPI's transport is chosen by --mpi-args, NCCL's by NCCL's own variables"),
)

ELASTIC: tuple[tuple[tuple[str, ...], int], ...] = (
    # (spellings of a flag of elastic training, the number of its values)
    (("--min-np", "--min-num-proc"), 1),
    (("--max-np", "--max-num-proc"), 1),
    (("--slots-per-host",), 1),
    (("--elastic-timeout",), 1),
    (("--reset-limit",), 1),
    (("--blacklist-cooldown-range",), 2),
    (("--host-discovery-script",), 1),
)
