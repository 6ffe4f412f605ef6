"""The engine's records of its operations."""

import pytest
import torch

import hvdlite as hvd
from hvdlite import _core
from hvdlite.world import world as worlds

pytestmark = [pytest.mark.ranks(1, 2, 3), pytest.mark.hosts("1,1", "2,1")]

STATES = ["POSTED", "MATCHED", "RUNNING", "DONE"]


def recorded(engine):
    """The operations in the order of their ends: (kind, name, states, bytes). Their times rise."""
    events, lost = engine.drain_events()
    assert lost == 0
    operations = {}
    for time_ns, number, kind, name, state, size_bytes in events:
        operations.setdefault(number, []).append((time_ns, kind, name, state, size_bytes))
    found = []
    for steps in operations.values():
        times, kinds, names, states, sizes = zip(*steps, strict=True)
        assert list(times) == sorted(times)
        assert len({*zip(kinds, names, sizes, strict=True)}) == 1
        found.append((times[-1], (kinds[0], names[0], list(states), sizes[0])))
    return [what for _, what in sorted(found)]


def each_kind():
    hvd.init()
    rank, size = hvd.rank(), hvd.size()
    engine = worlds.current().team.engine
    engine.record(1000)
    hvd.allreduce(torch.ones(3), name="a")
    hvd.allreduce(torch.ones(300_000), name="b")
    hvd.broadcast(torch.ones(7, dtype=torch.uint8), 0, name="c")
    hvd.allgather(torch.ones(rank + 1, 5), name="d")
    hvd.alltoall(torch.ones(2 * size, dtype=torch.int64), name="e")
    hvd.reducescatter(torch.ones(size, 2), name="f")
    hvd.barrier()
    hvd.join()
    operations = recorded(engine)
    engine.record(0)
    assert [states for _, _, states, _ in operations] == [STATES] * 8
    assert [(kind, name, size_bytes) for kind, name, _, size_bytes in operations[:6]] == [
        ("allreduce", "a", 12),
        ("allreduce", "b", 1_200_000),
        ("broadcast", "c", 7),
        ("allgather", "d", 20 * (rank + 1)),
        ("alltoall", "e", 16 * size),
        ("reducescatter", "f", 8 * size),
    ]
    assert [(kind, size_bytes) for kind, _, _, size_bytes in operations[6:]] == [
        ("barrier", 0),
        ("join", 0),
    ]
    hvd.barrier()
    assert engine.drain_events() == ([], 0)


def test_each_operation_is_recorded_with_its_states_in_order_and_its_bytes(world):
    world.run(each_kind)


def adasum():
    hvd.init()
    engine = worlds.current().team.engine
    engine.record(1000)
    hvd.allreduce(torch.ones(5), op=hvd.Adasum, name="a")
    assert recorded(engine) == [("allreduce", "a", STATES, 20)]
    engine.record(0)


def test_the_engines_own_operations_are_not_recorded(world):
    world.run(adasum)


def a_failure():
    hvd.init()
    engine = worlds.current().team.engine
    engine.record(1000)
    with pytest.raises(hvd.HorovodInternalError):
        hvd.allreduce(torch.ones(1 + hvd.rank()), name="a")
    (operation,) = recorded(engine)
    engine.record(0)
    kind, name, states, size_bytes = operation
    assert (kind, name, size_bytes) == ("allreduce", "a", 4 * (1 + hvd.rank()))
    assert (states[0], states[-1]) == ("POSTED", "FAILED")


@pytest.mark.ranks(2)
def test_an_operation_that_fails_is_recorded_as_failed(world):
    world.run(a_failure)


def plans():
    hvd.init()
    engine = worlds.current().team.engine
    tensor = torch.ones(5)
    where = tensor.data_ptr()
    engine.record(1000)
    plan = engine.plan(
        "p", _core.FLOAT32, _core.SUM, where, where, tensor.numel(), 1.0, 1.0, tensor
    )
    for _ in range(2):
        assert plan.start(tensor).wait() is None
    operations = recorded(engine)
    engine.record(0)
    assert operations[1:] == [("allreduce", "p", STATES, 20)] * 2
    kind, name, states, size_bytes = operations[0]
    assert (kind, name, size_bytes) == ("plan", "p", 0)
    assert (states[0], states[-1]) == ("POSTED", "DONE")


@pytest.mark.ranks(2)
def test_the_making_of_a_plan_is_told_from_its_runs_by_its_kind(world):
    world.run(plans)


def names():
    hvd.init()
    engine = worlds.current().team.engine
    given = ['"\\\n', "ü" * 111, "ü" * 200, "x" * 223, "x" * 224]
    engine.record(1000)
    for name in given:
        hvd.allreduce(torch.ones(1), name=name)
    found = [name for _, name, _, _ in recorded(engine)]
    engine.record(0)
    # A character of two bytes is not cut in half.
    assert found == ['"\\\n', "ü" * 111, "ü" * 110 + "...", "x" * 223, "x" * 220 + "..."]


@pytest.mark.ranks(1)
def test_a_long_name_is_cut_between_characters_and_ends_in_dots(world):
    world.run(names)


def overflow():
    hvd.init()
    engine = worlds.current().team.engine
    engine.record(10)
    for i in range(100):
        hvd.allreduce(torch.ones(1), name=f"t{i}")
    peeked = engine.events()
    events, lost = engine.drain_events()
    engine.record(0)
    assert (len(events), lost) == (10, 390)
    assert [(name, state) for _, _, _, name, state, _ in events] == [
        *[("t97", state) for state in STATES[2:]],
        *[(f"t{i}", state) for i in (98, 99) for state in STATES],
    ]
    assert [(time_ns, name, state) for time_ns, name, state in peeked] == [
        (time_ns, name, state) for time_ns, _, _, name, state, _ in events
    ]
    assert engine.events() == []


@pytest.mark.ranks(1, 2)
def test_the_latest_events_are_kept_and_the_lost_ones_counted(world):
    world.run(overflow)


def switched_on_in_between():
    hvd.init()
    engine = worlds.current().team.engine
    handle = None
    if hvd.rank() == 0:
        handle = hvd.allreduce_async(torch.ones(1), name="late")
    hvd.barrier()
    engine.record(1000)
    hvd.barrier()
    hvd.synchronize(handle or hvd.allreduce_async(torch.ones(1), name="late"))
    states = {name: states for _, name, states, _ in recorded(engine)}
    engine.record(0)
    assert states["late"] == (STATES if hvd.rank() else STATES[1:])


@pytest.mark.ranks(2)
def test_an_operation_under_way_is_recorded_from_its_next_state_on(world):
    world.run(switched_on_in_between)


def closed():
    hvd.init()
    rank = hvd.rank()
    engine = worlds.current().team.engine
    engine.record(1000)
    if rank == 0:
        hvd.allreduce_async(torch.ones(1), name="nobody answers")
    hvd.shutdown()
    found = [(name, states) for _, name, states, _ in recorded(engine)]
    assert found == ([("nobody answers", ["POSTED", "FAILED"])] if rank == 0 else [])
    hvd.init()


@pytest.mark.ranks(2)
def test_what_fails_when_the_engine_is_closed_can_be_drained_afterwards(world):
    world.run(closed)
