/* Two hosts of two ranks, all engines of this process, for test_bad_entries.py, which compiles it together
 * with the core. Rank 1, on host 0, and the leader of host 1 write what no sound rank writes: missing-rank queries, their
 * answers, and that the caller gave up. Rank 0 reads it while it asks who has not called an operation. */
#define _GNU_SOURCE
#include <sys/mman.h>
#include <unistd.h>

#include "watching/missing_query.h"
#include "network.h"
#include "postings.h"

#define NUM_HOSTS 2
#define LOCAL_SIZE 2
#define NUM_RANKS (NUM_HOSTS * LOCAL_SIZE)
#define BLOCK_BYTES 256
#define INLINE_BYTES 64
#define FAR 100000000

typedef struct {
    hvdl_answer head;
    uint8_t presence[LOCAL_SIZE];
} answer;

#define HEAD_BYTES sizeof(hvdl_answer)
#define ANSWER_BYTES (HEAD_BYTES + LOCAL_SIZE)

static hvdl_engine *engines[NUM_RANKS];
static float data[100];

static void say_nothing(const char *line)
{
    (void)line;
}

static hvdl_err make_engines(void)
{
    static const int sizes[] = {LOCAL_SIZE, LOCAL_SIZE}, ranks[] = {0, 1, 2, 3};
    static const char *names[] = {"here", "there"};
    hvdl_err err = HVDL_OK;
    for (int h = 0; h < NUM_HOSTS; h++) {
        size_t bytes, payload = hvdl_posted_payload(NUM_RANKS, INLINE_BYTES);
        int fd = memfd_create("bad entries", 0);
        if (fd < 0 || hvdl_shm_bytes(LOCAL_SIZE, payload, BLOCK_BYTES, &bytes) ||
            ftruncate(fd, (off_t)bytes))
            return HVDL_ENOMEM;
        for (int r = h * LOCAL_SIZE; !err && r < (h + 1) * LOCAL_SIZE; r++) {
            hvdl_wire wire = network_wire(r, 1 << 20);
            hvdl_engine_config config = {.rank = r,
                                         .num_ranks = NUM_RANKS,
                                         .num_hosts = NUM_HOSTS,
                                         .host_sizes = sizes,
                                         .members = ranks,
                                         .world_ranks = ranks,
                                         .host_names = names,
                                         .memory_fd = fd,
                                         .wire = &wire,
                                         .inline_bytes = INLINE_BYTES,
                                         .block_bytes = BLOCK_BYTES,
                                         .segment_bytes = 256,
                                         .piece_bytes = 1024,
                                         .say = say_nothing,
                                         .launcher = {.fd = -1},
                                         .rules = {{SIZE_MAX, HVDL_DOUBLING}},
                                         .num_rules = 1};
            err = hvdl_engine_create(&engines[r], &config);
        }
        close(fd);
    }
    return err;
}

static hvdl_operation *post(void)
{
    hvdl_operation *op = NULL;
    hvdl_posting posting = sum_posting("x", data, 100);
    return hvdl_engine_post(engines[0], &posting, false, &op) ? NULL : op;
}

static void write_entry(int type, const void *body, size_t bytes)
{
    if (hvdl_log_append(&engines[1]->shm, (hvdl_entry){.type = (uint16_t)type}, body, bytes, NULL,
                        0))
        exit(2);
}

static void send(int type, const void *payload, size_t bytes)
{
    hvdl_message message = {.type = (uint8_t)type};
    hvdl_send_message(engines[LOCAL_SIZE], 0, &message, payload, bytes);
    hvdl_control_flush(engines[LOCAL_SIZE]);
}

static void write_bad_questions(hvdl_key key)
{
    const hvdl_question asked = {.key = key, .number = 1, .host = 0, .local = 1, .is_posted = 1};
    hvdl_question bad[] = {asked, asked, asked, asked, asked};
    bad[0].host = 1;
    bad[1].host = -FAR;
    bad[2].host = FAR;
    bad[3].local = -1;
    bad[4].local = LOCAL_SIZE;
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        write_entry(HVDL_ENTRY_MISSING_QUERY, &bad[i], sizeof bad[i]);
        bad[i].host += i == 0 ? -1 : i > 2; /* of the other host's */
        send(HVDL_MSG_MISSING_QUERY, &bad[i], sizeof bad[i]);
    }
    write_entry(HVDL_ENTRY_MISSING_QUERY, &asked, sizeof asked - 1);
    send(HVDL_MSG_MISSING_QUERY, &asked, sizeof asked - 1);
    write_entry(HVDL_ENTRY_MISSING_QUERY, NULL, 0);
}

static void write_bad_answers(void)
{
    const answer told = {{.number = 1, .host = 1, .num_ranks = LOCAL_SIZE}, {1, 1}};
    answer bad[] = {told, told, told, told, told, told, told};
    bad[0].head.host = -FAR;
    bad[1].head.host = FAR;
    bad[2].head.host = NUM_HOSTS;
    bad[3].head.num_ranks = -1;
    bad[4].head.num_ranks = FAR;
    bad[5].head.awaits = FAR;
    memset(bad[6].head.missing, 'x', sizeof bad[6].head.missing);
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        write_entry(HVDL_ENTRY_MISSING_ANSWER, &bad[i], ANSWER_BYTES);
        send(HVDL_MSG_MISSING_ANSWER, &bad[i], ANSWER_BYTES);
    }
    for (size_t bytes = 0; bytes < ANSWER_BYTES; bytes += HEAD_BYTES - 1) {
        write_entry(HVDL_ENTRY_MISSING_ANSWER, &told, bytes);
        send(HVDL_MSG_MISSING_ANSWER, &told, bytes);
    }
}

/* Another rank of the host writes while rank 0 asks. */
static void *write_bad_entries(void *op)
{
    while (!__atomic_load_n(&engines[0]->stall.num_calls, __ATOMIC_ACQUIRE))
        usleep(1000);
    write_bad_questions(((hvdl_operation *)op)->key);
    write_bad_answers();
    return NULL;
}

/* Prints which ranks rank 0 takes for absent, and which hosts do not answer. */
static void ask(hvdl_operation *op)
{
    pthread_t writer;
    char text[HVDL_TEXT_BYTES];
    if (pthread_create(&writer, NULL, write_bad_entries, op))
        exit(2);
    hvdl_describe_timeout(engines[0], op, 1.0, text);
    pthread_join(writer, NULL);
    printf("%s\n", text);
}

/* A text that ends nowhere, and one that is not there. */
static void give_up(const char *how, hvdl_operation *op)
{
    char text[HVDL_TEXT_BYTES + 100];
    size_t bytes = strcmp(how, "empty") ? sizeof text : 0;
    memset(text, 'x', sizeof text);
    write_entry(HVDL_ENTRY_GIVE_UP, text, bytes);
    write_entry(HVDL_ENTRY_LEAVE + 100, text, sizeof text); /* what lies behind it */
    for (int i = 0; i < 100 && !hvdl_operation_done(op); i++)
        hvdl_engine_poll(engines[0]);
    const char *error = hvdl_operation_done(op) ? hvdl_operation_error(op) : "pending";
    printf("%s: %zu characters, %.30s\n", how, strlen(error), error);
}

/* A message that lies about itself, from the leader of host 1. */
static void send_damaged(const char *how)
{
    hvdl_message message = {.type = HVDL_MSG_POSTED, .rank = -1, .key = {1, 0}};
    struct {
        uint64_t num_messages;
        hvdl_message message;
    } packet = {1, message};
    hvdl_message *sent = &packet.message;
    hvdl_variant variant = {.desc = {.kind = HVDL_ALLREDUCE, .root = -1, .dtype = HVDL_FLOAT32},
                            .num_ranks = 1};
    sent->host = 1;
    sent->site_bytes = 1;
    sent->variants.count = 1;
    variant.desc.count = 4;
    variant.desc.op = HVDL_SUM;
    sent->payload_bytes = 16;
    if (!strcmp(how, "variants"))
        sent->variants.count = FAR;
    else if (!strcmp(how, "payload"))
        sent->payload_bytes = FAR;
    else if (!strcmp(how, "part"))
        sent->payload_bytes = 8;
    else if (!strcmp(how, "site"))
        sent->site_bytes = 60000;
    else if (!strcmp(how, "host"))
        sent->host = FAR;
    else if (!strcmp(how, "rank"))
        variant.ranks[0] = FAR;
    else if (!strcmp(how, "kind"))
        variant.desc.kind = 200;
    else if (!strcmp(how, "done"))
        sent->num_done = FAR;
    else if (!strcmp(how, "number"))
        sent->done[sent->num_done++] = FAR;
    else if (!strcmp(how, "messages"))
        packet.num_messages = UINT64_MAX;
    else if (!strcmp(how, "left"))
        *sent = (hvdl_message){.type = HVDL_MSG_LEFT, .host = 1, .rank = FAR};
    memcpy(&sent->variants.variants[0], &variant, sizeof variant);
    static hvdl_request request;
    if (hvdl_wire_send(&engines[LOCAL_SIZE]->wire, &packet, sizeof packet, 0, HVDL_TAG_CONTROL,
                       &request))
        exit(2);
}

static void hear_damaged(const char *how, hvdl_operation *op)
{
    send_damaged(how);
    for (int i = 0; i < 100 && !hvdl_operation_done(op); i++)
        hvdl_engine_poll(engines[0]);
    printf("%s\n", hvdl_operation_done(op) ? hvdl_operation_error(op) : "pending");
}

int main(int argc, char **argv)
{
    if (argc < 2 || !network_begin(NUM_RANKS) || make_engines())
        return 2;
    hvdl_operation *op = post();
    if (!op)
        return 2;
    if (argc == 3)
        hear_damaged(argv[2], op);
    else if (!strcmp(argv[1], "ask"))
        ask(op);
    else
        give_up(argv[1], op);
    return 0;
}
