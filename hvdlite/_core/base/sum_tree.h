/* The order in which the deterministic mode adds up floats: a tree over the ranks that depends on nothing but
 * their number. A tree of n > 1 ranks is that of the first p plus that of the others, where p is the largest
 * power of two below n:
 *
 *   n = 4: (0 + 1) + (2 + 3)    n = 6: ((0 + 1) + (2 + 3)) + (4 + 5)    n = 7: ... + ((4 + 5) + 6)
 *
 * A **partial** is the sum of a largest subtree whose ranks are all on one host. Hosts send each other partials,
 * so a host whose ranks are a subtree, such as ranks 16 to 23, sends one, as it would in any order; ranks
 * that alternate between hosts are partials of one rank each.
 *
 * A sum along a tree is written as its inputs in their order and `merges`: input k is put on a stack, then
 * merges[k] times the two uppermost entries are replaced by their sum. */
#ifndef HVDL_SUM_TREE_H
#define HVDL_SUM_TREE_H

#include "base/types.h"

#define HVDL_TREE_DEPTH 34 /* the most entries that the stack has, for any int of ranks */

typedef struct {
    int begin, end; /* ranks */
    int host;
} hvdl_partial;

typedef struct {
    hvdl_partial *partials; /* ascending */
    int num_partials;
    uint8_t *merges; /* of the partials */
    int *num_of;     /* by host: how many of them are its own */
    /* This host's ranks have ascending local ranks, so that each partial is of local ranks that follow each
     * other: by partial of this host its first one, and the end. */
    int *own_begins;
    bool combines; /* a partial, of any host, is of more than one rank */
} hvdl_sum_tree;

/* The merges of a tree of num_ranks ranks, without those that are not present (NULL: all are). Returns how many
 * inputs it has. */
int hvdl_tree_merges(int num_ranks, const bool *present, uint8_t *merges);

/* Whether the sums are formed one after the other, as without a tree. */
static inline bool hvdl_merges_are_chain(const uint8_t *merges, int num_inputs)
{
    for (int k = 1; k < num_inputs; k++)
        if (merges[k] != 1)
            return false;
    return true;
}

/* After a failure it must be freed, too. */
hvdl_err hvdl_sum_tree_make(hvdl_sum_tree *tree, const int *host_of, int num_ranks, int num_hosts,
                            int own_host);
void hvdl_sum_tree_free(hvdl_sum_tree *tree);

/* Whether recursive doubling between the hosts adds up the partials in the tree's order: each host has one, in
 * the order of the hosts, whose number is a power of two. */
bool hvdl_sum_tree_doubles(const hvdl_sum_tree *tree, int num_hosts);

#endif
