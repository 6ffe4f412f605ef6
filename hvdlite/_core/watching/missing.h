/* Which ranks of this host keep an operation back, as its shared log and its memory show. The driver. */
#ifndef HVDL_MISSING_H
#define HVDL_MISSING_H

#include "watching/missing_query.h"

/* Notes what each rank of this host last did, and reads the shared log as far as it went at that time: so no report
 * calls a rank missing that is in the operation, or has ended it. Operations may end. */
void hvdl_survey(hvdl_engine *engine);
/* As of the last survey. Fills in the rest. presence: by local rank. */
void hvdl_describe_missing(hvdl_engine *engine, const hvdl_question *asked, hvdl_answer *to,
                           uint8_t *presence);
/* How long a rank of this host has not looked, if it is too long; else 0. */
uint64_t hvdl_quiet_ns(const hvdl_engine *engine, int local);
/* It is known here that all ranks have posted it. */
bool hvdl_is_agreed(const hvdl_engine *engine, const hvdl_match *match);
/* A plan's runs go through all hosts without an agreement: what counts is their number. */
uint64_t hvdl_run_of(const hvdl_operation *operation);

#endif
