/* The kinds of operations: one row for each, with what the engine and the glue to Python need to know of
 * it. How the data of a kind goes through the engine: its hvdl_collective, see collectives/phases.h. */
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
    HVDL_REDUCE,
    /* As ALLGATHER and ALLTOALL, with results in the caller's memory, whose sizes it knows. */
    HVDL_ALLGATHER_INTO,
    HVDL_ALLTOALL_INTO,
    HVDL_GATHER,
    HVDL_SCATTER,
    /* The making of a plan. From here on callers can't post them. */
    HVDL_PLAN,
    /* Of plans, beside HVDL_ALLREDUCE: each rank owns some elements of a buffer. See collectives/owners.h. */
    HVDL_REDUCE_TO_OWNERS,
    HVDL_REDUCE_TO_HOST_OWNERS,
    HVDL_UNITE,
    HVDL_UNITE_ON_HOST,
    /* Messages: they are no postings and meet no other operations; see transfers/transfers.h. */
    HVDL_SEND,
    HVDL_RECV,
    HVDL_NUM_KINDS
} hvdl_kind;

/* What an operation gives to each rank. */
typedef enum {
    HVDL_RESULT_NONE,
    HVDL_RESULT_NUMBER, /* one number: see hvdl_operation_rows */
    HVDL_RESULT_PARTS, /* a part from each rank; in the caller's memory; if there is a root, only there */
    HVDL_RESULT_WHOLE, /* as large as the input; in the caller's memory, which may be the input's */
    HVDL_RESULT_SHARE, /* this rank's rows of that; in the caller's memory, not the input's */
    HVDL_RESULT_GATHERED /* rows of all ranks; the engine makes its memory when it knows their number */
} hvdl_result;

/* Which numbers of rows a rank posts beside the descriptor, as they may differ between the ranks. */
typedef enum {
    HVDL_ROWS_SAME,   /* none: all dimensions are the same on every rank */
    HVDL_ROWS_OWN,    /* its own first dimension */
    HVDL_ROWS_SPLITS, /* how many of its rows go to each rank */
    /* If there are splits (of elements); else as SAME: */
    HVDL_ROWS_CUT, /* none: a hash of how many each rank has, the same numbers on every rank */
    HVDL_ROWS_BOTH /* how many go to each rank, then how many come from each */
} hvdl_rows;

/* Which of the caller's tensors has a part for each rank, and may be a tuple of as many tensors; if there is
 * a root, only the root's. */
enum { HVDL_PARTS_IN = 1, HVDL_PARTS_OUT = 2 };

/* Who owns the elements of a buffer: one of all ranks each, or one of each host's ranks. */
typedef enum { HVDL_NO_OWNERS, HVDL_OWNERS_OF_ALL, HVDL_OWNERS_OF_HOST } hvdl_owners;

/* Whether the data travels with the posting. */
typedef enum { HVDL_TINY_NEVER, HVDL_TINY_IF_SMALL, HVDL_TINY_ALWAYS } hvdl_tiny;

typedef struct {
    const char *name;     /* in texts, events and the timeline */
    const char *constant; /* its name in the module; NULL: `name` in capitals */
    const char *called;   /* where it must be told from others of its name; NULL: `name` */
    uint8_t result, rows, tiny;
    uint8_t parts;          /* HVDL_PARTS_IN, HVDL_PARTS_OUT */
    uint8_t owners;         /* hvdl_owners */
    bool reduces;           /* the data of all ranks is combined by the descriptor's op */
    bool has_root;          /* the descriptor's root alone gives data, or gets it */
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
                                .rows = HVDL_ROWS_CUT,
                                .parts = HVDL_PARTS_IN,
                                .tiny = HVDL_TINY_IF_SMALL,
                                .reduces = true},
        [HVDL_REDUCE] = {.name = "reduce",
                         .result = HVDL_RESULT_WHOLE,
                         .tiny = HVDL_TINY_IF_SMALL,
                         .reduces = true,
                         .has_root = true},
        [HVDL_JOIN] = {.name = "join", .result = HVDL_RESULT_NUMBER},
        [HVDL_ALLGATHER_INTO] = {.name = "allgather",
                                 .constant = "ALLGATHER_INTO",
                                 .result = HVDL_RESULT_PARTS,
                                 .rows = HVDL_ROWS_CUT,
                                 .parts = HVDL_PARTS_OUT,
                                 .tiny = HVDL_TINY_IF_SMALL},
        [HVDL_ALLTOALL_INTO] = {.name = "alltoall",
                                .constant = "ALLTOALL_INTO",
                                .result = HVDL_RESULT_PARTS,
                                .rows = HVDL_ROWS_BOTH,
                                .parts = HVDL_PARTS_IN | HVDL_PARTS_OUT},
        [HVDL_GATHER] = {.name = "gather",
                         .result = HVDL_RESULT_PARTS,
                         .parts = HVDL_PARTS_OUT,
                         .has_root = true},
        [HVDL_SCATTER] = {.name = "scatter",
                          .result = HVDL_RESULT_WHOLE,
                          .parts = HVDL_PARTS_IN,
                          .has_root = true},
        [HVDL_PLAN] = {.name = "plan"},
        [HVDL_REDUCE_TO_OWNERS] = {.name = "reducescatter",
                                   .called = "reducescatter to owners among all ranks",
                                   .result = HVDL_RESULT_WHOLE,
                                   .tiny = HVDL_TINY_IF_SMALL,
                                   .owners = HVDL_OWNERS_OF_ALL,
                                   .reduces = true,
                                   .joined_takes_part = true},
        [HVDL_REDUCE_TO_HOST_OWNERS] = {.name = "reducescatter",
                                        .called = "reducescatter to owners on each host",
                                        .result = HVDL_RESULT_WHOLE,
                                        .tiny = HVDL_TINY_IF_SMALL,
                                        .owners = HVDL_OWNERS_OF_HOST,
                                        .reduces = true,
                                        .joined_takes_part = true},
        [HVDL_UNITE] = {.name = "allgather",
                        .called = "allgather from owners among all ranks",
                        .result = HVDL_RESULT_WHOLE,
                        .owners = HVDL_OWNERS_OF_ALL},
        [HVDL_UNITE_ON_HOST] = {.name = "allgather",
                                .called = "allgather from owners on each host",
                                .result = HVDL_RESULT_WHOLE,
                                .owners = HVDL_OWNERS_OF_HOST},
        [HVDL_SEND] = {.name = "send", .result = HVDL_RESULT_WHOLE},
        [HVDL_RECV] = {.name = "recv", .result = HVDL_RESULT_WHOLE},
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

/* Can the runs of a plan be of this kind? */
static inline bool hvdl_is_kind_of_runs(int kind)
{
    return kind == HVDL_ALLREDUCE ||
           (kind > HVDL_PLAN && kind < HVDL_NUM_KINDS && hvdl_facts_of_kind(kind)->owners);
}

static inline bool hvdl_root_gives(const hvdl_kind_facts *kind)
{
    return kind->has_root && !kind->reduces && kind->parts != HVDL_PARTS_OUT;
}

static inline bool hvdl_root_gets(const hvdl_kind_facts *kind)
{
    return kind->has_root && !hvdl_root_gives(kind);
}

/* Does data of the user's go through it? */
static inline bool hvdl_moves_data(const hvdl_kind_facts *kind)
{
    return kind->result > HVDL_RESULT_NUMBER;
}

/* Does the caller's source hold the parts of all ranks, or the root's, so that the descriptor tells of the
 * result? */
static inline bool hvdl_describes_result(const hvdl_kind_facts *kind)
{
    return kind->parts == HVDL_PARTS_IN && kind->has_root;
}

/* Is the first dimension cut or put together, so that there must be one? */
static inline bool hvdl_works_on_rows(const hvdl_kind_facts *kind)
{
    return kind->result > HVDL_RESULT_WHOLE;
}

/* Do the splits travel with its posting? (A tensor that stays on its device has none.) */
static inline bool hvdl_sends_splits(const hvdl_desc *desc)
{
    uint8_t rows = hvdl_facts_of(desc)->rows;
    return (rows == HVDL_ROWS_SPLITS || (rows == HVDL_ROWS_BOTH && desc->dims[0] < 0)) &&
           desc->place != HVDL_ORDERED;
}

static inline bool hvdl_sends_both_splits(const hvdl_desc *desc)
{
    return hvdl_sends_splits(desc) && hvdl_facts_of(desc)->rows == HVDL_ROWS_BOTH;
}

/* How many splits a caller gives, if any. */
static inline size_t hvdl_num_splits(const hvdl_kind_facts *kind, int num_ranks)
{
    return kind->rows == HVDL_ROWS_BOTH ? 2 * (size_t)num_ranks : (size_t)num_ranks;
}

/* How many numbers of rows a rank posts. */
static inline size_t hvdl_num_rows_posted(const hvdl_desc *desc, int num_ranks)
{
    const hvdl_kind_facts *kind = hvdl_facts_of(desc);
    if (kind->rows == HVDL_ROWS_OWN)
        return 1;
    return hvdl_sends_splits(desc) ? hvdl_num_splits(kind, num_ranks) : 0;
}

#endif
