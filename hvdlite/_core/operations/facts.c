/* What follows from an operation's descriptor and from where the ranks are. */
#define _GNU_SOURCE
#include "operations/facts.h"

#include <stdio.h>

#include "collectives/partials.h"
#include "engine/state.h"

/* Every rank of a host keeps tiny data of all of them, and between hosts that of all goes through one, its
 * coordinator: the more there are, the less each may have. */
#define HOST_BYTES 131072
#define COORDINATED_BYTES 65536
#define LEAST_INLINE_BYTES 4096

static size_t most_inline(const hvdl_engine *e)
{
    size_t share = HOST_BYTES / (size_t)e->placement.max_local_size;
    size_t between = COORDINATED_BYTES / (size_t)e->config.num_hosts;
    share = e->config.num_hosts > 1 && between < share ? between : share;
    share = share > LEAST_INLINE_BYTES ? share : LEAST_INLINE_BYTES;
    return share < e->config.inline_bytes ? share : e->config.inline_bytes;
}

/* Between hosts the parts of all travel with the answer. Where they differ in size none do. */
static bool is_tiny_of_parts(const hvdl_engine *e, const hvdl_desc *desc)
{
    size_t parts = e->config.num_hosts > 1 ? (size_t)e->config.num_ranks : 1;
    return !desc->layout && hvdl_desc_bytes(desc) <= most_inline(e) / parts;
}

bool hvdl_is_tiny(const hvdl_engine *e, const hvdl_desc *desc, bool is_run)
{
    uint8_t tiny = hvdl_facts_of(desc)->tiny;
    if (tiny == HVDL_TINY_ALWAYS || desc->place == HVDL_ORDERED)
        return true;
    if (tiny == HVDL_TINY_NEVER || desc->op == HVDL_ADASUM)
        return false;
    /* Between hosts a tiny operation costs a message to its coordinator and back; a plan's run does
     * without, since nothing is left to agree on. */
    if (is_run && e->config.num_hosts > 1)
        return desc->count == 0;
    if (hvdl_facts_of(desc)->result == HVDL_RESULT_PARTS)
        return is_tiny_of_parts(e, desc);
    /* A coordinator gets one sum of each host, which need not be a partial of the tree. */
    if (e->config.num_hosts > 1 && hvdl_facts_of(desc)->reduces && hvdl_adds_along_tree(e, desc))
        return desc->count == 0;
    return hvdl_desc_bytes(desc) <= most_inline(e);
}

hvdl_scale hvdl_last_scale(const hvdl_engine *e, const hvdl_desc *desc)
{
    hvdl_scale scale = HVDL_UNSCALED;
    scale.divisor = desc->op == HVDL_AVERAGE ? e->config.num_ranks : 1;
    scale.postscale = desc->postscale;
    return scale;
}

hvdl_scale hvdl_host_scale(const hvdl_engine *e, const hvdl_desc *desc)
{
    hvdl_scale scale = e->config.num_hosts > 1 ? HVDL_UNSCALED : hvdl_last_scale(e, desc);
    scale.prescale = desc->prescale;
    return scale;
}

hvdl_scale hvdl_weighted_scale(const hvdl_engine *e, const hvdl_operation *op)
{
    hvdl_scale scale = hvdl_host_scale(e, &op->desc);
    scale.num_first = op->num_weighted;
    scale.factors = op->factors;
    scale.first_postscale = scale.postscale * op->to_weighted;
    return scale;
}

size_t hvdl_data_bytes(const hvdl_desc *desc)
{
    bool moves = hvdl_moves_data(hvdl_facts_of(desc)) && desc->place != HVDL_ORDERED;
    return moves ? hvdl_desc_bytes(desc) : 0;
}

hvdl_key hvdl_make_key(int kind, const char *name)
{
    hvdl_key key = {0xcbf29ce484222325ull, 0x84222325cbf29ce4ull};
    uint64_t tag = (uint64_t)kind;
    key.lo ^= hvdl_mix(tag + 1);
    key.hi ^= hvdl_mix(tag + 0x9e3779b97f4a7c15ull);
    for (const unsigned char *c = (const unsigned char *)name; *c; c++) {
        key.lo = (key.lo ^ *c) * 0x100000001b3ull;
        key.hi = (key.hi ^ *c) * 0x9e3779b97f4a7c15ull;
        key.hi ^= key.hi >> 29;
    }
    return (hvdl_key){hvdl_mix(key.lo), hvdl_mix(key.hi)};
}

bool hvdl_can_be_joined(const hvdl_desc *desc)
{
    return hvdl_facts_of(desc)->joined_takes_part;
}

/* "allreduce and barrier": the kinds that callers post in which a rank that has joined takes part. */
static void put_kinds_of_joined(char *to, size_t room)
{
    size_t used = 0;
    int left = 0;
    for (int kind = 0; kind < HVDL_PLAN; kind++)
        left += hvdl_facts_of_kind(kind)->joined_takes_part;
    for (int kind = 0; kind < HVDL_PLAN && used < room; kind++)
        if (hvdl_facts_of_kind(kind)->joined_takes_part) {
            const char *after = --left > 1 ? ", " : left == 1 ? " and " : "";
            used += (size_t)snprintf(to + used, room - used, "%s%s", hvdl_kind_name(kind), after);
        }
}

void hvdl_describe_absent(const hvdl_engine *e, const hvdl_desc *desc, int rank,
                          char text[HVDL_TEXT_BYTES])
{
    char kinds[HVDL_NAME_BYTES];
    put_kinds_of_joined(kinds, sizeof kinds);
    snprintf(text, HVDL_TEXT_BYTES,
             HVDL_TITLE_HERE(
                 "%s") ": rank %d on %s has joined, and a joined rank takes part only in %s; call "
                       "join after the last other operation on every rank",
             hvdl_kind_name(desc->kind), hvdl_world_rank(e, rank), e->placement.name_of[rank],
             kinds);
}
