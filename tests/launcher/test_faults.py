"""The text of HVDLITE_FAULT: read, or refused with what is wrong and what is possible."""

import re
from dataclasses import replace

import pytest
from hypothesis import example, given

from hvdlite import _core
from hvdrun.errors import UsageError
from hvdrun.faults import CORE, GRADIENT, KINDS, OPERATION, OPERATIONS, STEP, parse
from hvdrun.plan.checks import check_faults
from hvdrun.plan.request import Request
from tests.launcher.plan.test_command import FACTS
from tests.launcher.test_garbage import edited

GOOD = "delay:0.5@rank=1,operation=allreduce,nth=20; kill@step=30 ;; bitflip:state@bit=7,name=a.b"


def test_a_list_of_faults_with_their_conditions_is_read():
    numbers = {"rank": -1, "nth": 1, "times": 1, "step": 0, "bit": 0}
    everywhere = {**numbers, "operation": "", "name": "", "call": ""}
    delay = {"kind": "delay", "value": "0.5", "rank": 1, "operation": "allreduce", "nth": 20}
    kill = {"kind": "kill", "value": "", "step": 30}
    flip = {"kind": "bitflip", "value": "state", "step": 1, "bit": 7, "name": "a.b"}
    found = [fault._asdict() for fault in parse(GOOD)]
    assert found == [everywhere | each for each in (delay, kill, flip)]
    assert [fault.place for fault in parse(GOOD)] == [OPERATION, STEP, STEP]
    assert parse("nan")[0].place == GRADIENT
    in_core = parse("drop@nth=3; fail-alloc@rank=1; fail-mpi@call=MPI_Isend,times=2")
    assert [(fault.place, fault.call) for fault in in_core] == [
        (CORE, ""),
        (CORE, ""),
        (CORE, "MPI_Isend"),
    ]
    assert parse("bitflip")[0].value == "parameter"
    assert parse("") == parse(" ; ") == ()


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("explode@rank=1", f"'explode' is no kind of fault; expected one of {', '.join(KINDS)}"),
        ("kill@1", "'1' is no condition of kill; expected rank=…, operation=…, name=…, nth=…, "),
        ("kill@", "'' is no condition of kill"),
        ("nan@nth=2", "'nth=2' is no condition of nan; expected rank=…, name=…, step=…, times=…"),
        ("kill@bit=2", "'bit=2' is no condition of kill"),
        ("kill@rank=1,rank=2", "kill has the condition rank twice"),
        ("kill@rank=-1", "kill: rank='-1': expected a whole number from 0 to 2147483647"),
        ("kill@rank=\u0661", "kill: rank='\u0661': expected a whole number"),
        ("kill@nth=0", "kill: nth='0': expected a whole number from 1 to"),
        ("kill@nth=" + "9" * 5000, "expected a whole number from 1 to"),
        ("bitflip@bit=128", "expected a whole number from 0 to 127"),
        ("kill@step=2,nth=3", "kill: nth is about operations, and step is about an optimizer's"),
        ("kill@operation=sum", "'sum' is no operation; expected one of allgather, allreduce, "),
        ("kill@name=", "kill: name= is empty"),
        ("fail-mpi@call=MPI_Send", "'MPI_Send' is no call of the core's; expected one of MPI_C"),
        ("drop@name=x", "'name=x' is no condition of drop; expected rank=…, nth=…, times=…"),
        ("drop;" * 17, "17 faults that happen in the core; expected at most 16"),
        ("kill:9", "kill takes no value after a colon, but has '9'"),
        ("delay@rank=1", "delay:'': expected seconds from 0 to 86400, as in delay:0.5"),
        ("delay:nan", "delay:'nan': expected seconds"),
        ("delay:1e999", "delay:'1e999': expected seconds"),
        ("exit", "exit:'': expected an exit code from 0 to 255, as in exit:3"),
        ("exit:256", "exit:'256': expected an exit code"),
        ("bitflip:gradient", "bitflip:'gradient': expected one of parameter, state"),
        ("bitflip:", "bitflip:'': expected one of parameter, state"),
    ],
)
def test_an_error_says_what_is_wrong_and_what_is_possible(text, error):
    with pytest.raises(ValueError, match=re.escape(error)):
        parse(f"raise; {text}; stop")


@given(edited([GOOD.encode(), b"exit:7@rank=0,times=2;stop", b"nan@name=fc,step=3;raise@nth=1"]))
@example(b"delay:" + b"9" * 5000)
@example(b"@" * 5000)
def test_any_text_is_read_or_refused(data):
    found, error = (), ""
    try:
        found = parse(data.decode(errors="surrogateescape"))
    except ValueError as refused:
        error = str(refused) or "nothing"
    assert len(error) < 1000
    assert error != "nothing"
    for fault in found:
        assert fault.kind in KINDS
        assert fault.operation in ("", *OPERATIONS)
        assert fault.rank >= -1
        assert min(fault.nth, fault.times) >= 1
        assert fault.kind != "delay" or float(fault.value) >= 0


def test_the_operations_are_those_that_the_core_has_for_callers():
    assert {*OPERATIONS} == {*_core.KIND_NAMES} - {"plan", "send", "recv"}


@pytest.mark.parametrize("how", ["exported", "inherited"])
def test_hvdrun_refuses_a_wrong_text_and_says_that_there_are_faults(how):
    def check(text, num_proc=2):
        variables = {"HVDLITE_FAULT": text}
        exported, inherited = (variables, {}) if how == "exported" else ({}, variables)
        request = Request((), num_proc, exports=exported)
        return check_faults(request, replace(FACTS, environ=inherited))

    said = "FAULTS ARE INJECTED: HVDLITE_FAULT makes this job fail on purpose: kill@rank=1"
    assert check("kill@rank=1 ") == said
    assert check("raise@name=\x1b[2J").endswith("raise@name=?[2J")
    assert check(" ; ") == ""
    with pytest.raises(UsageError, match="HVDLITE_FAULT: 'x' is no kind of fault; expected one of"):
        check("x")
    assert check("kill@rank=2", None)  # their number is not known yet
    with pytest.raises(UsageError, match="HVDLITE_FAULT: kill: rank=2, but the job has 2 ranks"):
        check("kill@rank=2")


def test_without_the_variable_hvdrun_says_nothing():
    assert check_faults(Request((), 2), FACTS) == ""
