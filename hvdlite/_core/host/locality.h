/* Do the cores of a host's ranks share a cache? If they do, a staging block is best written into it, where
 * the others read it. If not (other sockets, other groups of cores), every line that one has written and
 * another one reads, or the other way round, travels between caches far apart, which takes several times
 * as long as memory does: there it is best written past the caches. Where a rank's core is can change
 * while it runs, so the time that a block takes is measured again and again: a pure state machine, fed by
 * one rank of the host, whose answer all follow. */
#ifndef HVDL_LOCALITY_H
#define HVDL_LOCALITY_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define HVDL_LOCALITY_WINDOW 8 /* blocks from which a quartile is taken */

/* What is timed; times are compared only with those of the same work. */
typedef enum {
    HVDL_TIMED_SUMS, /* writing a block, and adding up the others' */
    /* Writing a block alone: the result that it is copied to may be touched for the first time. */
    HVDL_TIMED_COPIES,
    HVDL_NUM_TIMED
} hvdl_timed_work;

typedef struct {
    int num_times;
    double times[HVDL_LOCALITY_WINDOW]; /* ns per byte */
    double cached; /* the lower quartile when blocks were last written into the caches */
    uint64_t
        windows_left;  /* past the caches: until the other is tried again; else: no change until */
    uint64_t patience; /* windows between trials: longer, the more often they change nothing */
} hvdl_locality_times;

typedef struct {
    bool past_cache;       /* the answer; zeroed memory is a beginning */
    bool is_trial;         /* not known yet whether it is better so */
    hvdl_timed_work tried; /* which work was slow and is to show it; past the caches */
    uint64_t to_skip;
    uint64_t untimed; /* blocks since the last one that was timed */
    hvdl_locality_times of[HVDL_NUM_TIMED];
} hvdl_locality;

/* Notes how long that work took for so many bytes, waiting excluded. in_flight: blocks that may have been
 * written already when the answer changes. Returns whether it has changed. */
bool hvdl_locality_note(hvdl_locality *locality, hvdl_timed_work work, size_t bytes, uint64_t ns,
                        uint64_t in_flight);

/* A block went by that was not timed. After many the answer is that for caches that are near, as nothing
 * would ever correct the other one. Returns whether it has changed. */
bool hvdl_locality_untimed(hvdl_locality *locality);

#endif
