/* The kinds of operations: one row for each, with what the engine and the glue to Python need to know of
 * it. How the data of a kind goes through the engine is its course: see engine/phases.h. */
#ifndef HVDL_KINDS_H
#define HVDL_KINDS_H

#include "base/types.h"

typedef enum {
    HVDL_ALLREDUCE = 0,
    HVDL_BROADCAST,
    HVDL_ALLGATHER,
    HVDL_BARRIER,
    HVDL_ALLTOALL,
    HVDL_REDUCESCATTER,
    HVDL_JOIN,
    /* The making of a plan, whose runs are HVDL_ALLREDUCE. The last, as callers can't post it. */
    HVDL_PLAN,
    HVDL_NUM_KINDS
} hvdl_kind;

/* What an operation gives to each rank. */
typedef enum {
    HVDL_RESULT_NONE,
    HVDL_RESULT_NUMBER, /* one number: see hvdl_operation_rows */
    HVDL_RESULT_WHOLE, /* as large as the input; in the caller's memory, which may be the input's */
    HVDL_RESULT_SHARE, /* this rank's rows of that; in the caller's memory, not the input's */
    HVDL_RESULT_GATHERED /* rows of all ranks; the engine makes its memory when it knows their number */
} hvdl_result;

/* Which numbers of rows a rank posts beside the descriptor, as they may differ between the ranks. */
typedef enum {
    HVDL_ROWS_SAME,  /* none: all dimensions are the same on every rank */
    HVDL_ROWS_OWN,   /* its own first dimension */
    HVDL_ROWS_SPLITS /* how many of its rows go to each rank */
} hvdl_rows;

/* Whether the data travels with the posting. */
typedef enum { HVDL_TINY_NEVER, HVDL_TINY_IF_SMALL, HVDL_TINY_ALWAYS } hvdl_tiny;

typedef struct {
    const char *name; /* in texts, events and the timeline */
    uint8_t result, rows, tiny;
    bool reduces;           /* the data of all ranks is combined by the descriptor's op */
    bool has_root;          /* the descriptor's root alone gives data */
    bool joined_takes_part; /* a rank that has joined counts as present and gives nothing */
} hvdl_kind_facts;

static inline const hvdl_kind_facts *hvdl_facts_of_kind(int kind)
{
    static const hvdl_kind_facts rows[HVDL_NUM_KINDS] = {
        [HVDL_ALLREDUCE] = {.name = "allreduce",
                            .result = HVDL_RESULT_WHOLE,
                            .tiny = HVDL_TINY_IF_SMALL,
                            .reduces = true,
                            .joined_takes_part = true},
        [HVDL_BROADCAST] = {.name = "broadcast",
                            .result = HVDL_RESULT_WHOLE,
                            .tiny = HVDL_TINY_IF_SMALL,
                            .has_root = true},
        [HVDL_ALLGATHER] = {.name = "allgather",
                            .result = HVDL_RESULT_GATHERED,
                            .rows = HVDL_ROWS_OWN},
        [HVDL_BARRIER] = {.name = "barrier", .tiny = HVDL_TINY_ALWAYS, .joined_takes_part = true},
        [HVDL_ALLTOALL] = {.name = "alltoall",
                           .result = HVDL_RESULT_GATHERED,
                           .rows = HVDL_ROWS_SPLITS},
        [HVDL_REDUCESCATTER] = {.name = "reducescatter",
                                .result = HVDL_RESULT_SHARE,
                                .tiny = HVDL_TINY_IF_SMALL,
                                .reduces = true},
        [HVDL_JOIN] = {.name = "join", .result = HVDL_RESULT_NUMBER},
        [HVDL_PLAN] = {.name = "plan"},
    };
    return &rows[kind];
}

static inline const hvdl_kind_facts *hvdl_facts_of(const hvdl_desc *desc)
{
    return hvdl_facts_of_kind(desc->kind);
}

static inline const char *hvdl_kind_name(int kind)
{
    return hvdl_facts_of_kind(kind)->name;
}

/* Does data of the user's go through it? */
static inline bool hvdl_moves_data(const hvdl_kind_facts *kind)
{
    return kind->result > HVDL_RESULT_NUMBER;
}

/* Is the first dimension cut or put together, so that there must be one? */
static inline bool hvdl_works_on_rows(const hvdl_kind_facts *kind)
{
    return kind->result > HVDL_RESULT_WHOLE;
}

/* How many numbers of rows a rank posts. */
static inline size_t hvdl_num_rows_posted(const hvdl_kind_facts *kind, int num_ranks)
{
    switch (kind->rows) {
    case HVDL_ROWS_OWN: return 1;
    case HVDL_ROWS_SPLITS: return (size_t)num_ranks;
    default: return 0;
    }
}

/* Do the splits travel with its posting? (A tensor that stays on its device has none.) */
static inline bool hvdl_sends_splits(const hvdl_desc *desc)
{
    return hvdl_facts_of(desc)->rows == HVDL_ROWS_SPLITS && desc->place != HVDL_ORDERED;
}

#endif
