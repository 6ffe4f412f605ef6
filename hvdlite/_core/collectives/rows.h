/* Where the members' parts of a result lie, which may differ in size. The driver. */
#ifndef HVDL_ROWS_H
#define HVDL_ROWS_H

#include "engine/state.h"

/* Memory for a result that is not, or not at once, the caller's. */
hvdl_err hvdl_new_work(hvdl_operation *operation, size_t bytes);
/* Whether one rank sends another more or less elements than that expects, and the text about the first such
 * two. rows: the splits of all members, in the order of `members`. site: of the lowest rank, or empty. */
bool hvdl_splits_differ(const hvdl_engine *engine, const int64_t *rows, const char *site,
                        char text[HVDL_TEXT_BYTES]);

#endif
