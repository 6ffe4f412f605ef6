"""What Horovod has and hvdlite has not."""

import importlib

import pytest

import hvdlite
import hvdlite.torch
from hvdlite.absent import REASONS


@pytest.mark.parametrize("name", sorted(REASONS))
def test_a_name_of_horovods_that_is_not_there_is_an_error_that_says_why(name):
    with pytest.raises(AttributeError, match=f"hvdlite has no {name}: .+"):
        getattr(hvdlite, name)


@pytest.mark.parametrize("name", sorted(REASONS))
def test_the_import_of_a_module_that_is_not_there_says_why(name):
    with pytest.raises(ModuleNotFoundError, match=f"hvdlite has no {name}: .+"):
        importlib.import_module(f"hvdlite.{name}")


@pytest.mark.parametrize("package", ["hvdlite", "hvdlite.torch"])
@pytest.mark.parametrize("name", sorted(REASONS.keys() - {"functions", "mpi_ops"}))
def test_the_import_of_a_module_from_its_package_says_why(package, name):
    with pytest.raises(ModuleNotFoundError, match=f"hvdlite has no {name}: .+"):
        exec(f"from {package} import {name}")


def test_horovods_common_modules_say_where_their_contents_are():
    with pytest.raises(ModuleNotFoundError, match=r"as hvdlite\.HorovodInternalError"):
        importlib.import_module("hvdlite.common.exceptions")


def test_any_other_module_is_the_usual_error():
    for name in ("hvdlite.nothing", "hvdlite.torch.nothing"):
        with pytest.raises(ModuleNotFoundError, match=f"No module named '{name}'"):
            importlib.import_module(name)


@pytest.mark.parametrize("name", ["elastic", "elastic.state", "elastic.sampler"])
def test_horovods_modules_of_elastic_training_say_why_they_are_not_there(name):
    with pytest.raises(ModuleNotFoundError, match="it has no elastic training"):
        importlib.import_module(f"hvdlite.torch.{name}")


MODULES = ["compression", "functions", "mpi_ops", "optimizer", "sync_batch_norm"]


@pytest.mark.parametrize("name", MODULES)
def test_horovods_other_modules_have_the_names_of_hvdlite(name):
    module = importlib.import_module(f"hvdlite.torch.{name}")
    assert getattr(hvdlite.torch, name) is module
    for each in module.__all__:
        assert getattr(module, each) is getattr(hvdlite, each)


def test_names_are_imported_from_horovods_modules_as_scripts_do():
    from hvdlite.torch.compression import Compression
    from hvdlite.torch.functions import broadcast_parameters
    from hvdlite.torch.mpi_ops import Average, allreduce, rank, size
    from hvdlite.torch.optimizer import DistributedOptimizer
    from hvdlite.torch.sync_batch_norm import SyncBatchNorm

    names = (Compression, broadcast_parameters, Average, allreduce, rank, size)
    assert None not in (*names, DistributedOptimizer, SyncBatchNorm)


def test_the_error_for_elastic_says_what_to_do_instead():
    assert not hasattr(hvdlite, "elastic")
    with pytest.raises(AttributeError, match=r"no elastic training .* write checkpoints"):
        hvdlite.elastic.run(print)


def test_any_other_name_is_the_usual_error():
    for module in (hvdlite, hvdlite.torch):
        with pytest.raises(AttributeError, match="hvdlite has no attribute 'allreduse'"):
            print(module.allreduse)
    assert "__getattr__" not in hvdlite.__all__
