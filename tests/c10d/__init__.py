"""PyTorch's own tests of torch.distributed, which ship in its wheel, run against the backend
hvdlite: `make test-c10d`, and pytest does not.

    __main__.py      the command: runs the sessions, prints the table
    session.py       one session: a name of the backend and a number of ranks
    case.py          PyTorch's test case, its ranks forked from a process that has imported torch
    one_test.py      runs one test in a process group of its own, and ends what it leaves
    verdict.py       pure: which outcome is a defect
    reference.json   which tests must pass: those that Gloo passes, and ours under our own name
    exceptions.txt   tests that may fail, each with the reason
"""
