"""Which gradients are reduced together, and where each lies."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hvdlite.optimizer.buckets.layout import ALIGNMENT_BYTES, Item, assign, sizes_bytes
from hvdlite.optimizer.buckets.positions import ELEMS as POSITION_ELEMS

ITEMS = st.lists(
    st.builds(
        Item,
        elems=st.integers(0, 300),
        elem_bytes=st.sampled_from([2, 4, 8]),
        kind=st.sampled_from(["a", "b"]),
        group=st.sampled_from([None, None, 0, 1]),
    ),
    max_size=30,
)
LIMITS = st.integers(0, 2000)


@pytest.mark.parametrize(
    ("elems", "limits", "wanted"),
    [
        ([100] * 7, (800, 400), [(0,), (1, 2), (3, 4), (5, 6)]),
        ([10, 10_000, 10], (400, 40), [(0,), (1,), (2,)]),
    ],
)
def test_the_first_bucket_is_small_and_a_large_gradient_has_one_to_itself(elems, limits, wanted):
    items = [Item(each, 4, "float32") for each in elems]
    assert [bucket.members for bucket in assign(items, *limits)] == wanted


@given(ITEMS, LIMITS, LIMITS)
def test_every_gradient_is_in_one_bucket_of_its_kind_and_group(items, limit, first):
    buckets = assign(items, limit, first)
    assert sorted(i for bucket in buckets for i in bucket.members) == list(range(len(items)))
    for bucket in buckets:
        assert len({(items[i].kind, items[i].group) for i in bucket.members}) == 1


@given(ITEMS, LIMITS, LIMITS)
def test_places_are_aligned_and_do_not_overlap(items, limit, first):
    for bucket in assign(items, limit, first):
        end = 0
        for index, offset in zip(bucket.members, bucket.offsets_elems, strict=True):
            assert offset >= end
            assert offset * items[index].elem_bytes % ALIGNMENT_BYTES == 0
            end = offset + items[index].elems
        assert bucket.mask_offset_elems == end
        # Whether there is each of them, and the rank itself; then which round it is.
        assert bucket.position_offset_elems == end + len(bucket.members) + 1
        assert bucket.elems == bucket.position_offset_elems + POSITION_ELEMS


@given(ITEMS, LIMITS, LIMITS)
def test_buckets_stand_in_the_order_in_which_backward_completes_them(items, limit, first):
    last = [max(bucket.members) for bucket in assign(items, limit, first)]
    assert last == sorted(last)


TOTALS = st.integers(0, 1 << 40)


@given(TOTALS, st.booleans())
def test_more_gradients_make_larger_and_more_buckets_up_to_a_limit(total, several_hosts):
    size, first = sizes_bytes(total, several_hosts, overlaps=True)
    twice, _ = sizes_bytes(2 * total, several_hosts, overlaps=True)
    assert 0 < first <= size <= twice <= 25 << 20
    assert 2 * total / twice >= total / size


def test_between_hosts_buckets_are_smaller_and_do_not_wait_for_the_end():
    assert sizes_bytes(1 << 26, True, overlaps=True)[0] == 1 << 22
    assert sizes_bytes(1 << 26, True, overlaps=False) == sizes_bytes(1 << 26, True, overlaps=True)
    assert sizes_bytes(1 << 25, False, overlaps=True)[0] == 1 << 22


def test_where_computing_needs_all_cores_there_is_one_bucket():
    size, first = sizes_bytes(1 << 26, False, overlaps=False)
    assert size == first == 1 << 26
    assert sizes_bytes(0, False, overlaps=False) == (1, 1)
