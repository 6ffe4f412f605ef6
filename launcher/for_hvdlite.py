"""Everything that hvdlite imports from the launcher, and the only module it may import from.

`import hvdlite` loads these modules in every rank, so each of them imports little itself.
"""

# ruff: noqa: F401 — all of it is for hvdlite

from hvdrun.faults import CORE, GRADIENT, OPERATION, STEP, Fault
from hvdrun.faults import VARIABLE as FAULT_VARIABLE
from hvdrun.faults import parse as parse_faults
from hvdrun.knobs import KNOBS, uneven_shares
from hvdrun.machine import notes
from hvdrun.machine.binding import chosen_by_user
from hvdrun.machine.environment import ENDING
from hvdrun.machine.limits import throttling
from hvdrun.machine.notes import FORMAT, LINES_AT, LINES_BYTES, pack_lines
from hvdrun.machine.own_files import Identity, identity, open_file, open_folder, replace
from hvdrun.machine.processes import die_with_parent
from hvdrun.machine.resources import available_bytes, cores, left_in_cgroup_bytes, tightest_quota
from hvdrun.machine.socket_users import is_trusted, user_of
from hvdrun.pulse import LONGEST_NAME, MOST_VALUES, Pulse, is_name
from hvdrun.pulse import encode as encode_pulse
from hvdrun.pulse import every_s as pulse_every_s
from hvdrun.records import (
    LEAST_BUSY_S,
    LEAST_OF_A_STEP,
    MOST_LINKS,
    MOST_RECENT,
    MOST_SAMPLES,
    RECENT_S,
    RECENT_STEPS,
    TELLS_AGAIN_AFTER,
    TELLS_AT_LEAST_EVERY_S,
    TELLS_EVERY_S,
    Connection,
    Record,
    Sample,
    encode,
    of_world,
    summary_of,
)
