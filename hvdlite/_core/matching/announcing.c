/* What this rank appends to the shared log: what was posted here, in that order. Called by
 * the driver. */
#define _GNU_SOURCE
#include "matching/announcing.h"

#include <string.h>

#include "engine/fatal.h"
#include "engine/state.h"
#include "matching/weights.h"
#include "operations/activity.h"
#include "operations/facts.h"

struct hvdl_deferred {
    hvdl_deferred *next;
    hvdl_entry head;
    hvdl_shm_last posts; /* what is noted then */
    size_t body_bytes;
    char body[];
};

/* op: that this posts, which is noted when the others can read of it; NULL: none. */
static void announce_both(hvdl_engine *e, const hvdl_operation *op, hvdl_entry head,
                          const void *body, size_t bytes, const void *more, size_t more_bytes)
{
    if (more_bytes >= HVDL_PAST_CACHE_BYTES)
        hvdl_pipeline_untimed(&e->pipeline);
    if (!e->announcing.deferred && !hvdl_log_append(&e->shm, head, body, bytes, more, more_bytes)) {
        if (op && !op->internal)
            hvdl_note_operation(e, op, HVDL_DID_POST);
        return;
    }
    hvdl_deferred *entry = malloc(sizeof *entry + bytes + more_bytes);
    if (!entry) {
        hvdl_out_of_memory(e);
        return;
    }
    *entry = (hvdl_deferred){.head = head, .body_bytes = bytes + more_bytes};
    if (op && !op->internal)
        hvdl_put_activity(&entry->posts, op, HVDL_DID_POST);
    if (bytes)
        memcpy(entry->body, body, bytes);
    if (more_bytes)
        memcpy(entry->body + bytes, more, more_bytes);
    if (e->announcing.deferred)
        e->announcing.deferred_last->next = entry;
    else
        e->announcing.deferred = entry;
    e->announcing.deferred_last = entry;
}

void hvdl_announce(hvdl_engine *e, hvdl_entry head, const void *body, size_t bytes)
{
    announce_both(e, NULL, head, body, bytes, NULL, 0);
}

bool hvdl_append_deferred(hvdl_engine *e)
{
    bool any = false;
    while (e->announcing.deferred) {
        hvdl_deferred *entry = e->announcing.deferred;
        if (hvdl_log_append(&e->shm, entry->head, entry->body, entry->body_bytes, NULL, 0))
            break;
        if (entry->posts.activity && !e->failure.broken)
            hvdl_note_activity(e, &entry->posts);
        e->announcing.deferred = entry->next;
        free(entry);
        any = true;
    }
    return any;
}

/* Bytes of its input that this rank contributes to a tiny operation. */
static size_t own_payload(const hvdl_engine *e, const hvdl_desc *desc)
{
    bool is_heard = !hvdl_root_gives(hvdl_facts_of(desc)) || desc->root == e->config.rank;
    return is_heard ? hvdl_data_bytes(desc) : 0;
}

void hvdl_announce_post(hvdl_engine *e, hvdl_operation *op)
{
    struct {
        hvdl_post_body body;
        char site[HVDL_SITE_BYTES];
    } post;
    post.body = (hvdl_post_body){op->key, op->desc};
    const void *payload = op->input;
    size_t payload_bytes = 0;
    if (hvdl_is_tiny(e, &op->desc, false))
        payload_bytes = own_payload(e, &op->desc);
    if (hvdl_sends_splits(&op->desc)) {
        payload_bytes = hvdl_num_rows_posted(&op->desc, e->config.num_ranks) * sizeof *op->splits;
        payload = op->splits;
    }
    op->next = NULL;
    if (e->announcing.posts)
        e->announcing.posts_last->next = op;
    else
        e->announcing.posts = op;
    e->announcing.posts_last = op;
    hvdl_entry head = {.type = HVDL_ENTRY_POST, .rows = op->rows, .arg = op->internal};
    size_t body_bytes = sizeof post.body;
    if (op->site) {
        size_t site_bytes = strlen(op->site);
        memcpy(post.site, op->site, site_bytes);
        head.arg = hvdl_post_arg(op->internal, site_bytes);
        body_bytes += hvdl_padded_site_bytes(site_bytes);
    }
    announce_both(e, op, head, &post, body_bytes, payload, payload_bytes);
}

void hvdl_announce_join(hvdl_engine *e, hvdl_operation *op)
{
    announce_both(e, op, (hvdl_entry){.type = HVDL_ENTRY_JOIN}, NULL, 0, NULL, 0);
}

void hvdl_announce_run(hvdl_engine *e, hvdl_operation *op)
{
    hvdl_entry head = {.type = HVDL_ENTRY_RUN, .id = op->plan->id};
    if (op->has_weight)
        hvdl_weight_to_entry(&op->weight, &head);
    size_t payload_bytes = hvdl_is_tiny(e, &op->desc, true) ? own_payload(e, &op->desc) : 0;
    announce_both(e, op, head, NULL, 0, op->input, payload_bytes);
}

void hvdl_announce_leave(hvdl_engine *e, int rank, bool clean)
{
    hvdl_entry entry = {.type = HVDL_ENTRY_LEAVE, .id = (uint64_t)rank, .arg = clean};
    hvdl_announce(e, entry, NULL, 0);
}

hvdl_operation *hvdl_next_announced(hvdl_engine *e)
{
    hvdl_operation *op = e->announcing.posts;
    if (op) {
        e->announcing.posts = op->next;
        op->next = NULL;
    }
    return op;
}

void hvdl_forget_announced(hvdl_engine *e)
{
    e->announcing.posts = NULL;
}

void hvdl_announcing_free(hvdl_engine *e)
{
    while (e->announcing.deferred) {
        hvdl_deferred *next = e->announcing.deferred->next;
        free(e->announcing.deferred);
        e->announcing.deferred = next;
    }
}
