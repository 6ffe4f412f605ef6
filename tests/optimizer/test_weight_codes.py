"""The ranks' weights arrive exactly, in every dtype and under every factor."""

import math

import hypothesis
import pytest
import torch
from hypothesis import strategies as st

from hvdlite.optimizer.buckets import weight_codes

DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
WEIGHTS = st.one_of(
    st.none(),
    st.just(0.0),
    st.integers(1, 10**15).map(float),
    st.floats(1e-9, 1e15),
)


def reduced(own, dtype, predivide):
    """As the engine reduces: 16-bit numbers are added in float32 and rounded on each host and at
    the end."""
    members = len(own)
    wide = torch.float32 if dtype.itemsize == 2 else dtype
    first, second = (1 / predivide, predivide / members)
    hosts = []
    for host in (own[::2], own[1::2]):
        total = torch.zeros(weight_codes.elems(dtype, members), dtype=wide)
        for member, weight in host:
            place = torch.full((len(total),), 7, dtype=dtype)
            weight_codes.put(place, member, members, weight)
            total += place.to(wide) * first
        hosts.append(total.to(dtype))
    return (sum(host.to(wide) for host in hosts) * second).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@hypothesis.given(
    weights=st.lists(WEIGHTS, min_size=2, max_size=40),
    predivide=st.sampled_from([1.0, 3.0, 40.0, 1 / 7]),
)
def test_the_sum_of_the_weights_is_exact(dtype, weights, predivide):
    place = reduced(list(enumerate(weights)), dtype, predivide)
    wanted = math.fsum(weight or 0.0 for weight in weights)
    assert weight_codes.total(place, len(weights)) == wanted
