/* Where the ranks are: hosts, their ranks, and the rails. Constant once the engine is made. */
#ifndef HVDL_PLACEMENT_H
#define HVDL_PLACEMENT_H

#include "base/descriptors.h"
#include "engine/engine.h"

/* Written by placement.c, when the engine is made. */
typedef struct {
    int *host_sizes, *members, *world_ranks;
    int *host_of, *local_of; /* by rank */
    int *host_first;         /* index in members of each host's first */
    const char **name_of;    /* host name, by rank */
    hvdl_naming naming;      /* of world_ranks and name_of */
    char **host_names;
    int host, local, local_size, num_rails;
    int max_local_size;
    int *all_ranks;     /* 0, 1, 2, ... */
    int *rail_peers;    /* rank of this rank's rail on each host; NULL if it is not a rail */
    bool is_leader;     /* of its host: speaks for it with the other hosts */
    hvdl_sum_tree tree; /* of the deterministic mode; else empty */
} hvdl_placement;

/* Fills it from the configuration, whose arrays become copies that the placement owns. After a failure it
 * must be freed, too. */
hvdl_err hvdl_placement_make(hvdl_placement *placement, hvdl_engine_config *config);
void hvdl_placement_free(hvdl_placement *placement, int num_hosts);

static inline int hvdl_member_of_host(const hvdl_placement *placement, int host, int local)
{
    return placement->members[placement->host_first[host] + local];
}

#endif
