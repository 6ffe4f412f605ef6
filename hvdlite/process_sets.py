"""The sets of ranks that a collective can run on: at present the world alone."""

from __future__ import annotations

from hvdlite import world


class ProcessSet:
    """Some ranks of the world, ascending. Made by hvdlite; `global_process_set` is all of them."""

    def __init__(self, process_set_id: int) -> None:
        self._id = process_set_id

    @property
    def process_set_id(self) -> int | None:
        """Its number; None before `init`."""
        return self._id if world.is_initialized() else None

    @property
    def ranks(self) -> list[int] | None:
        """The world ranks of its members; None before `init`."""
        return list(range(world.size())) if world.is_initialized() else None

    def size(self) -> int | None:
        """The number of members; None before `init`."""
        return world.size() if world.is_initialized() else None

    def rank(self) -> int | None:
        """This process's number among the members; None before `init`."""
        return world.rank() if world.is_initialized() else None

    def included(self) -> bool | None:
        """Whether this process is a member; None before `init`."""
        return True if world.is_initialized() else None

    def __repr__(self) -> str:
        return "global_process_set"


global_process_set = ProcessSet(0)
