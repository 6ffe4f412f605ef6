"""Which ranks are on which host, and the numbers that follow."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hvdlite.world.teams.placement import Placement, hosts_of, pretended_leaders


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
