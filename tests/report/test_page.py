"""The page and its command."""

import json
import os
from collections import Counter
from html.parser import HTMLParser

import pytest
import torch
from click.testing import CliRunner

import hvdlite as hvd
from hvdlite.report import page
from hvdlite.report.__main__ import main
from hvdlite.report.figures import overlaps, steps
from hvdlite.report.trace import Span, Trace, match, read
from tests.report.timelines import operation, title, trace, two_ranks, written

VOID = {"meta"}


class Checked(HTMLParser):
    """Fails where a tag is not closed; keeps tags and text."""

    def __init__(self, text):
        super().__init__()
        self.stack, self.tags, self.words, self.attributes = [], Counter(), [], []
        self.feed(text)
        self.close()
        assert self.stack == []

    def handle_starttag(self, tag, attrs):
        self.tags[tag] += 1
        self.attributes += attrs
        if tag not in VOID:
            self.stack.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags[tag] += 1
        self.attributes += attrs

    def handle_endtag(self, tag):
        assert self.stack.pop() == tag

    def handle_data(self, data):
        self.words.append(data)

    @property
    def text(self):
        return " ".join(" ".join(self.words).split())


def test_the_page_shows_the_figures():
    shown = Checked(page.html(two_ranks(), "run.json"))
    for words in (
        "run.json 2 ranks, 4 operations.",
        "1.00 ms median step",
        "computation on rank 1 on host 80 % 800 µs 1",
        "allreduce b 20 % 200 µs 1",
        "rank 0 on host 400 µs 25 % 300 µs 500 µs",
        "rank 1 on host 2 100 % 200 µs 400 µs 0",
        "allreduce 256 KiB 2 200 µs 1,000 1,000",
    ):
        assert words in shown.text, words


def test_the_page_loads_nothing_and_runs_nothing():
    shown = Checked(page.html(two_ranks(), "run.json"))
    assert not {"script", "link", "img", "iframe", "object", "form", "a"} & set(shown.tags)
    names = {name for name, _ in shown.attributes}
    assert not {"src", "href", "xlink:href", "action"} & names
    assert not any(name.startswith("on") for name in names)
    policy = "default-src 'none'; style-src 'unsafe-inline'"
    assert ("content", policy) in shown.attributes


HOSTILE = "</title></style><script>alert(1)</script>\"' onload=alert(1) {{ 7*7 }} \x00\u202e&amp;"


def test_names_are_text_whatever_they_say():
    made = two_ranks()
    plain = Checked(page.html(two_ranks(), "run.json")).tags
    for each in made.operations:
        each.name += HOSTILE
        each.kind += HOSTILE
    for each in made.spans:
        each.name = HOSTILE
    made.ranks = dict.fromkeys(made.ranks, HOSTILE)
    made.notes = [HOSTILE]
    text = page.html(made, HOSTILE)
    shown = Checked(text)
    assert not shown.tags["script"]
    assert all(shown.tags[tag] >= plain[tag] for tag in plain)
    assert not any(name.startswith("on") for name, _ in shown.attributes)
    assert "\x00" not in text
    assert "\u202e" not in text
    assert "{{ 7*7 }}" in shown.text


def test_a_timeline_without_steps_has_a_page_that_says_so(tmp_path):
    made = [title(0), {"ph": "i", "name": "the timeline ends", "pid": 0, "ts": 5}]
    text = Checked(page.html(read(written(tmp_path / "t.json", made)), "t")).text
    assert "the file holds no steps of a DistributedOptimizer" in text
    assert "No operation of several ranks has ended." in text
    assert "No operation that moves data has ended." in text
    assert "does not say how the clocks of the hosts differ" in text
    assert page.html(Trace({0: "rank 0"}), "t")
    assert page.html(trace([operation(0, "x", (None, None, None, 3))], []), "t")


def test_a_long_job_of_many_ranks_has_a_small_page():
    spans = [
        Span(rank, "STEP", "STEP", "o", n, 10.0 * n, 10.0 * n + 10)
        for rank in range(100)
        for n in range(1, 1000)
    ]
    text = page.html(trace([], spans, 100), "t")
    assert len(text) < 200_000
    assert "84 other ranks are left out" in Checked(text).text


@pytest.mark.parametrize(
    ("us", "text"),
    [
        (0.5, "0.50 µs"),
        (999.4, "999 µs"),
        (999.6, "1.00 ms"),
        (31_000, "31.0 ms"),
        (-2e6, "-2.00 s"),
    ],
)
def test_times_have_three_digits_and_a_unit(us, text):
    assert page.time_text(us) == text


def ran(*arguments):
    return CliRunner().invoke(main, [str(each) for each in arguments])


def test_the_command_writes_the_page_beside_the_timeline(tmp_path):
    path = written(tmp_path / "run.json", [title(0)])
    result = ran(path)
    assert (result.exit_code, result.output) == (0, f"{tmp_path}/run.html\n")
    Checked((tmp_path / "run.html").read_text())
    assert ran(path, "-o", tmp_path / "other.html").exit_code == 0
    assert (tmp_path / "other.html").exists()


def test_the_command_says_what_is_wrong(tmp_path):
    empty = tmp_path / "empty.json"
    empty.write_text("")
    html = tmp_path / "run.html"
    html.write_text("[]")
    good = written(tmp_path / "run.json", [title(0)])
    for arguments, problem in (
        ((tmp_path / "none",), "can't read"),
        ((tmp_path,), "can't read"),
        ((empty,), f"can't report on '{empty}': it is empty"),
        ((html,), "would overwrite the timeline"),
        ((good, "-o", tmp_path / "nowhere/x.html"), "can't write"),
        ((good, "-o", good), "would overwrite the timeline"),
    ):
        result = ran(*arguments)
        assert result.exit_code in (1, 2)
        assert problem in result.output
    assert json.loads((tmp_path / "run.json").read_text())


def trains(path):
    hvd.init()
    hvd.start_timeline(path)
    model = torch.nn.Linear(300, 300)
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    optimizers = [
        hvd.DistributedOptimizer(torch.optim.SGD([param], lr=0.1), named_parameters=[(name, param)])
        for name, param in model.named_parameters()
    ]
    for _ in range(6):
        model(torch.ones(4, 300)).sum().backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    hvd.stop_timeline()
    return os.path.exists(path)


@pytest.mark.ranks
@pytest.mark.hosts("1,1")
@pytest.mark.above_mpi
def test_the_timeline_of_a_training_has_all_that_the_page_shows(world, tmp_path):
    path = tmp_path / "run.json"
    world.run(trains, str(path))
    made = read(str(path))
    assert made.notes == []
    for rank in (0, 1):
        kinds = Counter((each.kind, each.optimizer) for each in made.spans if each.rank == rank)
        of_steps = [count for (kind, _), count in kinds.items() if kind == "STEP"]
        of_backward = [count for (kind, _), count in kinds.items() if kind == "BACKWARD"]
        assert of_steps == of_backward == [6, 6]
        assert kinds["WAIT", ""] >= 6
    found = steps(made.spans)
    assert len(found) == 5
    by_step = {
        (each.rank, each.optimizer, each.number): each for each in made.spans if each.kind == "STEP"
    }
    for each in made.spans:
        if each.kind == "BACKWARD":
            step = by_step[each.rank, each.optimizer, each.number]
            assert step.begin <= each.begin <= each.end <= step.end
    for each in overlaps(made, found, match(made.operations)):
        assert each.communication > 0
        assert 0 <= each.hidden <= each.communication
    text = Checked(page.html(made, "run.json")).text
    assert "critical path" in text
    assert "computation on rank" in text
