#include "base/sum_tree.h"

#include <stdlib.h>
#include <string.h>

/* Of more than one. */
static int largest_power_below(int num_ranks)
{
    int power = 1;
    while (power < num_ranks - power)
        power *= 2;
    return power;
}

/* ---- one tree ---- */

/* Adds the inputs of the subtree of ranks begin to end, after the first num_inputs ones. */
static int put_merges(int begin, int end, const bool *present, uint8_t *merges, int num_inputs)
{
    if (end - begin == 1) {
        if (present && !present[begin])
            return num_inputs;
        merges[num_inputs] = 0;
        return num_inputs + 1;
    }
    int middle = begin + largest_power_below(end - begin);
    int after_left = put_merges(begin, middle, present, merges, num_inputs);
    int after_right = put_merges(middle, end, present, merges, after_left);
    if (after_left > num_inputs && after_right > after_left)
        merges[after_right - 1]++;
    return after_right;
}

int hvdl_tree_merges(int num_ranks, const bool *present, uint8_t *merges)
{
    return put_merges(0, num_ranks, present, merges, 0);
}

/* ---- partials ---- */

static bool on_one_host(const int *host_of, int begin, int end)
{
    for (int rank = begin + 1; rank < end; rank++)
        if (host_of[rank] != host_of[begin])
            return false;
    return true;
}

static void put_partials(hvdl_sum_tree *tree, const int *host_of, int begin, int end)
{
    if (on_one_host(host_of, begin, end)) {
        tree->merges[tree->num_partials] = 0;
        tree->partials[tree->num_partials++] = (hvdl_partial){begin, end, host_of[begin]};
        tree->num_of[host_of[begin]]++;
        tree->combines |= end - begin > 1;
        return;
    }
    int middle = begin + largest_power_below(end - begin);
    put_partials(tree, host_of, begin, middle);
    put_partials(tree, host_of, middle, end);
    tree->merges[tree->num_partials - 1]++;
}

hvdl_err hvdl_sum_tree_make(hvdl_sum_tree *tree, const int *host_of, int num_ranks, int num_hosts,
                            int own_host)
{
    size_t ranks = (size_t)num_ranks;
    memset(tree, 0, sizeof *tree);
    tree->partials = calloc(ranks, sizeof *tree->partials);
    tree->merges = calloc(ranks, sizeof *tree->merges);
    tree->num_of = calloc((size_t)num_hosts, sizeof *tree->num_of);
    tree->own_begins = calloc(ranks + 1, sizeof *tree->own_begins);
    if (!tree->partials || !tree->merges || !tree->num_of || !tree->own_begins)
        return HVDL_ENOMEM;
    put_partials(tree, host_of, 0, num_ranks);
    int own = 0;
    for (int p = 0; p < tree->num_partials; p++) {
        const hvdl_partial *partial = &tree->partials[p];
        if (partial->host != own_host)
            continue;
        tree->own_begins[own + 1] = tree->own_begins[own] + partial->end - partial->begin;
        own++;
    }
    return HVDL_OK;
}

void hvdl_sum_tree_free(hvdl_sum_tree *tree)
{
    free(tree->partials);
    free(tree->merges);
    free(tree->num_of);
    free(tree->own_begins);
}

bool hvdl_sum_tree_doubles(const hvdl_sum_tree *tree, int num_hosts)
{
    if (tree->num_partials != num_hosts || (num_hosts & (num_hosts - 1)) != 0)
        return false;
    for (int p = 0; p < num_hosts; p++)
        if (tree->partials[p].host != p || tree->merges[p] != __builtin_ctz((unsigned)p + 1))
            return false;
    return true;
}
