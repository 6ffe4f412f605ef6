"""What the keeper learns from the messages between a rank and MPI's daemon."""

import os
import select
import socket

import pytest

from hvdrun.agent.frames import MPI_BEGUN, MPI_DONE, MPI_JOB
from hvdrun.agent.rank.pmi import Relay


class Way:
    """A rank, a daemon, and a relay between them."""

    def __init__(self):
        self.told = []
        self.daemon, for_rank = socket.socketpair()
        self.poll = select.poll()
        environment = {"PMI_FD": str(for_rank.detach())}
        self.relay = Relay(environment, self.poll, self._tell)
        (new_end,) = self.relay.for_rank.values()
        self.rank = socket.socket(fileno=os.dup(new_end))
        self.relay.begin()

    def _tell(self, kind, payload=None):
        self.told.append(kind if payload is None else (kind, payload))

    def hear(self):
        self.relay.hear({fd for fd, _ in self.poll.poll(0)})

    def say(self, *parts):
        for part in parts:
            self.rank.sendall(part)
            self.hear()


@pytest.fixture
def way():
    found = Way()
    yield found
    found.rank.close()
    found.daemon.close()


WIRE = [  # of both versions of PMI
    (b"cmd=init pmi_version=1 pmi_subversion=1\n", b"cmd=finalize\n"),
    (b"    22cmd=fullinit;pmirank=1;", b"    13cmd=finalize;"),
]


@pytest.mark.parametrize(("begins", "ends"), WIRE)
@pytest.mark.parametrize("cut", [0, 3, 8, 12])
def test_a_rank_is_in_mpi_from_its_first_word_to_its_last(way, begins, ends, cut):
    way.say(begins[:cut], begins[cut:])
    assert (way.told, way.relay.is_in_mpi) == ([MPI_BEGUN], True)
    way.say(b"cmd=put key=a value=initialize\n", ends[:cut], ends[cut:])
    assert (way.told, way.relay.is_in_mpi) == ([MPI_BEGUN, MPI_DONE], False)


def test_what_both_sides_say_arrives_unchanged(way):
    way.say(b"cmd=get key=x\n")
    assert way.daemon.recv(99) == b"cmd=get key=x\n"
    way.daemon.sendall(b"cmd=get_result rc=0\n")
    way.hear()
    assert way.rank.recv(99) == b"cmd=get_result rc=0\n"


def test_a_rank_hears_that_its_daemon_is_gone(way):
    way.daemon.close()
    way.hear()
    assert way.rank.recv(99) == b""


def test_the_daemon_does_not_hear_from_here_that_a_rank_is_gone(way):
    way.rank.close()
    way.hear()
    way.daemon.setblocking(False)
    with pytest.raises(BlockingIOError):
        way.daemon.recv(99)


@pytest.mark.parametrize(
    "words", [(b"cmd=init pmi\n",), (b"cmd=init pmi\n", b"cmd=finalize\n"), ()]
)
def test_a_rank_that_closes_its_end_between_mpi_init_and_mpi_finalize_is_noticed(way, words):
    way.say(*words)
    way.rank.close()
    assert way.relay.hear({way.relay.of_rank}) == (len(words) != 1)


ANSWERS = [  # of both versions of PMI
    (b"cmd=maxes rc=0 kvsname_max=256\n", b"cmd=my_kvsname rc=0 kvsname=kvs_7_0_5_a\n"),
    (
        b"    40cmd=fullinit-response;pmirank=0;",
        b"    51cmd=job-getid-response;jobid=kvs_7_0_5_a;rc=0;",
    ),
]


@pytest.mark.parametrize(("before", "answer"), ANSWERS)
@pytest.mark.parametrize("cut", [1, 20, 33, 38])
def test_the_name_of_the_job_is_learned_from_the_daemon(way, before, answer, cut):
    for part in (before, answer[:cut], answer[cut:]):
        assert way.relay.job == b""
        way.daemon.sendall(part)
        way.hear()
    assert way.relay.job == b"kvs_7_0_5_a"
    assert way.told == [(MPI_JOB, b"kvs_7_0_5_a")]


def test_a_rank_cannot_choose_the_name_of_the_job(way):
    way.say(b"cmd=get kvsname=other key=x\n")
    assert way.relay.job == b""


@pytest.mark.parametrize("cut", [20, 40, 57])
def test_the_file_that_the_daemon_offers_is_learned(way, cut):
    way.daemon.sendall(b"cmd=my_kvsname rc=0 kvsname=kvs_7_0_5_a\n")
    way.hear()
    answer = b"cmd=get_result rc=0 value=/tmp/hydra_hwloc_xmlfile_c3H5uV\n"
    for part in (answer[:cut], answer[cut:], b"cmd=get_result rc=1\n"):
        assert way.relay.topology_file == b"" or part.startswith(b"cmd=get_result rc=1")
        way.daemon.sendall(part)
        way.hear()
    assert way.relay.topology_file == b"/tmp/hydra_hwloc_xmlfile_c3H5uV"
    assert way.relay.job == b"kvs_7_0_5_a"
