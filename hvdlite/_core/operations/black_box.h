/* The black box: the latest operations of this process, in memory that outlives it. The rank's keeper has that
 * memory, too, and reads it when the rank has ended, however it ended. See docs/design/black-box.md. */
#ifndef HVDL_BLACK_BOX_H
#define HVDL_BLACK_BOX_H

#include "engine/state.h"

/* memory: as the engine's configuration; NULL: none. */
hvdl_err hvdl_box_open(hvdl_black_box *box, hvdl_box_memory *memory);
void hvdl_box_free(hvdl_black_box *box);
/* A sweep begins: what was read of the clock is too old. */
static inline void hvdl_box_forget_time(hvdl_black_box *box)
{
    box->now_ns = 0;
}
/* One look at the clock per sweep: a time is too early by what the sweep has taken until then, which may be as long
 * as the reduction of a segment. */
static inline uint64_t hvdl_box_now(hvdl_black_box *box)
{
    if (!box->now_ns)
        box->now_ns = hvdl_now_ns();
    return box->now_ns;
}
void hvdl_box_write_posted(hvdl_engine *engine, hvdl_operation *operation);
void hvdl_box_write_state(hvdl_engine *engine, const hvdl_operation *operation, int state);
/* peer: a world rank. */
void hvdl_box_write_peer(hvdl_engine *engine, const hvdl_operation *operation, int peer);

#endif
