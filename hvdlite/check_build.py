"""Prints what this installation can do: `hvdrun --check-build` runs it as a job of one rank.

    python -m hvdlite.check_build

Without hvdrun it starts no MPI, and says so.
"""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError
from importlib.metadata import version as version_of
from pathlib import Path

import torch

from hvdlite import _core, built
from hvdlite.errors import LaunchError
from hvdlite.world.bootstrap import mpi
from hvdlite.world.process.cpu_threads import own_cores
from hvdlite.world.teams import shared_memory

# CPU features that matter for reducing and for torch.
FEATURES = (
    *("avx", "avx2", "fma", "f16c", "avx512f", "avx512bw", "avx512_bf16", "avx512_fp16"),
    *("amx_bf16", "asimd", "asimdhp", "bf16", "sve"),
)

# Whether it is available, its name, and details.
Row = tuple[bool, str, str]


def rows() -> Iterator[tuple[str, list[Row]]]:
    """The sections with their titles."""
    yield (
        f"hvdlite {version_of('hvdlite')}",
        [
            (True, "Python", f"{platform.python_version()} ({sys.executable})"),
            (True, "PyTorch", str(torch.__version__)),
        ],
    )
    yield "Between ranks", [*_mpi(), _shared_memory()]
    yield "GPUs", _gpus()
    yield "CPU", _cpu()
    never = "hvdlite does not use it: it has MPI and shared memory, and NCCL on GPUs"
    yield "Only in Horovod", [(False, name, never) for name in ("Gloo", "oneCCL", "DDL")]


def _mpi() -> Iterator[Row]:
    try:
        yield True, "mpi4py", version_of("mpi4py")
    except PackageNotFoundError:
        yield False, "mpi4py", "not installed: pip install mpi4py"
        return
    if mpi.launcher_of(os.environ) is None:
        yield False, "MPI", "not started, since no launcher started this process"
        return
    try:
        mpi_runtime = mpi.load()
    except LaunchError as error:
        yield False, "MPI", str(error)
        return
    version, several = mpi_runtime.version(), mpi_runtime.threads_supported()
    if mpi_runtime.finalize:
        mpi_runtime.MPI.Finalize()
    yield True, "MPI", version
    yield (
        several,
        "several threads",
        "MPI_THREAD_MULTIPLE: operations make progress while the program computes"
        if several
        else "one at a time: operations make progress only while the program waits for them",
    )


def _shared_memory() -> Row:
    found = shared_memory.mechanism()
    return found is not None, "shared memory", found or "none: ranks of a host send MPI messages"


def _gpus() -> list[Row]:
    nccl = built.nccl_built()
    version = f"{nccl // 10000}.{nccl // 100 % 100}.{nccl % 100}"
    lacks = "not in this build of PyTorch"
    return [
        (built.cuda_built(), "CUDA", torch.version.cuda or lacks),
        (built.rocm_built(), "ROCm", torch.version.hip or lacks),
        (bool(nccl), "NCCL", version if nccl else f"{lacks}: GPU tensors go through host memory"),
        (torch.cuda.is_available(), "devices", f"{torch.cuda.device_count()} seen"),
    ]


def _cpu() -> list[Row]:
    best, *others = _core.kernel_variants()
    model, flags = cpu_info(Path("/proc/cpuinfo").read_text())
    cores = own_cores()
    quota = "" if cores.quota is None else f", a quota of {cores.quota:g}"
    features = " ".join(name for name in FEATURES if name in flags)
    return [
        (True, "model", model or platform.machine()),
        (True, "cores", f"{len(cores.physical)}, {len(cores.mask)} hardware threads{quota}"),
        (bool(features), "features", features or "none of those that the kernels use"),
        (True, "kernels", f"{best} (also built, and possible here: {', '.join(others) or 'none'})"),
    ]


def cpu_info(text: str) -> tuple[str, set[str]]:
    """The model and the flags of the first CPU in /proc/cpuinfo; ARM has no model there."""
    found: dict[str, str] = {}
    for line in text.splitlines():
        name, _, value = line.partition(":")
        found.setdefault(name.strip(), value.strip())
    flags = found.get("flags") or found.get("Features", "")
    return found.get("model name", ""), set(flags.split())


def main() -> None:
    for title, lines in rows():
        print(f"{title}:")
        for there, name, detail in lines:
            print(f"    [{'X' if there else ' '}] {name:<16} {detail}")
        print()


if __name__ == "__main__":
    main()
