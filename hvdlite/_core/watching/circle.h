/* Circles: ranks that wait for each other, each in an operation that another one has not posted. */
#ifndef HVDL_CIRCLE_H
#define HVDL_CIRCLE_H

#include "engine/state.h"

/* The driver: looks now and then whether this rank is in a circle. */
void hvdl_circle_look(hvdl_engine *engine);
void hvdl_read_circle(hvdl_engine *engine, const hvdl_entry *entry);

#endif
