/* Giving up: a caller lets all operations fail, on all ranks of all hosts, with its text. The shared log tells the
 * ranks of the host, and its leader the leaders of the others. */
#define _GNU_SOURCE
#include "engine/giving_up.h"

#include <string.h>

#include "engine/fatal.h"
#include "engine/state.h"
#include "matching/announcing.h"
#include "matching/messages.h"

/* GIVE_UP's arg: its host alone knows of it, and the leader tells the others. */
#define TELL_HOSTS 1

bool hvdl_giving_up_step(hvdl_engine *e)
{
    char text[HVDL_TEXT_BYTES];
    pthread_mutex_lock(&e->giving_up.lock);
    memcpy(text, e->giving_up.text, sizeof text);
    atomic_store(&e->giving_up.wanted, false);
    pthread_mutex_unlock(&e->giving_up.lock);
    hvdl_announce_give_up(e, text, false);
    return true;
}

static void tell_hosts(hvdl_engine *e, const char *text)
{
    for (int h = 0; e->placement.is_leader && h < e->config.num_hosts; h++)
        if (h != e->placement.host) {
            hvdl_message message = {.type = HVDL_MSG_GIVE_UP};
            hvdl_send_message(e, h, &message, text, strlen(text) + 1);
        }
}

void hvdl_announce_give_up(hvdl_engine *e, const char *text, bool at_once)
{
    if (e->config.num_ranks == 1) {
        hvdl_fatal_on_all(e, text);
        return;
    }
    hvdl_announce(e, (hvdl_entry){.type = HVDL_ENTRY_GIVE_UP, .arg = TELL_HOSTS}, text,
                  strlen(text) + 1);
    /* A rank that is stopped may hold up the shared log: at least here, and on the other hosts, they fail. */
    if (at_once || e->announcing.deferred) {
        tell_hosts(e, text);
        hvdl_fatal_on_all(e, text);
    }
}

/* The text that another rank gave, whether or not it ends in these bytes. */
static void copy_reason(char to[HVDL_TEXT_BYTES], const void *from, size_t bytes)
{
    size_t length =
        bytes ? strnlen(from, bytes < HVDL_TEXT_BYTES ? bytes : HVDL_TEXT_BYTES - 1) : 0;
    memcpy(to, from, length);
    to[length] = '\0';
    if (!length)
        strcpy(to, HVDL_NO_REASON);
}

void hvdl_read_give_up(hvdl_engine *e, const hvdl_entry *entry)
{
    char text[HVDL_TEXT_BYTES];
    copy_reason(text, hvdl_entry_body(entry), entry->body_bytes);
    if (entry->arg == TELL_HOSTS)
        tell_hosts(e, text);
    hvdl_fatal_on_all(e, text);
}

void hvdl_on_give_up(hvdl_engine *e, const void *reason, size_t bytes)
{
    char text[HVDL_TEXT_BYTES];
    copy_reason(text, reason, bytes);
    hvdl_announce(e, (hvdl_entry){.type = HVDL_ENTRY_GIVE_UP}, text, strlen(text) + 1);
    if (e->announcing.deferred)
        hvdl_fatal_on_all(e, text);
}
