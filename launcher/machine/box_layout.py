"""The memory of a rank's black box: `hvdl_box_memory` of the core's operations/black_box.h.

Keepers import it: hence it imports nothing.
"""

# A text that ends with a NUL, and then the entries, each of which begins with its ticket.
HEAD_BYTES, ENTRY_BYTES, ENTRIES = 4096, 128, 512
TOTAL_BYTES = HEAD_BYTES + ENTRIES * ENTRY_BYTES
# What a keeper sends of it, compressed: never much longer than what it was made from.
LARGEST_BYTES = TOTAL_BYTES + 1024
