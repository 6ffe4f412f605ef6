#define _GNU_SOURCE
#include "host/passes.h"

#include <stdlib.h>
#include <string.h>

/* Below this many bytes per pass every rank adds up the whole pass: the second synchronization costs
 * more than the additions. */
#define DIRECT_BYTES 16384

hvdl_range hvdl_slice(size_t count, int num_rails, int rail, hvdl_dtype dtype)
{
    size_t align = 64 / hvdl_dtype_bytes((int)dtype);
    return hvdl_part(count, (size_t)num_rails, (size_t)rail, align);
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

/* Scatter: where source i lies in what its rank gets, given where the source before it ends. */
static size_t source_begin(const hvdl_pass *pass, int i, size_t end)
{
    return i && pass->sources[i - 1].local == pass->sources[i].local ? end : 0;
}

/* Scatter: the number of the rank that gets source i, among those that get some, given that of the source
 * before it. */
static int getter_of(const hvdl_pass *pass, int i, int getter)
{
    return i && pass->sources[i - 1].local != pass->sources[i].local ? getter + 1 : getter;
}

static size_t longest_of(const hvdl_pass *pass, int *num_getters)
{
    size_t longest = 0, end = 0;
    int getter = 0;
    for (int i = 0; i < pass->num_sources; i++) {
        bool gathers = pass->type == HVDL_PASS_SCATTER;
        end = (gathers ? source_begin(pass, i, end) : 0) + pass->sources[i].bytes;
        getter = getter_of(pass, i, getter);
        longest = end > longest ? end : longest;
    }
    *num_getters = getter + 1;
    return longest;
}

void hvdl_pass_lay_out(const hvdl_shm *shm, hvdl_pass *pass)
{
    size_t esize = hvdl_dtype_bytes((int)pass->dtype), longest = 0;
    int num_getters;
    switch (pass->type) {
    case HVDL_PASS_ALLREDUCE:
        pass->unit = shm->block_bytes / esize;
        pass->direct = shm->local_size <= 2 || pass->count * esize <= DIRECT_BYTES;
        longest = pass->count;
        break;
    case HVDL_PASS_SCATTER: /* a block holds something for every rank that gets a sum */
        longest = longest_of(pass, &num_getters);
        pass->unit = shm->block_bytes / (size_t)num_getters / 64 * 64;
        break;
    case HVDL_PASS_SHARE: /* every source has a staging block of its own */
        longest = longest_of(pass, &num_getters);
        pass->unit = shm->block_bytes;
        break;
    case HVDL_PASS_PARTS:
        pass->unit = hvdl_slot_bytes(shm, pass->num_slots);
        longest = pass->count;
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

static hvdl_range both(hvdl_range a, hvdl_range b)
{
    size_t begin = a.begin > b.begin ? a.begin : b.begin;
    size_t end = a.end < b.end ? a.end : b.end;
    return (hvdl_range){begin, end > begin ? end : begin};
}

/* Scatter: what a block holds of one source. */
typedef struct {
    const hvdl_source *source;
    size_t at, bytes; /* of the source */
    size_t staged; /* where it lies in the staging blocks of those that do not get it, in bytes */
    int next, getter; /* the loop's */
    size_t end;
} stretch;

/* The next stretch of block b, of any rank (local: -1) or one that gets it; all begin with {0}. */
static bool next_stretch(const hvdl_pass *pass, uint64_t b, int local, stretch *at)
{
    while (at->next < pass->num_sources) {
        int i = at->next++;
        const hvdl_source *source = &pass->sources[i];
        size_t begin = source_begin(pass, i, at->end), first = b * pass->unit;
        at->getter = getter_of(pass, i, at->getter);
        at->end = begin + source->bytes;
        hvdl_range part =
            both((hvdl_range){begin, at->end}, (hvdl_range){first, first + pass->unit});
        if (!hvdl_range_size(part) || (local >= 0 && local != source->local))
            continue;
        at->source = source;
        at->at = part.begin - begin;
        at->bytes = hvdl_range_size(part);
        at->staged = (size_t)at->getter * pass->unit + (part.begin - first);
        return true;
    }
    return false;
}

static size_t stretch_bytes(const hvdl_pass *pass, uint64_t b, int local)
{
    size_t bytes = 0;
    for (stretch part = {0}; next_stretch(pass, b, local, &part);)
        bytes += part.bytes;
    return bytes;
}

/* Parts: where in `from`'s staging block its part for `to` lies. */
static size_t slot_offset(const hvdl_pass *pass, int from, int to)
{
    return pass->num_slots > 1 ? (size_t)(to - (to > from)) * pass->unit : 0;
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

/* Bytes of a source, as bytes of the buffer. */
static hvdl_range in_buffer(const hvdl_source *source, hvdl_range part)
{
    return (hvdl_range){source->begin + part.begin, source->begin + part.end};
}

/* Gives a block of a share: the source's bytes `part`. What lies in no extent is left out of the staging block. */
static void give_of(hvdl_shm *shm, const hvdl_pass *pass, const hvdl_source *source,
                    hvdl_range part, char *staging, hvdl_timed *timed)
{
    if (!pass->extents.list) {
        hvdl_shm_copy_timed(shm, staging, source->from + part.begin, hvdl_range_size(part), false,
                            timed);
        return;
    }
    hvdl_range left = in_buffer(source, part);
    size_t begin = left.begin;
    for (hvdl_extent extent; hvdl_next_extent(pass->extents, &left, &extent);)
        hvdl_shm_copy_timed(shm, staging + (extent.bytes.begin - begin), extent.at,
                            hvdl_range_size(extent.bytes), false, timed);
}

/* Takes what this rank wants of a block of a share: the source's bytes `part`, which are at `at`. */
static void take_of(const hvdl_pass *pass, const hvdl_source *source, hvdl_range part,
                    const char *at)
{
    hvdl_range wanted = both(part, source->take);
    if (pass->extents.list) {
        hvdl_range left = in_buffer(source, wanted);
        size_t begin = source->begin + part.begin;
        for (hvdl_extent extent; hvdl_next_extent(pass->extents, &left, &extent);)
            memcpy(extent.at, at + (extent.bytes.begin - begin), hvdl_range_size(extent.bytes));
        return;
    }
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

/* The distance from where the sums of a source begin to those from byte `at` of it. */
static size_t sums_at(const hvdl_pass *pass, size_t at)
{
    if (!pass->partial_begins)
        return at;
    return at / hvdl_dtype_bytes((int)pass->dtype) * hvdl_dtype_bytes((int)pass->part_dtype);
}

/* Of this host's ranks, of which this one is alone or the others' elements begin at offset_bytes of their staging
 * blocks, to the partials that begin at `to`. */
static __attribute__((noinline)) void add_up_partials(hvdl_shm *shm, const hvdl_pass *pass,
                                                      uint64_t number, size_t offset_bytes,
                                                      size_t count, const char *own, char *to)
{
    const void *inputs[HVDL_MAX_LOCAL];
    uint8_t merges[HVDL_MAX_LOCAL];
    for (int p = 0; p < pass->num_partials; p++, to += pass->part_stride) {
        int begin = pass->partial_begins[p], end = pass->partial_begins[p + 1], num_inputs = 0;
        const bool *taking_part = pass->taking_part ? pass->taking_part + begin : NULL;
        for (int r = begin; r < end; r++)
            if (!taking_part || taking_part[r - begin])
                inputs[num_inputs++] =
                    r == shm->local_rank ? own : hvdl_staging(shm, r, number) + offset_bytes;
        hvdl_tree_merges(end - begin, taking_part, merges);
        if (num_inputs)
            hvdl_reduce_tree(pass->dtype, pass->part_dtype, pass->op, to, inputs, merges,
                             num_inputs, count, &pass->scale);
        else
            hvdl_fill_neutral(pass->part_dtype, pass->op, to, count);
    }
}

/* Copies what the other ranks add up. */
static void put_scattered(hvdl_shm *shm, const hvdl_pass *pass, uint64_t b, char *staging)
{
    size_t esize = hvdl_dtype_bytes((int)pass->dtype);
    for (stretch part = {0}; next_stretch(pass, b, -1, &part);) {
        const hvdl_source *source = part.source;
        if (staging && source->local == shm->local_rank)
            continue;
        char *to = staging ? staging + part.staged : source->to + sums_at(pass, part.at);
        if (!staging && pass->partial_begins && pass->part_dtype != pass->dtype)
            add_up_partials(shm, pass, 0, 0, part.bytes / esize, source->from + part.at, to);
        else
            put_elements(shm, pass, to, source->from + part.at, part.bytes / esize);
    }
}

static void put_parts(hvdl_shm *shm, const hvdl_pass *pass, uint64_t b, uint64_t number,
                      hvdl_timed *timed)
{
    for (int i = 0; i < pass->num_sources; i++) {
        const hvdl_source *part = &pass->sources[i];
        hvdl_range range = block_of(part->bytes, pass->unit, b);
        if (i == shm->local_rank || !hvdl_range_size(range))
            continue;
        char *staging = hvdl_staging(shm, shm->local_rank, number);
        hvdl_shm_copy_timed(shm, staging + slot_offset(pass, shm->local_rank, i),
                            part->from + range.begin, hvdl_range_size(range), false, timed);
    }
}

/* What a rank gives to itself. The others do not wait for it, so it follows what they wait for; and it
 * has just been read, if it is the same for all. */
static void keep_own(const hvdl_shm *shm, const hvdl_pass *pass, uint64_t b)
{
    for (int i = 0; i < pass->num_sources; i++) {
        const hvdl_source *source = &pass->sources[i];
        hvdl_range part = block_of(source->bytes, pass->unit, b);
        if (source->local != shm->local_rank || !hvdl_range_size(part))
            continue;
        if (pass->type == HVDL_PASS_SHARE && !pass->extents.list)
            take_of(pass, source, part, source->from + part.begin);
        else if (pass->type == HVDL_PASS_PARTS && source->to != source->from)
            memcpy(source->to + part.begin, source->from + part.begin, hvdl_range_size(part));
    }
}

/* Each rank begins with another one. */
static void take_parts(hvdl_shm *shm, const hvdl_pass *pass, uint64_t b, uint64_t number)
{
    int ranks = pass->num_sources;
    for (int i = 1; i < ranks; i++) {
        int from = (shm->local_rank + i) % ranks;
        const hvdl_source *part = &pass->sources[from];
        hvdl_range range = block_of(part->take.end, pass->unit, b);
        if (hvdl_range_size(range))
            memcpy(part->to + range.begin,
                   hvdl_staging(shm, from, number) + slot_offset(pass, from, shm->local_rank),
                   hvdl_range_size(range));
    }
}

static void put_in(hvdl_shm *shm, const hvdl_pass *pass, uint64_t b, uint64_t number,
                   hvdl_timed *timed)
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
        if (!alone && !pass->direct) /* only this rank needs it */
            left_out = block_slice(shm, pass, b, shm->local_rank);
        put_elements(shm, pass, to, from, left_out.begin);
        put_elements(shm, pass, to + left_out.end * esize, from + left_out.end * esize,
                     count - left_out.end);
        break;
    }
    case HVDL_PASS_SCATTER: put_scattered(shm, pass, b, staging); break;
    case HVDL_PASS_SHARE:
        for (int i = 0; i < pass->num_sources && !alone; i++) {
            const hvdl_source *source = &pass->sources[i];
            hvdl_range part = block_of(source->bytes, pass->unit, b);
            if (source->local == shm->local_rank && hvdl_range_size(part))
                give_of(shm, pass, source, part, staging, timed);
        }
        break;
    case HVDL_PASS_PARTS: put_parts(shm, pass, b, number, timed); break;
    }
}

/* Adds up `count` elements of all ranks into `to`: this rank's own, and those that begin at offset_bytes
 * of the others' staging blocks. */
static void add_up(hvdl_shm *shm, const hvdl_pass *pass, uint64_t number, size_t offset_bytes,
                   size_t count, const char *own, char *to)
{
    if (pass->partial_begins) {
        add_up_partials(shm, pass, number, offset_bytes, count, own, to);
        return;
    }
    const void *inputs[HVDL_MAX_LOCAL];
    double factors[HVDL_MAX_LOCAL];
    int num_inputs = 0;
    for (int r = 0; r < shm->local_size; r++)
        if (!pass->taking_part || pass->taking_part[r]) {
            factors[num_inputs] = pass->scale.factors ? pass->scale.factors[r] : 1.0;
            inputs[num_inputs++] =
                r == shm->local_rank ? own : hvdl_staging(shm, r, number) + offset_bytes;
        }
    bool for_others = to == hvdl_staging(shm, shm->local_rank, number) + offset_bytes;
    size_t esize = hvdl_dtype_bytes((int)pass->dtype), bytes = count * esize;
    hvdl_scale scale = pass->scale;
    if (scale.factors)
        scale.factors = factors;
    if (scale.num_first)
        scale = hvdl_scale_from(&scale, (size_t)(own - pass->scaled_from) / esize);
    (for_others && hvdl_goes_past_cache(shm, bytes) ? hvdl_reduce_past_cache : hvdl_reduce)(
        pass->dtype, pass->op, to, inputs, num_inputs, count, &scale);
}

static void reduce_block(hvdl_shm *shm, const hvdl_pass *pass, uint64_t b, uint64_t number)
{
    size_t esize = hvdl_dtype_bytes((int)pass->dtype);
    if (pass->type == HVDL_PASS_ALLREDUCE) {
        /* In place: nobody else reads this slice of this rank's staging block before it is summed. */
        hvdl_range slice = block_slice(shm, pass, b, shm->local_rank);
        size_t begin = block_of(pass->count, pass->unit, b).begin + slice.begin;
        add_up(shm, pass, number, slice.begin * esize, hvdl_range_size(slice),
               pass->in + begin * esize,
               hvdl_staging(shm, shm->local_rank, number) + slice.begin * esize);
        return;
    }
    for (stretch part = {0}; next_stretch(pass, b, shm->local_rank, &part);)
        add_up(shm, pass, number, part.staged, part.bytes / esize, part.source->from + part.at,
               part.source->to + sums_at(pass, part.at));
}

static void take_out(hvdl_shm *shm, const hvdl_pass *pass, uint64_t b, uint64_t number)
{
    size_t esize = hvdl_dtype_bytes((int)pass->dtype);
    switch (pass->type) {
    case HVDL_PASS_ALLREDUCE: {
        hvdl_range part = block_of(pass->count, pass->unit, b);
        if (!pass->out)
            break;
        char *to = pass->out + part.begin * esize;
        if (pass->direct) {
            add_up(shm, pass, number, 0, hvdl_range_size(part), pass->in + part.begin * esize, to);
            break;
        }
        for (int r = 0; r < shm->local_size; r++) {
            hvdl_range slice = block_slice(shm, pass, b, r);
            memcpy(to + slice.begin * esize, hvdl_staging(shm, r, number) + slice.begin * esize,
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
                take_of(pass, source, part, hvdl_staging(shm, source->local, number));
        }
        break;
    case HVDL_PASS_PARTS: take_parts(shm, pass, b, number); break;
    }
}

/* Scatter: does this rank add up anything? */
static bool gets_some(const hvdl_shm *shm, const hvdl_pass *pass)
{
    for (int i = 0; i < pass->num_sources; i++)
        if (pass->sources[i].local == shm->local_rank)
            return true;
    return false;
}

bool hvdl_pass_reduces(const hvdl_shm *shm, const hvdl_pass *pass)
{
    if (pass->type == HVDL_PASS_SCATTER)
        return gets_some(shm, pass);
    return pass->type == HVDL_PASS_ALLREDUCE && !pass->direct;
}

size_t hvdl_pass_summed_bytes(const hvdl_shm *shm, const hvdl_pass *pass, hvdl_stage stage,
                              size_t *own)
{
    uint64_t b = pass->at[stage];
    size_t esize = hvdl_dtype_bytes((int)pass->dtype), all;
    switch (pass->type) {
    case HVDL_PASS_ALLREDUCE:
        all = hvdl_range_size(block_of(pass->count, pass->unit, b)) * esize;
        *own = pass->direct ? all
                            : hvdl_range_size(block_slice(shm, pass, b, shm->local_rank)) * esize;
        return all;
    case HVDL_PASS_SCATTER:
        *own = stretch_bytes(pass, b, shm->local_rank);
        return stretch_bytes(pass, b, -1);
    default: *own = 0; return 0;
    }
}

void hvdl_pass_work(hvdl_shm *shm, const hvdl_pass *pass, hvdl_stage stage, uint64_t number,
                    hvdl_timed *timed)
{
    uint64_t b = pass->at[stage];
    if (stage == HVDL_STAGE_IN)
        put_in(shm, pass, b, number, timed);
    else if (stage == HVDL_STAGE_REDUCED && pass->type >= HVDL_PASS_SHARE)
        keep_own(shm, pass, b);
    else if (shm->local_size == 1)
        return;
    else if (stage == HVDL_STAGE_OUT)
        take_out(shm, pass, b, number);
    else if (pass->type == HVDL_PASS_ALLREDUCE ? !pass->direct : pass->type == HVDL_PASS_SCATTER)
        reduce_block(shm, pass, b, number);
}
