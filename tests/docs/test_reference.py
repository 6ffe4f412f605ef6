"""The reference has every public name, and the generated tables have all that they should."""

import doctest
import importlib.util
import inspect
import re

import pytest
import torch

import hvdlite as hvd
from docs.generator import tables
from docs.generator.reference import names_in, resolve
from hvdrun.command_line.cli import cli
from hvdrun.command_line.runtime_options import WITHOUT_EFFECT
from hvdrun.errors import LaunchError
from hvdrun.knobs import KNOBS
from tests.docs.pages import PAGES, within
from tests.harness.uncounted import uncounted
from tests.harness.worlds import ROOT

NAMES = [
    name
    for page, text in PAGES.items()
    if page.startswith("docs/reference/") and "<!-- docstrings -->" in text
    for part in text.split("<!-- docstrings -->")[:-1]
    for name, _ in names_in(part)
]
FUNCTIONS = [name for name in NAMES if inspect.isfunction(resolve(name))]


def test_every_public_name_is_in_the_reference_once():
    assert sorted(NAMES) == sorted(set(NAMES))
    assert set(hvd.__all__) <= set(NAMES)


def test_the_import_of_a_module_replaces_no_public_name():
    """Python puts an imported submodule in place of a name of its package."""
    names = [name for name in hvd.__all__ if not inspect.ismodule(getattr(hvd, name))]
    assert [name for name in names if importlib.util.find_spec(f"hvdlite.{name}")] == []


@pytest.mark.parametrize("name", NAMES)
def test_every_name_of_the_reference_is_there_and_documented(name):
    assert inspect.getdoc(resolve(name))


@pytest.mark.parametrize("name", sorted({*FUNCTIONS} & {*hvd.__all__}))
def test_a_public_function_has_an_example(name):
    assert doctest.DocTestParser().get_examples(inspect.getdoc(resolve(name)))


@uncounted()
def run_examples(name, folder):
    """The examples of a docstring, on every rank; what they show is rank 0's."""
    hvd.init()
    program = {"__name__": "__main__", "torch": torch, "hvd": hvd}
    doc = inspect.getdoc(resolve(name))
    test = doctest.DocTestParser().get_doctest(doc, program, name, None, None)
    found = []
    checker = doctest.OutputChecker() if hvd.rank() == 0 else AnyOutput()
    runner = doctest.DocTestRunner(checker, optionflags=doctest.ELLIPSIS)
    with within(folder):
        runner.run(test, out=found.append)
    assert not runner.failures, "".join(found)


class AnyOutput(doctest.OutputChecker):
    def check_output(self, want, got, optionflags):
        return True


WITH_EXAMPLES = [name for name in NAMES if ">>>" in (inspect.getdoc(resolve(name)) or "")]


@pytest.mark.ranks(2)
@pytest.mark.parametrize("name", [name for name in WITH_EXAMPLES if name != "run"])
def test_the_examples_of_a_docstring_run_on_two_ranks(world, name, tmp_path):
    world.run(run_examples, name, tmp_path)


@pytest.mark.wide
def test_the_example_of_run_runs():
    doc = inspect.getdoc(hvd.run)
    program = {"__name__": "__main__", "hvd": hvd}
    test = doctest.DocTestParser().get_doctest(doc, program, "run", None, None)
    assert doctest.DocTestRunner().run(test).failed == 0


def test_every_knob_is_in_the_table():
    table = tables.variables()
    for knob in KNOBS:
        assert (f"`{knob.variable}`" in table) == (not knob.internal)
        for named in filter(None, (knob.horovod, knob.flag, knob.off_flag)):
            assert f"`{named}`" in table
    without_effect = tables.without_effect()
    assert all(f"`{flag}`" in without_effect for flag, *_ in WITHOUT_EFFECT)


PAGE = tables.VARIABLES.read_text()


def test_the_page_of_variables_has_the_table_of_the_knobs():
    assert tables.with_variables(PAGE) == PAGE, "run: python -m docs.generator.tables"


NAME = re.compile(r"\b(?:HVDLITE|HVDRUN)_[A-Z0-9_]*[A-Z0-9]\b")


def test_the_page_of_variables_has_every_name_that_the_code_uses_and_no_other():
    sources = [*(ROOT / "hvdlite").rglob("*.[pch]*"), *(ROOT / "launcher").rglob("*.py")]
    used = {name for path in sources if path.suffix != ".pyc" for name in names_of(path)}
    used |= {knob.variable for knob in KNOBS}
    assert {"HVDLITE_STRICT", "HVDLITE_RESULT_PIPE", "HVDRUN_LINK"} <= used
    assert set(NAME.findall(PAGE)) == used


def names_of(path):
    return NAME.findall(path.read_text())


def test_every_exit_code_is_in_the_table():
    table = tables.exit_codes()
    for kind in LaunchError.__subclasses__():
        assert f"| {kind.code} | `{kind.__name__}` | {kind.cause} |" in table


def test_every_option_is_in_the_table():
    table = tables.options()
    for option in cli.params:
        if getattr(option, "help", None) and not getattr(option, "hidden", False):
            assert f"`{option.opts[0]}" in table, option.opts
