"""Metrics of torchmetrics over the data of all ranks."""

import pickle
import warnings

import pytest
import torch
from torchmetrics import Accuracy, CatMetric, MeanMetric, MetricCollection, PearsonCorrCoef
from torchmetrics.classification import BinaryAUROC

import hvdlite as hvd
from hvdlite.recipes import synchronized

CLASSES = 4
SIZES = [7, 2, 0, 5]  # a rank has no data


def samples(ranks):
    """All ranks' predictions and targets, rank by rank."""
    data = torch.Generator().manual_seed(3)
    sizes = SIZES[:ranks]
    scores = torch.rand(sum(sizes), CLASSES, generator=data)
    labels = torch.randint(CLASSES, (sum(sizes),), generator=data)
    return list(zip(scores.split(sizes), labels.split(sizes), strict=True))


def make(name):
    if name == "accuracy":
        return Accuracy(task="multiclass", num_classes=CLASSES), lambda s, t: (s, t)
    if name == "mean":
        return MeanMetric(), lambda s, t: (s[:, 0], t)
    if name == "cat":
        return CatMetric(), lambda s, t: (s[:, 0],)
    if name == "auroc":  # two lists, one of integers
        return BinaryAUROC(), lambda s, t: (s[:, 0], t % 2)
    if name == "sum of two":
        return MeanMetric() + MeanMetric(), lambda s, t: (s[:, 0],)
    if name == "tensors that are stacked":
        return PearsonCorrCoef(), lambda s, t: (s[:, 0], s[:, 1])
    assert name == "collection"
    parts = [
        Accuracy(task="multiclass", num_classes=CLASSES, average=a) for a in ("micro", "macro")
    ]
    return MetricCollection(dict(zip("ab", parts, strict=True))), lambda s, t: (s, t)


NAMES = ["accuracy", "mean", "cat", "auroc", "sum of two", "tensors that are stacked", "collection"]


def computed(name):
    hvd.init()
    warnings.filterwarnings("ignore", ".*was called before the ``update``")
    metric, arguments = make(name)
    assert synchronized(metric) is metric
    scores, labels = samples(hvd.size())[hvd.rank()]
    # By two, so that lists have several tensors.
    for s, t in zip(scores.split(2), labels.split(2), strict=True):
        if len(s):
            metric.update(*arguments(s, t))
    first = metric.compute()
    again = metric.clone().compute()
    # It goes on with its own data.
    if len(labels):
        metric.update(*arguments(scores, labels))
    return [plain(value) for value in (first, again, metric.compute())]


def plain(value):
    """Results go to the test without tensors."""
    if isinstance(value, dict):
        return {key: plain(part) for key, part in value.items()}
    return value.tolist()


@pytest.mark.ranks(2, 4)
@pytest.mark.parametrize("name", NAMES)
def test_compute_gives_the_value_of_all_ranks_data(world, name):
    whole, arguments = make(name)
    twice, _ = make(name)
    for scores, labels in samples(world.size):
        parts = [(s, t) for s, t in zip(scores.split(2), labels.split(2), strict=True) if len(s)]
        for s, t in parts:
            whole.update(*arguments(s, t))
            twice.update(*arguments(s, t))
        if len(labels):
            twice.update(*arguments(scores, labels))
    once, both = whole.compute(), twice.compute()
    for found in world.run(computed, name):
        for value, expected in zip(found, (once, once, both), strict=True):
            if name == "cat":  # in the order of the ranks, not of the updates
                value, expected = sorted(value), torch.sort(expected).values
            assert value == pytest.approx(plain(expected), rel=1e-6)


def disagrees():
    hvd.init()
    metric = synchronized(MeanMetric() if hvd.rank() else CatMetric())
    metric.update(1.0)
    with pytest.raises(hvd.HorovodInternalError) as info:
        metric.compute()
    return str(info.value).partition(": ")[2]


@pytest.mark.ranks(2)
def test_ranks_with_different_metrics_get_the_same_error(world):
    one, other = world.run(disagrees)
    assert one == other
    assert one == (
        "the ranks have different metrics: CatMetric with the states value on rank 0, MeanMetric "
        "with the states mean_value, weight on rank 1; compute the same ones in the same order on "
        "every rank"
    )


def in_a_process_set():
    hvd.init()
    last = hvd.add_process_set([hvd.size() - 1])
    metric = synchronized(MeanMetric(), process_set=last) if last.included() else MeanMetric()
    metric.update(float(hvd.rank()))
    value = metric.compute().item()
    hvd.remove_process_set(last)
    return value


@pytest.mark.ranks(2)
def test_a_process_set_of_one_computes_alone(world):
    assert world.run(in_a_process_set) == [0.0, 1.0]


def test_a_synchronized_metric_can_be_pickled(world_of_one):
    metric = synchronized(MeanMetric())
    metric.update(2.0)
    again = pickle.loads(pickle.dumps(metric))
    again.update(4.0)
    assert (metric.compute().item(), again.compute().item()) == (2.0, 3.0)


def test_only_metrics_can_be_synchronized():
    with pytest.raises(
        ValueError, match="synchronized: Linear is no metric or collection of torch"
    ):
        synchronized(torch.nn.Linear(1, 1))
