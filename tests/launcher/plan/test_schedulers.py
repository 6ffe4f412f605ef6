"""A scheduler that starts ranks is one file and one row."""

from dataclasses import replace

import pytest

from hvdrun.plan import schedulers
from hvdrun.plan.request import Allocation, Starter
from hvdrun.plan.schedulers.scheduler import Scheduler
from hvdrun.preflight.question import probe_command
from hvdrun.ssh_errors import Trouble
from tests.launcher.plan.test_command import AGENT, FACTS, MPICH_5, OPENMPI_5, argv, command


class Flux(Starter):
    """The starter of a scheduler that hvdrun does not know."""

    scheduler = "Flux"
    unwanted = ("FLUX_SIZE",)

    def connection(self, host):
        return [self.program, "exec", "-h", host]

    def rank_options(self, kind, allocation, shares, environ, cwd, binding_args=()):
        return ["run", f"-n{sum(share.count for share in shares)}", f"-opmi={kind}"]


HOSTS = command(MPICH_5, "server1:2,b:1,c:1").shares
FLUX = Allocation("Flux", tuple(share.host for share in HOSTS))
STARTER = Flux("/bin/flux")
IN_JOB = replace(FACTS, starter=STARTER, environ={**FACTS.environ, "FLUX_SIZE": "3"})


@pytest.fixture(autouse=True)
def row(monkeypatch):
    found = Scheduler(
        "Flux",
        "-N",
        lambda environ, read: FLUX.hosts if "FLUX_URI" in environ else None,
        option="flux",
        find_starter=lambda environ: STARTER if "FLUX_URI" in environ else None,
        troubles=((r"^flux-exec: Error", Trouble("no broker", "flux start", way="flux")),),
    )
    monkeypatch.setattr(schedulers, "SCHEDULERS", (*schedulers.SCHEDULERS, found))


def test_its_program_starts_the_ranks():
    by_flux = replace(MPICH_5, starter=STARTER)
    made = command(by_flux, facts=IN_JOB, allocation=FLUX)
    assert made.argv == argv(f"/bin/flux run -n4 -opmi=mpich {AGENT} rank python train.py")
    assert made.connections == (argv(f"{AGENT} ssh b"), argv(f"{AGENT} ssh c"))
    assert made.starter == "flux"
    assert "FLUX_SIZE" not in made.environment
    assert made.environment["HVDRUN_REACH"] == "/bin/flux exec -h '{host}'"


def test_its_program_stands_in_sshs_place_where_mpirun_starts_the_ranks():
    made = command(OPENMPI_5, facts=IN_JOB, allocation=FLUX)
    assert made.environment["HVDRUN_REACH"] == "/bin/flux exec -h '{host}'"
    assert made.starter == "mpirun"


def test_preflight_asks_the_hosts_by_it():
    words = probe_command(None, FLUX.hosts[1], FACTS, {}, STARTER)
    assert tuple(words[:-1]) == argv(f"/bin/flux exec -h b {AGENT} host")


def test_its_hosts_its_program_and_what_it_says_are_known():
    inside = {"FLUX_URI": "local://"}
    assert schedulers.find(inside, open) == FLUX
    assert schedulers.find({}, open) is None
    assert schedulers.find_starter(inside) == STARTER
    assert schedulers.find_starter({}) is None
    assert schedulers.remedy(FLUX) == "ask Flux for more (-N)"
    assert schedulers.trouble("flux-exec: Error: rank 2\n").way == "flux"
    assert schedulers.trouble("ssh: connect: Connection refused\n").way == "ssh"
