/* The black box: the latest operations of this process, in memory that outlives it. The rank's keeper has that
 * memory, too, and reads it when the rank has ended, however it ended. See docs/design/black-box.md. */
#ifndef HVDL_BLACK_BOX_H
#define HVDL_BLACK_BOX_H

#include <stdatomic.h>

#include "engine/engine.h"
#include "host/shm.h"

#define HVDL_BOX_ENTRIES 512
#define HVDL_BOX_NAME_BYTES 112
#define HVDL_BOX_HEAD_BYTES 4096 /* with the ticket counter at its end */

/* Of the times, which are CLOCK_MONOTONIC's, 0 means that it has not happened. All words are atomic, as they are read
 * while they are written. launcher/reports/black_box.py reads them, and launcher/machine/box_layout.py has their
 * sizes. */
typedef struct {
    /* 0 while the rest is written; a release, so that who reads it sees the rest. Counts from 1. */
    _Atomic uint64_t ticket;
    _Atomic uint64_t key; /* of its kind and name */
    _Atomic uint64_t posted_ns, matched_ns, started_ns, ended_ns;
    _Atomic uint64_t bytes;
    _Atomic uint32_t team,
        round; /* round: how many of this key there have been in this epoch; 0: not counted */
    _Atomic uint32_t epoch; /* of join.c: a joined rank counts anew */
    _Atomic uint32_t members;
    _Atomic int32_t
        peer; /* a message: the other rank; else the last one to post it; -1: not known */
    _Atomic uint8_t kind;
    _Atomic uint8_t failed;
    _Atomic uint8_t
        in_words; /* of an operation of hvdlite's own, what users read in place of its name */
    uint8_t zero[1];
    /* Its characters, in the order of memory: cut in the middle, and NUL after the end of a shorter one. */
    _Atomic uint64_t name[HVDL_BOX_NAME_BYTES / sizeof(uint64_t)];
} hvdl_box_entry;

/* Of all engines of the process, which write at the same time. */
struct hvdl_box_memory {
    char head[HVDL_BOX_HEAD_BYTES - sizeof(uint64_t)]; /* Python's: a text that says what this is */
    _Atomic uint64_t last_ticket;
    hvdl_box_entry entries[HVDL_BOX_ENTRIES];
};

typedef struct hvdl_box_rounds hvdl_box_rounds;

/* Written by black_box.c. The driver. */
typedef struct {
    hvdl_box_memory *memory; /* NULL: there is none */
    hvdl_box_rounds *rounds;
    uint64_t now_ns; /* the clock, as this sweep has read it; 0: it has not */
} hvdl_black_box;

/* memory: as the engine's configuration; NULL: none. */
hvdl_err hvdl_box_open(hvdl_black_box *box, hvdl_box_memory *memory);
void hvdl_box_free(hvdl_black_box *box);
/* A sweep begins: what was read of the clock is too old. */
static inline void hvdl_box_forget_time(hvdl_black_box *box)
{
    box->now_ns = 0;
}
/* One look at the clock per sweep: a time is too early by what the sweep has taken until then, which may be as long
 * as the reduction of a segment. */
static inline uint64_t hvdl_box_now(hvdl_black_box *box)
{
    if (!box->now_ns)
        box->now_ns = hvdl_now_ns();
    return box->now_ns;
}
void hvdl_box_write_posted(hvdl_engine *engine, hvdl_operation *operation);
void hvdl_box_write_state(hvdl_engine *engine, const hvdl_operation *operation, int state);
/* peer: a world rank. */
void hvdl_box_write_peer(hvdl_engine *engine, const hvdl_operation *operation, int peer);

#endif
