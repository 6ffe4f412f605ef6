"""The compatibility page says what hvdlite does with all that Horovod has, and so it is."""

import ast
import fnmatch
import functools
import inspect
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import click
import pytest

import hvdlite
import hvdlite.torch
from hvdrun.command_line.cli import cli, main
from hvdrun.command_line.runtime_options import WITHOUT_EFFECT
from hvdrun.knobs import KNOBS
from tests.harness.programs import run_program

DOCS = Path(__file__).resolve().parent.parent / "docs"
PAGE = DOCS / "compatibility.md"
HOROVOD = json.loads((DOCS / "horovod-0.28.1.json").read_text())

# By the page's first table; a name or flag of the first line can be used as with Horovod.
USABLE = {"same", "better", "no effect"}
ABSENT = {"not there"}
STATUSES = USABLE | ABSENT | {"different"}

NAMES: dict[str, dict[str, str]] = HOROVOD["torch"] | HOROVOD["submodules"] | HOROVOD["package"]
FLAGS = {flag["flag"]: flag for flag in HOROVOD["flags"]}
VARIABLES = sorted({flag["variable"] for flag in FLAGS.values() if "variable" in flag})


def read_tables(text):
    """All rows of the tables of a page, by the title of the first column, in their order."""
    tables: dict[str, list[list[list[str]]]] = {}
    for block in text.split("\n\n"):
        lines = block.splitlines()
        if lines[0].startswith("| "):
            titles, _, *rows = ([c.strip() for c in line.strip("|").split("|")] for line in lines)
            assert all(len(row) == len(titles) for row in rows), titles
            tables.setdefault(titles[0], []).append(rows)
    return tables


def code(cell):
    return cell.strip("`")


TABLES = read_tables(PAGE.read_text())


def rows_of(title):
    return [row for table in TABLES[title] for row in table]


class NameRow(NamedTuple):
    parameters: str
    status: str


class ParameterRow(NamedTuple):
    functions: tuple[str, ...]
    status: str


NAME_ROWS = {code(row[0]): NameRow(code(row[1]), row[2]) for row in rows_of("name")}
PARAMETER_ROWS = {
    code(row[0]): ParameterRow(tuple(map(code, row[1].split())), row[2])
    for row in rows_of("parameter")
}
FLAG_ROWS = {row[0].replace("`", ""): row for row in rows_of("flag")}
VARIABLE_ROWS = {code(row[0]): row for row in rows_of("variable")}
ADDITIONS = [code(row[0]) for row in rows_of("only in hvdlite")]


# The signatures of Horovod and of hvdlite, in one form.

NO_DEFAULT = inspect.Parameter.empty


class Parameter(NamedTuple):
    text: str
    name: str
    default: Any
    # `*args` or `**kwargs`: whatever the method of the wrapped optimizer takes.
    passed_on: bool = False


def parameters_of(text):
    """What a list of parameters says. Names in defaults mean hvdlite's; KeyError: it has none."""
    function = ast.parse(f"def f({text}): ...").body[0]
    assert isinstance(function, ast.FunctionDef)
    args = function.args
    defaults = [None] * (len(args.args) - len(args.defaults)) + args.defaults
    found = []
    for arg, default in zip(args.args, defaults, strict=True):
        if default is None:
            found.append(Parameter(arg.arg, arg.arg, NO_DEFAULT))
        else:
            written = ast.unparse(default)
            value = eval(written, vars(hvdlite.torch).copy())
            found.append(Parameter(f"{arg.arg}={written}", arg.arg, value))
    found += [Parameter(f"*{a.arg}", a.arg, NO_DEFAULT, True) for a in [args.vararg] if a]
    found += [Parameter(f"**{a.arg}", a.arg, NO_DEFAULT, True) for a in [args.kwarg] if a]
    return found


# What an optimizer takes that it hands to the wrapped one is what torch's own takes.
METHODS = """
import inspect, json, torch
import hvdlite.torch as hvd
hvd.init()
def methods(op):
    wrapped = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1)
    optimizer = hvd.DistributedOptimizer(wrapped, op=op)
    found = {}
    for name in dir(optimizer):
        if not name.startswith("_") and inspect.isroutine(method := getattr(optimizer, name)):
            parameters = list(inspect.signature(method).parameters.values())
            if str(inspect.signature(method)).startswith("(*args"):
                method = getattr(torch.optim.SGD([torch.zeros(1)], lr=0.1), name)
                parameters = list(inspect.signature(method).parameters.values())
            found[name] = [(p.name, p.default is p.empty or repr(p.default)) for p in parameters]
    return found
print(json.dumps({op: methods(getattr(hvd, op)) for op in ("Average", "Adasum")}))
"""


run_once = functools.cache(run_program)


def optimizer_methods(op):
    """The methods of a distributed optimizer and their parameters, from a process of its own."""
    finished = run_once((sys.executable, "-c", METHODS), limit_s=60)
    assert finished.code == 0, finished
    return json.loads(finished.stdout)[op]


def hvdlites_parameters(name, op="Average"):
    """Those of the name in hvdlite.torch, or for Horovod's own package in hvdlite. None of what is
    not called, and of exceptions.

    Raises:
        AttributeError: there is no such name.
    """
    owner, _, member = name.rpartition(".")
    if owner == "DistributedOptimizer":
        if member not in (methods := optimizer_methods(op)):
            raise AttributeError(name)
        given = [(n, NO_DEFAULT if d is True else ast.literal_eval(d)) for n, d in methods[member]]
    else:
        thing: Any = hvdlite if name in HOROVOD["package"] else hvdlite.torch
        for part in name.split("."):
            thing, owner_is_class = getattr(thing, part), inspect.isclass(thing)
        if not callable(thing) or (inspect.isclass(thing) and issubclass(thing, Exception)):
            return []
        given = [(p.name, p.default) for p in inspect.signature(thing).parameters.values()]
        given = given[1:] if owner_is_class else given
    return [Parameter(n, n, default) for n, default in given]


def accepts(ours, theirs, position):
    """Whether the parameter at that position of Horovod's is the same in hvdlite's."""
    wanted = theirs[position]
    if wanted.passed_on:
        return True
    if position >= len(ours) or ours[position].name != wanted.name:
        return False
    default = ours[position].default
    return type(default) is type(wanted.default) and default == wanted.default


def differences(name, op="Average"):
    """Which of Horovod's parameters are not the same in hvdlite, and those that it can't know."""
    theirs, ours = parameters_of(NAMES[name].get("parameters", "")), hvdlites_parameters(name, op)
    if "parameters" not in NAMES[name]:
        return []
    different = [p.text for i, p in enumerate(theirs) if not accepts(ours, theirs, i)]
    if not any(p.passed_on for p in theirs):
        different += [f"+{p.name}" for p in ours[len(theirs) :] if p.default is NO_DEFAULT]
    return different


def is_absent(name, op="Average"):
    try:
        hvdlites_parameters(name, op)
    except AttributeError:
        return name not in hvdlite.__all__
    return False


def ops_of(name):
    """Adasum's optimizer is another class."""
    return ("Average", "Adasum") if name.startswith("DistributedOptimizer.") else ("Average",)


def named(*statuses):
    return [
        pytest.param(name, op, id=name if op == "Average" else f"{name}-{op}")
        for name, row in NAME_ROWS.items()
        if row.status in statuses
        for op in ops_of(name)
    ]


# The page is complete and regular.


@pytest.mark.parametrize("name", NAMES)
def test_each_name_of_horovod_has_a_row_with_its_parameters(name):
    assert NAME_ROWS[name].parameters == NAMES[name].get("parameters", "")


@pytest.mark.parametrize("flag", FLAGS)
def test_each_flag_of_horovodrun_has_a_row_with_its_spellings_value_and_default(flag):
    facts = FLAGS[flag]
    assert FLAG_ROWS[facts["spellings"]][1:3] == [facts["takes"], facts.get("default", "")]


@pytest.mark.parametrize(
    "name", [name for name, row in NAME_ROWS.items() if row.status not in ABSENT]
)
def test_each_parameter_of_a_name_that_is_there_has_one_row(name):
    for parameter in parameters_of(NAMES[name].get("parameters", "")):
        functions = PARAMETER_ROWS[parameter.text].functions
        assert sum(fnmatch.fnmatchcase(name, pattern) for pattern in functions) == 1, parameter.text


def test_the_page_has_no_row_for_what_horovod_does_not_have():
    assert set(NAME_ROWS) == set(NAMES)
    assert set(FLAG_ROWS) == {facts["spellings"] for facts in FLAGS.values()}
    assert sorted(VARIABLE_ROWS) == VARIABLES
    for parameter, row in PARAMETER_ROWS.items():
        for pattern in row.functions:
            assert any(
                fnmatch.fnmatchcase(name, pattern)
                and parameter in [p.text for p in parameters_of(NAMES[name].get("parameters", ""))]
                for name in NAMES
            ), f"{parameter} of {pattern}"


@pytest.mark.parametrize("title", ["name", "parameter", "only in hvdlite", "variable"])
def test_the_rows_of_a_table_are_sorted_and_each_is_there_once(title):
    first = [[code(row[0]) for row in table] for table in TABLES[title]]
    assert first == [sorted(cells) for cells in first]
    every = [cell for cells in first for cell in cells]
    assert len(set(every)) == len(every)


def test_flags_are_sorted_by_their_long_spelling():
    assert [max(cells.split(), key=len) for cells in FLAG_ROWS] == list(FLAGS)


def test_every_row_has_one_of_the_words_that_the_page_explains():
    assert {row[0] for row in rows_of("in hvdlite")} == STATUSES
    used: list[Any] = [row.status for row in (*NAME_ROWS.values(), *PARAMETER_ROWS.values())]
    used += [row[3] for row in FLAG_ROWS.values()] + [row[2] for row in VARIABLE_ROWS.values()]
    assert set(used) <= STATUSES


# hvdlite is as the page says.


@pytest.mark.parametrize(("name", "op"), named(*USABLE))
def test_what_is_the_same_or_better_takes_what_horovods_takes(name, op):
    assert differences(name, op) == []


@pytest.mark.parametrize(("name", "op"), named("different"))
def test_what_is_different_differs_in_the_parameters_that_say_so(name, op):
    said = [p.text for p in parameters_of(NAMES[name].get("parameters", ""))]
    said = [text for text in said if PARAMETER_ROWS[text].status == "different"]
    assert differences(name, op) == said


@pytest.mark.parametrize(("name", "op"), named(*ABSENT))
def test_what_is_said_to_be_absent_is(name, op):
    assert is_absent(name, op)


def test_a_name_with_a_parameter_that_is_different_is_not_the_same():
    # It may be better: the call is then as in Horovod, and what the parameter does is not.
    for parameter, row in PARAMETER_ROWS.items():
        if row.status == "different":
            assert "same" not in {NAME_ROWS[name].status for name in row.functions}, parameter


@pytest.mark.parametrize("name", sorted(hvdlite.__all__))
def test_each_export_is_horovods_or_an_addition_that_the_page_has(name):
    assert getattr(hvdlite.torch, name) is getattr(hvdlite, name)
    assert (name in HOROVOD["torch"]) != (name in ADDITIONS)


@pytest.mark.parametrize("name", ADDITIONS)
def test_an_addition_is_there_and_horovod_does_not_have_it(name):
    assert not is_absent(name)
    assert name not in HOROVOD["torch"]


# hvdrun takes what the page says.


def written(flag, spelling):
    """Ways to write a flag with a value, and the value that hvdrun should see."""
    samples: Mapping[str, tuple[str, Any]] = {"int": ("7", 7), "float": ("0.5", 0.5)}
    takes = FLAGS[flag]["takes"]
    if takes == "nothing":
        return [[spelling]], True
    if takes == "2 int":
        return [[spelling, "7", "8"]], (7, 8)
    text, value = samples.get(takes, (takes.split()[0], takes.split()[0]))
    ways = [[spelling, text]]
    return ways + ([[f"{spelling}={text}"]] if spelling.startswith("--") else []), value


# What hvdrun takes a flag without a value for.
MEANS = {"--mpi": "auto"}


def hvdrun_sees(words, value):
    """Whether hvdrun takes the words as an option of its own with that value. Runs nothing."""
    value = MEANS.get(words[0], value)
    try:
        context = cli.make_context("hvdrun", [*words, "true"])
    except click.exceptions.Exit as exit:  # --help has been shown
        return exit.exit_code == 0
    except click.UsageError:
        return False
    kinds = (float, int) if type(value) is int else type(value)
    given = [v for v in context.params.values() if isinstance(v, kinds)]
    return context.params["command"] == ("true",) and value in given


FLAG_CASES = [
    pytest.param(flag, spelling, row[3], id=f"{spelling}-{row[3]}")
    for spellings, row in FLAG_ROWS.items()
    for spelling in spellings.split()
    for flag in [max(spellings.split(), key=len)]
    if flag != "command"
]


@pytest.mark.parametrize(("flag", "spelling", "status"), FLAG_CASES)
def test_a_flag_is_taken_as_horovodrun_takes_it_or_refused(
    flag, spelling, status, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    ways, value = written(flag, spelling)
    (tmp_path / str(value)).touch()  # --config-file is read at once
    assert {hvdrun_sees(way, value) for way in ways} == {status not in ABSENT}


@pytest.mark.parametrize(
    ("flag", "spelling"), [case.values[:2] for case in FLAG_CASES if case.values[2] in ABSENT]
)
def test_what_is_not_there_is_refused_with_the_reason(flag, spelling, capsys):
    for way in written(flag, spelling)[0]:
        assert main(["-np", "2", *way, "--dry-run", "true"]) == 64
        said = capsys.readouterr().err
        assert spelling in said
        assert "No such option" not in said


def plain(text):
    """A cell of the page as hvdrun would say it."""
    return text.replace("`", "")


@pytest.mark.parametrize(("flag", "variable", "_", "why"), WITHOUT_EFFECT)
def test_the_page_gives_the_reason_that_hvdrun_gives_for_what_has_no_effect(flag, variable, _, why):
    reason = why[0].upper() + why[1:]
    if flag in FLAGS:
        *_, status, said = FLAG_ROWS[FLAGS[flag]["spellings"]]
        assert (status, plain(said)) == ("no effect", reason)
    if variable:
        *_, status, said = VARIABLE_ROWS[variable]
        assert (status, plain(said)) == ("no effect", reason)


def test_every_flag_without_effect_is_one_that_hvdrun_says_so_of():
    known = {flag for flag, *_ in WITHOUT_EFFECT}
    for spellings, row in FLAG_ROWS.items():
        if row[3] == "no effect":
            assert known & set(spellings.split()), spellings


ELASTIC_VALUES = {"slots": 2, "reset_limit": 1, "cooldown_range": (1, 2)}


@pytest.mark.parametrize("name", [p for p, row in PARAMETER_ROWS.items() if row.status in ABSENT])
def test_a_parameter_of_run_that_is_not_there_is_refused(name):
    assert PARAMETER_ROWS[name].functions == ("run",)
    name = name.partition("=")[0]
    with pytest.raises(ValueError, match=name):
        hvdlite.run(print, num_proc=1, **{name: ELASTIC_VALUES.get(name, 1)})


def test_the_rest_of_the_command_line_is_the_command():
    assert FLAG_ROWS["command"][3] == "same"
    words = ["python", "train.py", "-np", "3", "--verbose"]
    assert cli.make_context("hvdrun", words).params["command"] == tuple(words)


@pytest.mark.parametrize("variable", VARIABLES)
def test_a_variable_is_read_where_the_page_has_hvdlites_name_of_it(variable):
    _, own, status, _ = VARIABLE_ROWS[variable]
    knobs = [knob.variable for knob in KNOBS if knob.horovod == variable]
    assert knobs == ([code(own)] if own else [])
    options = [option for option in cli.params if getattr(option, "envvar", None) == variable]
    assert bool(knobs or options) == (status in {"same", "better", "different"})
