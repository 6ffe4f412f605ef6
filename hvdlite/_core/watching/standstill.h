/* Operations that all ranks have posted and that stand still: their data does not move. The driver. */
#ifndef HVDL_STANDSTILL_H
#define HVDL_STANDSTILL_H

#include "matching/messages.h"

/* Looks now and then whether the operations move. */
void hvdl_standstill_look(hvdl_engine *engine);
void hvdl_standstill_free(hvdl_engine *engine);

/* Breaks the engine with the text with which this host's ranks fail. */
void hvdl_take_verdict(hvdl_engine *engine);
#define hvdl_heed_verdict(engine)                                                                  \
    do {                                                                                           \
        if (atomic_load_explicit(&(engine)->shm.control->verdict, memory_order_relaxed))           \
            hvdl_take_verdict(engine);                                                             \
    } while (0)

/* ---- messages ---- */

void hvdl_on_stands(hvdl_engine *engine, const hvdl_message *message, const void *payload);
void hvdl_on_standing(hvdl_engine *engine, const hvdl_message *message, const void *payload);
void hvdl_on_stood(hvdl_engine *engine, const char *text);

#endif
