/* The texts about sends and receives. */
#ifndef HVDL_TRANSFER_TEXTS_H
#define HVDL_TRANSFER_TEXTS_H

#include "engine/state.h"

/* "to rank 1 with tag 3": the name of its operation. peer: what texts call it; -1: any. */
void hvdl_name_transfer(bool is_send, int peer, int tag, char *to, size_t room);
/* The sides of this message have tensors of different sizes. The same on both ranks. */
void hvdl_describe_sizes(const hvdl_engine *engine, const hvdl_transfer *transfer, int sender,
                         int receiver, size_t sent_bytes, size_t received_bytes,
                         char text[HVDL_TEXT_BYTES]);
/* Nobody is left for it. */
void hvdl_describe_gone(const hvdl_engine *engine, const hvdl_transfer *transfer,
                        char text[HVDL_TEXT_BYTES]);
/* What hvdl_describe_timeout says of it. Any thread. */
void hvdl_describe_transfer_timeout(const hvdl_engine *engine, const hvdl_transfer *transfer,
                                    double seconds, char text[HVDL_TEXT_BYTES]);
/* It is matched, or its data moves: if it was reported as late, that is over. */
void hvdl_transfer_goes_on(hvdl_engine *engine, hvdl_transfer *transfer);

#endif
