"""Which ranks are on which host, and the numbers that follow."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hvdlite.errors import LaunchError
from hvdlite.world.teams.placement import Placement, hosts_of, placement_of, pretended_leaders


def layouts(leaders):
    hosts = hosts_of(leaders)
    names = tuple(f"host{i}" for i in range(len(hosts)))
    return [Placement(rank, hosts, names) for rank in range(len(leaders))]


@pytest.mark.parametrize(
    ("counts", "leaders"), [((3,), [0, 0, 0]), ((2, 1, 2), [0, 0, 2, 3, 3]), ((1, 1), [0, 1])]
)
def test_pretended_hosts_take_the_ranks_in_order(counts, leaders):
    assert pretended_leaders(counts) == leaders
    assert [len(ranks) for ranks in hosts_of(leaders)] == list(counts)


class Taken:
    """Peers of one host, as MPI says; facts: the name and the boot of each one's machine."""

    rank = 0

    def __init__(self, facts):
        self.facts = facts
        self.size = len(facts)

    def host_leader(self):
        return 0

    def allgather(self, thing):
        return [thing] * self.size if thing == 0 else self.facts


def test_two_machines_that_mpi_takes_for_one_host_are_an_error():
    both = r"rank 0 on job\.1-a and rank 2 on job\.1-b for ranks of one host, but these are two"
    with pytest.raises(LaunchError, match=both):
        placement_of(Taken([("job.1-a", "x"), ("job.1-a", "x"), ("job.1-b", "y")]), ())
    # Containers of one machine may have names of their own.
    assert placement_of(Taken([("a", "x"), ("b", "x")]), ()).hosts == ((0, 1),)
    assert placement_of(Taken([("a", ""), ("a", "x")]), ()).hosts == ((0, 1),)


def test_ranks_that_are_dealt_round_robin_are_ascending_on_each_host():
    assert hosts_of([0, 1, 0, 1, 0]) == ((0, 2, 4), (1, 3))


def test_cross_ranks_are_those_with_the_same_local_rank_on_the_hosts_that_have_it():
    found = layouts([0, 0, 2, 3, 3])
    assert [(r.local_rank, r.local_size, r.cross_rank, r.cross_size) for r in found] == [
        (0, 2, 0, 3),
        (1, 2, 0, 2),
        (0, 1, 1, 3),
        (0, 2, 2, 3),
        (1, 2, 1, 2),
    ]
    assert not found[0].homogeneous
    assert layouts([0, 0, 2, 2])[0].homogeneous


@given(st.lists(st.integers(0, 3), min_size=1, max_size=9))
def test_every_rank_is_found_by_its_host_and_local_rank(host_by_rank):
    leaders = [host_by_rank.index(host) for host in host_by_rank]
    for placement in layouts(leaders):
        assert placement.size == len(leaders)
        assert placement.hosts[placement.host][placement.local_rank] == placement.rank
        assert placement.cross_ranks[placement.cross_rank] == placement.rank
        assert [ranks[0] for ranks in placement.hosts] == sorted(set(leaders))
