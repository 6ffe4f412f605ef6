"""HVDLITE_AS_GLOO=1: the name "gloo" means hvdlite, and groups keep the name that was asked for."""

import os
import subprocess
import sys

import pytest

PROGRAM = """
import torch.distributed as dist
for asked in {asked}:
    dist.init_process_group(asked, store=dist.HashStore(), rank=0, world_size=1)
    sub = dist.new_group()
    for group in (dist.group.WORLD, sub):
        print(type(group).__name__, dist.get_backend(group))
    dist.destroy_process_group()
"""
OURS, TORCHS = "HvdliteProcessGroup", "ProcessGroup"


@pytest.mark.parametrize(
    ("value", "asked", "said"),
    [
        ("1", ["gloo", "cpu:gloo", None], [OURS, "gloo", OURS, "cpu:gloo", OURS, "undefined"]),
        ("0", ["gloo"], [TORCHS, "gloo"]),
    ],
)
def test_the_name_gloo_means_hvdlite_where_that_is_asked_for(value, asked, said):
    run = subprocess.run(
        [sys.executable, "-c", PROGRAM.format(asked=asked)],
        env={**os.environ, "HVDLITE_AS_GLOO": value},
        capture_output=True,
        text=True,
        timeout=120,
    )
    twice = [word for i in range(0, len(said), 2) for word in 2 * said[i : i + 2]]
    assert run.stdout.split() == twice, run.stderr
