"""examples/from_horovod.py: a script for Horovod with another import line."""

import ast
import re

import pytest

from tests.harness.worlds import ROOT

# Of what `horovod.torch` offers, as its documentation lists it.
HOROVODS_NAMES = {
    *("init", "rank", "size", "local_rank", "allreduce", "DistributedOptimizer"),
    *("broadcast_parameters", "broadcast_optimizer_state", "Compression"),
}


def last_accuracy(stdout):
    return float(re.findall(r"test accuracy (\S+) %$", stdout, re.MULTILINE)[-1])


def test_the_import_line_is_all_that_names_hvdlite():
    tree = ast.parse((ROOT / "examples/from_horovod.py").read_text())
    imports = [
        ast.unparse(node)
        for node in ast.walk(tree)
        if isinstance(node, ast.Import | ast.ImportFrom) and "hvdlite" in ast.unparse(node)
    ]
    assert imports == ["import hvdlite.torch as hvd"]
    used = {
        node.attr
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and ast.unparse(node.value) == "hvd"
    }
    assert used <= HOROVODS_NAMES


@pytest.mark.wide
def test_it_trains_on_two_ranks_with_compression_and_accumulation(hvdrun):
    run = hvdrun(2, "from_horovod.py", "--fp16-allreduce", "--batches-per-allreduce", "2")
    assert run.code == 0, run
    assert run.stdout.count("Epoch ") == 12, "rank 0 alone reports"
    assert last_accuracy(run.stdout) >= 95
