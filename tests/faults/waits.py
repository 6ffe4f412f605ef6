"""Faults that make the other ranks wait."""

from __future__ import annotations

from tests.faults.fault import STALL_S, Fault, is_held, waits

SLEEPS = "sleeps|waits for a lock or another thread"  # a sleep of Python may be either
LOADER = """
class Data(torch.utils.data.Dataset):
    def __len__(self):
        return 8 * 1000
    def __getitem__(self, index):
        if RANK == CULPRIT and index == 8 * 5:
            {does}
        return BATCH[0]

def batches(workers):
    data = Data()
    yield from torch.utils.data.DataLoader(data, batch_size=8, num_workers=workers){mark}
"""


def loader(does: str, of_loader: bool) -> str:
    """The line to be named: where the script waits for its loader, or in the dataset."""
    mark = "  # the line"
    return LOADER.format(does=does + ("" if of_loader else mark), mark=mark if of_loader else "")


def _stalls(name: str, says: tuple[str, ...], **pieces: str) -> Fault:
    return Fault(name, says, limit_s=STALL_S, **pieces)  # type: ignore[arg-type]


def _before_init(name: str, code: str, before: str, does: str) -> Fault:
    says = (
        r"^hvdrun: ranks 0,2 wait in hvd\.init\(\) for rank {rank}, which has not called it",
        rf"^    rank {{rank}} on {{host}} (?:{does})",
        r"train\.py:{line} in ",
    )
    return Fault(name, says, code=code, before=before, limit_s=STALL_S)


WAITS = [
    _stalls("sleep in the loop", waits(SLEEPS), fault="time.sleep(60)  # the line"),
    _stalls(
        "sleep in a dataset",
        waits(SLEEPS, r"torch/utils/data/\S+ in "),
        code=loader("begins(); time.sleep(60)", of_loader=False),
        data="batches(0)",
    ),
    _stalls(
        "sleep in a DataLoader's worker",
        waits("[^\n]*it waits for its DataLoader"),
        code=loader("begins(); time.sleep(60)", of_loader=True),
        data="batches(2)",
    ),
    _stalls(
        "a DataLoader's worker is stopped",
        waits(
            r"[^\n]*its child process \d+ \([^\n]*\) is stopped[^\n]*it waits for its DataLoader"
        ),
        code=loader("begins(); os.kill(os.getpid(), signal.SIGSTOP)", of_loader=True),
        data="batches(2)",
    ),
    _stalls(
        "a DataLoader's worker reads from a FIFO",
        waits(r"[^\n]*its child process \d+ \([^\n]*\) waits until a file is opened"),
        code=loader(
            "begins(); name = tempfile.mktemp(); os.mkfifo(name); open(name)", of_loader=True
        ),
        data="batches(2)",
    ),
    _stalls(
        "SIGSTOP of a rank",
        is_held(r"is stopped, for \S+ s now"),
        fault="os.kill(os.getpid(), signal.SIGSTOP)",
    ),
    _stalls(
        "a loop in C that holds the GIL",
        waits("computes"),
        fault="max(itertools.repeat(1))  # the line",
    ),
    _stalls(
        "a busy loop in Python",
        waits("computes"),
        fault="""
        number = 0
        while True: number += 1  # the line
        """,
    ),
    _stalls(
        "a lock that another thread holds",
        waits("waits for a lock or another thread"),
        code="""
        def hold(lock):
            with lock:
                time.sleep(600)
        """,
        fault="""
        lock = threading.Lock()
        threading.Thread(target=hold, args=(lock,), daemon=True).start()
        time.sleep(0.2)
        lock.acquire()  # the line
        """,
    ),
    _stalls(
        "a deadlock of two locks",
        waits("waits for a lock or another thread"),
        code="""
        def take(first, second, both):
            with first:
                both.wait()
                with second:  # the line
                    pass
        """,
        fault="""
        a, b, both = threading.Lock(), threading.Lock(), threading.Barrier(2)
        threading.Thread(target=take, args=(a, b, both), daemon=True).start()
        take(b, a, both)
        """,
    ),
    Fault(
        "input()",
        waits("waits for data from a (pipe|socket)|reads from"),
        fault="input()  # the line",
        culprit=0,
        limit_s=STALL_S,
    ),
    _stalls(
        "a child process that does not end",
        waits("waits for a child process to end"),
        fault="subprocess.run(['sleep', '60'])  # the line",
    ),
    _stalls(
        "a pipe",
        waits("waits for data from a pipe"),
        fault="""
        reader, writer = os.pipe()
        os.read(reader, 1)  # the line
        """,
    ),
    _stalls(
        "a FIFO",
        waits("waits until a file is opened"),
        fault="""
        name = tempfile.mktemp()
        os.mkfifo(name)
        open(name)  # the line
        """,
    ),
    _stalls(
        "a lock on a file",
        waits(r"waits for a lock on the file \S*held"),
        fault="""
        name = tempfile.mkdtemp() + "/held"
        code = "import fcntl,sys,time; f=open(sys.argv[1],'w'); fcntl.lockf(f,2); print()"
        command = [sys.executable, "-c", code + "; time.sleep(60)", name]
        child = subprocess.Popen(command, stdout=subprocess.PIPE, bufsize=0)
        time.sleep(1)
        file = open(name, "w")
        fcntl.lockf(file, fcntl.LOCK_EX)  # the line
        """,
    ),
    _stalls(
        "a socket that never answers",
        waits("waits for data from a socket"),
        fault="""
        mine, theirs = socket.socketpair()
        mine.recv(1)  # the line
        """,
    ),
    _before_init(
        "an import that hangs",
        "",
        """
        if RANK == CULPRIT:
            begins()
            folder = tempfile.mkdtemp()
            pathlib.Path(folder, "hangs.py").write_text("import time; time.sleep(60)")
            sys.path.insert(0, folder)
            import hangs  # the line
        """,
        "sleeps|waits for a lock or another thread",
    ),
    _before_init(
        "a rank that never calls init",
        """
        def prepare():
            time.sleep(60)  # the line
        """,
        """
        if RANK == CULPRIT:
            begins()
            prepare()
        """,
        "sleeps|waits for a lock or another thread",
    ),
]
