/* Adasum: gradients are added where they are orthogonal and averaged where they are parallel
 * (Maleki et al., "Scaling Distributed Training with Adaptive Summation", MLSys 2021):
 *
 *   adasum(a, b) = (1 - a.b / 2|a|^2) a + (1 - a.b / 2|b|^2) b,   a + b where a norm is 0
 *
 * over n members along a tree: with p the largest power of two <= n, member r >= p is first combined
 * into r - p; then pairs at distance 1, 2, 4, ...
 *
 * The dot products are over whole tensors. So that no rank needs all of all n tensors:
 *
 *   1. every member gets its slice (1/n) of all tensors: an alltoall        (the operation itself)
 *   2. per level of the tree, the slices' dot products of all its pairs are added up over the members
 *      (a tiny allreduce in float64), and every member combines its slices
 *   3. the slices of the result are gathered                                (an allgather)
 *
 * which moves as many bytes as an allreduce. Steps 2 and 3 are operations of the engine's own, the
 * **children** of the operation. They are matched by its key. All sums are formed in float64. Scale
 * factors act as everywhere (reduce.h), before and after that. */
#define _GNU_SOURCE
#include "collectives/adasum.h"

#include <stdlib.h>
#include <string.h>

#include "base/sizes.h"
#include "collectives/phases.h"
#include "engine/state.h"
#include "kernels/reduce.h"
#include "operations/operations.h"

#define MAX_LEVELS 32

/* ---- the tree ---- */

static int power_below(int ranks)
{
    int power = 1;
    while (2 * power <= ranks)
        power *= 2;
    return power;
}

/* Level 0 folds the members from p on; level l > 0 combines at distance 2^(l-1). The members of pair
 * `pair`; false: there are no more. */
static bool pair_of(int ranks, int level, int pair, int *a, int *b)
{
    int power = power_below(ranks), distance = level ? 1 << (level - 1) : power;
    *a = level ? 2 * distance * pair : pair;
    *b = *a + distance;
    return level ? *b < power : *b < ranks;
}

static int num_pairs(int ranks, int level)
{
    int pairs = 0, a, b;
    while (pair_of(ranks, level, pairs, &a, &b))
        pairs++;
    return pairs;
}

static int num_levels(int ranks)
{
    int levels = 1;
    for (int power = power_below(ranks); power > 1; power /= 2)
        levels++;
    return levels;
}

static void put_dots(hvdl_adasum *adasum, int ranks)
{
    int a, b;
    for (int pair = 0; pair_of(ranks, adasum->level, pair, &a, &b); pair++) {
        const double *x = adasum->slices + (size_t)a * adasum->elems;
        const double *y = adasum->slices + (size_t)b * adasum->elems;
        double xy = 0, xx = 0, yy = 0;
        for (size_t i = 0; i < adasum->elems; i++) {
            xy += x[i] * y[i];
            xx += x[i] * x[i];
            yy += y[i] * y[i];
        }
        memcpy(adasum->dots + 3 * pair, (double[]){xy, xx, yy}, 3 * sizeof(double));
    }
}

/* The dots are complete: each pair becomes one, in the place of its first member. */
static void combine_pairs(hvdl_adasum *adasum, int ranks)
{
    int a, b;
    for (int pair = 0; pair_of(ranks, adasum->level, pair, &a, &b); pair++) {
        double *x = adasum->slices + (size_t)a * adasum->elems;
        const double *y = adasum->slices + (size_t)b * adasum->elems;
        const double *dots = adasum->dots + 3 * pair;
        bool plain = dots[1] == 0.0 || dots[2] == 0.0;
        double wx = plain ? 1.0 : 1.0 - dots[0] / (2.0 * dots[1]);
        double wy = plain ? 1.0 : 1.0 - dots[0] / (2.0 * dots[2]);
        for (size_t i = 0; i < adasum->elems; i++)
            x[i] = wx * x[i] + wy * y[i];
    }
}

/* ---- the steps ---- */

static hvdl_range slice_of(const hvdl_engine *e, const hvdl_operation *op, int rank)
{
    return hvdl_part((size_t)op->desc.count, (size_t)e->config.num_ranks, (size_t)rank, 1);
}

/* Step 1 is an alltoall of elements. */
static hvdl_err prepare(const hvdl_engine *e, hvdl_operation *op, const int64_t *posted)
{
    (void)posted; /* all ranks have tensors of the same size */
    size_t ranks = (size_t)e->config.num_ranks, locals = (size_t)e->placement.local_size;
    int64_t *rows = hvdl_new_array(ranks * locals, sizeof *rows);
    op->splits = malloc(ranks * sizeof *op->splits);
    if (!rows || !op->splits) {
        free(rows);
        return HVDL_ENOMEM;
    }
    for (int rank = 0; rank < (int)ranks; rank++)
        op->splits[rank] = (int64_t)hvdl_range_size(slice_of(e, op, rank));
    for (size_t i = 0; i < ranks; i++)
        for (size_t local = 0; local < locals; local++)
            rows[i * locals + local] = op->splits[hvdl_rank_of_local(e, (int)local)];
    hvdl_err err = hvdl_alltoall_prepare(e, op, rows);
    free(rows);
    return err;
}

static hvdl_err post_dots(hvdl_engine *e, hvdl_operation *op)
{
    hvdl_adasum *adasum = op->adasum;
    int pairs = num_pairs(e->config.num_ranks, adasum->level);
    put_dots(adasum, e->config.num_ranks);
    hvdl_posting dots = {
        .name = op->name, .words = op->words, .input = adasum->dots, .output = adasum->dots};
    dots.desc = (hvdl_desc){.kind = HVDL_ALLREDUCE, .dtype = HVDL_FLOAT64, .op = HVDL_SUM};
    dots.desc.root = -1;
    dots.desc.prescale = dots.desc.postscale = 1.0;
    dots.desc.ndim = 1;
    dots.desc.dims[0] = dots.desc.count = 3 * pairs;
    return hvdl_post_child(e, op, &dots, adasum->level);
}

static hvdl_err post_result(hvdl_engine *e, hvdl_operation *op)
{
    hvdl_adasum *adasum = op->adasum;
    hvdl_from_doubles(op->desc.dtype, adasum->result, adasum->slices, adasum->elems,
                      op->desc.postscale);
    hvdl_posting slices = {.name = op->name, .words = op->words, .input = adasum->result};
    slices.desc = (hvdl_desc){.kind = HVDL_ALLGATHER, .dtype = op->desc.dtype, .op = HVDL_SUM};
    slices.desc.root = -1;
    slices.desc.prescale = slices.desc.postscale = 1.0;
    slices.desc.ndim = 1;
    slices.desc.count = 1;
    slices.desc.dims[0] = -1;
    slices.rows = (int64_t)adasum->elems;
    return hvdl_post_child(e, op, &slices, MAX_LEVELS);
}

/* Posts the dot products of the next level that has pairs, or the result. */
static hvdl_err next_level(hvdl_engine *e, hvdl_operation *op)
{
    hvdl_adasum *adasum = op->adasum;
    while (adasum->level < adasum->num_levels && !num_pairs(e->config.num_ranks, adasum->level))
        adasum->level++;
    return adasum->level < adasum->num_levels ? post_dots(e, op) : post_result(e, op);
}

/* Step 1 is over. */
static hvdl_err begin(hvdl_engine *e, hvdl_operation *op)
{
    size_t ranks = (size_t)e->config.num_ranks;
    hvdl_adasum *adasum = op->adasum = calloc(1, sizeof *adasum);
    size_t elems = hvdl_range_size(slice_of(e, op, e->config.rank));
    if (adasum) {
        adasum->elems = elems;
        adasum->num_levels = num_levels((int)ranks);
        adasum->slices = hvdl_new_array(ranks * elems, sizeof(double));
        adasum->dots = malloc(3 * ranks * sizeof(double));
        adasum->result = malloc(elems * hvdl_dtype_bytes(op->desc.dtype) + 1);
    }
    if (!adasum || !adasum->slices || !adasum->dots || !adasum->result)
        return HVDL_ENOMEM;
    hvdl_to_doubles(op->desc.dtype, adasum->slices, op->work, ranks * elems, op->desc.prescale);
    free(op->work);
    op->work = NULL;
    return next_level(e, op);
}

hvdl_err hvdl_adasum_child_done(hvdl_engine *e, hvdl_operation *op, hvdl_operation *child,
                                const char *text)
{
    hvdl_adasum *adasum = op->adasum;
    op->child = NULL;
    if (text) {
        /* MPI may still read what it sends. */
        child->adasum = op->adasum;
        op->adasum = NULL;
        hvdl_finish(e, op, text);
        return HVDL_OK;
    }
    if (child->desc.kind == HVDL_ALLREDUCE) {
        combine_pairs(adasum, e->config.num_ranks);
        adasum->level++;
        return next_level(e, op);
    }
    if (hvdl_desc_bytes(&op->desc))
        memcpy(op->output, child->work, hvdl_desc_bytes(&op->desc));
    hvdl_finish(e, op, NULL);
    return HVDL_OK;
}

const hvdl_collective hvdl_collective_adasum = {
    .prepare = prepare,
    .count_pieces = hvdl_alltoall_count_pieces,
    .has_exchange = hvdl_alltoall_has_exchange,
    .has_pass = hvdl_alltoall_has_pass,
    .make_pass = hvdl_alltoall_make_pass,
    .describe_exchange = hvdl_alltoall_describe_exchange,
    .settle = begin,
    .every_rank_exchanges = true,
    .rows_are_elems = true,
};
