/* A buffer that does not lie in one piece of memory. */
#ifndef HVDL_EXTENTS_H
#define HVDL_EXTENTS_H

#include "base/schedule.h"

/* Some bytes of the buffer, and where they lie. */
typedef struct {
    hvdl_range bytes;
    char *at;
} hvdl_extent;

/* Ascending, none empty, without common bytes. What lies between two of them is nowhere: it is neither given nor
 * taken. `list` is NULL where the buffer lies in one piece. */
typedef struct {
    hvdl_extent *list;
    size_t count;
} hvdl_extents;

/* A copy with a list of its own, for free(). */
hvdl_err hvdl_extents_copy(hvdl_extents extents, hvdl_extents *to);

/* The part of the first extent that has some of these bytes, which are then taken off the range; false: none has.
 * So a loop goes through all:
 *
 *     while (hvdl_next_extent(extents, &range, &part)) */
bool hvdl_next_extent(hvdl_extents extents, hvdl_range *range, hvdl_extent *part);

/* Of the ranges, and not of where they lie: equal on ranks whose buffers are divided alike. Never 0. */
uint64_t hvdl_extents_hash(hvdl_extents extents);

#endif
