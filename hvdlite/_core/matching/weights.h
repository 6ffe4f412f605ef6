/* The weights of a plan's runs on one host: each rank's travels with its announcement. The driver. */
#ifndef HVDL_WEIGHTS_H
#define HVDL_WEIGHTS_H

#include "engine/state.h"

/* Puts the weight of a run into its RUN entry. */
void hvdl_weight_to_entry(const hvdl_weight *weight, hvdl_entry *run);
/* Keeps the one in this entry, if it has one. */
hvdl_err hvdl_keep_weight(const hvdl_engine *engine, hvdl_match *match, const hvdl_entry *entry);
/* All ranks of the host have posted the run, or joined: says how `operation`, this rank's part, is weighted. */
void hvdl_weigh(const hvdl_engine *engine, const hvdl_match *match, hvdl_operation *operation);

#endif
