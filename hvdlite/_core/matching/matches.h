/* What the ranks of this host have posted under one key. The driver. */
#ifndef HVDL_MATCHES_H
#define HVDL_MATCHES_H

#include "engine/state.h"

/* One that collects; NULL: no memory. */
hvdl_match *hvdl_match_new(const hvdl_engine *engine, uint64_t id);
hvdl_match *hvdl_match_by_key(hvdl_engine *engine, hvdl_key key);
hvdl_match *hvdl_match_by_id(hvdl_engine *engine, uint64_t id);
void hvdl_match_free(hvdl_match *match);
void hvdl_matches_free(hvdl_engine *engine);
/* Have all ranks of this host posted, or joined? */
bool hvdl_match_complete(const hvdl_engine *engine, const hvdl_match *match);
/* A rank of this host that has not posted, or -1. */
int hvdl_match_absent(const hvdl_engine *engine, const hvdl_match *match);
/* Its operation on this rank ends. */
static inline void hvdl_match_leave(hvdl_matches *matches, hvdl_match *match)
{
    match->operation = NULL;
    if (match->collecting)
        return;
    hvdl_table_remove(&matches->by_id, &match->by_id);
    hvdl_match_free(match);
}

#endif
