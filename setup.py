"""The C extension `hvdlite._core`; everything else about the package is in setup.cfg."""

from glob import glob

from setuptools import Extension, setup

WRAPPED = ("malloc", "calloc", "realloc", "posix_memalign", "strdup")

core = Extension(
    "hvdlite._core",
    sources=sorted(glob("hvdlite/_core/*/*.c")),
    depends=sorted(glob("hvdlite/_core/*/*.h")),
    include_dirs=["hvdlite/_core"],
    # One build serves every Python from 3.10 on.
    define_macros=[("Py_LIMITED_API", "0x030A0000")],
    py_limited_api=True,
    # No contraction: a fused multiply-add would round differently from machine to machine.
    extra_compile_args=["-std=c11", "-O3", "-ffp-contract=off", "-fvisibility=hidden"],
    libraries=["pthread"],
    # Allocations can fail on purpose: see base/allocations.c.
    extra_link_args=[
        "-Wl," + ",".join(f"--wrap={name}" for name in WRAPPED),
    ],
)

setup(ext_modules=[core] if core.sources else [])
