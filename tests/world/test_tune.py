"""hvdlite.tune: from times to rules, and the file that it writes."""

import pytest

from hvdlite import tune
from hvdlite.world.teams import algorithm_table
from tests.harness.programs import run_program
from tests.harness.worlds import ROOT, mpiexec_command, python_of

SIZES = (1, 4, 16, 64, 256)


def times_where(best):
    """best: the algorithm that takes half as long as the others, by size."""
    return {
        name: {size: size * (1.0 if best[size] == name else 2.0) for size in SIZES}
        for name in tune.ORDER
    }


@pytest.mark.parametrize(
    ("letters", "expected"),
    [
        ("rrrrr", ((None, "ring"),)),
        ("xxxxx", ((None, "recursive_doubling"),)),
        ("xxddr", ((8, "recursive_doubling"), (128, "direct"), (None, "ring"))),
        ("xrrrr", ((2, "recursive_doubling"), (None, "ring"))),
        ("ddddr", ((128, "direct"), (None, "ring"))),
        # One outlier moves no limit.
        ("xxrxx", ((None, "recursive_doubling"),)),
        ("drrrx", ((2, "direct"), (None, "ring"))),
    ],
)
def test_the_rules_are_the_best_ones_with_one_limit_between_two_algorithms(letters, expected):
    names = {"r": "ring", "d": "direct", "x": "recursive_doubling"}
    best = dict(zip(SIZES, (names[letter] for letter in letters), strict=True))
    assert tune.rules_of(times_where(best), SIZES) == expected


def run_tune(*arguments, hosts, monkeypatch):
    monkeypatch.setenv("HVDLITE_HOST_RANKS", hosts)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    command = [*mpiexec_command("openmpi", 2), str(python_of("openmpi")), "-m", "hvdlite.tune"]
    return run_program([*command, *map(str, arguments)], 60)


def test_a_run_writes_a_table_and_keeps_the_rules_for_other_numbers_of_hosts(tmp_path, monkeypatch):
    path = tmp_path / "table.json"
    for hosts in (5, 2):
        algorithm_table.add(path, hosts, ((None, "direct"),), {})
    done = run_tune(path, "--rounds", 1, "--largest", 1024, hosts="1,1", monkeypatch=monkeypatch)
    assert done.code == 0, done
    rules = algorithm_table.read(path).rules
    assert rules[5] == ((None, "direct"),)
    assert rules[2][-1][0] is None
    assert [line.split()[0] for line in done.stdout.splitlines()[:3]] == ["bytes", "256", "1024"]


@pytest.mark.wide
def test_on_one_host_it_says_that_there_is_nothing_to_choose(tmp_path, monkeypatch):
    done = run_tune(tmp_path / "table.json", hosts="2", monkeypatch=monkeypatch)
    assert done.code == 1, done
    assert "this job runs on one host" in done.stderr


@pytest.mark.wide
@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        pytest.param(
            "missing/table.json", None, "No such file or directory", marks=pytest.mark.wide
        ),
        ("table.json", "{}", "not a table of algorithms: KeyError('hosts')"),
    ],
)
def test_a_file_that_can_not_be_written_is_said_before_anything_is_measured(
    tmp_path, monkeypatch, name, text, expected
):
    path = tmp_path / name
    if text is not None:
        path.write_text(text)
    done = run_tune(path, hosts="1,1", monkeypatch=monkeypatch)
    assert done.code == 1, done
    assert done.stderr.count(f"Error: {path}: ") == 1
    assert expected in done.stderr
    assert not done.stdout
    assert text is None or path.read_text() == text


def test_rules_written_by_hand_are_kept(tmp_path):
    path = tmp_path / "table.json"
    path.write_text('{"hosts": {"3": [[null, "ring"]]}}')
    algorithm_table.add(path, 2, ((None, "direct"),), {})
    assert algorithm_table.read(path).rules == {3: ((None, "ring"),), 2: ((None, "direct"),)}
    assert list(tmp_path.iterdir()) == [path]
