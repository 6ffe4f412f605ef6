"""Everything that hvdlite imports from the launcher, and the only module it may import from.

`import hvdlite` loads these modules in every rank, so each of them imports little itself.
"""

from hvdrun.knobs import KNOBS
from hvdrun.machine import notes
from hvdrun.machine.binding import chosen_by_user
from hvdrun.machine.cgroups import throttling
from hvdrun.machine.environment import ENDING
from hvdrun.machine.own_files import Identity, identity, open_file, open_folder, replace
from hvdrun.machine.processes import die_with_parent
from hvdrun.machine.resources import available_bytes, left_in_cgroup_bytes
from hvdrun.machine.socket_users import is_trusted, user_of
from hvdrun.machine.topology import cores, tightest_quota
from hvdrun.records import (
    MOST_RECENT,
    MOST_SAMPLES,
    RECENT_S,
    RECENT_STEPS,
    TELLS_AGAIN_AFTER,
    TELLS_AT_LEAST_EVERY_S,
    TELLS_EVERY_S,
    Record,
    Sample,
    encode,
    of_world,
)
from hvdrun.summary import summary_of

__all__ = [
    "ENDING",
    "KNOBS",
    "MOST_RECENT",
    "MOST_SAMPLES",
    "RECENT_S",
    "RECENT_STEPS",
    "TELLS_AGAIN_AFTER",
    "TELLS_AT_LEAST_EVERY_S",
    "TELLS_EVERY_S",
    "Identity",
    "Record",
    "Sample",
    "available_bytes",
    "chosen_by_user",
    "cores",
    "die_with_parent",
    "encode",
    "identity",
    "is_trusted",
    "left_in_cgroup_bytes",
    "notes",
    "of_world",
    "open_file",
    "open_folder",
    "replace",
    "summary_of",
    "throttling",
    "tightest_quota",
    "user_of",
]
