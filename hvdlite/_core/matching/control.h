/* Messages between the leaders of the hosts: they are received, and handed to the parts that they concern. */
#ifndef HVDL_CONTROL_H
#define HVDL_CONTROL_H

#include "matching/messages.h"

hvdl_err hvdl_control_create(hvdl_engine *engine);
/* Moves messages. *progressed is set, never cleared. */
void hvdl_control_step(hvdl_engine *engine, bool *progressed);
void hvdl_control_destroy(hvdl_engine *engine);

#endif
