/* A pass: how one piece of an operation is cut into blocks, where these lie in the staging memory, and what
 * a rank does with a block in each stage. When it may, pipeline.h says. */
#ifndef HVDL_PASSES_H
#define HVDL_PASSES_H

#include "base/extents.h"
#include "host/shm.h"
#include "kernels/reduce.h"

typedef enum {
    HVDL_PASS_ALLREDUCE, /* everyone gets the sum */
    HVDL_PASS_SCATTER,   /* some ranks get the sums of a part each */
    HVDL_PASS_SHARE,     /* some ranks give, everyone gets all that is given */
    HVDL_PASS_PARTS      /* each rank gives a part to each */
} hvdl_pass_type;

/* Share: what local rank `local` gives, and what this rank takes of it. Scatter: what this rank gives to
 * the sum that local rank `local` gets; those of one rank stand together. Parts, of which this rank has as
 * many as there are ranks, in their order: what it gives to `local`, and what it takes from there, from 0. */
typedef struct {
    int local;
    const char *from; /* share: valid on that rank */
    size_t bytes;
    hvdl_range take; /* share: of these bytes */
    /* Where they, or the sum, go on the rank that gets them; may be where they come from. */
    char *to;
    /* Share in place in extents, which has no `from` and `to`: its first byte of the buffer. */
    size_t begin;
} hvdl_source;

typedef struct hvdl_pass {
    struct hvdl_pass *next;
    void *owner; /* the operation */
    uint64_t piece;
    int phase;
    hvdl_pass_type type;
    /* allreduce, scatter */
    hvdl_dtype dtype;
    hvdl_op op;
    hvdl_scale scale;        /* its factors are by local rank, and live as long as the pass */
    const char *scaled_from; /* this rank's first element, from which scale.num_first counts */
    /* By local rank; NULL: all. The others have joined, and their input is not read. Lives as long as
     * the pass. */
    const bool *taking_part;
    /* Floats in the deterministic mode: this host's partials, which begin at these local ranks; NULL: all inputs
     * are combined one after the other. Where the host has several, or they are of another type, partial i of a
     * source goes part_stride * i bytes behind its `to`. */
    const int *partial_begins;
    int num_partials;
    size_t part_stride;
    hvdl_dtype part_dtype;
    /* allreduce: elements from `in` to `out`, which may be equal; NULL: this rank wants none */
    const char *in;
    char *out;
    size_t count;         /* parts: bytes of the longest part on the host */
    int num_slots;        /* parts: as many as a rank gives to others, on every rank */
    hvdl_extents extents; /* share: the operation's, if its buffer lies in extents */
    /* set by hvdl_pass_lay_out */
    size_t
        unit; /* allreduce: elements per block; else bytes per block and rank that gets or gives */
    uint64_t num_blocks;
    bool direct;                  /* allreduce: everyone adds up everything */
    uint64_t at[HVDL_NUM_STAGES]; /* blocks of it that this rank has passed, per stage */
    int num_sources;              /* share, scatter, parts */
    hvdl_source sources[];
} hvdl_pass;

/* Elements of a piece of `count` elements that rail `rail` owns; slices begin at cache lines. */
hvdl_range hvdl_slice(size_t count, int num_rails, int rail, hvdl_dtype dtype);

/* Bytes of each of so many parts in a staging block. */
static inline size_t hvdl_slot_bytes(const hvdl_shm *shm, int num_slots)
{
    return shm->block_bytes / (size_t)num_slots / 64 * 64;
}

hvdl_pass *hvdl_pass_new(hvdl_pass_type type, int num_sources);

/* Cuts it into blocks. */
void hvdl_pass_lay_out(const hvdl_shm *shm, hvdl_pass *pass);

/* Whether this rank adds up something in stage HVDL_STAGE_REDUCED. */
bool hvdl_pass_reduces(const hvdl_shm *shm, const hvdl_pass *pass);

/* Bytes of the next block of this stage that are added up, of which *own by this rank; 0: the pass only moves
 * data. */
size_t hvdl_pass_summed_bytes(const hvdl_shm *shm, const hvdl_pass *pass, hvdl_stage stage,
                              size_t *own);

/* Does this stage of its next block, which is block `number` of the stream. timed: NULL, or what the copies
 * that others read are added to. */
void hvdl_pass_work(hvdl_shm *shm, const hvdl_pass *pass, hvdl_stage stage, uint64_t number,
                    hvdl_timed *timed);

#endif
