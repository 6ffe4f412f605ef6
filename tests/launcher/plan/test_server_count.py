"""hvdrun --servers: a job needs a worker."""

from dataclasses import replace

import pytest

from hvdrun.errors import UsageError
from hvdrun.plan.request import Request
from hvdrun.plan.server_count import check as check_request
from tests.launcher.plan.test_command import FACTS

OPTION = {"HVDLITE_SERVERS": "2"}


def check(request, num_proc, environ):
    check_request(replace(request, num_proc=num_proc), replace(FACTS, environ=environ))


@pytest.mark.parametrize(
    ("request_", "environ"),
    [
        (Request((), settings=OPTION), {}),
        (Request((), exports={"HVDLITE_SERVERS": "2"}), {}),
        (Request(()), {"HVDLITE_SERVERS": "2"}),
    ],
)
def test_servers_leave_at_least_one_worker(request_, environ):
    check(request_, 3, environ)
    check(request_, None, environ)
    with pytest.raises(UsageError, match="2: the job has 2 processes, servers included"):
        check(request_, 2, environ)


def test_an_option_counts_before_a_variable():
    check(Request((), settings=OPTION), 3, {"HVDLITE_SERVERS": "3"})


def test_what_is_no_number_is_left_to_the_ranks():
    check(Request(()), 1, {"HVDLITE_SERVERS": "some"})
    check(Request(()), 1, {})
