#define _GNU_SOURCE
#include "matching/matches.h"

#include "engine/state.h"

hvdl_match *hvdl_match_by_key(hvdl_engine *e, hvdl_key key)
{
    hvdl_node *node = hvdl_table_first(&e->matches.by_key, key.lo);
    for (; node; node = hvdl_table_next(node->next, key.lo)) {
        hvdl_match *match = HVDL_CONTAINER(node, hvdl_match, by_key);
        if (hvdl_key_equal(match->key, key))
            return match;
    }
    return NULL;
}

hvdl_match *hvdl_match_by_id(hvdl_engine *e, uint64_t id)
{
    hvdl_node *node = hvdl_table_first(&e->matches.by_id, id);
    return node ? HVDL_CONTAINER(node, hvdl_match, by_id) : NULL;
}

void hvdl_match_free(hvdl_match *match)
{
    free(match->payloads);
    free(match->rows);
    free(match->weights);
    free(match);
}

void hvdl_matches_free(hvdl_engine *e)
{
    for (size_t i = 0; i < e->matches.by_key.num_slots; i++)
        for (hvdl_node *node = e->matches.by_key.slots[i], *next; node; node = next) {
            next = node->next;
            hvdl_match_free(HVDL_CONTAINER(node, hvdl_match, by_key));
        }
    free(e->matches.by_key.slots);
    free(e->matches.by_id.slots);
}

hvdl_match *hvdl_match_new(const hvdl_engine *e, uint64_t id)
{
    size_t ranks = (size_t)e->placement.local_size;
    hvdl_match *match = calloc(1, sizeof *match + ranks * sizeof *match->posted_by);
    if (match) {
        match->id = id;
        match->collecting = true;
        match->coordinator = -1;
    }
    return match;
}

bool hvdl_match_complete(const hvdl_engine *e, const hvdl_match *match)
{
    if (match->posted == e->placement.local_size || match->internal || !e->join.num_joined)
        return match->posted == e->placement.local_size;
    int missing = 0;
    for (int r = 0; r < e->placement.local_size; r++)
        missing += !match->posted_by[r] && !e->join.joined[r];
    return match->posted > 0 && !missing;
}

int hvdl_match_absent(const hvdl_engine *e, const hvdl_match *match)
{
    for (int r = 0; r < e->placement.local_size; r++)
        if (!match->posted_by[r])
            return hvdl_rank_of_local(e, r);
    return -1;
}
