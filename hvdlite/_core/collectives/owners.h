/* Owners: every element of a buffer belongs to one rank. A plan that reduces to the owners is the first half
 * of an allreduce: each rank gets the sums of the elements that it owns, with the bits that the allreduce
 * gives. A plan that unites is the second half: what each rank owns reaches all.
 *
 * Who owns what is a pure function of the placement, the knobs and the number and type of the elements:
 *
 *   one host        rank r of n owns slice r of n of the buffer: one range, which begins at a cache line.
 *   several hosts   each piece is cut as the allreduce cuts it: into a slice for each rail, and that into a
 *                   chunk for each host. The chunk whose sum the ring's first half completes on host h, which
 *                   is chunk h + 1, belongs to the ranks of host h that this rail serves: the rail itself
 *                   and, where a host has more ranks than rails, those that come a whole number of rails
 *                   later. They have equal parts of it.
 *   on each host    so, too, but there are no chunks: on each host its ranks own everything.
 *
 * So hosts own equal parts, also where they have different numbers of ranks: the ring's sums depend on
 * where the chunks begin. `desc->cut_as` is the type whose cut counts: a buffer of parameters is cut as that of
 * the gradients, which may travel as another type. */
#ifndef HVDL_OWNERS_H
#define HVDL_OWNERS_H

#include "engine/state.h"

/* Of a buffer, which may have 0 elements. hvdl_engine_owned (engine.h) says what a member owns of all. */
uint64_t hvdl_owned_pieces(const hvdl_engine *engine, const hvdl_desc *desc);
/* What a member owns of a piece: elements of the buffer. Later pieces lie behind earlier ones. */
hvdl_range hvdl_owned(const hvdl_engine *engine, const hvdl_desc *desc, uint64_t piece, int member);

#endif
