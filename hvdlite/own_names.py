"""The names of hvdlite's own operations, and what users read of these.

Ranks find each other's operations by name, also where their models differ: so a name tells nothing
of a rank's own. Texts show an operation's words instead, which may differ between ranks; it is the
core that makes them into titles (`hvdl_put_title`).
"""

from __future__ import annotations

from collections.abc import Sequence

_MOST_OF_A_NAME = 24


class OwnName(str):
    """A name with its words, where hvdlite posts an operation or makes a plan."""

    # The core keeps the text of `words` for as long as the name.
    __slots__ = ("words",)
    words: str

    def __new__(cls, name: str, words: str) -> OwnName:
        made = super().__new__(cls, name)
        made.words = words
        return made

    def __reduce__(self) -> tuple[type[OwnName], tuple[str, str]]:
        """For copies."""
        return OwnName, (str(self), self.words)


def own_name(owner: str, part: str, words: str) -> OwnName:
    """Of a part of what the owner does. {} in the words stands for the owner's."""
    return OwnName(f"{owner}.{part}", words.replace("{}", words_of(owner)))


def renamed(name: str, new: str) -> str:
    """Another name with the same words, if there are any."""
    return OwnName(new, name.words) if isinstance(name, OwnName) else new


def words_of(name: str) -> str:
    return name.words if isinstance(name, OwnName) else name


def name_of_optimizer(number: int, generation: int, kind: str) -> OwnName:
    """Of what a DistributedOptimizer does. number: in its team, from 0. generation: how often its
    operations were made anew. kind: the name of its class."""
    which = f", DistributedOptimizer no. {number + 1}" if number else ""
    return OwnName(f"DistributedOptimizer.{number}.{generation}", f"the {kind} optimizer{which}")


def names_in_words(params: Sequence[str]) -> str:
    """The first and the last of these names of parameters, each cut to its end."""
    shown = [
        each if len(each) <= _MOST_OF_A_NAME else f"…{each[1 - _MOST_OF_A_NAME :]}"
        for each in (*params[:1], *params[1:][-1:])
    ]
    return (" and " if len(params) == 2 else " … ").join(shown)
