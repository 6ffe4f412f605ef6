/* What a coordinator asks the hosts about late operations. The driver; between hosts. Its messages: control.h. */
#ifndef HVDL_INQUIRIES_H
#define HVDL_INQUIRIES_H

#include "watching/stall.h"

typedef struct hvdl_inquiry hvdl_inquiry;

/* Written by inquiries.c. */
typedef struct {
    hvdl_inquiry *first;
    int num_asking; /* of these, under way */
} hvdl_inquiries;

/* Ends those that no host answers any more, and begins others. */
void hvdl_inquiries_look(hvdl_engine *engine, uint64_t now);
/* Nobody waits for it any more. goes_on: it is no error. */
void hvdl_inquiries_forget(hvdl_engine *engine, hvdl_key key, uint64_t run, bool goes_on);
/* Everything fails. */
void hvdl_inquiries_end(hvdl_engine *engine);

#endif
