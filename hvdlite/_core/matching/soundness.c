/* Whether a message from another host can be one of ours. Its sender is a process of the same job, but may be
 * broken: what it says must not make this one write where it should not. */
#define _GNU_SOURCE
#include "matching/soundness.h"

#include <string.h>

#include "engine/state.h"
#include "matching/messages.h"
#include "operations/facts.h"

bool hvdl_message_fits(const hvdl_message *message, const char *at, const char *end)
{
    int32_t count = message->variants.count;
    if (count < 0 || count > HVDL_MAX_VARIANTS || message->site_bytes > HVDL_SITE_BYTES)
        return false;
    size_t room = (size_t)(end - at), head = hvdl_padded(hvdl_message_bytes(message));
    return head <= room && message->payload_bytes <= room - head;
}

static bool is_rank(const hvdl_engine *e, int rank)
{
    return rank >= 0 && rank < e->config.num_ranks;
}

static bool is_sound_variant(const hvdl_engine *e, const hvdl_variant *variant)
{
    const hvdl_desc *desc = &variant->desc;
    int named = variant->num_ranks < HVDL_MAX_NAMED ? variant->num_ranks : HVDL_MAX_NAMED;
    for (int i = 0; i < named; i++)
        if (!is_rank(e, variant->ranks[i]))
            return false;
    return variant->num_ranks > 0 && variant->num_ranks <= e->config.num_ranks &&
           desc->kind < HVDL_NUM_KINDS && desc->dtype < HVDL_NUM_DTYPES &&
           desc->op < HVDL_NUM_OPS && desc->runs < HVDL_NUM_KINDS &&
           desc->cut_as < HVDL_NUM_DTYPES && desc->place <= HVDL_ORDERED && desc->count >= 0 &&
           (desc->root == -1 ? !hvdl_facts_of(desc)->has_root : is_rank(e, desc->root)) &&
           memchr(variant->site, 0, sizeof variant->site);
}

/* Ends within it. */
static bool is_text(const char *payload, size_t bytes)
{
    return bytes && bytes <= HVDL_TEXT_BYTES && !payload[bytes - 1];
}

/* What a host sends along with its posting, in bytes. */
static bool is_sound_part(const hvdl_engine *e, const hvdl_message *message)
{
    const hvdl_variants *variants = &message->variants;
    if (!variants->count || message->rank >= e->config.num_ranks)
        return false;
    if (variants->count > 1)
        return true; /* it is not kept */
    const hvdl_desc *desc = &variants->variants[0].desc;
    size_t ranks = (size_t)e->placement.host_sizes[message->host], sent = message->payload_bytes;
    size_t row = hvdl_num_rows_posted(desc, e->config.num_ranks), bytes = hvdl_data_bytes(desc);
    if (row && desc->place != HVDL_ORDERED)
        return sent == ranks * row * sizeof(int64_t);
    if (!bytes || !hvdl_is_tiny(e, desc, false))
        return !sent;
    if (hvdl_facts_of(desc)->result == HVDL_RESULT_PARTS)
        return sent == ranks * bytes;
    if (!hvdl_root_gives(hvdl_facts_of(desc)))
        return sent == bytes;
    if (e->placement.host_of[desc->root] != message->host)
        return !sent;
    return sent == bytes || (!sent && message->rank >= 0); /* the root has joined, so it fails */
}

bool hvdl_message_is_sound(const hvdl_engine *e, int host, const hvdl_message *message,
                           const char *payload)
{
    if (message->host != host || message->num_done < 0 || message->num_done > HVDL_MAX_DONE)
        return false;
    for (int i = 0; i < message->num_done; i++)
        if (message->done[i] < 0 || message->done[i] >= e->control->tags.num_numbers)
            return false;
    for (int i = 0; i < message->variants.count; i++)
        if (!is_sound_variant(e, &message->variants.variants[i]))
            return false;
    switch (message->type) {
    case HVDL_MSG_POSTED: return is_sound_part(e, message);
    case HVDL_MSG_ZERO: return message->variants.count == 1;
    case HVDL_MSG_LEFT:
    case HVDL_MSG_HOST_JOINED:
    case HVDL_MSG_ALL_JOINED: return is_rank(e, message->rank);
    case HVDL_MSG_FAILED: return is_text(payload, message->payload_bytes);
    default: return true; /* of the stall check's, what is not right is dropped */
    }
}
