"""The cgroups that this process is in. Imported beside each rank, hence without other modules."""

from __future__ import annotations

# typing costs 10 ms of each start, and collections.abc as much.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator


def cgroups(controller: str, root: str = "/") -> Iterator[tuple[str, bool]]:
    """The folders of the cgroups that bind this process, with whether they are of version 2.

    A limit of any ancestor binds too. In a container the path of /proc/self/cgroup may lie outside
    what is mounted; what is mounted is then the container's own.
    """
    for line in read(f"{root}/proc/self/cgroup").splitlines():
        number, controllers, path = line.split(":", 2)
        if number == "0":
            mount = f"{root}/sys/fs/cgroup"
        elif controller in controllers.split(","):
            mount = f"{root}/sys/fs/cgroup/{controller}"
        else:
            continue
        while path.strip("/"):
            yield mount + path, number == "0"
            path = path.rpartition("/")[0]
        yield mount, number == "0"


def read(path: str) -> str:
    """Nothing where there is no such file: containers and virtual machines hide some."""
    try:
        with open(path) as file:
            return file.read().strip()
    except OSError:
        return ""
