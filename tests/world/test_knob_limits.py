"""Numbers at the ends of their ranges, and beyond, where the core takes sizes from them."""

import sys

import pytest
import torch

import hvdlite as hvd
from hvdlite import _core
from hvdlite.world.teams import team as teams
from hvdrun.knobs import KNOBS
from tests.harness.programs import run_program

LARGEST = {
    knob.variable: str(knob.maximum)
    for knob in KNOBS
    if knob.kind == "int" and knob.name != "event_log"
}
EVENTS = next(knob for knob in KNOBS if knob.name == "event_log")


def refuses(variable, text):
    hvd.shutdown()
    with pytest.raises(ValueError, match=f"{variable}={text!r}: expected a whole number from"):
        hvd.init()
    assert not hvd.is_initialized()


@pytest.mark.ranks(2)
@pytest.mark.mpis("openmpi")
@pytest.mark.parametrize("variable", [*LARGEST, EVENTS.variable])
def test_a_number_beyond_its_range_is_an_error_of_init_on_every_rank(world, variable):
    for text in (str(int(LARGEST.get(variable, EVENTS.maximum)) + 1), str(2**61), str(2**63 - 1)):
        world.run(refuses, variable, text, knobs={variable: text})


def works():
    hvd.init()
    total = hvd.size() * (hvd.size() + 1) / 2
    wrong = []
    for count in (3, 5000, 300_000):
        x = torch.full((count,), hvd.rank() + 1.0)
        if not hvd.allreduce(x, op=hvd.Sum).eq(total).all():
            wrong.append(count)
    gathered = hvd.allgather(torch.tensor([hvd.rank()])).tolist()
    torch.manual_seed(0)
    model = torch.nn.Linear(3, 3)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    model(torch.ones(3)).sum().backward()
    optimizer.step()
    hvd.shutdown()
    assert not wrong
    assert gathered == list(range(len(gathered)))


@pytest.mark.ranks
@pytest.mark.hosts("1,1")
def test_the_core_works_with_the_largest_sizes_of_all_knobs(world):
    # Each rank is alone on its host: no block is shared.
    no_servers = {"HVDLITE_SERVERS": "0"}  # as many would leave no worker
    world.run(works, knobs=LARGEST | no_servers)


def works_or_says_what_it_needs():
    try:
        hvd.init()
    except hvd.HvdliteError as error:
        return str(error)
    hvd.barrier()
    hvd.shutdown()
    return ""


@pytest.mark.ranks(2)
@pytest.mark.mpis("openmpi")
def test_the_largest_number_of_events_is_kept_or_said_to_be_too_much(world):
    texts = world.run(works_or_says_what_it_needs, knobs={EVENTS.variable: str(EVENTS.maximum)})
    assert len(set(texts)) == 1
    assert not texts[0] or "MiB of memory, but" in texts[0] or "HVDLITE_EVENT_LOG" in texts[0]


def one_rank_lacks_memory():
    hvd.shutdown()
    whole = teams._engine

    def lacks(config, placement, *rest):
        if placement.rank == 1:
            raise MemoryError
        return whole(config, placement, *rest)

    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(teams, "_engine", lacks)
        with pytest.raises(hvd.HvdliteError) as caught:
            hvd.init()
        assert not hvd.is_initialized()
    works()
    return str(caught.value)


@pytest.mark.ranks(2)
@pytest.mark.hosts("2,1")
def test_a_rank_that_has_no_memory_for_its_engine_is_an_error_on_every_rank(world):
    for text in world.run(one_rank_lacks_memory):
        assert text.startswith("rank 1: not enough memory for the engine; set HVDLITE_BLOCK_BYTES")


@pytest.mark.parametrize("block_bytes", [2**61, 2**63 - 64, 2**63 - 1])
@pytest.mark.parametrize("inline_bytes", [16384, 2**61, 2**63 - 1])
def test_more_memory_than_can_be_addressed_is_a_memory_error(block_bytes, inline_bytes):
    with pytest.raises(MemoryError):
        _core.memory_bytes(2, 2, inline_bytes, block_bytes)


ENGINE = """
import sys
from hvdlite import _core
sizes = dict(inline_bytes=64, block_bytes=64, segment_bytes=64, piece_bytes=64, event_capacity=0)
sizes |= dict(stall_warning_s=0.0, stall_shutdown_s=0.0, launcher=(-1, 0, 0), black_box=(0, 0))
for name in sizes:
    for value in (2**59, 2**61, 2**63 - 1, 2**63, 2**64, -1, 1e400, float("nan")):
        try:
            engine = _core.Engine(
                rank=0, hosts=((0,),), host_names=("h",), world_ranks=(0,), memory_fd=-1, wire=None,
                progress_thread=True, algorithms=(), deterministic=False, **{**sizes, name: value}
            )
        except (MemoryError, OverflowError, TypeError, ValueError):
            continue
        engine.close()
print("done")
"""


def test_an_engine_refuses_sizes_that_it_cannot_have():
    finished = run_program([sys.executable, "-c", ENGINE], limit_s=60)
    assert (finished.code, finished.stdout) == (0, "done\n"), finished
