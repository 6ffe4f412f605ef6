/* What happens below, told to the parts above. */
#ifndef HVDL_CALLBACKS_H
#define HVDL_CALLBACKS_H

#include "engine/state.h"

extern const hvdl_callbacks hvdl_engine_callbacks;

#endif
