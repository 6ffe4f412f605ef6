/* Whether another host could have sent a message. */
#ifndef HVDL_SOUNDNESS_H
#define HVDL_SOUNDNESS_H

#include "matching/messages.h"

/* Whether a message of which the fixed part has been read lies before `end` as it says, from `at` on. */
bool hvdl_message_fits(const hvdl_message *message, const char *at, const char *end);
/* Whether the host could have sent it. */
bool hvdl_message_is_sound(const hvdl_engine *engine, int host, const hvdl_message *message,
                           const char *payload);

#endif
