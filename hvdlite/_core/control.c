/* Agreement between hosts. When all ranks of a host have posted an operation, its leader tells the
 * operation's **coordinator**: the leader of the host that the operation's key hashes to, so that the
 * work is spread over the hosts. When all hosts have told it, the coordinator answers every leader:
 *
 *   leader -> coordinator   POSTED: what was posted, and the host's part of tiny data
 *   coordinator -> leader   MATCHED: a tag for the exchanges, rows  |  RESULT: the tiny result
 *                           |  FAILED: the text of the disagreement
 *
 * and the leader puts the answer into its host's journal. That is one round trip, in which tiny data
 * travels along. The runs of a plan need none of it: they use the tag the plan was given.
 *
 * Tags: coordinator h hands out numbers of its own range. A number is free again when the leaders of
 * all hosts have said DONE, which they add to their next message to that coordinator. */
#define _GNU_SOURCE
#include <sched.h>
#include <stdio.h>
#include <string.h>
#include <time.h>

#include "state.h"

#define TESTS_PER_STEP 8      /* receives looked at in one step, in turn */
#define MAX_DONE 16           /* DONE notes that are kept for a message that goes there anyway */
#define MAX_TAG_NUMBERS 65536 /* per coordinator */

enum { POSTED, MATCHED, RESULT, FAILED, DONE, LEFT };

typedef struct {
    int32_t type, host; /* of the sender */
    hvdl_key key;
    hvdl_variants variants; /* POSTED */
    int32_t tag;            /* MATCHED */
    int32_t rank, clean;    /* LEFT */
    int32_t num_done, done[MAX_DONE];
    uint32_t payload_bytes;
} message_head;

typedef struct sending {
    struct sending *next;
    hvdl_request request;
    char bytes[];
} sending;

/* An operation that this host's leader has asked about. */
typedef struct {
    hvdl_node by_key;
    hvdl_key key;
    uint64_t id; /* of its meeting */
} asked;

/* An operation that other leaders have asked this coordinator about. */
typedef struct open_agreement {
    hvdl_node by_key;
    hvdl_key key;
    int num_hosts;
    bool *hosts; /* that have posted */
    hvdl_variants variants;
    char *name;                  /* known once the own host has posted */
    char *payloads;              /* tiny: of each host */
    int64_t *rows;               /* allgather: host by host */
    struct open_agreement *next; /* among those that wait for a tag */
} open_agreement;

typedef struct {
    int32_t count, numbers[MAX_DONE];
} done_notes;

struct hvdl_control {
    size_t room; /* bytes of the largest message */
    /* The leader: one from the leader of each other host. Not from any source: with ranks on the own
     * and on other hosts, MPICH 5.0 was seen to lose messages to several such receives. */
    hvdl_request *receives;
    char *receive_buffers;
    int next_receive;
    sending *sendings;
    hvdl_table asked, open;
    done_notes *notes; /* per coordinator */
    int numbers_per_host;
    uint16_t *num_done; /* per number of this coordinator: hosts that have said DONE */
    int *free_numbers, num_free;
    open_agreement *waiting, *waiting_last; /* for a free number */
    uint64_t num_messages;
    int num_left;  /* leaders of other hosts that have said LEFT, after which they say nothing */
    bool has_left; /* so has this one */
};

/* ---- sending ---- */

static int leader_of(const hvdl_engine *e, int host)
{
    return e->members[e->host_first[host]];
}

static void send_message(hvdl_engine *e, int host, message_head *head, const void *payload,
                         size_t payload_bytes)
{
    hvdl_control *control = e->control;
    sending *message = malloc(sizeof *message + sizeof *head + payload_bytes);
    head->host = e->host;
    head->payload_bytes = (uint32_t)payload_bytes;
    head->num_done = 0;
    done_notes *notes = &control->notes[host];
    if (head->type == POSTED || head->type == DONE) {
        head->num_done = notes->count;
        memcpy(head->done, notes->numbers, sizeof head->done);
        notes->count = 0;
    }
    if (!message) {
        hvdl_break(e, "rank %d is out of memory", e->config.rank);
        return;
    }
    memcpy(message->bytes, head, sizeof *head);
    if (payload_bytes)
        memcpy(message->bytes + sizeof *head, payload, payload_bytes);
    if (hvdl_wire_send(&e->wire, message->bytes, sizeof *head + payload_bytes, leader_of(e, host),
                       HVDL_TAG_CONTROL, &message->request)) {
        free(message);
        hvdl_break(e, "rank %d on %s: MPI reported an error", e->config.rank,
                   e->name_of[e->config.rank]);
        return;
    }
    message->next = control->sendings;
    control->sendings = message;
    control->num_messages++;
}

static bool test_sends(hvdl_engine *e)
{
    bool any = false;
    for (sending **at = &e->control->sendings; *at;) {
        sending *message = *at;
        bool done = false;
        if (hvdl_wire_test(&e->wire, &message->request, &done) || !done) {
            at = &message->next;
            continue;
        }
        *at = message->next;
        free(message);
        any = true;
    }
    return any;
}

/* ---- the leader: answers ---- */

static void take_answer(hvdl_engine *e, const message_head *head, const void *payload)
{
    static const int entry_types[] = {
        [MATCHED] = HVDL_ENTRY_START, [RESULT] = HVDL_ENTRY_RESULT, [FAILED] = HVDL_ENTRY_FAIL};
    hvdl_node *node = hvdl_table_first(&e->control->asked, head->key.lo);
    while (node && !hvdl_key_equal(HVDL_CONTAINER(node, asked, by_key)->key, head->key))
        node = hvdl_table_next(node->next, head->key.lo);
    if (!node)
        return;
    asked *question = HVDL_CONTAINER(node, asked, by_key);
    hvdl_entry entry = {
        .type = (uint16_t)entry_types[head->type], .id = question->id, .arg = (uint64_t)head->tag};
    hvdl_table_remove(&e->control->asked, node);
    free(question);
    hvdl_announce(e, entry, payload, head->payload_bytes);
}

static void answer(hvdl_engine *e, int host, hvdl_key key, int type, int tag, const void *payload,
                   size_t bytes)
{
    message_head head = {.type = type, .key = key, .tag = tag};
    if (host != e->host) {
        send_message(e, host, &head, payload, bytes);
        return;
    }
    head.payload_bytes = (uint32_t)bytes;
    take_answer(e, &head, payload);
}

/* ---- the coordinator ---- */

static void free_agreement(open_agreement *agreement)
{
    free(agreement->hosts);
    free(agreement->name);
    free(agreement->payloads);
    free(agreement->rows);
    free(agreement);
}

static void answer_all(hvdl_engine *e, open_agreement *agreement, int type, int tag,
                       const void *payload, size_t bytes)
{
    for (int h = 0; h < e->config.num_hosts; h++)
        if (agreement->hosts[h])
            answer(e, h, agreement->key, type, tag, payload, bytes);
    free_agreement(agreement);
}

/* The sum, or the root's data, of a tiny operation; into scratch. Returns its size. */
static size_t tiny_result(hvdl_engine *e, const open_agreement *agreement, char *to)
{
    const hvdl_desc *desc = &agreement->variants.variants[0].desc;
    size_t bytes = hvdl_desc_bytes(desc);
    if (desc->kind == HVDL_BARRIER || !bytes)
        return 0;
    if (desc->kind == HVDL_BROADCAST) {
        memcpy(to, agreement->payloads + (size_t)e->host_of[desc->root] * bytes, bytes);
        return bytes;
    }
    const void *inputs[e->config.num_hosts];
    hvdl_scale scale = hvdl_final_scale(e, desc);
    for (int h = 0; h < e->config.num_hosts; h++)
        inputs[h] = agreement->payloads + (size_t)h * bytes;
    hvdl_reduce(desc->dtype, desc->op, to, inputs, e->config.num_hosts, (size_t)desc->count,
                &scale);
    return bytes;
}

/* All hosts have posted. */
static void decide(hvdl_engine *e, open_agreement *agreement)
{
    hvdl_control *control = e->control;
    const hvdl_desc *desc = &agreement->variants.variants[0].desc;
    if (agreement->variants.count > 1) {
        char text[HVDL_TEXT_BYTES];
        hvdl_variants_describe(&agreement->variants, agreement->name, e->name_of, text);
        answer_all(e, agreement, FAILED, 0, text, strlen(text) + 1);
        return;
    }
    if (hvdl_is_tiny(e, desc, false)) {
        size_t bytes = tiny_result(e, agreement, e->scratch);
        answer_all(e, agreement, RESULT, 0, e->scratch, bytes);
        return;
    }
    if (!control->num_free) {
        agreement->next = NULL;
        if (control->waiting)
            control->waiting_last->next = agreement;
        else
            control->waiting = agreement;
        control->waiting_last = agreement;
        return;
    }
    int number = control->free_numbers[--control->num_free];
    int tag = HVDL_TAG_FIRST + HVDL_TAGS_PER_ID * (e->host * control->numbers_per_host + number);
    size_t bytes = agreement->rows ? (size_t)e->config.num_ranks * sizeof(int64_t) : 0;
    answer_all(e, agreement, MATCHED, tag, agreement->rows, bytes);
}

static open_agreement *agreement_of(hvdl_engine *e, hvdl_key key)
{
    hvdl_table *open = &e->control->open;
    hvdl_node *node = hvdl_table_first(open, key.lo);
    for (; node; node = hvdl_table_next(node->next, key.lo)) {
        open_agreement *agreement = HVDL_CONTAINER(node, open_agreement, by_key);
        if (hvdl_key_equal(agreement->key, key))
            return agreement;
    }
    open_agreement *agreement = calloc(1, sizeof *agreement);
    if (!agreement)
        return NULL;
    agreement->key = key;
    agreement->hosts = calloc((size_t)e->config.num_hosts, sizeof *agreement->hosts);
    if (!agreement->hosts || hvdl_table_insert(open, &agreement->by_key, key.lo)) {
        free_agreement(agreement);
        return NULL;
    }
    return agreement;
}

/* Keeps what a host sent along. */
static hvdl_err keep_part(hvdl_engine *e, open_agreement *agreement, int host,
                          const hvdl_desc *desc, const void *payload, size_t bytes)
{
    if (!bytes || agreement->variants.count > 1)
        return HVDL_OK;
    if (desc->kind == HVDL_ALLGATHER) {
        if (!agreement->rows)
            agreement->rows = calloc((size_t)e->config.num_ranks, sizeof *agreement->rows);
        if (!agreement->rows)
            return HVDL_ENOMEM;
        memcpy(agreement->rows + e->host_first[host], payload, bytes);
        return HVDL_OK;
    }
    if (!agreement->payloads)
        agreement->payloads = calloc((size_t)e->config.num_hosts, bytes);
    if (!agreement->payloads)
        return HVDL_ENOMEM;
    memcpy(agreement->payloads + (size_t)host * bytes, payload, bytes);
    return HVDL_OK;
}

static void take_posted(hvdl_engine *e, const message_head *head, const void *payload,
                        const char *name)
{
    if (e->gone) {
        answer(e, head->host, head->key, FAILED, 0, e->gone, strlen(e->gone) + 1);
        return;
    }
    open_agreement *agreement = agreement_of(e, head->key);
    if (agreement) {
        hvdl_variants_merge(&agreement->variants, &head->variants);
        if (name)
            agreement->name = strdup(name);
    }
    if (!agreement || keep_part(e, agreement, head->host, &head->variants.variants[0].desc, payload,
                                head->payload_bytes)) {
        hvdl_break(e, "rank %d is out of memory", e->config.rank);
        return;
    }
    agreement->hosts[head->host] = true;
    if (++agreement->num_hosts < e->config.num_hosts)
        return;
    hvdl_table_remove(&e->control->open, &agreement->by_key);
    decide(e, agreement);
}

void hvdl_control_fail_open(hvdl_engine *e)
{
    hvdl_table *open = &e->control->open;
    for (size_t i = 0; i < open->num_slots; i++)
        while (open->slots[i]) {
            open_agreement *agreement = HVDL_CONTAINER(open->slots[i], open_agreement, by_key);
            hvdl_table_remove(open, &agreement->by_key);
            answer_all(e, agreement, FAILED, 0, e->gone, strlen(e->gone) + 1);
        }
}

/* ---- tags ---- */

static void take_done(hvdl_engine *e, int number)
{
    hvdl_control *control = e->control;
    if (++control->num_done[number] < e->config.num_hosts)
        return;
    control->num_done[number] = 0;
    control->free_numbers[control->num_free++] = number;
    open_agreement *agreement = control->waiting;
    if (agreement) {
        control->waiting = agreement->next;
        decide(e, agreement);
    }
}

void hvdl_control_tag_done(hvdl_engine *e, int tag)
{
    hvdl_control *control = e->control;
    if (tag < HVDL_TAG_FIRST)
        return; /* it had none: nothing was to be exchanged */
    int id = (tag - HVDL_TAG_FIRST) / HVDL_TAGS_PER_ID;
    int host = id / control->numbers_per_host, number = id % control->numbers_per_host;
    if (host == e->host) {
        take_done(e, number);
        return;
    }
    done_notes *notes = &control->notes[host];
    notes->numbers[notes->count++] = number;
    if (notes->count == MAX_DONE) {
        message_head head = {.type = DONE};
        send_message(e, host, &head, NULL, 0);
    }
}

/* ---- the leader: questions ---- */

/* This host's part of the data, into scratch (or, rows, as they are). */
static size_t host_part(hvdl_engine *e, const hvdl_meeting *meeting, const void **part)
{
    const hvdl_desc *desc = &meeting->variants.variants[0].desc;
    *part = e->scratch;
    if (meeting->variants.count > 1)
        return 0;
    if (desc->kind == HVDL_ALLGATHER) {
        *part = meeting->rows;
        return (size_t)e->local_size * sizeof(int64_t);
    }
    size_t bytes = hvdl_desc_bytes(desc);
    if (!bytes || !hvdl_is_tiny(e, desc, false) || desc->kind == HVDL_BARRIER)
        return 0;
    if (desc->kind == HVDL_BROADCAST) {
        if (e->host_of[desc->root] != e->host)
            return 0;
        *part = meeting->payloads + (size_t)e->local_of[desc->root] * bytes;
        return bytes;
    }
    const void *inputs[HVDL_MAX_LOCAL];
    hvdl_scale none = {1, 1.0};
    for (int r = 0; r < e->local_size; r++)
        inputs[r] = meeting->payloads + (size_t)r * bytes;
    hvdl_reduce(desc->dtype, desc->op, e->scratch, inputs, e->local_size, (size_t)desc->count,
                &none);
    return bytes;
}

void hvdl_control_posted(hvdl_engine *e, hvdl_meeting *meeting)
{
    asked *question = calloc(1, sizeof *question);
    if (!question || hvdl_table_insert(&e->control->asked, &question->by_key, meeting->key.lo)) {
        free(question);
        hvdl_break(e, "rank %d is out of memory", e->config.rank);
        return;
    }
    question->key = meeting->key;
    question->id = meeting->id;
    message_head head = {.type = POSTED, .host = e->host, .key = meeting->key};
    head.variants = meeting->variants;
    const void *part;
    size_t bytes = host_part(e, meeting, &part);
    meeting->coordinator = (int)(meeting->key.hi % (uint64_t)e->config.num_hosts);
    if (meeting->coordinator == e->host) {
        head.payload_bytes = (uint32_t)bytes;
        take_posted(e, &head, part, meeting->operation->name);
    } else {
        send_message(e, meeting->coordinator, &head, part, bytes);
    }
}

/* ---- receiving ---- */

static void take_message(hvdl_engine *e, const char *bytes)
{
    message_head head;
    memcpy(&head, bytes, sizeof head);
    const char *payload = bytes + sizeof head;
    for (int i = 0; i < head.num_done; i++)
        take_done(e, head.done[i]);
    switch (head.type) {
    case POSTED: take_posted(e, &head, payload, NULL); break;
    case MATCHED:
    case RESULT:
    case FAILED: take_answer(e, &head, payload); break;
    case LEFT: {
        hvdl_entry entry = {
            .type = HVDL_ENTRY_LEAVE, .id = (uint64_t)head.rank, .arg = (uint64_t)head.clean};
        e->control->num_left += head.rank == leader_of(e, head.host);
        hvdl_announce(e, entry, NULL, 0);
        break;
    }
    default: break;
    }
}

static bool post_receive(hvdl_engine *e, int host)
{
    hvdl_control *control = e->control;
    return !hvdl_wire_recv(&e->wire, control->receive_buffers + (size_t)host * control->room,
                           control->room, leader_of(e, host), HVDL_TAG_CONTROL,
                           &control->receives[host]);
}

/* Takes the message that has come from a host's leader, if one has. */
static bool receive(hvdl_engine *e, int host)
{
    hvdl_control *control = e->control;
    hvdl_request *request = &control->receives[host];
    bool done = false;
    if (!request->active || hvdl_wire_test(&e->wire, request, &done) || !done)
        return false;
    const char *message = control->receive_buffers + (size_t)host * control->room;
    message_head head;
    memcpy(&head, message, sizeof head);
    bool last = head.type == LEFT && head.rank == leader_of(e, host);
    take_message(e, message);
    if (!last && !post_receive(e, host))
        hvdl_break(e, "rank %d on %s: MPI reported an error", e->config.rank,
                   e->name_of[e->config.rank]);
    return true;
}

static bool receive_some(hvdl_engine *e)
{
    hvdl_control *control = e->control;
    bool any = false;
    int hosts = e->config.num_hosts, tests = hosts < TESTS_PER_STEP ? hosts : TESTS_PER_STEP;
    for (int i = 0; i < tests && !e->broken; i++) {
        control->next_receive = (control->next_receive + 1) % hosts;
        any |= receive(e, control->next_receive);
    }
    return any;
}

bool hvdl_control_step(hvdl_engine *e, bool *progressed)
{
    if (e->control->sendings)
        *progressed |= test_sends(e);
    if (e->is_leader)
        *progressed |= receive_some(e);
    return e->control->sendings != NULL;
}

void hvdl_control_leave(hvdl_engine *e, int rank, bool clean)
{
    if (!e->is_leader || e->control->has_left)
        return;
    e->control->has_left = rank == e->config.rank;
    for (int h = 0; h < e->config.num_hosts; h++)
        if (h != e->host) {
            message_head head = {.type = LEFT, .rank = rank, .clean = clean};
            send_message(e, h, &head, NULL, 0);
        }
}

bool hvdl_control_all_left(const hvdl_engine *e)
{
    return e->control->num_left == e->config.num_hosts - 1;
}

uint64_t hvdl_control_messages(const hvdl_engine *e)
{
    return e->control ? e->control->num_messages : 0;
}

/* ---- life ---- */

static size_t largest_payload(const hvdl_engine *e)
{
    size_t rows = (size_t)e->config.num_ranks * sizeof(int64_t);
    size_t room = e->config.inline_bytes > rows ? e->config.inline_bytes : rows;
    return room > HVDL_TEXT_BYTES ? room : HVDL_TEXT_BYTES;
}

hvdl_err hvdl_control_create(hvdl_engine *e)
{
    hvdl_control *control = calloc(1, sizeof *control);
    if (!control)
        return HVDL_ENOMEM;
    e->control = control;
    int hosts = e->config.num_hosts;
    int numbers = (e->wire.tag_ub - HVDL_TAG_FIRST) / HVDL_TAGS_PER_ID / hosts;
    control->numbers_per_host = numbers < MAX_TAG_NUMBERS ? numbers : MAX_TAG_NUMBERS;
    if (control->numbers_per_host < 2 * MAX_DONE)
        return HVDL_EINVAL; /* notes that are kept back would use up all numbers */
    control->room = (sizeof(message_head) + largest_payload(e) + 63) / 64 * 64;
    control->receives = calloc((size_t)hosts, sizeof *control->receives);
    control->receive_buffers = malloc(e->is_leader ? (size_t)hosts * control->room : 1);
    control->notes = calloc((size_t)hosts, sizeof *control->notes);
    control->num_done = calloc((size_t)control->numbers_per_host, sizeof *control->num_done);
    control->free_numbers = calloc((size_t)control->numbers_per_host, sizeof(int));
    if (!control->receives || !control->receive_buffers || !control->notes || !control->num_done ||
        !control->free_numbers)
        return HVDL_ENOMEM;
    for (int number = control->numbers_per_host - 1; number >= 0; number--)
        control->free_numbers[control->num_free++] = number;
    for (int h = 0; e->is_leader && h < hosts; h++)
        if (h != e->host && !post_receive(e, h))
            return HVDL_EMPI;
    return HVDL_OK;
}

static void free_asked(hvdl_table *table)
{
    for (size_t i = 0; i < table->num_slots; i++)
        while (table->slots[i]) {
            asked *question = HVDL_CONTAINER(table->slots[i], asked, by_key);
            hvdl_table_remove(table, &question->by_key);
            free(question);
        }
    free(table->slots);
}

static void free_open(hvdl_table *table)
{
    for (size_t i = 0; i < table->num_slots; i++)
        while (table->slots[i]) {
            open_agreement *agreement = HVDL_CONTAINER(table->slots[i], open_agreement, by_key);
            hvdl_table_remove(table, &agreement->by_key);
            free_agreement(agreement);
        }
    free(table->slots);
}

/* What was said last (an answer, LEFT) should leave before the process goes on to other things. */
static void flush_sends(hvdl_engine *e)
{
    struct timespec pause = {0, 100000};
    for (int i = 0; i < 10000 && e->control->sendings; i++) {
        test_sends(e);
        if (!e->control->sendings)
            return;
        if (i < 100)
            sched_yield();
        else
            nanosleep(&pause, NULL);
    }
}

void hvdl_control_destroy(hvdl_engine *e)
{
    hvdl_control *control = e->control;
    if (!control)
        return;
    bool ended = true;
    if (control->notes)
        flush_sends(e);
    for (int h = 0; control->receives && h < e->config.num_hosts; h++)
        ended &= hvdl_wire_cancel_recv(&e->wire, &control->receives[h]);
    free_asked(&control->asked);
    free_open(&control->open);
    while (control->waiting) {
        open_agreement *next = control->waiting->next;
        free_agreement(control->waiting);
        control->waiting = next;
    }
    if (ended) { /* else MPI may still write into them */
        free(control->receive_buffers);
        free(control->receives);
    }
    /* Sends that have not left are MPI's to read for the life of the process. */
    free(control->notes);
    free(control->num_done);
    free(control->free_numbers);
    free(control);
    e->control = NULL;
}
