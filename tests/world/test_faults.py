"""HVDLITE_FAULT in a team's operations: which of them it is about."""

import logging

import pytest
import torch

import hvdlite as hvd
from hvdlite.errors import ConfigError
from hvdlite.world import world as worlds

pytestmark = pytest.mark.mpis("mpich")  # nothing here is an MPI's


class Said(logging.Handler):
    """What hvdlite logs about faults."""

    def __init__(self):
        super().__init__()
        self.lines = []

    def emit(self, record):
        if "on purpose: " in record.getMessage():
            self.lines.append(record.getMessage().partition("on purpose: ")[2])

    def __enter__(self):
        logging.getLogger("hvdlite").addHandler(self)
        return self.lines

    def __exit__(self, *_):
        logging.getLogger("hvdlite").removeHandler(self)


def calls_in_two_worlds_and_a_process_set():
    with Said() as lines:
        for name in ("a", "b"):
            hvd.init()
            hvd.barrier()
            hvd.allreduce_(torch.ones(1), name=f"{name}1")
            assert hvd.allreduce(torch.ones(1), name=f"{name}2", op=hvd.Sum).item() == 2
            hvd.shutdown()
        hvd.init()
        of_1 = hvd.add_process_set([1])
        if hvd.rank() == 1:
            assert hvd.allreduce(torch.ones(1), name="alone", process_set=of_1).item() == 1
        hvd.barrier()
        hvd.remove_process_set(of_1)
    return lines


@pytest.mark.ranks(2)
def test_operations_are_counted_over_worlds_and_process_sets(world):
    fault = "delay:0@rank=1,operation=allreduce,nth=3,times=3"
    lines = world.run(calls_in_two_worlds_and_a_process_set, knobs={"HVDLITE_FAULT": fault})
    assert lines == [[], ["allreduce 'b1'", "allreduce 'b2'", "allreduce 'alone'"]]


def steps():
    hvd.init()
    torch.manual_seed(1)
    model = torch.nn.Linear(2, 1)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    with Said() as lines:
        for _ in range(3):
            model(torch.ones(2)).backward()
            optimizer.step()
    return [line for line in lines if ".bucket.0'" in line]


@pytest.mark.ranks(2)
def test_each_reduction_of_a_bucket_is_an_allreduce_of_its_name(world):
    lines = world.run(steps, knobs={"HVDLITE_FAULT": "delay:0.0@times=1000,rank=0"})
    assert lines[0] == [lines[0][0]] * 3
    assert lines[0][0].startswith("allreduce 'DistributedOptimizer.")
    assert lines[1] == []


def installed():
    hvd.init()
    team, engine = worlds.current().team, worlds.current().team.engine
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))])
    hvd.DistributedOptimizer(optimizer)
    ways = (team.post, team.run, team.plan, team.run_allreduce)
    return [way.__self__ is engine for way in ways], len(optimizer._optimizer_step_pre_hooks)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("knobs", [{}, {"HVDLITE_FAULT": "kill@rank=7"}])
def test_without_a_fault_of_the_rank_nothing_is_installed(world, knobs):
    assert world.run(installed, knobs=knobs) == [([True] * 4, 0)] * 2


def test_init_refuses_a_wrong_text(monkeypatch):
    monkeypatch.setenv("HVDLITE_FAULT", "kill@rank=one")
    with pytest.raises(ConfigError, match=r"HVDLITE_FAULT: kill: rank='one': expected a whole nu"):
        hvd.init()
    assert not hvd.is_initialized()
