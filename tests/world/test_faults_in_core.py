"""HVDLITE_FAULT in the core, under each MPI: a call of MPI returns an error, there is no memory, a
message is lost. Every operation ends on every rank, with an error or the right result."""

import os
import re

import pytest
import torch

import hvdlite as hvd

# `make faults` plays every case, `make test` some.
ALL = os.environ.get("HVDLITE_TEST_FAULTS") == "all"
ROUNDS = 3
OPERATIONS = 3 * ROUNDS
# So small that data goes between the hosts in several messages, and not with its posting.
KNOBS = {"HVDLITE_INLINE_BYTES": "64", "HVDLITE_SEGMENT_BYTES": "4096"}


def train():
    """How many operations have ended well, and the error of the next one."""
    mine = torch.arange(4000, dtype=torch.float32) + hvd.rank()
    sums = 2 * torch.arange(4000, dtype=torch.float32) + 1
    operations = [
        lambda: torch.equal(hvd.allreduce(mine, op=hvd.Sum), sums),
        lambda: hvd.allgather(mine[hvd.rank() :]).shape[0] == 7999,
        lambda: torch.equal(hvd.broadcast(mine, 1), mine - hvd.rank() + 1),
    ]
    done = 0
    for _ in range(ROUNDS):
        for operation in operations:
            try:
                assert operation(), f"operation {done} has a wrong result"
            except (hvd.HorovodInternalError, MemoryError) as error:
                return done, str(error) or type(error).__name__
            done += 1
    return done, ""


def fails(faults):
    """What has become of each of these cases. Each begins with a world of its own."""
    outcomes = []
    for fault in faults:
        os.environ["HVDLITE_FAULT"] = fault
        try:
            hvd.init()
            outcomes.append(train())
        except (hvd.HorovodInternalError, MemoryError) as error:  # of init
            assert not hvd.is_initialized()
            outcomes.append((-1, str(error) or type(error).__name__))
        finally:
            hvd.shutdown()
            del os.environ["HVDLITE_FAULT"]
    return outcomes


def numbers(least, most, step):
    return range(least, most, 1 if ALL else step)


# From about the 41st on they are no longer those of making an engine.
ALLOCATIONS = [*numbers(1, 37, 6), *range(37, 50), *numbers(50, 145, 9)]

# Of the rank: what its own error says, and the others'.
OWN = {
    "fail-mpi": r"rank {rank}( on host{rank})?:.* MPI reported an error( in \w+ '.*')?",
    "fail-alloc": (
        r"rank {rank} on host{rank} is out of memory.*|MemoryError"
        r"|rank {rank} has no memory for the result of .*|rank {rank}: not enough memory for .*"
    ),
}
OTHERS = r"rank {rank} on host{rank} has left .*"


@pytest.mark.hosts("1,1")
@pytest.mark.parametrize(
    ("kind", "rank", "call", "chosen"),
    [
        ("fail-mpi", 1, "MPI_Isend", numbers(1, 45, 5)),
        ("fail-mpi", 0, "MPI_Irecv", numbers(1, 45, 5)),
        ("fail-mpi", 1, "MPI_Testsome", numbers(1, 200, 29)),
        ("fail-mpi", 0, "", numbers(1, 150, 17)),
        ("fail-alloc", 1, "", ALLOCATIONS),
        ("fail-alloc", 0, "", ALLOCATIONS),
    ],
)
def test_whatever_fails_on_a_rank_is_an_error_on_all_ranks(world, kind, rank, call, chosen):
    on = f",call={call}" if call else ""
    cases = [f"{kind}@rank={rank}{on},nth={n}" for n in chosen]
    outcomes = world.run(fails, cases, knobs=KNOBS, limit_s=60)
    own, others = outcomes[rank], outcomes[1 - rank]
    for case, (done, error), (others_done, others_error) in zip(cases, own, others, strict=True):
        if done == -1 and error != "MemoryError":  # no world was made
            assert (others_done, others_error) == (done, error), case
        elif done == -1:
            said = f"init failed on rank {rank} on host{rank}: MemoryError"
            assert others_done == -1, case
            assert others_error.startswith(said), case
        elif others_error:
            # A rank may be through with an operation while another one is not.
            assert abs(others_done - done) <= 1, case
            assert re.fullmatch(OTHERS.format(rank=rank), others_error), (case, others_error)
        else:
            assert done in (OPERATIONS - 1, OPERATIONS), (case, error)
        assert not error or re.fullmatch(OWN[kind].format(rank=rank), error), (case, error)
    failed = sum(bool(error) for _, error in own)
    assert failed > len(cases) // 2


@pytest.mark.hosts("1,1")
def test_a_message_that_is_lost_fails_all_ranks_after_the_shutdown_time(world):
    times = {
        "HVDLITE_STALL_CHECK_TIME_SECONDS": "1",
        "HVDLITE_STALL_SHUTDOWN_TIME_SECONDS": "2",
    }
    outcomes = world.run(fails, ["drop@rank=1,nth=3"], knobs=KNOBS | times, limit_s=60)
    texts = {error for ((_, error),) in outcomes}
    assert len(texts) == 1, texts
    assert re.search(r"rank \d on host\d.* all operations fail now", texts.pop())
