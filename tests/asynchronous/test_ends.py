"""Processes that are killed or stopped, servers and workers, under hvdrun and without it."""

import pytest

from tests.harness.needs import lacking
from tests.harness.programs import run_program
from tests.harness.without_mpi import job_without_mpi, run_ranks
from tests.harness.worlds import MPIS, python_of

LIMIT_S = 100

# The server sends itself the signal in its third step. A worker that hears of it wakes it up.
SIGNALLED = """
import logging, os, signal, sys, threading, time, torch, hvdlite as hvd
from pathlib import Path

number, path = int(sys.argv[1]), Path(sys.argv[2])

class Signalled(torch.optim.SGD):
    steps = 0

    def step(self, closure=None):
        self.steps += 1
        if self.steps == 3:
            path.write_text(str(os.getpid()))
            os.kill(os.getpid(), number)
        super().step()

class Wakes(logging.Handler):
    def emit(self, record):
        print(record.getMessage(), file=sys.stderr)
        if "is it stopped" in record.getMessage():
            threading.Thread(target=wake, daemon=True).start()

def wake():
    while True:
        if path.exists() and (pid := path.read_text()):
            os.kill(int(pid), signal.SIGCONT)
        time.sleep(0.1)

hvd.init()
logging.getLogger("hvdlite").addHandler(Wakes())
param = torch.nn.Parameter(torch.zeros(2))
optimizer = hvd.AsyncOptimizer(Signalled([param], lr=1.0), max_staleness=1)
param.grad = -torch.ones(2)
try:
    for _ in range(4):
        optimizer.step()
    optimizer.synchronize()
    hvd.barrier()
    optimizer.pull()
except hvd.HorovodInternalError as error:
    sys.exit(f"worker {hvd.rank()} of {hvd.size()}: {error}")
print(f"worker {hvd.rank()} of {hvd.size()} has {param.tolist()}")
"""


@pytest.fixture
def signalled(tmp_path):
    """hvdrun's job under an MPI: two workers, and a server that sends itself the signal."""

    def run(mpi, number, *options):
        python = python_of(mpi)
        if not (python.parent / "mpiexec").exists():
            lacking(f"no {mpi}; `make build`")
        script = tmp_path / "train.py"
        script.write_text(SIGNALLED)
        command = [python.with_name("hvdrun"), "-np", "3", "--servers", "1", *options]
        return run_program([*command, python, script, str(number), tmp_path / "pid"], LIMIT_S)

    return run


@pytest.mark.parametrize("mpi", MPIS)
def test_hvdrun_ends_a_job_whose_server_is_killed(signalled, mpi):
    finished = signalled(mpi, 9)
    assert finished.code == 137, finished
    assert "hvdrun: rank 2 on localhost was ended by SIGKILL" in finished.stderr
    assert "the other 2 ranks were ended" in finished.stderr
    assert "has [" not in finished.stdout


@pytest.mark.wide_in("openmpi")
@pytest.mark.parametrize("mpi", MPIS)
def test_a_job_whose_server_was_stopped_says_so_and_goes_on(signalled, mpi):
    finished = signalled(mpi, 19, "--stall-check-warning-time-seconds", "1")
    assert finished.code == 0, finished
    assert "s for an answer of server 0 (rank 2 of the job, on " in finished.stderr
    for rank in range(2):
        assert f"[{rank}] worker {rank} of 2 has [8.0, 8.0]" in finished.stdout


@pytest.mark.parametrize("number", [pytest.param(0, marks=pytest.mark.wide), 9])
def test_without_mpi_a_job_has_servers_and_their_end_is_an_error_on_every_worker(tmp_path, number):
    with job_without_mpi() as variables:
        variables["HVDLITE_SERVERS"] = "1"
        *workers, server = run_ranks(SIGNALLED, 3, variables, number, tmp_path / "pid")
    assert server.code == -number, server
    for worker, finished in enumerate(workers):
        assert finished.code == (1 if number else 0), finished
        if number:
            assert f"worker {worker} of 2: AsyncOptimizer: rank 2 on " in finished.stderr
            assert " has died" in finished.stderr
        else:
            assert finished.stdout == f"worker {worker} of 2 has [8.0, 8.0]\n"


A_WORKER_DIES = """
import os, sys, torch, hvdlite as hvd
hvd.init()
param = torch.nn.Parameter(torch.zeros(2))
optimizer = hvd.AsyncOptimizer(torch.optim.SGD([param], lr=1.0), max_staleness=1)
param.grad = torch.ones(2)
optimizer.step()
if hvd.rank() == 1:
    os.kill(os.getpid(), 9)
try:
    for _ in range(3):
        optimizer.step()
except hvd.HorovodInternalError as error:
    sys.exit(str(error))
"""


@pytest.mark.parametrize("num_servers", [0, pytest.param(1, marks=pytest.mark.wide)])
def test_a_worker_that_dies_is_an_error_where_it_is_waited_for(num_servers):
    with job_without_mpi() as variables:
        variables["HVDLITE_SERVERS"] = str(num_servers)
        waits, dies, *serving = run_ranks(A_WORKER_DIES, 2 + num_servers, variables)
    assert dies.code == -9, dies
    assert waits.code == 1, waits
    assert "AsyncOptimizer: " in waits.stderr
    assert "rank 1 on " in waits.stderr
    assert " has died" in waits.stderr
    for server in serving:
        assert server.code == 1, server
        assert " has died" in server.stderr
