"""Tensors that the ranks of a host have in common: parameters (`parameters`) and data (`tensors`),
in memory of the host (`memory`), how they are written once (`loading`), and the check that nobody
writes them otherwise (`check`). It may import the collectives, the world and the C core.
"""

from hvdlite.shared.check import verify, writing
from hvdlite.shared.memory import place_of
from hvdlite.shared.parameters import is_shared, require_shared, share_parameters
from hvdlite.shared.tensors import shared_tensor

__all__ = [
    "is_shared",
    "place_of",
    "require_shared",
    "share_parameters",
    "shared_tensor",
    "verify",
    "writing",
]
