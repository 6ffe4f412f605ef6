"""What a step of asynchronous training sends and holds: a table of docs/design/cost.md. Pure
counts, whatever the network.

All gradients are dense. Without servers, the workers of each host share its copy of the parameters,
and each host is the home of an equal part. Otherwise each server has an equal part; there is one on
each of the last hosts, as hvdrun places them.
"""

from __future__ import annotations

from dataclasses import dataclass

from benchmarks.cost import table

# What a worker sends to a server in a step, and gets from it: a header, and what lies in shared
# memory where both are on one host.
BETWEEN_HOSTS, ON_A_HOST = 2, 1


@dataclass(frozen=True)
class Job:
    """Each host has local_size workers. parameter_bytes: of all parameters, whose gradients are as
    large; state: how many times as large the optimizer's state is."""

    hosts: int
    local_size: int
    servers: int
    parameter_bytes: int
    state: float = 2.0  # Adam

    @property
    def workers(self) -> int:
        return self.hosts * self.local_size

    @property
    def owners(self) -> int:
        """Servers or homes."""
        return self.servers or self.hosts

    @property
    def part_bytes(self) -> float:
        """Of the parameters that an owner has."""
        return self.parameter_bytes / self.owners

    def is_beside(self, host: int) -> bool:
        """Whether a host has an owner."""
        return host >= self.hosts - self.owners

    def far(self, host: int) -> int:
        """How many owners a worker of a host has on others."""
        return self.owners - self.is_beside(host)

    @property
    def far_workers(self) -> int:
        """How many workers an owner has on other hosts."""
        return self.workers - self.local_size


def messages(job: Job, host: int) -> int:
    """How many a worker of a host sends in a step, and gets."""
    near = ON_A_HOST if job.servers and job.is_beside(host) else 0
    return BETWEEN_HOSTS * job.far(host) + near


def sent_by_worker(job: Job, host: int) -> float:
    """Bytes of gradients to other hosts in a step; it gets as many of parameters."""
    return job.far(host) * job.part_bytes


def sent_by_owner(job: Job) -> float:
    """Bytes of parameters to other hosts while each worker makes a step; it gets as many of
    gradients."""
    return job.far_workers * job.part_bytes


def worker_bytes(job: Job, host: int) -> float:
    """In the memory of a worker, its part of shared parameters included: parameters, gradients, a
    place for each of what is sent and received, and without servers its own state at home."""
    parameters = job.parameter_bytes / (1 if job.servers else job.local_size)
    at_home = 0.0 if job.servers else job.state * job.part_bytes
    return parameters + job.parameter_bytes + 2 * job.far(host) * job.part_bytes + at_home


def owner_bytes(job: Job) -> float:
    """In the memory of a server: its part with the state, and a place for the gradients of each
    worker. At home, what the host's first worker has for those of other hosts."""
    if job.servers:
        return (1 + job.workers + job.state) * job.part_bytes
    return (job.far_workers + job.state) * job.part_bytes if job.hosts > 1 else 0.0


def asynchronous_training(parameters: int = 100_000_000, local_size: int = 4) -> str:
    """Of a worker on the first host, which has no server unless each has."""
    rows = []
    for hosts in (1, 2, 4, 16, 64):
        for servers in sorted({0, 1, hosts}):
            job = Job(hosts, local_size, servers, 4 * parameters)
            sent = [sent_by_worker(job, 0), sent_by_owner(job)]
            held = [worker_bytes(job, 0), owner_bytes(job)]
            cells = [f"{count / 1e6:.0f}" for count in (*sent, *held)]
            rows.append([str(hosts), str(servers), str(messages(job, 0)), *cells])
    head = ("hosts", "servers", "messages of a worker", "MB of a worker", "MB of a server or home")
    return table([*head, "MB in the memory of a worker", "of a server, or more at home"], rows)
