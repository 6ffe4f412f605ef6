"""What the command says of a timeline."""

import os
from collections import Counter

import pytest
import torch
from click.testing import CliRunner

import hvdlite as hvd
from hvdlite.report.__main__ import main
from hvdlite.report.figures import steps
from hvdlite.report.text import lines, time_text
from hvdlite.report.trace import Span, Trace, read
from tests.report.timelines import operation, title, trace, two_ranks, written


def test_the_figures_are_told():
    made = two_ranks()
    made.errors = {1: 50.0}
    assert list(lines(made, "run.json")) == [
        "run.json: ranks: 2, operations: 4",
        (
            "steps without the first: 1; the median takes 1.00 ms, 95 % at most 1.00 ms, the"
            " longest 1.00 ms (step 2)"
        ),
        "the critical path, the parts of a step's length: of all, per step, in how many steps:",
        "   80 %    800 µs         1  computation on rank 1 on host",
        "   20 %    200 µs         1  allreduce b",
        (
            "who posts an operation last, in how many, by how much after the one before (the"
            " median), and in all; the clocks may be wrong by 50.0 µs:"
        ),
        "  100 %    200 µs    400 µs  rank 1 on host, of 2 operations",
        "    0 %   0.00 µs   0.00 µs  rank 0 on host, of 2 operations",
    ]


def test_names_of_the_users_change_no_terminal():
    made = two_ranks()
    for each in made.operations:
        each.name += "\x1b[2J\u202e"
    made.ranks = dict.fromkeys(made.ranks, "\x1b[2J" * 100)
    made.notes = ["\x00"]
    assert all(line.isprintable() for line in lines(made, "\x1b"))


def test_a_timeline_without_steps_is_told_as_such(tmp_path):
    made = [title(0), {"ph": "i", "name": "the timeline ends", "pid": 0, "ts": 5}]
    text = "\n".join(lines(read(written(tmp_path / "t.json", made)), "t"))
    assert "note: the file holds no steps of a DistributedOptimizer" in text
    assert "no operation of several ranks has ended" in text
    assert list(lines(Trace({0: "rank 0"}), "t"))
    assert list(lines(trace([operation(0, "x", None, 3)], []), "t"))


def test_a_long_job_of_many_ranks_has_a_short_report():
    spans = [
        Span(rank, "STEP", "o", n, 10.0 * n, 10.0 * n + 10)
        for rank in range(100)
        for n in range(1, 1000)
    ]
    operations = [operation(rank, "x", rank, 200) for rank in range(100)]
    assert len(list(lines(trace(operations, spans, 100), "t"))) < 40


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
    assert time_text(us) == text


def ran(*arguments):
    return CliRunner().invoke(main, [str(each) for each in arguments])


def test_the_command_says_what_is_wrong(tmp_path):
    empty = tmp_path / "empty.json"
    empty.write_text("")
    for arguments, problem in (
        ((tmp_path / "none",), "can't read"),
        ((tmp_path,), "can't read"),
        ((empty,), f"can't report on '{empty}': it is empty"),
    ):
        result = ran(*arguments)
        assert result.exit_code == 1
        assert problem in result.output
    result = ran(written(tmp_path / "run.json", [title(0)]))
    assert (result.exit_code, result.output[:28]) == (0, "run.json: ranks: 1, operatio")


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
    text = "\n".join(lines(made, "run.json"))
    assert "computation on rank" in text
