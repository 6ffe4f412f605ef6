"""Faults that end a rank."""

from __future__ import annotations

from tests.faults.fault import TRACEBACK, Fault, ends
from tests.faults.waits import loader

# One that is killed, or leaves, writes no traceback.
WHERE = r"^hvdrun: it last waited for hvdlite in \S*train\.py:{waited} in train"
# torch raises from a signal's handler, wherever the script is at that moment.
ANYWHERE = r'File "[^"]*train\.py", line \d+, in '
FULL = """
def fill():
    libc = ctypes.CDLL(None, use_errno=True)
    folder = tempfile.mkdtemp()
    private, CLONE_NEWNS = 1 << 18 | 1 << 14, 1 << 17
    assert libc.unshare(CLONE_NEWNS) == 0
    assert libc.mount(b"none", b"/", None, ctypes.c_ulong(private), None) == 0
    assert libc.mount(b"tmpfs", folder.encode(), b"tmpfs", ctypes.c_ulong(0), b"size=1m") == 0
    {saves}  # the line
"""

ENDS = [
    Fault(
        "an exception",
        ends("ended with exit code 1 ", TRACEBACK, "ValueError: a bad batch"),
        fault="raise ValueError('a bad batch')  # the line",
    ),
    Fault(
        "sys.exit(3)",
        ends("ended with exit code 3 ", WHERE),
        fault="sys.exit(3)",
    ),
    Fault("os._exit(3)", ends("ended with exit code 3 ", WHERE), fault="os._exit(3)"),
    Fault(
        "SIGSEGV",
        ends(r"was ended by SIGSEGV", WHERE),
        fault="ctypes.string_at(0)",
    ),
    Fault(
        "SIGKILL",
        ends(r"was ended by SIGKILL", WHERE),
        fault="os.kill(os.getpid(), signal.SIGKILL)",
    ),
    Fault(
        "an early end with 0",
        # The others fail, and say because of whom.
        (
            r"rank {rank} on \S+ has left (?:\(it called shutdown or ended\)|while operations)",
            r"train\.py",
        ),
        fault="return",
        blames=(0, 1, 2),
    ),
    Fault(
        "os._exit(0)",
        ends(r"ended with exit code 0 after \S+ s, in mid-job"),
        fault="os._exit(0)",
    ),
    Fault(
        "a recursion without an end",
        ends("ended with exit code 1 ", TRACEBACK, "RecursionError"),
        code="""
        def deeper(n):
            return deeper(n + 1)  # the line
        """,
        fault="deeper(0)",
    ),
    Fault(
        "MemoryError",
        ends("ended with exit code 1 ", TRACEBACK, "MemoryError"),
        fault="bytearray(1 << 60)  # the line",
    ),
    Fault(
        "a DataLoader's worker that dies",
        ends(
            "ended with exit code 1 ",
            ANYWHERE,
            r"DataLoader worker \(pid\(?s?\)? .*\) exited unexpectedly",
        ),
        code=loader("begins(); os._exit(1)", of_loader=True),
        data="batches(2)",
    ),
    Fault(
        "a DataLoader's worker that is killed",
        ends("ended with exit code 1 ", ANYWHERE, r"DataLoader worker .* Killed|SIGKILL"),
        code=loader("begins(); os.kill(os.getpid(), signal.SIGKILL)", of_loader=True),
        data="batches(2)",
    ),
    Fault(
        "an exception in a dataset",
        ends("ended with exit code 1 ", TRACEBACK, "KeyError: 'label'"),
        code=loader("begins(); raise KeyError('label')", of_loader=False),
        data="batches(2)",
    ),
    Fault(
        "a full disk",
        ends("ended with exit code 1 ", TRACEBACK, "No space left on device"),
        code=FULL.format(saves='pathlib.Path(folder, "log").write_bytes(bytes(1 << 21))'),
        fault="fill()",
        culprit=0,
    ),
    Fault(
        "a full disk at torch.save",
        ends(
            "ended with exit code 1 ",
            TRACEBACK,
            "No space left on device|failed writing|file write failed",
        ),
        code=FULL.format(saves='torch.save(torch.ones(1 << 20), folder + "/checkpoint")'),
        fault="fill()",
        culprit=0,
    ),
]
