"""The sets of ranks that a collective can run on."""

from __future__ import annotations

import operator
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from hvdlite.errors import NotInitializedError
from hvdlite.world.teams.team import Team

if TYPE_CHECKING:
    from mpi4py.MPI import Intracomm


def as_int(thing: object) -> int | None:
    """The value of any integer, also of numpy's; None for anything else, and for bool."""
    if isinstance(thing, bool):
        return None
    try:
        return operator.index(thing)  # type: ignore[arg-type]
    except TypeError:
        return None


class ProcessSet:
    """Some ranks of the world. Register it with `init(process_sets=[...])` or `add_process_set`
    before use; until then, and after `remove_process_set` and `shutdown`, its properties are None.

    A copy of it is itself. A pickled one comes back as an unregistered set of the same ranks.

    Example:
        On rank 0 of 2:

        >>> second = hvd.ProcessSet([1])
        >>> second.included() is None  # not registered
        True
        >>> _ = hvd.add_process_set(second)
        >>> second.ranks, second.size(), second.included()
        ([1], 1, False)
        >>> hvd.remove_process_set(second)
        True
    """

    def __init__(self, ranks_or_comm: Iterable[int] | Intracomm) -> None:
        """ranks_or_comm: world ranks, in any order; or an mpi4py communicator of the members, which
            is not kept: its ranks are looked up when the set is registered.

        Raises:
            ValueError: No ranks, something else than ranks, or a rank twice.
        """
        # The members, ascending; None until they are looked up in the communicator.
        self.wanted: tuple[int, ...] | None = None
        self.wanted_comm: Any = None
        self._id: int | None = None
        self._ranks: tuple[int, ...] | None = None
        # This process's team; None if it is not a member, or the set is not registered.
        self.team: Team | None = None
        members: Any = ranks_or_comm
        if hasattr(members, "Get_group"):
            self.wanted_comm = members
            return
        if isinstance(members, str) or not isinstance(members, Iterable):
            raise ValueError(
                f"ProcessSet({members!r}): expected a list of ranks, or an mpi4py communicator"
            )
        given = list(members)
        ranks = [rank for thing in given if (rank := as_int(thing)) is not None and rank >= 0]
        if not ranks or len(ranks) != len(given):
            raise ValueError(f"ProcessSet({given}): expected one or more ranks, counted from 0")
        if len(set(ranks)) != len(ranks):
            raise ValueError(f"ProcessSet({given}): a rank appears twice")
        self.wanted = tuple(sorted(ranks))

    @property
    def process_set_id(self) -> int | None:
        """Its number, the same on every rank."""
        return self._id

    @property
    def ranks(self) -> list[int] | None:
        """The world ranks of its members, ascending."""
        return None if self._ranks is None else list(self._ranks)

    @property
    def mpi_comm(self) -> Intracomm | None:
        """An mpi4py communicator of the members; None on other ranks, and without MPI.

        It is freed when the set is removed, or by an `init` after `shutdown`.
        """
        return None if self.team is None else self.team.comm

    def size(self) -> int | None:
        """The number of members."""
        return None if self._ranks is None else len(self._ranks)

    def rank(self) -> int | None:
        """This process's number among the members, from 0; None if it is no member."""
        return None if self.team is None else self.team.rank

    def included(self) -> bool | None:
        """Whether this process is a member."""
        return None if self._ranks is None else self.team is not None

    def register(self, process_set_id: int, ranks: tuple[int, ...], team: Team | None) -> None:
        """Makes it the registered set of this number. team: None if this process is no member."""
        self._id, self._ranks, self.team = process_set_id, ranks, team

    def unregister(self) -> None:
        """Undoes `register`."""
        self._id = self._ranks = self.team = None

    def __repr__(self) -> str:
        if self is global_process_set:
            return "global_process_set"
        ranks = self._ranks or self.wanted
        return f"ProcessSet({self.wanted_comm if ranks is None else list(ranks)})"

    def __copy__(self) -> ProcessSet:
        return self

    def __deepcopy__(self, memo: object) -> ProcessSet:
        return self

    def __reduce__(self) -> str | tuple[Any, ...]:
        if self is global_process_set:
            return "global_process_set"
        ranks = self._ranks or self.wanted
        if ranks is None:
            raise TypeError(
                f"{self!r} was made from a communicator; it can be pickled once it is registered"
            )
        return ProcessSet, (ranks,)


global_process_set = ProcessSet([0])
global_process_set.__doc__ = "All ranks of the world."


def team_of(operation: str, process_set: object) -> Team:
    """The team that an operation on `process_set` runs in.

    Raises:
        NotInitializedError: (a ValueError) before `init`.
        ValueError: It is not a process set, or not registered, or this process is not a member.
    """
    if isinstance(process_set, ProcessSet) and process_set.team is not None:
        return process_set.team
    included(operation, process_set)
    own = global_process_set.team.rank if global_process_set.team is not None else None
    raise ValueError(
        f"{operation}: rank {own} is not a member of process_set={process_set!r}; only members "
        "call operations on it"
    )


def included(operation: str, process_set: object) -> bool:
    """Whether this process is a member of the process set passed to an operation.

    Raises:
        NotInitializedError: (a ValueError) before `init`.
        ValueError: It is not a process set, or not registered.
    """
    if not isinstance(process_set, ProcessSet):
        raise ValueError(
            f"{operation}: process_set={process_set!r} is {type(process_set).__name__}, expected "
            "a ProcessSet"
        )
    if global_process_set.team is None:
        raise NotInitializedError
    if process_set.ranks is None:
        raise ValueError(
            f"{operation}: process_set={process_set!r} is not registered; pass it to "
            "init(process_sets=[...]), or to add_process_set on every rank"
        )
    return process_set.team is not None
