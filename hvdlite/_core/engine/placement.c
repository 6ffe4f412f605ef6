#define _GNU_SOURCE
#include "engine/placement.h"

#include <stdlib.h>
#include <string.h>

static void *copy_of(const void *from, size_t bytes)
{
    void *to = malloc(bytes ? bytes : 1);
    if (to)
        memcpy(to, from, bytes);
    return to;
}

static hvdl_err allocate(hvdl_placement *p, const hvdl_engine_config *config)
{
    size_t ranks = (size_t)config->num_ranks, hosts = (size_t)config->num_hosts;
    p->host_sizes = copy_of(config->host_sizes, hosts * sizeof(int));
    p->members = copy_of(config->members, ranks * sizeof(int));
    p->world_ranks = copy_of(config->world_ranks, ranks * sizeof(int));
    p->host_of = calloc(ranks, sizeof(int));
    p->local_of = calloc(ranks, sizeof(int));
    p->host_first = calloc(hosts, sizeof(int));
    p->name_of = calloc(ranks, sizeof *p->name_of);
    p->host_names = calloc(hosts, sizeof *p->host_names);
    p->rail_peers = calloc(hosts, sizeof(int));
    p->all_ranks = calloc(ranks, sizeof(int));
    return p->host_sizes && p->members && p->world_ranks && p->host_of && p->local_of &&
                   p->host_first && p->name_of && p->host_names && p->rail_peers && p->all_ranks
               ? HVDL_OK
               : HVDL_ENOMEM;
}

hvdl_err hvdl_placement_make(hvdl_placement *p, hvdl_engine_config *config)
{
    const char *const *host_names = config->host_names;
    hvdl_err err = allocate(p, config);
    if (err)
        return err;
    config->host_sizes = p->host_sizes;
    config->members = p->members;
    config->world_ranks = p->world_ranks;
    config->host_names = (const char *const *)p->host_names;
    p->naming = (hvdl_naming){p->world_ranks, p->name_of};
    for (int rank = 0; rank < config->num_ranks; rank++)
        p->all_ranks[rank] = rank;
    p->num_rails = config->num_ranks;
    for (int h = 0, first = 0; h < config->num_hosts; first += p->host_sizes[h++]) {
        int size = p->host_sizes[h];
        p->host_first[h] = first;
        p->host_names[h] = strdup(host_names[h]);
        if (!p->host_names[h])
            return HVDL_ENOMEM;
        p->num_rails = size < p->num_rails ? size : p->num_rails;
        p->max_local_size = size > p->max_local_size ? size : p->max_local_size;
        for (int local = 0; local < size; local++) {
            int rank = p->members[first + local];
            p->host_of[rank] = h;
            p->local_of[rank] = local;
            p->name_of[rank] = p->host_names[h];
        }
    }
    p->host = p->host_of[config->rank];
    p->local = p->local_of[config->rank];
    p->local_size = p->host_sizes[p->host];
    p->is_leader = p->local == 0;
    for (int h = 0; h < config->num_hosts && p->local < p->num_rails; h++)
        p->rail_peers[h] = hvdl_member_of_host(p, h, p->local);
    if (!config->deterministic)
        return HVDL_OK;
    return hvdl_sum_tree_make(&p->tree, p->host_of, config->num_ranks, config->num_hosts, p->host);
}

void hvdl_placement_free(hvdl_placement *p, int num_hosts)
{
    for (int h = 0; p->host_names && h < num_hosts; h++)
        free(p->host_names[h]);
    free(p->host_names);
    free(p->name_of);
    free(p->host_sizes);
    free(p->members);
    free(p->world_ranks);
    free(p->host_of);
    free(p->local_of);
    free(p->host_first);
    free(p->rail_peers);
    free(p->all_ranks);
    hvdl_sum_tree_free(&p->tree);
}
