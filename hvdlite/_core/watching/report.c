#define _GNU_SOURCE
#include "watching/report.h"

#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/stat.h>

#include "engine/state.h"
#include "operations/facts.h"

#define HVDL_NOTE_STALLED 'W' /* hvdrun's machine/notes.py */

const char hvdl_uneven[] =
    "do all ranks have the same number of batches? A rank that runs out of them before the others "
    "must call hvd.join(); drop_last=True and a DistributedSampler give all ranks as many";

/* After the first report on a host, if there is no limit. */
#define HOW_TO_END                                                                                 \
    "no limit ends this wait; with HVDLITE_STALL_SHUTDOWN_TIME_SECONDS=600 (hvdrun "               \
    "--stall-check-shutdown-time-seconds 600) all operations fail after 600 s"

void hvdl_put(hvdl_writer *to, const char *format, ...)
{
    static const char dots[] = "...";
    va_list arguments;
    size_t room = to->room - to->used;
    va_start(arguments, format);
    int wrote = vsnprintf(to->text + to->used, room, format, arguments);
    va_end(arguments);
    if (wrote < 0)
        return;
    if ((size_t)wrote < room) {
        to->used += (size_t)wrote;
        return;
    }
    size_t length = to->room - sizeof dots;
    while (length && ((unsigned char)to->text[length] & 0xc0) == 0x80)
        length--;
    memcpy(to->text + length, dots, sizeof dots);
    to->used = to->room - 1;
}

/* ---- what a rank last did ---- */

static void put_last(hvdl_writer *to, const hvdl_shm_last *last)
{
    static const char *const what[] = {
        [HVDL_DID_NOTHING] = "has called no collective yet",
        [HVDL_DID_POST] = "has been in",
        [HVDL_DID_END] = "last finished",
        [HVDL_DID_FAIL] = "last failed in",
        [HVDL_DID_UNKNOWN] = "is just beginning or ending an operation",
    };
    char title[HVDL_TITLE_BYTES];
    hvdl_put(to, "%s", what[last->activity]);
    if (last->activity == HVDL_DID_NOTHING || last->activity == HVDL_DID_UNKNOWN)
        return;
    double seconds = (double)(hvdl_now_ns() - last->time_ns) / 1e9;
    hvdl_put_title(title, sizeof title, hvdl_kind_name(last->kind), last->in_words, last->name);
    hvdl_put(to, last->activity == HVDL_DID_POST ? " %s for %.0f s" : " %s %.0f s ago", title,
             seconds);
}

void hvdl_put_rank(const hvdl_engine *e, hvdl_writer *to, int local, const hvdl_shm_last *last)
{
    int rank = hvdl_rank_of_local(e, local);
    hvdl_put(to, "%srank %d on %s (which ", to->used ? ", " : "", hvdl_world_rank(e, rank),
             e->placement.name_of[rank]);
    put_last(to, last);
    hvdl_put(to, ")");
}

/* ---- allreduces that come once for each batch ---- */

/* All unnamed ones are of one kind. */
static uint64_t reduced_key(const hvdl_operation *op)
{
    return op->unnamed ? HVDL_KEY_OF_UNNAMED : op->key.lo;
}

void hvdl_note_reduced(hvdl_engine *e, const hvdl_operation *op)
{
    uint64_t key = reduced_key(op);
    e->stall.reduced[key % HVDL_NUM_REDUCED] = key;
}

bool hvdl_comes_again(const hvdl_engine *e, const hvdl_operation *op)
{
    uint64_t key = reduced_key(op);
    if (op->desc.kind != HVDL_ALLREDUCE || (op->unnamed && !hvdl_is_number(op->name)))
        return hvdl_is_run(op);
    return hvdl_is_run(op) || e->stall.reduced[key % HVDL_NUM_REDUCED] == key;
}

const char *hvdl_put_uneven(const char *text, char to[HVDL_TEXT_BYTES])
{
    snprintf(to, HVDL_TEXT_BYTES, "%s; %s", text, hvdl_uneven);
    return to;
}

/* ---- saying it ---- */

void hvdl_say(const hvdl_engine *e, const char *text)
{
    char line[HVDL_TEXT_BYTES + 32];
    snprintf(line, sizeof line, "hvdlite: %s\n", text);
    e->config.say(line);
}

/* The program may have closed the socket and opened another file under its number. */
static bool is_there(const hvdl_socket *socket)
{
    struct stat found;
    return socket->fd >= 0 && !fstat(socket->fd, &found) && found.st_dev == socket->device &&
           found.st_ino == socket->inode;
}

void hvdl_report(const hvdl_engine *e, const char *text)
{
    char note[1 + HVDL_TEXT_BYTES];
    hvdl_say(e, text);
    if (!e->config.stall_shutdown_ns &&
        !atomic_exchange_explicit(&e->shm.control->has_told_shutdown, 1, memory_order_relaxed))
        hvdl_say(e, HOW_TO_END);
    if (!is_there(&e->config.launcher))
        return;
    int length = snprintf(note, sizeof note, "%c%s", HVDL_NOTE_STALLED, text);
    /* If it is not taken at once, the user has the report all the same. */
    (void)send(e->config.launcher.fd, note, (size_t)length, MSG_DONTWAIT | MSG_NOSIGNAL);
}

#define MAX_DOUBLINGS 20             /* of the time at which a report is due */
#define LEAST_PAUSE_NS 4000000000ull /* between two reports */

bool hvdl_report_is_due(uint64_t first, uint64_t age_ns, int report)
{
    return first && report <= MAX_DOUBLINGS && age_ns > first << report &&
           age_ns > first + (uint64_t)report * LEAST_PAUSE_NS;
}
