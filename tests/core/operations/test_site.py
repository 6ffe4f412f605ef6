"""The site of an operation, the line of the script that posts it, in texts about it."""

import pytest
import torch

import hvdlite as hvd
from hvdlite import _core
from hvdlite.world import world as worlds

pytestmark = [pytest.mark.ranks(2, 4), pytest.mark.hosts("1,1", "2,2", "3,1")]


def failure_of(kind, name, count, site):
    """Posts an unnamed operation, and returns the text of its failure."""
    tensor = torch.ones(count)
    posting = _core.posting(kind, name, True, _core.FLOAT32, tensor, tensor, site=site)
    return worlds.current().team.engine.post(posting).wait()


def call_different_operations(sites):
    """Rank 1 broadcasts, the others reduce; sites: of rank 0, 1 ..., the last for all others."""
    hvd.init()
    rank = hvd.rank()
    kind = _core.BROADCAST if rank == 1 else _core.ALLREDUCE
    text = failure_of(kind, "world.12", 3, sites[min(rank, len(sites) - 1)])
    assert failure_of(_core.ALLREDUCE, "world.13", 3, sites[0]) is None
    return text


def the_text(world, *sites):
    (text,) = set(world.run(call_different_operations, sites))
    return text


def test_a_disagreement_names_the_line_of_the_lowest_rank_of_each_side(world):
    text = the_text(world, "train.py:29", "train.py:31", "other.py:7")
    assert text.startswith("operation 'world.12': rank 1 on ") or world.size == 2
    assert " (train.py:31) called broadcast" in text
    assert " (train.py:29) called allreduce" in text
    assert "other.py" not in text
    assert text.endswith("; call the same operations in the same order on every rank")


def test_an_operation_without_a_site_has_none_in_its_text(world):
    text = the_text(world, "")
    assert "(" not in text
    assert text.count("called") == 1
    assert text.endswith("in the same order on every rank, or give each a name")


def test_one_side_may_have_no_site(world):
    text = the_text(world, "", "train.py:31")
    assert " (train.py:31) called broadcast" in text
    assert text.count("(") == 1


def test_a_long_site_is_cut_at_the_front(world):
    text = the_text(world, "ä" * 100 + "long.py:29", "b" * 100 + ".py:31")
    assert f" ({'ä' * 26}long.py:29) " in text
    assert f" ({'b' * 57}.py:31) " in text


def differ_by_shape():
    hvd.init()
    rank = hvd.rank()
    return failure_of(_core.ALLREDUCE, "shapes", 4 if rank == hvd.size() - 1 else 3, f"line:{rank}")


def test_the_line_of_the_lowest_rank_counts_whichever_posts_first(world):
    (text,) = set(world.run(differ_by_shape))
    assert " (line:0) sent float32[3]" in text
    assert f" (line:{world.size - 1}) sent float32[4]" in text


def reduce_with_sites_of_all_lengths(longest):
    hvd.init()
    engine = worlds.current().team.engine
    for length in range(longest + 1):
        tensor = torch.arange(5.0)
        site = "x" * (length if hvd.rank() else longest - length)
        posting = _core.posting(
            _core.ALLREDUCE,
            f"n{length}",
            False,
            _core.FLOAT32,
            tensor,
            tensor,
            _core.SUM,
            site=site,
        )
        assert engine.post(posting).wait() is None
        assert tensor.tolist() == [hvd.size() * i for i in range(5)]


def test_sites_do_not_touch_the_data_that_travels_behind_them(world):
    world.run(reduce_with_sites_of_all_lengths, 70)


def test_a_site_is_text_without_nul():
    tensor = torch.ones(3)
    with pytest.raises(ValueError, match="a site may not contain a NUL"):
        _core.posting(_core.ALLREDUCE, "x", False, _core.FLOAT32, tensor, tensor, site="a\0b")
    posting = _core.posting(_core.ALLREDUCE, "x", False, _core.FLOAT32, tensor, site="a.py:1")
    assert posting.site == "a.py:1"
    assert posting.replace(name="y").site == "a.py:1"
    assert posting.replace(site="b.py:2").site == "b.py:2"
