/* Sums of floats in the deterministic mode, along a tree over all ranks: base/sum_tree.h. The driver.
 *
 * On one host the passes add up along the tree. On several, phase A makes the partials of each rail's slice, and
 * the hosts exchange these. A host that has one, of the tensor's type, makes it where any other sum of the host is
 * made. Else it has memory of its own for those of the few pieces that are under way;
 * where each host has one rank, that is the whole tensor. */
#ifndef HVDL_PARTIALS_H
#define HVDL_PARTIALS_H

#include "engine/state.h"

bool hvdl_adds_along_tree(const hvdl_engine *engine, const hvdl_desc *desc);

/* Makes memory, if it is needed, for pieces of which this rail has up to so many elements. */
hvdl_err hvdl_partials_prepare(const hvdl_engine *engine, hvdl_operation *operation,
                               size_t most_elems, uint64_t num_pieces);

/* Where the host's first partial of what this rail has of a piece begins; `sums`: where its sums do. */
char *hvdl_partials_at(const hvdl_engine *engine, const hvdl_operation *operation, uint64_t piece,
                       char *sums);

/* Has the pass or the exchange take the tree's order, if the operation does. */
void hvdl_pass_along_tree(const hvdl_engine *engine, const hvdl_operation *operation,
                          hvdl_pass *pass);
void hvdl_exchange_along_tree(const hvdl_engine *engine, const hvdl_operation *operation,
                              uint64_t piece, hvdl_exchange_spec *spec);

/* Direct, or recursive doubling if that is chosen and adds in the same order. */
hvdl_algorithm hvdl_tree_algorithm(const hvdl_engine *engine, const hvdl_operation *operation,
                                   hvdl_algorithm chosen);

#endif
