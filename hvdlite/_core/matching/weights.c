#define _GNU_SOURCE
#include "matching/weights.h"

#include <stdlib.h>
#include <string.h>

#include "engine/state.h"

/* What the `rows` of a RUN entry say about its `arg`. */
enum { NO_WEIGHT, WEIGHT, WEIGHT_IN_INPUT };

void hvdl_weight_to_entry(const hvdl_weight *weight, hvdl_entry *run)
{
    run->rows = weight->is_in_input ? WEIGHT_IN_INPUT : WEIGHT;
    memcpy(&run->arg, &weight->value, sizeof run->arg);
}

/* By local rank the weights, then the factors of the ranks' input. */
hvdl_err hvdl_keep_weight(const hvdl_engine *e, hvdl_match *match, const hvdl_entry *entry)
{
    size_t ranks = (size_t)e->placement.local_size;
    if (entry->rows == NO_WEIGHT)
        return HVDL_OK;
    if (!match->weights)
        match->weights = calloc(2 * ranks, sizeof *match->weights);
    if (!match->weights)
        return HVDL_ENOMEM;
    double *weight = &match->weights[entry->from];
    memcpy(weight, &entry->arg, sizeof *weight);
    weight[ranks] = entry->rows == WEIGHT_IN_INPUT ? 1.0 : *weight;
    match->num_weights++;
    return HVDL_OK;
}

/* Added in the order of the ranks, which gives every one the same bits. Equal weights that are not in the
 * input yet are as good as 1.0 each, and then nothing is multiplied. */
void hvdl_weigh(const hvdl_engine *e, const hvdl_match *match, hvdl_operation *op)
{
    int ranks = e->placement.local_size;
    size_t num_weighted = match->plan->posting.num_weighted;
    const double *weights = match->weights, *factors = weights + ranks;
    double total = 0.0, first = -1.0;
    bool equal = true;
    if (!num_weighted || match->num_weights < match->posted)
        return;
    for (int r = 0; r < ranks; r++) {
        if (!match->posted_by[r])
            continue;
        first = first < 0.0 ? weights[r] : first;
        equal = equal && weights[r] == first && factors[r] == first;
        total += weights[r];
    }
    if (total == 0.0)
        return;
    op->to_weighted = e->config.num_ranks / (equal ? (double)match->posted : total);
    op->factors = equal ? NULL : factors;
    op->num_weighted = equal && op->to_weighted == 1.0 ? 0 : num_weighted;
}
