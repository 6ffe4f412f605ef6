/* The pipeline: data between the ranks of one host, as one endless stream of blocks.
 *
 * A **pass** moves one piece of one operation. Passes are scheduled in the same order on all ranks of
 * the host (the shared log's), and only when every rank has what it needs for them, so the stream never
 * waits for anything but the other ranks' cores. Blocks are numbered through all passes. For each,
 * every rank goes through three stages, each in order, and announces how far it is:
 *
 *   in       its input is in its staging block           (the buffer must have been freed: all ranks
 *                                                         have taken out block b - HVDL_NUM_BUFFERS)
 *   reduced  its slice of the block is summed up         (all ranks have put in block b)
 *   out      it has taken out what it needs              (all ranks have reduced block b)
 *
 * A rank runs ahead where it can: with HVDL_NUM_BUFFERS buffers it puts in later blocks, also of
 * later passes, while earlier ones wait for slower ranks. Small passes and two ranks skip the middle
 * stage: everyone adds up everything, which saves a synchronization. The sums are formed in rank
 * order either way, so both give the same bits.
 *
 * A rank reads its own part of a sum from its input, not from its staging block, so that the cache lines
 * of the staging block go to the other ranks alone. */
#ifndef HVDL_PIPELINE_H
#define HVDL_PIPELINE_H

#include "host/locality.h"
#include "host/passes.h"
#include "host/shm.h"

typedef struct {
    hvdl_shm *shm;
    hvdl_pass *first, *last;               /* scheduled and not finished here, in order */
    hvdl_pass *current[HVDL_NUM_STAGES];   /* the pass that each stage is at, or NULL: at the end */
    uint64_t blocks[HVDL_NUM_STAGES];      /* blocks passed, ever: what this rank publishes */
    hvdl_locality locality;                /* local rank 0 */
    hvdl_timed timed_in[HVDL_NUM_BUFFERS]; /* of the block in each buffer, as it was put in */
} hvdl_pipeline;

void hvdl_pipeline_init(hvdl_pipeline *pipeline, hvdl_shm *shm);

/* Appends a pass, which the pipeline owns until hvdl_pipeline_step hands it back. */
void hvdl_pipeline_add(hvdl_pipeline *pipeline, hvdl_pass *pass);

/* Does one stage of one block. *finished: a pass that this rank has finished, for the caller to free,
 * or NULL. Returns whether it did anything. */
bool hvdl_pipeline_step(hvdl_pipeline *pipeline, hvdl_pass **finished);

/* Marks the local ranks for which the others wait: whatever the passes are, they could go on, and have not.
 * *stage: the one that they have not passed. Returns how many; 0: no block is under way. */
int hvdl_pipeline_behind(const hvdl_shm *shm, bool behind[], hvdl_stage *stage);

/* A block's worth of data, or less, went to the other ranks without the pipeline, and was not timed. */
void hvdl_pipeline_untimed(hvdl_pipeline *pipeline);

/* Whether this rank times the copies that others read, and notes those of each block. */
bool hvdl_pipeline_times_copies(const hvdl_pipeline *pipeline);
void hvdl_pipeline_note_copy(hvdl_pipeline *pipeline, hvdl_timed copied);

/* Removes all passes, when the stream is broken; returns them as a list. */
hvdl_pass *hvdl_pipeline_clear(hvdl_pipeline *pipeline);

static inline bool hvdl_pipeline_busy(const hvdl_pipeline *pipeline)
{
    return pipeline->first != NULL;
}

#endif
