/* Messages between the leaders of the hosts: control.c moves them; coordinator.c (agreement), tags.c, join.c,
 * roll_call.c and giving_up.c say what is in them. */
#ifndef HVDL_CONTROL_H
#define HVDL_CONTROL_H

#include "engine/state.h"

#define HVDL_TAGS_PER_ID (2 * HVDL_PIECE_WINDOW) /* two for each piece in flight */
#define HVDL_MAX_DONE 16 /* DONE notes that are kept for a message that goes there anyway */
/* Of a coordinator: it has at least so many, of which plans leave some to other operations. */
#define HVDL_MIN_TAG_NUMBERS 32
#define HVDL_MAX_TAG_NUMBERS 65536
#define HVDL_NUMBERS_WITHOUT_PLANS 8

enum {
    HVDL_MSG_POSTED,
    HVDL_MSG_START,
    HVDL_MSG_RESULT,
    HVDL_MSG_FAILED,
    HVDL_MSG_DONE,
    HVDL_MSG_LEFT,
    HVDL_MSG_ORDER,
    HVDL_MSG_TURN,
    HVDL_MSG_HOST_JOINED,
    HVDL_MSG_ALL_JOINED,
    HVDL_MSG_ZERO,
    HVDL_MSG_RUN,
    HVDL_MSG_RUNS,
    HVDL_MSG_GIVE_UP,
    HVDL_MSG_ROLL_CALL,
    HVDL_MSG_ROLL_ANSWER,
    HVDL_MSG_FREE,
    HVDL_MSG_SHORT
};

typedef struct {
    int32_t type, host; /* of the sender */
    hvdl_key key;
    int32_t tag; /* START; TURN: the number */
    int32_t rank,
        clean; /* LEFT; rank: HOST_JOINED, ALL_JOINED, too, and of POSTED one who has joined */
    int16_t internal;    /* POSTED: of the engine's own operations */
    uint16_t site_bytes; /* of the last variant's site, with its NUL, that travel */
    uint64_t epoch;      /* POSTED */
    uint64_t clock;      /* the sender's, see hvdl_control.clock */
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

/* What travels: several messages to one host as one of MPI's. */
typedef struct hvdl_packet {
    struct hvdl_packet *next;
    hvdl_request request;
    size_t bytes_used; /* of what follows, which is what is sent */
    struct {
        uint64_t num_messages;
    } head;
    char bytes[];
} hvdl_packet;

/* An operation that other leaders have asked this coordinator about. */
typedef struct hvdl_agreement {
    hvdl_node by_key;
    hvdl_key key;
    uint64_t epoch; /* of join.c */
    bool internal;
    int absent;  /* a rank that has joined and not posted, or -1 */
    bool *hosts; /* that have posted */
    hvdl_variants variants;
    char *payloads;              /* tiny: of each host */
    int64_t *rows;               /* allgather: host by host */
    struct hvdl_agreement *next; /* among those that wait for a tag */
} hvdl_agreement;

/* A run of a plan that is not known here yet. */
typedef struct hvdl_early_run {
    struct hvdl_early_run *next;
    int tag;
    uint64_t run;
} hvdl_early_run;

/* A rank that leaves after an epoch whose end is not known here yet. */
typedef struct hvdl_held_leave {
    struct hvdl_held_leave *next;
    int rank;
} hvdl_held_leave;

typedef struct {
    int32_t count, numbers[HVDL_MAX_DONE];
    bool at_once; /* that coordinator has been short of numbers: nothing is kept back any more */
} hvdl_done_notes;

/* Agreement on operations. Written by coordinator.c. */
typedef struct {
    hvdl_table asked, open;
    hvdl_agreement *waiting, *waiting_last; /* for a free number */
    int next_turn;                          /* host 0 */
    char *scratch;                          /* for the longest payload */
} hvdl_coordinator;

/* Numbers for exchanges. Written by tags.c. */
typedef struct {
    int num_coordinators;   /* the first hosts, whose leaders they are */
    int num_numbers;        /* of each coordinator */
    hvdl_done_notes *notes; /* per coordinator */
    uint16_t *num_done;     /* per number of this coordinator: hosts that have said DONE */
    bool *is_plan;          /* by number of this coordinator */
    int *free_numbers, num_free, num_plans; /* num_plans: of those that are not free */
    bool was_short;                         /* of numbers, and has told all leaders */
} hvdl_tags;

/* Joins of whole hosts. Written by join.c. */
typedef struct {
    /* By host: how often all its ranks have joined, and how often it has heard that of all. */
    uint64_t *by_host, *heard;
    uint64_t num_told, num_epochs; /* how often this leader has said so, and has heard it of all */
    int last_joined;
    /* Lamport's, which every message carries and a join advances: a host that joins when it could know
     * of another's join has the later time. Of the joins taken in this epoch the latest counts. */
    uint64_t clock, latest_clock;
    int latest_joined;
    int own_join; /* of this host, the last rank: not told yet, as what has come is heard first; or -1 */
    int own_join_steps; /* since then, that heard nothing */
    hvdl_early_run *early_runs;
    uint64_t num_early_zero_runs; /* of all plans: runs that wait for the one before */
    hvdl_held_leave *held_leaves;
} hvdl_host_joins;

/* The messages, written by control.c, and what is agreed on by them. */
struct hvdl_control {
    size_t room; /* bytes of a packet, its head included */
    /* The leader: one from the leader of each other host. Not from any source: with ranks on the own
     * and on other hosts, MPICH 5.0 was seen to lose messages to several such receives. */
    hvdl_request *receives;
    char *receive_buffers;
    hvdl_packet **packets; /* by host: what the next one to it holds already, or NULL */
    int num_packets;       /* of these */
    hvdl_packet *sendings;
    int num_left;  /* leaders of other hosts that have said LEFT, after which they say nothing */
    bool has_left; /* so has this one */
    bool has_told_runs;

    hvdl_coordinator coordinator;
    hvdl_tags tags;
    hvdl_host_joins joins;
};

/* ---- control.c ---- */

static inline int hvdl_leader_of(const hvdl_engine *engine, int host)
{
    return engine->placement.members[engine->placement.host_first[host]];
}

/* The host whose leader is the coordinator of what has this key. */
static inline int hvdl_coordinator_of(const hvdl_engine *engine, hvdl_key key)
{
    return (int)(key.hi % (uint64_t)engine->control->tags.num_coordinators);
}

hvdl_err hvdl_control_create(hvdl_engine *engine);
/* The leader: all ranks of this host have posted. */
void hvdl_control_posted(hvdl_engine *engine, hvdl_meeting *meeting);
/* The leader: the exchanges of an operation with this tag have ended on this host. */
void hvdl_control_tag_done(hvdl_engine *engine, int tag);
/* The leader: a rank has left, so what is not agreed on yet fails. */
void hvdl_control_fail_open(hvdl_engine *engine);
/* The leader: all ranks of this host have joined, `last` as the last one. */
void hvdl_control_joined(hvdl_engine *engine, int last);
/* The leader: a run of a plan has begun here, to which hosts that have joined must come. */
void hvdl_control_run(hvdl_engine *engine, const hvdl_plan *plan);
/* The leader: a plan is made, of which others may have told a run already. */
void hvdl_control_plan_made(hvdl_engine *engine, hvdl_plan *plan);
/* Moves messages. *progressed is set, never cleared. */
void hvdl_control_step(hvdl_engine *engine, bool *progressed);
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
void hvdl_control_destroy(hvdl_engine *engine);

/* To another host's leader, with the next packet. Fills in the sender and what the receiver should know
 * anyway. */
void hvdl_send_message(hvdl_engine *engine, int host, hvdl_message *message, const void *payload,
                       size_t payload_bytes);

/* A rank of another host has left. */
void hvdl_announce_leave(hvdl_engine *engine, int rank, bool clean);

/* ---- soundness.c ---- */

/* Whether a message of which the fixed part has been read lies before `end` as it says, from `at` on. */
bool hvdl_message_fits(const hvdl_message *message, const char *at, const char *end);
/* Whether the host could have sent it. */
bool hvdl_message_is_sound(const hvdl_engine *engine, int host, const hvdl_message *message,
                           const char *payload);

/* ---- coordinator.c ---- */

void hvdl_on_posted(hvdl_engine *engine, const hvdl_message *message, const void *payload);
void hvdl_on_answer(hvdl_engine *engine, const hvdl_message *message, const void *payload);
/* All hosts have posted it, or joined, or a tag is free for it: it is answered, or waits for a tag. */
void hvdl_decide(hvdl_engine *engine, hvdl_agreement *agreement);
/* Host 0: numbers an operation that stays on devices, for its coordinator. */
void hvdl_on_order(hvdl_engine *engine, int host, hvdl_key key);
/* The coordinator: it has the number, and tells all. */
void hvdl_on_turn(hvdl_engine *engine, hvdl_key key, int turn);
/* Has the host posted it, and no answer been given yet? */
bool hvdl_is_open(const hvdl_engine *engine, hvdl_key key, int host);
/* Hosts have joined: what is complete now is decided. */
void hvdl_decide_complete(hvdl_engine *engine);
/* Decides the oldest one that waits for a tag; false: there is none. */
bool hvdl_decide_waiting(hvdl_engine *engine);
hvdl_err hvdl_coordinator_make(hvdl_engine *engine, size_t payload_bytes);
void hvdl_coordinator_free(hvdl_coordinator *coordinator);

/* ---- tags.c ---- */

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

/* ---- roll_call.c ---- */

void hvdl_on_roll_call(hvdl_engine *engine, int host, const void *payload, size_t bytes);
void hvdl_on_roll_answer(hvdl_engine *engine, int host, const void *payload, size_t bytes);

/* ---- giving_up.c ---- */

void hvdl_on_give_up(hvdl_engine *engine, const void *reason, size_t bytes);

/* ---- join.c ---- */

void hvdl_on_host_joined(hvdl_engine *engine, int host, int last, uint64_t clock);
/* After a step of the control messages, while own_join is set: `heard` something in it. */
void hvdl_tell_own_join(hvdl_engine *engine, bool heard);
void hvdl_on_all_joined(hvdl_engine *engine, int host, int last);
/* A message came that was sent at this time of Lamport's clock. */
void hvdl_hear_clock(hvdl_engine *engine, uint64_t clock);
hvdl_err hvdl_host_joins_make(hvdl_engine *engine);
void hvdl_host_joins_free(hvdl_host_joins *joins);
/* A rank of `host` leaves in good order. True: that is told after the end of the epoch. */
bool hvdl_hold_leave(hvdl_engine *engine, int host, int rank);
/* All ranks of this host have joined, and the others do something. */
void hvdl_on_zero(hvdl_engine *engine, const hvdl_message *message);
void hvdl_on_run(hvdl_engine *engine, int tag, uint64_t run);

#endif
