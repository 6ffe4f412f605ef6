/* Operations whose data travels in the shared log. The driver. */
#ifndef HVDL_TINY_H
#define HVDL_TINY_H

#include "engine/state.h"

/* Keeps what a rank of this host posted with its operation, and has been counted in the match. own:
 * the operation of this rank, or NULL: of another one. The last one's data stays in the shared log, where
 * it is used before this entry has been read. */
hvdl_err hvdl_keep_payload(hvdl_engine *engine, hvdl_match *match, const hvdl_entry *entry,
                           const hvdl_operation *own, const hvdl_desc *desc, const void *payload,
                           size_t bytes);
/* What a local rank gave to a tiny operation, which is complete on this host and has not failed here. */
const char *hvdl_payload_of(const hvdl_engine *engine, const hvdl_match *match, int local,
                            size_t bytes);
/* The elements of a tiny result that this rank wants. */
hvdl_range hvdl_tiny_part(const hvdl_engine *engine, const hvdl_operation *operation);
/* Puts what `rank` gave to where it belongs in the result, which has a part of each. */
void hvdl_put_tiny_part(hvdl_operation *operation, int rank, const char *from, size_t bytes);
/* On one host: all the data is here. */
void hvdl_complete_tiny(hvdl_engine *engine, hvdl_match *match);

#endif
