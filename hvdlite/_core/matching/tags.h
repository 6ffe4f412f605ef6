/* The tags of exchanges between hosts. Their leaders' drivers. */
#ifndef HVDL_TAGS_H
#define HVDL_TAGS_H

#include "matching/messages.h"

/* The leader: the exchanges of an operation with this tag have ended on this host. */
void hvdl_control_tag_done(hvdl_engine *engine, int tag);
/* The first tag of a number that is free at this coordinator, or -1: then numbers come back as soon as
 * operations end. */
int hvdl_next_tag(hvdl_engine *engine, bool is_plan);
/* Whether one more plan leaves numbers to other operations; if not, the text for it. */
bool hvdl_has_tag_for_plan(const hvdl_engine *engine, char text[HVDL_TEXT_BYTES]);
/* That coordinator is short of numbers. */
void hvdl_on_short(hvdl_engine *engine, int host);
/* Divides this MPI's tags among the coordinators. */
hvdl_err hvdl_tags_make(hvdl_engine *engine);
void hvdl_tags_free(hvdl_tags *tags);
/* A host is done with a tag of this coordinator. */
void hvdl_on_done(hvdl_engine *engine, int number);
/* All hosts have freed the plan with this tag. */
void hvdl_on_free(hvdl_engine *engine, int tag);

#endif
