"""average_metrics and Metric: means over all samples of all ranks."""

import json
import math
from fractions import Fraction

import numpy
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import hvdlite as hvd
from hvdlite.recipes import Metric, average_metrics
from hvdlite.recipes.weighted_mean import WeightedMean

finite = st.floats(-1e300, 1e300)
weights = st.one_of(st.floats(0, 1e6), st.integers(0, 2**40).map(float))


@given(st.lists(st.tuples(finite, weights)))
def test_a_weighted_mean_is_the_float_nearest_to_the_true_one(pairs):
    mean = WeightedMean()
    for value, weight in pairs:
        mean.add(value, weight)
    total = sum(Fraction(weight) for _, weight in pairs)
    if total == 0:
        assert math.isnan(mean.result())
    else:
        true = sum(Fraction(value) * Fraction(weight) for value, weight in pairs) / total
        assert mean.result() == float(true)


@given(st.lists(st.tuples(finite, weights)), st.lists(st.tuples(finite, weights)))
def test_a_weighted_mean_does_not_depend_on_which_rank_has_which_sample(some, others):
    one, another, every = WeightedMean(), WeightedMean(), WeightedMean()
    for mean, pairs in ((one, some), (another, others), (every, others + some)):
        for value, weight in pairs:
            mean.add(value, weight)
    one.merge(another.state())
    assert one.result() == every.result() or math.isnan(every.result())


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([math.inf, 1.0], math.inf),
        ([math.nan, 1.0], math.nan),
        ([math.inf, -math.inf], math.nan),
    ],
)
def test_a_value_that_is_not_finite_shows_in_the_mean(values, expected):
    mean = WeightedMean()
    for value in values:
        mean.add(value, 2.0)
    assert mean.result() == pytest.approx(expected, nan_ok=True)


def unequal_shards(rows):
    """rows: the sizes of the shards; value i of the whole is i."""
    hvd.init()
    begin = sum(rows[: hvd.rank()])
    own = torch.arange(begin, begin + rows[hvd.rank()], dtype=torch.float64)
    return average_metrics(
        {
            "mean": own.mean(),
            "nested": [numpy.float32(own.mean().item()), (own.mean().item(), True)],
        },
        weight=len(own),
    )


@pytest.mark.ranks(2, 3)
@pytest.mark.hosts("2,1")
def test_the_mean_over_unequal_shards_is_that_of_all_samples(world):
    rows = [5, 2, 8][: world.size]
    mean = (sum(rows) - 1) / 2
    expected = {"mean": mean, "nested": [mean, (mean, 1.0)]}
    # A rank without samples has the mean NaN, which does not count.
    rows_with_none = [0, *rows[1:]]
    shown = (sum(rows_with_none) - 1) / 2
    assert world.run(unequal_shards, rows) == [expected] * world.size
    for got in world.run(unequal_shards, rows_with_none):
        assert got["mean"] == shown


def without_samples():
    hvd.init()
    mine = hvd.rank() == 1
    nothing = average_metrics({"loss": 0.1} if mine else None, weight=3 if mine else 0)
    empty = average_metrics({} if mine else {"loss": 0.1}, weight=0 if mine else 3)
    others = [
        average_metrics({"loss": 0.1} if mine else values, weight=3 if mine else torch.tensor(0))
        for values in ({"loss": None}, {"acc": [1.0, "?"], "loss": 2}, "nothing", [math.nan])
    ]
    assert others == [{"loss": 0.1}] * 4
    assert math.isnan(
        average_metrics({"loss" if mine else "acc": None}, 0)["loss" if mine else "acc"]
    )
    nobody = average_metrics(7, weight=0)
    metric = Metric("validation")
    if mine:
        metric.update([0.25])
    return nothing, empty, math.isnan(nobody), metric.compute(), math.isnan(Metric().compute())


@pytest.mark.ranks(2)
def test_a_rank_without_samples_takes_part_and_need_not_know_the_keys(world):
    expected = {"loss": 0.1}, {"loss": 0.1}, True, [0.25], True
    assert world.run(without_samples) == [expected] * 2


def large_counts():
    hvd.init()
    half = 2**52
    return average_metrics(half + hvd.rank(), weight=1), average_metrics([0.1] * 2, weight=3)


@pytest.mark.ranks(2, 3)
def test_integers_of_53_bits_and_equal_values_stay_exact(world):
    middle = float(Fraction(sum(2**52 + rank for rank in range(world.size)), world.size))
    assert world.run(large_counts) == [(middle, [0.1, 0.1])] * world.size


def averages_twenty_values(path):
    hvd.init()
    hvd.start_timeline(path)
    average_metrics({str(key): float(key) for key in range(20)}, weight=1, name="values")
    metric = Metric("metric")
    for _ in range(100):
        metric.update({str(key): torch.tensor(float(key)) for key in range(20)})
    metric.compute()
    hvd.stop_timeline()


@pytest.mark.ranks(2)
def test_twenty_values_travel_in_one_collective(world, tmp_path):
    path = tmp_path / "timeline.json"
    world.run(averages_twenty_values, str(path))
    events = [event for event in json.loads(path.read_text()) if event["ph"] == "b"]
    # A title has a kind and a name; the states of an operation are single words.
    titles = sorted({event["name"] for event in events if " " in event["name"]})
    assert titles == ["allgather metric", "allgather values"]


def disagreements():
    hvd.init()
    rank = hvd.rank()
    texts = []
    for values, weight in [
        ({"loss": 1.0, ("accuracy" if rank else "acc"): {"top": 1}}, 1),
        ({"loss": 1.0} if rank else {}, 1),
        ({"loss": torch.ones(3) if rank else 1.0}, 1),
        (1.0, -1 if rank else 1),
        ("0.5" if rank else 1.0, 1),
        ({"loss": None if rank else 1.0}, 1),
        (1.0, math.nan if rank else 1),
    ]:
        try:
            average_metrics(values, weight)
        except (ValueError, hvd.HorovodInternalError) as error:
            texts.append((type(error).__name__, str(error)))
    # After an error all goes on.
    return texts, average_metrics(2.0)


ONE_ELEMENT = "expected a real one with one element; reduce it first, for example by .mean()"


@pytest.mark.ranks(2)
def test_ranks_that_disagree_all_get_an_error_that_names_ranks_and_keys(world):
    (zeros, two), (ones, _) = world.run(disagreements)
    assert two == 2.0
    assert zeros[:2] == ones[:2]
    kind, text = zeros[0]
    assert kind == "HorovodInternalError"
    assert text == (
        "average_metrics: the ranks have different keys: 'acc' 'top' only on rank 0; 'accuracy' "
        "'top' only on rank 1; pass the same keys on every rank, or weight=0 on a rank without "
        "samples"
    )
    assert "'loss' only on rank 1" in zeros[1][1]
    kinds, texts = zip(*ones[2:], strict=True)
    assert set(kinds) == {"ValueError"}
    what = "expected a number or a tensor of one element"
    assert [text.removeprefix("average_metrics: ") for text in texts] == [
        "'loss' is a tensor float32[3], " + ONE_ELEMENT,
        "weight=-1.0, expected a finite number of at least 0",
        f"the value is str, {what}",
        f"'loss' is NoneType, {what}",
        "weight=nan, expected a finite number of at least 0",
    ]
    for (kind, text), (_, cause) in zip(zeros[2:], ones[2:], strict=True):
        assert kind == "HorovodInternalError"
        assert text == f"average_metrics failed on rank 1: ValueError: {cause}"


def accumulates():
    hvd.init()
    metric = Metric("train")
    loss = torch.zeros(())
    # Rank r has r + 1 batches; the script goes on with the same tensor, in place.
    for batch in range(hvd.rank() + 1):
        loss.fill_(batch + 10 * hvd.rank())
        metric.update({"loss": loss, "count": 2**53 - 1}, weight=torch.tensor(batch + 1))
    first = metric.compute()
    again = metric.compute()
    metric.reset()
    metric.update(hvd.rank())
    return first, again, metric.compute(), repr(metric)


@pytest.mark.ranks(2, 3)
def test_a_metric_is_the_mean_of_all_updates_of_all_ranks(world):
    pairs = [(b + 10 * r, b + 1) for r in range(world.size) for b in range(r + 1)]
    loss = sum(value * weight for value, weight in pairs) / sum(weight for _, weight in pairs)
    first = {"loss": loss, "count": 2**53 - 1}
    expected = first, first, (world.size - 1) / 2, "Metric('train')"
    assert world.run(accumulates) == [expected] * world.size


def in_a_process_set():
    hvd.init()
    pair = hvd.add_process_set([0, 2])
    result = None
    if pair.included():
        metric = Metric(process_set=pair)
        metric.update(hvd.rank())
        result = metric.compute(), average_metrics(hvd.rank(), 1 + hvd.rank(), process_set=pair)
    hvd.remove_process_set(pair)
    return result


@pytest.mark.ranks(3)
def test_only_the_members_of_a_process_set_count(world):
    assert world.run(in_a_process_set) == [(1.0, 1.5), None, (1.0, 1.5)]


def test_an_update_without_samples_may_have_other_keys():
    metric = Metric("train")
    for values, weight in [({"acc": None}, 0), ({"loss": 1.0}, 2), ({"acc": 1.0}, 0)]:
        metric.update(values, weight)
    assert metric._samples.part().means.keys() == {("loss",)}
    assert metric._samples.structure == {"loss": 0.0}


def test_the_keys_of_a_metric_stay_the_same():
    metric = Metric("train")
    metric.update({"loss": 1.0})
    with pytest.raises(
        ValueError, match=r"Metric 'train': the keys are 'acc', .* were 'loss'; pass"
    ):
        metric.update({"acc": 1.0})
    with pytest.raises(ValueError, match=r"'loss' is an integer beyond what a float64 holds"):
        metric.update({"loss": 10**400})
    with pytest.raises(ValueError, match=r"Metric 'train': weight=-1.0, expected a finite"):
        metric.update({"loss": 1.0}, weight=-1)
