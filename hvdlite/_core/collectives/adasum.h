/* Adasum, as operations of the engine's own. The driver. */
#ifndef HVDL_ADASUM_H
#define HVDL_ADASUM_H

#include "engine/state.h"

/* A later step is over; text NULL: well. */
hvdl_err hvdl_adasum_child_done(hvdl_engine *engine, hvdl_operation *operation,
                                hvdl_operation *child, const char *text);

#endif
