"""`hvdlite.run` in a real notebook's kernel, where ipykernel is installed beside hvdlite."""

import sys
from importlib import import_module
from importlib.util import find_spec

import psutil
import pytest

from tests.harness.needs import lacking
from tests.harness.worlds import python_of

pytestmark = pytest.mark.long
LIMIT_S = 60.0

WORKS = """
import hvdlite
class Point:
    def __init__(self, x):
        self.x = x
def work(base):
    import hvdlite as hvd
    hvd.init()
    print("on", hvd.rank())
    return Point(base + hvd.rank())
print([point.x for point in hvdlite.run(work, (5,), num_proc=2)])
"""
WAITS = """
import hvdlite
def wait():
    import time
    print("up", flush=True)
    time.sleep(60)
hvdlite.run(wait, num_proc=1)
"""


@pytest.fixture
def kernel(tmp_path):
    """A kernel that runs, and the client that talks to it."""
    if sys.version_info < (3, 11):
        pytest.skip("ipykernel is not in the constraints for this Python")
    if find_spec("ipykernel") is None:
        lacking("this needs ipykernel, which `make test-rig` installs")
    command = [str(python_of("openmpi")), "-m", "ipykernel_launcher", "-f", "{connection_file}"]
    spec = import_module("jupyter_client.kernelspec").KernelSpec(argv=command)
    managers = import_module("jupyter_client.manager")
    manager = managers.KernelManager(connection_file=str(tmp_path / "kernel.json"))
    manager._kernel_spec = spec
    manager.start_kernel()
    client = manager.blocking_client()
    client.start_channels()
    client.wait_for_ready(LIMIT_S)
    yield manager, client
    client.stop_channels()
    manager.shutdown_kernel(now=True)
    manager.cleanup_resources()


def shown(client, cell, until):
    """What the cell shows, up to that: a text, or the state of the kernel."""
    text = ""
    while until not in text:
        message = client.get_iopub_msg(timeout=LIMIT_S)
        content = message["content"] if message["parent_header"].get("msg_id") == cell else {}
        text += content.get("text", content.get("ename", content.get("execution_state", "")))
    return text


def test_a_cell_gets_what_the_ranks_print_and_return(kernel):
    _, client = kernel
    text = shown(client, client.execute(WORKS), "idle")
    assert "[0] on 0\n" in text
    assert "[1] on 1\n" in text
    assert "[5, 6]\n" in text


def test_a_cell_that_is_interrupted_ends_its_job(kernel):
    manager, client = kernel
    cell = client.execute(WAITS)
    shown(client, cell, "up\n")
    family = psutil.Process(manager.provisioner.process.pid).children(recursive=True)
    assert len(family) >= 4  # hvdrun, mpirun, a shim or keeper and the rank
    manager.interrupt_kernel()
    assert "KeyboardInterrupt" in shown(client, cell, "idle")
    assert not psutil.wait_procs(family, timeout=20)[1]


def test_a_kernel_that_is_restarted_ends_its_job(kernel):
    manager, client = kernel
    cell = client.execute(WAITS)
    shown(client, cell, "up\n")
    family = psutil.Process(manager.provisioner.process.pid).children(recursive=True)
    manager.restart_kernel(now=True)
    assert not psutil.wait_procs(family, timeout=20)[1]
