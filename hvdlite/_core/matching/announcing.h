/* What this rank appends to the shared log. The driver. */
#ifndef HVDL_ANNOUNCING_H
#define HVDL_ANNOUNCING_H

#include "engine/state.h"

/* A POST entry's body; the site follows, padded, then tiny data. */
typedef struct {
    hvdl_key key;
    hvdl_desc desc;
} hvdl_post_body;

/* A POST entry's arg: whether the operation is the engine's own, and the bytes of its site. */
static inline uint64_t hvdl_post_arg(bool internal, size_t site_bytes)
{
    return (uint64_t)internal | site_bytes << 1;
}

static inline bool hvdl_post_is_internal(const hvdl_entry *post)
{
    return post->arg & 1;
}

static inline size_t hvdl_post_site_bytes(const hvdl_entry *post)
{
    return (size_t)(post->arg >> 1);
}

/* So that the tiny data is aligned. */
static inline size_t hvdl_padded_site_bytes(size_t site_bytes)
{
    return (site_bytes + 7) / 8 * 8;
}

/* Appends to the shared log now or, in order, later. */
void hvdl_announce(hvdl_engine *engine, hvdl_entry head, const void *body, size_t bytes);
void hvdl_announce_join(hvdl_engine *engine, hvdl_operation *join);
void hvdl_announce_run(hvdl_engine *engine, hvdl_operation *run);
/* An operation that is matched by its key. */
void hvdl_announce_post(hvdl_engine *engine, hvdl_operation *operation);
/* A rank of another host has left. */
void hvdl_announce_leave(hvdl_engine *engine, int rank, bool clean);
/* Returns whether it did anything. */
bool hvdl_append_deferred(hvdl_engine *engine);

/* The operation of this rank whose POST entry is read now. NULL: it has failed. */
hvdl_operation *hvdl_next_announced(hvdl_engine *engine);
/* Everything fails. */
void hvdl_forget_announced(hvdl_engine *engine);
void hvdl_announcing_free(hvdl_engine *engine);

#endif
