/* Messages between the leaders of the hosts: how they are sent. control.c receives them. */
#ifndef HVDL_MESSAGES_H
#define HVDL_MESSAGES_H

#include "engine/state.h"

enum {
    HVDL_MSG_POSTED,
    HVDL_MSG_START,
    HVDL_MSG_RESULT,
    HVDL_MSG_FAILED,
    HVDL_MSG_DONE,
    HVDL_MSG_LEFT,
    HVDL_MSG_ORDER,
    HVDL_MSG_SEQUENCE,
    HVDL_MSG_HOST_JOINED,
    HVDL_MSG_ALL_JOINED,
    HVDL_MSG_ZERO,
    HVDL_MSG_RUN,
    HVDL_MSG_RUNS,
    HVDL_MSG_GIVE_UP,
    HVDL_MSG_MISSING_QUERY,
    HVDL_MSG_MISSING_ANSWER,
    HVDL_MSG_FREE,
    HVDL_MSG_SHORT
};

typedef struct {
    int32_t type, host; /* of the sender */
    hvdl_key key;
    int32_t tag; /* START; SEQUENCE: the number */
    int32_t rank,
        clean; /* LEFT; rank: HOST_JOINED, ALL_JOINED, too, and of POSTED a rank that has joined */
    int16_t internal;    /* POSTED: of the engine's own operations */
    uint16_t site_bytes; /* of the last variant's site, with its NUL, that travel */
    uint64_t epoch;      /* POSTED */
    uint64_t clock;      /* the sender's, see hvdl_host_joins.clock */
    uint64_t run;        /* RUN: its number; RUNS: how many there are */
    int32_t num_done, done[HVDL_MAX_DONE];
    uint32_t payload_bytes;
    hvdl_variants variants; /* POSTED; the last, as only those that are there travel */
} hvdl_message;

/* Of the message without its payload, as it travels: with the bytes that are used of the last site, as most
 * messages that have variants have one. */
static inline size_t hvdl_message_bytes(const hvdl_message *message)
{
    size_t fixed = offsetof(hvdl_message, variants.variants);
    size_t count = (size_t)message->variants.count;
    if (!count)
        return fixed;
    return fixed + (count - 1) * sizeof(hvdl_variant) + offsetof(hvdl_variant, site) +
           message->site_bytes;
}

static inline size_t hvdl_padded(size_t bytes)
{
    return (bytes + 7) / 8 * 8;
}

static inline int hvdl_leader_of(const hvdl_engine *engine, int host)
{
    return engine->placement.members[engine->placement.host_first[host]];
}

/* The host whose leader is the coordinator of what has this key. */
static inline int hvdl_coordinator_of(const hvdl_engine *engine, hvdl_key key)
{
    return (int)(key.hi % (uint64_t)engine->control->tags.num_coordinators);
}

/* To another host's leader, with the next packet. Fills in the sender and what the receiver should know
 * anyway. */
void hvdl_send_message(hvdl_engine *engine, int host, hvdl_message *message, const void *payload,
                       size_t payload_bytes);
/* Whether sends are under way. */
bool hvdl_control_busy(const hvdl_engine *engine);
/* Sends what has been said since the last time: many small messages go out as one. */
void hvdl_control_flush(hvdl_engine *engine);
/* Tells the other hosts that a rank of this one leaves; on its leader. After its own leave it says
 * nothing more. */
void hvdl_control_leave(hvdl_engine *engine, int rank, bool clean);
/* The leader, when a rank of another host has left: has this host begun a run that the other one never
 * will? */
bool hvdl_control_run_is_lost(const hvdl_engine *engine);
/* Have the leaders of all other hosts said that they leave? */
bool hvdl_control_all_left(const hvdl_engine *engine);

/* Frees what has left. Returns whether there was anything. */
bool hvdl_free_sent_messages(hvdl_engine *engine);
/* Waits, not for ever: what was said last (an answer, LEFT) should leave before the process goes on. */
void hvdl_await_sent_messages(hvdl_engine *engine);

#endif
