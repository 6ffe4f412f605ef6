"""The table of algorithms: which one counts, where it comes from, that all ranks have the same."""

import json

import pytest
import torch

import hvdlite as hvd
from hvdlite.errors import ConfigError
from hvdlite.world import world
from hvdlite.world.config import Config
from hvdlite.world.teams import algorithm_table

RULES = ((1000, "recursive_doubling"), (20_000, "direct"), (None, "ring"))


def test_the_rules_of_the_next_smaller_number_of_hosts_count():
    table = algorithm_table.AlgorithmTable(
        {4: ((None, "direct"),), 2: RULES, 16: ((None, "ring"),)}
    )
    assert [table.rules_for(hosts)[-1][1] for hosts in (2, 3, 4, 15, 16, 4096)] == [
        *("ring", "ring"),
        *("direct", "direct"),
        *("ring", "ring"),
    ]
    assert algorithm_table.AlgorithmTable({4: RULES}).rules_for(2) == RULES


def test_what_is_written_is_read_again(tmp_path):
    path = tmp_path / "table.json"
    algorithm_table.add(path, 2, RULES, "yesterday")
    assert algorithm_table.from_config(Config(algorithm_table=str(path))).rules == {2: RULES}


def test_what_is_built_in_is_a_table(tmp_path):
    for hosts, rules in algorithm_table.BUILT_IN.items():
        algorithm_table.add(tmp_path / "table.json", hosts, rules, {})
    assert algorithm_table.read(tmp_path / "table.json").rules == algorithm_table.BUILT_IN


def test_one_that_is_forced_is_the_only_one():
    table = algorithm_table.from_config(Config(algorithm="direct", algorithm_table="/not/there"))
    assert {name for hosts in (2, 64) for _, name in table.rules_for(hosts)} == {"direct"}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", "not a table of algorithms"),
        ("[]", "not a table of algorithms"),
        ('{"hosts": {"2": 5}}', "not a table of algorithms"),
        ('{"hosts": {"two": [[null, "ring"]]}}', "'two'"),
        ('{"hosts": {}}', "needs rules for 2 hosts or more"),
        ('{"hosts": {"1": [[null, "ring"]]}}', "needs rules for 2 hosts or more"),
        (
            '{"hosts": {"2": [[null, "tree"]]}}',
            "unknown algorithm 'tree'; expected one of recursive_doubling, direct, ring",
        ),
        ('{"hosts": {"2": []}}', "the last one must be null"),
        ('{"hosts": {"2": [[5, "ring"]]}}', "the last one must be null"),
        ('{"hosts": {"2": [[5, "ring"], [4, "direct"], [null, "ring"]]}}', "must ascend"),
        ('{"hosts": {"2": [[1e6, "direct"], [null, "ring"]]}}', "1000000.0 is not a size in bytes"),
        ('{"hosts": {"2": [[-1, "direct"], [null, "ring"]]}}', "-1 is not a size in bytes"),
        (
            json.dumps({"hosts": {"2": [[1 << 63, "ring"], [None, "ring"]]}}),
            "is not a size in bytes",
        ),
        (
            json.dumps({"hosts": {"2": [[i, "ring"] for i in range(9)]}}),
            "expected at most 8 rules, got 9",
        ),
    ],
)
def test_a_file_that_is_no_table_is_an_error_that_names_the_variable(tmp_path, text, expected):
    path = tmp_path / "table.json"
    path.write_text(text)
    with pytest.raises(ConfigError) as failure:
        algorithm_table.from_config(Config(algorithm_table=str(path)))
    assert str(failure.value).startswith(f"HVDLITE_ALGORITHM_TABLE={str(path)!r}: ")
    assert expected in str(failure.value)


def test_an_algorithm_that_does_not_exist_is_an_error_that_names_the_variable():
    with pytest.raises(ConfigError, match="HVDLITE_ALGORITHM='tree': expected one of auto, ring"):
        Config.from_env({"HVDLITE_ALGORITHM": "tree"})


def rules_after_init(path_of):
    with pytest.MonkeyPatch.context() as patch:
        from mpi4py import MPI

        hvd.shutdown()
        patch.setenv("HVDLITE_ALGORITHM_TABLE", path_of[MPI.COMM_WORLD.Get_rank()])
        try:
            hvd.init()
        except ConfigError as error:
            return str(error)
        rules = world.current().table.rules_for(2)
        total = hvd.allreduce(torch.ones(5000), op=hvd.Sum)
        hvd.shutdown()
        return rules, total.unique().tolist()


@pytest.mark.ranks
@pytest.mark.hosts("1,1")
def test_all_ranks_have_the_table_of_rank_0_or_its_error(world, tmp_path):
    path = tmp_path / "table.json"
    algorithm_table.add(path, 2, RULES, {})
    assert world.run(rules_after_init, [str(path), "/not/there"]) == [(RULES, [2.0])] * 2
    texts = world.run(rules_after_init, ["/not/there", str(path)])
    assert texts[0] == texts[1]
    assert "HVDLITE_ALGORITHM_TABLE='/not/there': " in texts[0]


def count_messages(counts):
    """For each count of float32: how many data messages this rank sends in an allreduce of them."""
    hvd.init()
    sent = []
    for count in counts:
        before = world.current().team.engine.counters()["data_messages"]
        hvd.allreduce(torch.ones(count), name=f"{count}")
        sent.append(world.current().team.engine.counters()["data_messages"] - before)
    return sent


# Of two hosts, one message in recursive doubling, two in the others.
@pytest.mark.ranks
@pytest.mark.hosts("1,1")
def test_the_size_decides(world, tmp_path):
    path = tmp_path / "table.json"
    algorithm_table.add(path, 2, ((24_000, "recursive_doubling"), (None, "ring")), {})
    knobs = {"HVDLITE_ALGORITHM_TABLE": str(path)}
    assert world.run(count_messages, [5000, 6000, 6001], knobs=knobs) == [[1, 1, 2]] * 2
    for forced, messages in (("ring", 2), ("direct", 2), ("recursive_doubling", 1)):
        knobs["HVDLITE_ALGORITHM"] = forced
        assert world.run(count_messages, [5000, 6001], knobs=knobs) == [[messages] * 2] * 2
