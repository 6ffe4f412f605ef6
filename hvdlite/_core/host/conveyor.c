#define _GNU_SOURCE
#include "host/conveyor.h"

#include <stdlib.h>
#include <string.h>

/* Below this many bytes per pass every rank adds up the whole pass: the second synchronization costs
 * more than the additions. */
#define DIRECT_BYTES 16384

/* Reading smaller parts of a block is not timed. */
#define TIMED_BYTES 16384

hvdl_range hvdl_slice(size_t count, int num_rails, int rail, hvdl_dtype dtype)
{
    size_t align = 64 / hvdl_dtype_bytes((int)dtype);
    return hvdl_part(count, (size_t)num_rails, (size_t)rail, align);
}

void hvdl_conveyor_init(hvdl_conveyor *conveyor, hvdl_shm *shm)
{
    memset(conveyor, 0, sizeof *conveyor);
    conveyor->shm = shm;
}

hvdl_pass *hvdl_pass_new(hvdl_pass_type type, int num_sources)
{
    hvdl_pass *pass = calloc(1, sizeof *pass + (size_t)num_sources * sizeof(hvdl_source));
    if (pass) {
        pass->type = type;
        pass->num_sources = num_sources;
        pass->scale = HVDL_UNSCALED;
    }
    return pass;
}

/* ---- geometry ---- */

static void lay_out(const hvdl_shm *shm, hvdl_pass *pass)
{
    size_t esize = hvdl_dtype_bytes((int)pass->dtype), longest = 0;
    switch (pass->type) {
    case HVDL_PASS_ALLREDUCE:
        pass->unit = shm->block_bytes / esize;
        pass->direct = shm->local_size <= 2 || pass->count * esize <= DIRECT_BYTES;
        longest = pass->count;
        break;
    case HVDL_PASS_SCATTER: /* a block holds a part of every rail's slice */
        pass->unit = shm->block_bytes / (size_t)pass->num_rails / 64 * 64 / esize;
        longest = hvdl_range_size(hvdl_slice(pass->count, pass->num_rails, 0, pass->dtype));
        break;
    case HVDL_PASS_SHARE: /* every source has a staging block of its own */
        pass->unit = shm->block_bytes;
        for (int i = 0; i < pass->num_sources; i++)
            if (pass->sources[i].bytes > longest)
                longest = pass->sources[i].bytes;
        break;
    }
    pass->num_blocks = hvdl_ceil_div(longest, pass->unit);
}

/* Part of [0, total) that block `block` covers. */
static hvdl_range block_of(size_t total, size_t unit, uint64_t block)
{
    size_t begin = block * unit < total ? block * unit : total;
    return (hvdl_range){begin, total - begin < unit ? total : begin + unit};
}

/* Scatter: the elements of the piece that block `block` holds of rail `rail`'s slice. */
static hvdl_range scatter_range(const hvdl_pass *pass, int rail, uint64_t block)
{
    hvdl_range slice = hvdl_slice(pass->count, pass->num_rails, rail, pass->dtype);
    hvdl_range part = block_of(hvdl_range_size(slice), pass->unit, block);
    return (hvdl_range){slice.begin + part.begin, slice.begin + part.end};
}

/* ---- the stages' work; b: the block within the pass, number: within the stream ---- */

/* Copies the input unscaled: the rank that adds it up scales it. A rank alone on its host does so here. */
static void put_elements(hvdl_shm *shm, const hvdl_pass *pass, char *to, const char *from,
                         size_t count)
{
    const void *input = from;
    if (shm->local_size > 1 || hvdl_is_unscaled(&pass->scale))
        hvdl_shm_copy(shm, to, from, count * hvdl_dtype_bytes((int)pass->dtype));
    else
        hvdl_reduce(pass->dtype, HVDL_SUM, to, &input, 1, count, &pass->scale);
}

static hvdl_range both(hvdl_range a, hvdl_range b)
{
    size_t begin = a.begin > b.begin ? a.begin : b.begin;
    size_t end = a.end < b.end ? a.end : b.end;
    return (hvdl_range){begin, end > begin ? end : begin};
}

/* Takes what this rank wants of a block of a share: the source's bytes `part`, which are at `at`. */
static void take_of(const hvdl_source *source, hvdl_range part, const char *at)
{
    hvdl_range wanted = both(part, source->take);
    const char *from = at + (wanted.begin - part.begin);
    char *to = source->to + (wanted.begin - source->take.begin);
    if (hvdl_range_size(wanted) && to != from)
        memcpy(to, from, hvdl_range_size(wanted));
}

/* The slice of an allreduce's block that local rank `local` adds up: elements of the block. */
static hvdl_range block_slice(const hvdl_shm *shm, const hvdl_pass *pass, uint64_t b, int local)
{
    size_t count = hvdl_range_size(block_of(pass->count, pass->unit, b));
    return hvdl_slice(count, shm->local_size, local, pass->dtype);
}

/* Whether this rank may read its own part of a sum from its input: then its staging block is only for
 * the others. `out` may be the same memory: each element is read before it is written. */
static bool reads_input(const hvdl_pass *pass)
{
    return pass->type == HVDL_PASS_ALLREDUCE && hvdl_range_size(pass->keep) == pass->count;
}

static void put_in(hvdl_shm *shm, const hvdl_pass *pass, uint64_t b, uint64_t number)
{
    size_t esize = hvdl_dtype_bytes((int)pass->dtype);
    bool alone = shm->local_size == 1;
    char *staging = alone ? NULL : hvdl_staging(shm, shm->local_rank, number);
    switch (pass->type) {
    case HVDL_PASS_ALLREDUCE: {
        hvdl_range part = block_of(pass->count, pass->unit, b), left_out = {0, 0};
        size_t count = hvdl_range_size(part);
        const char *from = pass->in + part.begin * esize;
        char *to = alone ? pass->out + part.begin * esize : staging;
        if (!alone && !pass->direct && reads_input(pass)) /* only this rank needs it */
            left_out = block_slice(shm, pass, b, shm->local_rank);
        put_elements(shm, pass, to, from, left_out.begin);
        put_elements(shm, pass, to + left_out.end * esize, from + left_out.end * esize,
                     count - left_out.end);
        break;
    }
    case HVDL_PASS_SCATTER:
        for (int rail = 0; rail < pass->num_rails; rail++) {
            hvdl_range part = scatter_range(pass, rail, b);
            char *to = alone ? pass->out + part.begin * esize
                             : staging + (size_t)rail * pass->unit * esize;
            put_elements(shm, pass, to, pass->in + part.begin * esize, hvdl_range_size(part));
        }
        break;
    case HVDL_PASS_SHARE:
        for (int i = 0; i < pass->num_sources; i++) {
            const hvdl_source *source = &pass->sources[i];
            hvdl_range part = block_of(source->bytes, pass->unit, b);
            if (source->local != shm->local_rank || !hvdl_range_size(part))
                continue;
            if (!alone)
                hvdl_shm_copy(shm, staging, source->from + part.begin, hvdl_range_size(part));
            take_of(source, part, source->from + part.begin);
        }
        break;
    }
}

/* Adds up `count` elements of all ranks, which begin at offset_bytes of the staging blocks, into
 * `to`. own: where this rank's are; NULL: in its staging block too. */
static void add_up(hvdl_shm *shm, const hvdl_pass *pass, uint64_t number, size_t offset_bytes,
                   size_t count, const char *own, char *to)
{
    const void *inputs[HVDL_MAX_LOCAL];
    int num_inputs = 0;
    for (int r = 0; r < shm->local_size; r++)
        if (!pass->taking_part || pass->taking_part[r])
            inputs[num_inputs++] =
                own && r == shm->local_rank ? own : hvdl_staging(shm, r, number) + offset_bytes;
    bool for_others = to == hvdl_staging(shm, shm->local_rank, number) + offset_bytes;
    size_t bytes = count * hvdl_dtype_bytes((int)pass->dtype);
    (for_others && hvdl_goes_past_cache(shm, bytes) ? hvdl_reduce_past_cache : hvdl_reduce)(
        pass->dtype, pass->op, to, inputs, num_inputs, count, &pass->scale);
}

static void reduce_block(hvdl_shm *shm, const hvdl_pass *pass, uint64_t b, uint64_t number)
{
    size_t esize = hvdl_dtype_bytes((int)pass->dtype);
    if (pass->type == HVDL_PASS_ALLREDUCE) {
        /* In place: nobody else reads this slice of this rank's staging block before it is summed. */
        hvdl_range slice = block_slice(shm, pass, b, shm->local_rank);
        size_t begin = block_of(pass->count, pass->unit, b).begin + slice.begin;
        add_up(shm, pass, number, slice.begin * esize, hvdl_range_size(slice),
               reads_input(pass) ? pass->in + begin * esize : NULL,
               hvdl_staging(shm, shm->local_rank, number) + slice.begin * esize);
    } else {
        hvdl_range part = scatter_range(pass, shm->local_rank, b);
        add_up(shm, pass, number, (size_t)shm->local_rank * pass->unit * esize,
               hvdl_range_size(part), NULL, pass->out + part.begin * esize);
    }
}

static void take_out(hvdl_shm *shm, const hvdl_pass *pass, uint64_t b, uint64_t number)
{
    size_t esize = hvdl_dtype_bytes((int)pass->dtype);
    switch (pass->type) {
    case HVDL_PASS_ALLREDUCE: {
        hvdl_range part = block_of(pass->count, pass->unit, b);
        hvdl_range wanted = both(part, pass->keep);
        if (!hvdl_range_size(wanted))
            break;
        char *to = pass->out + (wanted.begin - pass->keep.begin) * esize;
        if (pass->direct) {
            add_up(shm, pass, number, (wanted.begin - part.begin) * esize, hvdl_range_size(wanted),
                   reads_input(pass) ? pass->in + wanted.begin * esize : NULL, to);
            break;
        }
        for (int r = 0; r < shm->local_size; r++) {
            hvdl_range slice = block_slice(shm, pass, b, r);
            slice = (hvdl_range){part.begin + slice.begin, part.begin + slice.end};
            slice = both(slice, wanted);
            if (hvdl_range_size(slice))
                memcpy(to + (slice.begin - wanted.begin) * esize,
                       hvdl_staging(shm, r, number) + (slice.begin - part.begin) * esize,
                       hvdl_range_size(slice) * esize);
        }
        break;
    }
    case HVDL_PASS_SCATTER: break;
    case HVDL_PASS_SHARE:
        for (int i = 0; i < pass->num_sources; i++) {
            const hvdl_source *source = &pass->sources[i];
            hvdl_range part = block_of(source->bytes, pass->unit, b);
            if (source->local != shm->local_rank)
                take_of(source, part, hvdl_staging(shm, source->local, number));
        }
        break;
    }
}

/* ---- the stream ---- */

void hvdl_conveyor_add(hvdl_conveyor *conveyor, hvdl_pass *pass)
{
    lay_out(conveyor->shm, pass);
    pass->next = NULL;
    if (conveyor->last)
        conveyor->last->next = pass;
    else
        conveyor->first = pass;
    conveyor->last = pass;
    for (int stage = 0; stage < HVDL_NUM_STAGES; stage++)
        if (!conveyor->current[stage])
            conveyor->current[stage] = pass;
}

/* Whether this rank may do the next block of `stage`. */
static bool may_enter(hvdl_conveyor *conveyor, const hvdl_pass *pass, hvdl_stage stage)
{
    hvdl_shm *shm = conveyor->shm;
    uint64_t number = conveyor->blocks[stage];
    if (stage > HVDL_STAGE_IN && conveyor->blocks[stage - 1] <= number)
        return false; /* a rank's own stages follow each other */
    if (shm->local_size == 1)
        return true;
    switch (stage) {
    case HVDL_STAGE_IN:
        return number < HVDL_NUM_BUFFERS ||
               hvdl_stage_reached(shm, HVDL_STAGE_OUT, number + 1 - HVDL_NUM_BUFFERS);
    case HVDL_STAGE_REDUCED:
        if (pass->type == HVDL_PASS_SCATTER ? shm->local_rank >= pass->num_rails
                                            : pass->type == HVDL_PASS_SHARE || pass->direct)
            return true; /* nothing to do here */
        return hvdl_stage_reached(shm, HVDL_STAGE_IN, number + 1);
    default:
        if (pass->type == HVDL_PASS_SCATTER)
            return true;
        if (pass->type == HVDL_PASS_SHARE || pass->direct)
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
    uint64_t b = pass->at[stage];
    size_t all = 0, slice; /* elements of the block, and of them what this rank adds up */
    if (pass->type == HVDL_PASS_ALLREDUCE && reads_input(pass)) {
        all = hvdl_range_size(block_of(pass->count, pass->unit, b));
        slice = pass->direct ? all : hvdl_range_size(block_slice(shm, pass, b, 0));
    } else if (pass->type == HVDL_PASS_SCATTER) {
        for (int rail = 0; rail < pass->num_rails; rail++)
            all += hvdl_range_size(scatter_range(pass, rail, b));
        slice = hvdl_range_size(scatter_range(pass, 0, b));
    } else {
        return 0;
    }
    size_t esize = hvdl_dtype_bytes((int)pass->dtype);
    bool copies_all = pass->direct || pass->type == HVDL_PASS_SCATTER;
    if (all * esize < TIMED_BYTES)
        return 0;
    if (stage == HVDL_STAGE_IN)
        return (copies_all ? all : all - slice) * esize;
    bool adds = stage == (pass->direct ? HVDL_STAGE_OUT : HVDL_STAGE_REDUCED);
    return adds ? (size_t)(shm->local_size - 1) * slice * esize : 0;
}

static void work_on(hvdl_shm *shm, const hvdl_pass *pass, hvdl_stage stage, uint64_t number)
{
    uint64_t b = pass->at[stage];
    if (stage == HVDL_STAGE_IN)
        put_in(shm, pass, b, number);
    else if (shm->local_size == 1)
        return;
    else if (stage == HVDL_STAGE_OUT)
        take_out(shm, pass, b, number);
    else if (pass->type == HVDL_PASS_ALLREDUCE
                 ? !pass->direct
                 : pass->type == HVDL_PASS_SCATTER && shm->local_rank < pass->num_rails)
        reduce_block(shm, pass, b, number);
}

static void tell_past_cache(hvdl_conveyor *conveyor)
{
    atomic_store_explicit(&conveyor->shm->control->past_cache, conveyor->locality.past_cache,
                          memory_order_relaxed);
}

void hvdl_conveyor_untimed(hvdl_conveyor *conveyor)
{
    if (hvdl_locality_untimed(&conveyor->locality))
        tell_past_cache(conveyor);
}

static void do_block(hvdl_conveyor *conveyor, const hvdl_pass *pass, hvdl_stage stage)
{
    hvdl_shm *shm = conveyor->shm;
    hvdl_timed *in = &conveyor->timed_in[conveyor->blocks[stage] % HVDL_NUM_BUFFERS];
    size_t bytes = bytes_to_time(shm, pass, stage);
    uint64_t begun_ns = bytes ? hvdl_now_ns() : 0;
    work_on(shm, pass, stage, conveyor->blocks[stage]);
    uint64_t ns = bytes ? hvdl_now_ns() - begun_ns : 0;
    if (stage == HVDL_STAGE_IN) {
        *in = (hvdl_timed){bytes, ns};
        if (!bytes)
            hvdl_conveyor_untimed(conveyor);
    } else if (bytes && in->bytes &&
               hvdl_locality_note(&conveyor->locality, bytes + in->bytes, ns + in->ns,
                                  HVDL_NUM_BUFFERS)) {
        tell_past_cache(conveyor);
    }
}

/* Moves a stage past passes that it has finished. */
static void settle(hvdl_conveyor *conveyor, hvdl_stage stage)
{
    hvdl_pass *pass = conveyor->current[stage];
    while (pass && pass->at[stage] == pass->num_blocks)
        pass = pass->next;
    conveyor->current[stage] = pass;
}

bool hvdl_conveyor_step(hvdl_conveyor *conveyor, hvdl_pass **finished)
{
    *finished = NULL;
    if (!conveyor->first)
        return false;
    bool worked = false;
    /* The stage that frees buffers and lets other ranks go on comes first. */
    for (int stage = HVDL_STAGE_OUT; stage >= HVDL_STAGE_IN && !worked; stage--) {
        settle(conveyor, (hvdl_stage)stage);
        hvdl_pass *pass = conveyor->current[stage];
        if (!pass || !may_enter(conveyor, pass, (hvdl_stage)stage))
            continue;
        do_block(conveyor, pass, (hvdl_stage)stage);
        pass->at[stage]++;
        conveyor->blocks[stage]++;
        if (conveyor->shm->local_size > 1)
            hvdl_stage_publish(conveyor->shm, (hvdl_stage)stage, conveyor->blocks[stage], true);
        worked = true;
    }
    hvdl_pass *first = conveyor->first;
    if (first->at[HVDL_STAGE_OUT] == first->num_blocks) {
        for (int stage = 0; stage < HVDL_NUM_STAGES; stage++)
            settle(conveyor, (hvdl_stage)stage);
        conveyor->first = first->next;
        if (!conveyor->first)
            conveyor->last = NULL;
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
int hvdl_conveyor_behind(const hvdl_shm *shm, bool behind[], hvdl_stage *stage)
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

hvdl_pass *hvdl_conveyor_clear(hvdl_conveyor *conveyor)
{
    hvdl_pass *all = conveyor->first;
    conveyor->first = conveyor->last = NULL;
    for (int stage = 0; stage < HVDL_NUM_STAGES; stage++)
        conveyor->current[stage] = NULL;
    return all;
}
