#define _GNU_SOURCE
#include "host/pipeline.h"

#include <string.h>

void hvdl_pipeline_init(hvdl_pipeline *pipeline, hvdl_shm *shm)
{
    memset(pipeline, 0, sizeof *pipeline);
    pipeline->shm = shm;
}

void hvdl_pipeline_add(hvdl_pipeline *pipeline, hvdl_pass *pass)
{
    hvdl_pass_lay_out(pipeline->shm, pass);
    pass->next = NULL;
    if (pipeline->last)
        pipeline->last->next = pass;
    else
        pipeline->first = pass;
    pipeline->last = pass;
    for (int stage = 0; stage < HVDL_NUM_STAGES; stage++)
        if (!pipeline->current[stage])
            pipeline->current[stage] = pass;
}

/* Whether this rank may do the next block of `stage`. */
static bool may_enter(hvdl_pipeline *pipeline, const hvdl_pass *pass, hvdl_stage stage)
{
    hvdl_shm *shm = pipeline->shm;
    uint64_t number = pipeline->blocks[stage];
    if (stage > HVDL_STAGE_IN && pipeline->blocks[stage - 1] <= number)
        return false; /* a rank's own stages follow each other */
    if (shm->local_size == 1)
        return true;
    switch (stage) {
    case HVDL_STAGE_IN:
        return number < HVDL_NUM_BUFFERS ||
               hvdl_stage_reached(shm, HVDL_STAGE_OUT, number + 1 - HVDL_NUM_BUFFERS);
    case HVDL_STAGE_REDUCED:
        if (!hvdl_pass_reduces(shm, pass))
            return true; /* nothing to do here */
        return hvdl_stage_reached(shm, HVDL_STAGE_IN, number + 1);
    default:
        if (pass->type == HVDL_PASS_SCATTER)
            return true;
        if (pass->type >= HVDL_PASS_SHARE || pass->direct)
            return hvdl_stage_reached(shm, HVDL_STAGE_IN, number + 1);
        return hvdl_stage_reached(shm, HVDL_STAGE_REDUCED, number + 1);
    }
}

/* Local rank 0 times the two steps that show how far away the other ranks' caches are: writing a block
 * that they have read, and adding up what they have written. Returns how many bytes of the next block of
 * this stage move that way, or 0: it is not timed. */
static size_t bytes_to_time(const hvdl_shm *shm, const hvdl_pass *pass, hvdl_stage stage)
{
    bool is_float = pass->dtype == HVDL_FLOAT32 || pass->dtype == HVDL_FLOAT64 ||
                    pass->dtype == HVDL_FLOAT16 || pass->dtype == HVDL_BFLOAT16;
    bool is_sum = pass->op == HVDL_SUM || pass->op == HVDL_AVERAGE;
    if (!HVDL_HAS_PAST_CACHE || shm->local_size == 1 || shm->local_rank ||
        hvdl_past_cache_is_forced() || !is_float || !is_sum)
        return 0;
    size_t own, all = hvdl_pass_summed_bytes(shm, pass, stage, &own);
    if (all < HVDL_TIMED_BYTES)
        return 0;
    if (stage == HVDL_STAGE_IN)
        return pass->direct ? all : all - own;
    bool adds = stage == (pass->direct ? HVDL_STAGE_OUT : HVDL_STAGE_REDUCED);
    return adds ? (size_t)(shm->local_size - 1) * own : 0;
}

static void tell_past_cache(hvdl_pipeline *pipeline)
{
    atomic_store_explicit(&pipeline->shm->control->past_cache, pipeline->locality.past_cache,
                          memory_order_relaxed);
}

void hvdl_pipeline_untimed(hvdl_pipeline *pipeline)
{
    if (hvdl_locality_untimed(&pipeline->locality))
        tell_past_cache(pipeline);
}

bool hvdl_pipeline_times_copies(const hvdl_pipeline *pipeline)
{
    return HVDL_HAS_PAST_CACHE && pipeline->shm->local_size > 1 && !pipeline->shm->local_rank &&
           !hvdl_past_cache_is_forced();
}

void hvdl_pipeline_note_copy(hvdl_pipeline *pipeline, hvdl_timed copied)
{
    if (copied.bytes < HVDL_TIMED_BYTES)
        hvdl_pipeline_untimed(pipeline);
    else if (hvdl_locality_note(&pipeline->locality, HVDL_TIMED_COPIES, copied.bytes, copied.ns,
                                HVDL_NUM_BUFFERS))
        tell_past_cache(pipeline);
}

/* Puts in a block that is copied and not added up. */
static void copy_in(hvdl_pipeline *pipeline, const hvdl_pass *pass)
{
    hvdl_timed copied = {0, 0};
    bool times = hvdl_pipeline_times_copies(pipeline);
    hvdl_pass_work(pipeline->shm, pass, HVDL_STAGE_IN, pipeline->blocks[HVDL_STAGE_IN],
                   times ? &copied : NULL);
    hvdl_pipeline_note_copy(pipeline, copied);
}

static void do_block(hvdl_pipeline *pipeline, const hvdl_pass *pass, hvdl_stage stage)
{
    if (stage == HVDL_STAGE_IN && pass->type >= HVDL_PASS_SHARE) {
        copy_in(pipeline, pass);
        return;
    }
    hvdl_shm *shm = pipeline->shm;
    hvdl_timed *in = &pipeline->timed_in[pipeline->blocks[stage] % HVDL_NUM_BUFFERS];
    size_t bytes = bytes_to_time(shm, pass, stage);
    uint64_t begun_ns = bytes ? hvdl_now_ns() : 0;
    hvdl_pass_work(shm, pass, stage, pipeline->blocks[stage], NULL);
    uint64_t ns = bytes ? hvdl_now_ns() - begun_ns : 0;
    if (stage == HVDL_STAGE_IN) {
        *in = (hvdl_timed){bytes, ns};
        if (!bytes)
            hvdl_pipeline_untimed(pipeline);
    } else if (bytes && in->bytes &&
               hvdl_locality_note(&pipeline->locality, HVDL_TIMED_SUMS, bytes + in->bytes,
                                  ns + in->ns, HVDL_NUM_BUFFERS)) {
        tell_past_cache(pipeline);
    }
}

/* Moves a stage past passes that it has finished. */
static void settle(hvdl_pipeline *pipeline, hvdl_stage stage)
{
    hvdl_pass *pass = pipeline->current[stage];
    while (pass && pass->at[stage] == pass->num_blocks)
        pass = pass->next;
    pipeline->current[stage] = pass;
}

bool hvdl_pipeline_step(hvdl_pipeline *pipeline, hvdl_pass **finished)
{
    *finished = NULL;
    if (!pipeline->first)
        return false;
    bool worked = false;
    /* The stage that frees buffers and lets other ranks go on comes first. */
    for (int stage = HVDL_STAGE_OUT; stage >= HVDL_STAGE_IN && !worked; stage--) {
        settle(pipeline, (hvdl_stage)stage);
        hvdl_pass *pass = pipeline->current[stage];
        if (!pass || !may_enter(pipeline, pass, (hvdl_stage)stage))
            continue;
        do_block(pipeline, pass, (hvdl_stage)stage);
        pass->at[stage]++;
        pipeline->blocks[stage]++;
        if (pipeline->shm->local_size > 1)
            hvdl_stage_publish(pipeline->shm, (hvdl_stage)stage, pipeline->blocks[stage], true);
        worked = true;
    }
    hvdl_pass *first = pipeline->first;
    if (first->at[HVDL_STAGE_OUT] == first->num_blocks) {
        for (int stage = 0; stage < HVDL_NUM_STAGES; stage++)
            settle(pipeline, (hvdl_stage)stage);
        pipeline->first = first->next;
        if (!pipeline->first)
            pipeline->last = NULL;
        *finished = first;
        worked = true;
    }
    return worked;
}

/* The first stage of the oldest block that a rank has not taken out, which the rank has not passed. */
static uint64_t oldest_step(const hvdl_shm *shm, int local, uint64_t *put_in)
{
    const _Atomic uint64_t *stages = shm->control->ranks[local].stages;
    uint64_t out = atomic_load_explicit(&stages[HVDL_STAGE_OUT], memory_order_relaxed);
    uint64_t reduced = atomic_load_explicit(&stages[HVDL_STAGE_REDUCED], memory_order_relaxed);
    uint64_t in = atomic_load_explicit(&stages[HVDL_STAGE_IN], memory_order_relaxed);
    int stage = in <= out ? HVDL_STAGE_IN : reduced <= out ? HVDL_STAGE_REDUCED : HVDL_STAGE_OUT;
    *put_in = in > *put_in ? in : *put_in;
    return out * HVDL_NUM_STAGES + (uint64_t)stage;
}

/* Steps are ordered by block, then by stage. A step only ever waits for steps before it, so nothing but its
 * own rank keeps back the first step that is not done. */
int hvdl_pipeline_behind(const hvdl_shm *shm, bool behind[], hvdl_stage *stage)
{
    uint64_t first = UINT64_MAX, put_in = 0;
    int count = 0;
    for (int r = 0; r < shm->local_size; r++) {
        uint64_t step = oldest_step(shm, r, &put_in);
        first = step < first ? step : first;
    }
    for (int r = 0; r < shm->local_size; r++) {
        behind[r] = first < put_in * HVDL_NUM_STAGES && oldest_step(shm, r, &put_in) == first;
        count += behind[r];
    }
    *stage = (hvdl_stage)(first % HVDL_NUM_STAGES);
    return count;
}

hvdl_pass *hvdl_pipeline_clear(hvdl_pipeline *pipeline)
{
    hvdl_pass *all = pipeline->first;
    pipeline->first = pipeline->last = NULL;
    for (int stage = 0; stage < HVDL_NUM_STAGES; stage++)
        pipeline->current[stage] = NULL;
    return all;
}
