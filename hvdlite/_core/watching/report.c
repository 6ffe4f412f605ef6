/* The texts of the stall check: which ranks have posted an operation, and what the others last did. */
#define _GNU_SOURCE
#include <limits.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/stat.h>

#include "matching/control.h"
#include "watching/report.h"

#define HVDL_NOTE_STALLED 'W' /* hvdrun's machine/notes.py */
#define MAX_DETAILED 8        /* missing ranks of a host that are described one by one */
#define LONGEST_DETAIL 256    /* bytes of such a description */

const char hvdl_uneven[] =
    "do all ranks have the same number of batches? A rank that runs out of them before the others "
    "must call hvd.join(); drop_last=True and a DistributedSampler give all ranks as many";

/* Of what an optimizer's parameters decide. */
#define OTHER_PARAMETERS                                                                           \
    "do the optimizers of all ranks have the same parameters, with the same requires_grad?"

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

void hvdl_put_activity(hvdl_shm_last *to, const hvdl_operation *op, hvdl_activity activity)
{
    to->kind = op->desc.kind;
    to->activity = activity;
    to->in_words = op->words != NULL;
    hvdl_copy_name(to->name, sizeof to->name, hvdl_shown(op));
}

/* Odd while it is written; a reader that sees a change reads again. */
static hvdl_shm_rank *begin_note(hvdl_engine *e)
{
    hvdl_shm_rank *self = &e->shm.control->ranks[e->placement.local];
    uint32_t sequence = atomic_load_explicit(&self->last_sequence, memory_order_relaxed);
    atomic_store_explicit(&self->last_sequence, sequence + 1, memory_order_relaxed);
    atomic_thread_fence(memory_order_release);
    return self;
}

static void end_note(hvdl_shm_rank *self, uint64_t time_ns)
{
    uint32_t sequence = atomic_load_explicit(&self->last_sequence, memory_order_relaxed);
    self->last.time_ns = time_ns;
    atomic_store_explicit(&self->last_sequence, sequence + 1, memory_order_release);
}

void hvdl_note_activity(hvdl_engine *e, const hvdl_shm_last *last)
{
    hvdl_shm_rank *self = begin_note(e);
    self->last = *last;
    end_note(self, hvdl_now_ns());
}

void hvdl_note_operation(hvdl_engine *e, const hvdl_operation *op, hvdl_activity activity)
{
    hvdl_shm_rank *self = begin_note(e);
    hvdl_put_activity(&self->last, op, activity);
    uint64_t time_ns = activity == HVDL_DID_POST  ? op->posted_ns
                       : activity == HVDL_DID_END ? hvdl_box_now(&e->black_box)
                                                  : hvdl_now_ns(); /* long after the last sweep */
    end_note(self, time_ns);
}

hvdl_shm_last hvdl_last_of(const hvdl_engine *e, int local)
{
    const hvdl_shm_rank *rank = &e->shm.control->ranks[local];
    hvdl_shm_last last;
    for (int tries = 0; tries < 1000; tries++) {
        uint32_t before = atomic_load_explicit(&rank->last_sequence, memory_order_acquire);
        last = rank->last;
        atomic_thread_fence(memory_order_acquire);
        if (!(before & 1) &&
            before == atomic_load_explicit(&rank->last_sequence, memory_order_relaxed))
            return last;
    }
    return (hvdl_shm_last){.activity = HVDL_DID_UNKNOWN}; /* its rank may be stopped there */
}

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

static void put_rank(hvdl_engine *e, hvdl_writer *to, int local, const hvdl_shm_last *last)
{
    int rank = hvdl_rank_of_local(e, local);
    hvdl_put(to, "%srank %d on %s (which ", to->used ? ", " : "", hvdl_world_rank(e, rank),
             e->placement.name_of[rank]);
    put_last(to, last);
    hvdl_put(to, ")");
}

void hvdl_put_rank(hvdl_engine *e, hvdl_writer *to, int local)
{
    hvdl_shm_last last = hvdl_last_of(e, local);
    if (to->used + LONGEST_DETAIL <= to->room)
        put_rank(e, to, local, &last);
}

/* ---- which ranks have posted ---- */

uint64_t hvdl_run_of(const hvdl_operation *op)
{
    if (!hvdl_is_run(op))
        return 0;
    return op->plan->num_runs - (op->meeting && !op->meeting->collecting);
}

hvdl_meeting *hvdl_meeting_of(hvdl_engine *e, hvdl_key key, uint64_t run)
{
    hvdl_plan *plan = hvdl_plan_by_key(e, key);
    hvdl_meeting *meeting = plan ? plan->collecting : hvdl_meeting_by_key(e, key);
    if (plan ? run == plan->num_runs : meeting != NULL)
        return meeting;
    for (size_t i = 0; i < e->meetings.by_id.num_slots; i++)
        for (hvdl_node *node = e->meetings.by_id.slots[i]; node; node = node->next) {
            meeting = HVDL_CONTAINER(node, hvdl_meeting, by_id);
            if (hvdl_key_equal(meeting->key, key))
                return meeting;
        }
    return NULL;
}

bool hvdl_is_agreed(const hvdl_engine *e, const hvdl_meeting *meeting)
{
    if (meeting->collecting)
        return false;
    return e->config.num_hosts == 1 || (!meeting->plan && meeting->coordinator < 0);
}

static void put_ranks(hvdl_writer *to, int first, int last)
{
    const char *before = to->used ? ", " : "";
    if (last > first + 1)
        hvdl_put(to, "%s%d-%d", before, first, last);
    else if (last > first)
        hvdl_put(to, "%s%d, %d", before, first, last);
    else
        hvdl_put(to, "%s%d", before, first);
}

/* Ranks in a row. */
typedef struct {
    int first, last;
} hvdl_row;

/* The rows of a text; a number after `*limit` may be missing in it, as it was cut there. A part that is cut, such as
 * "7...", may be the beginning of another number. */
static int read_rows(const char *text, hvdl_row rows[], int *limit)
{
    int num_rows = 0, before = -1;
    while (*text) {
        char *end = NULL;
        hvdl_row row = {(int)strtol(text, &end, 10), 0};
        row.last = row.first;
        if (*end == '-')
            row.last = (int)strtol(end + 1, &end, 10);
        if (end == text || (*end && *end != ',')) {
            *limit = before < *limit ? before : *limit;
            break;
        }
        rows[num_rows++] = row;
        before = row.last;
        text = *end ? end + 1 : end;
        text += *text == ' ';
    }
    return num_rows;
}

static int compare_rows(const void *one, const void *other)
{
    return ((const hvdl_row *)one)->first - ((const hvdl_row *)other)->first;
}

void hvdl_put_in_order(hvdl_writer *to, const char *ranks)
{
    static const char dots[] = ", ...";
    hvdl_row rows[HVDL_POSTED_BYTES]; /* of both: a row has a digit and a comma at least */
    int limit = INT_MAX, num_rows = read_rows(to->text, rows, &limit), num_joined = 0;
    num_rows += read_rows(ranks, rows + num_rows, &limit);
    qsort(rows, (size_t)num_rows, sizeof *rows, compare_rows);
    for (int i = 0; i < num_rows && rows[i].first <= limit; i++) {
        rows[i].last = rows[i].last < limit ? rows[i].last : limit;
        if (num_joined && rows[i].first <= rows[num_joined - 1].last + 1)
            rows[num_joined - 1].last = rows[i].last;
        else
            rows[num_joined++] = rows[i];
    }
    to->used = 0;
    *to->text = '\0';
    bool is_cut = limit < INT_MAX;
    for (int i = 0; i < num_joined; i++) {
        size_t used = to->used;
        put_ranks(to, rows[i].first, rows[i].last);
        if (to->used + sizeof dots > to->room) {
            to->text[to->used = used] = '\0';
            is_cut = true;
            break;
        }
    }
    if (is_cut)
        hvdl_put(to, "%s", to->used ? dots : dots + 2);
}

void hvdl_describe_host(hvdl_engine *e, const hvdl_late *what, const hvdl_shm_last *lasts,
                        hvdl_stall_part *answer)
{
    hvdl_writer posted = {answer->posted, sizeof answer->posted, 0};
    hvdl_writer missing = {answer->missing, sizeof answer->missing, 0};
    const hvdl_meeting *meeting = hvdl_meeting_of(e, what->key, what->run);
    const hvdl_plan *plan = hvdl_plan_by_key(e, what->key);
    bool is_over = !meeting && plan && what->run < plan->num_runs;
    int num_detailed = 0, num_more = 0, first = -1, last = -1;
    *posted.text = *missing.text = '\0';
    answer->num_missing = answer->num_elsewhere = answer->num_users = answer->num_failed = 0;
    if (meeting && hvdl_is_agreed(e, meeting))
        return;
    for (int r = 0; r < e->placement.local_size; r++) {
        int rank = hvdl_rank_of_local(e, r), number = hvdl_world_rank(e, rank);
        if (meeting ? meeting->posted_by[r] : is_over && !e->join.joined[r]) {
            if (first >= 0 && number > last + 1) {
                put_ranks(&posted, first, last);
                first = -1;
            }
            first = first < 0 ? number : first;
            last = number;
            continue;
        } else if (e->join.joined[r]) {
            continue; /* it takes part all the same */
        }
        answer->num_missing++;
        answer->num_elsewhere += lasts[r].activity == HVDL_DID_POST;
        answer->num_failed += lasts[r].activity == HVDL_DID_FAIL;
        answer->num_users += lasts[r].activity == HVDL_DID_POST && !lasts[r].in_words;
        if (num_detailed == MAX_DETAILED || missing.used + LONGEST_DETAIL > missing.room) {
            num_more++;
        } else {
            put_rank(e, &missing, r, &lasts[r]);
            num_detailed++;
        }
    }
    if (first >= 0)
        put_ranks(&posted, first, last);
    if (num_more)
        hvdl_put(&missing, " and %d more on %s", num_more, e->config.host_names[e->placement.host]);
}

hvdl_advice hvdl_advice_for(const hvdl_stall_part *all, int num_silent)
{
    if (!all->num_missing)
        return HVDL_ASK_HOST;
    if (num_silent || all->num_elsewhere < all->num_missing)
        return all->num_failed ? HVDL_ASK_FAILED : HVDL_ASK_PATH;
    return all->num_users ? HVDL_ASK_ORDER : HVDL_ASK_OWN;
}

static void put_title(hvdl_writer *to, const hvdl_late *what)
{
    char title[HVDL_TITLE_BYTES];
    hvdl_put_title(title, sizeof title, hvdl_kind_name(what->kind), what->in_words, what->name);
    hvdl_put(to, "%s", title);
}

/* In a failure only what tells of a likely cause. */
static void put_question(hvdl_writer *to, const hvdl_late *what, hvdl_advice advice)
{
    bool is_elsewhere = advice == HVDL_ASK_ORDER || advice == HVDL_ASK_OWN;
    const char *before = what->gives_up ? "; " : "";
    if (what->kind == HVDL_PLAN)
        hvdl_put(to, "%s" OTHER_PARAMETERS, before);
    else if (what->comes_again && advice == HVDL_ASK_PATH)
        hvdl_put(to, "%s%s", before, hvdl_uneven);
    else if (what->comes_again && advice == HVDL_ASK_ORDER)
        hvdl_put(to, "%sdo all ranks take the same path through the program, and %s", before,
                 hvdl_uneven);
    else if (!what->gives_up && is_elsewhere)
        hvdl_put(to, "do all ranks take the same path through the program, or is that operation "
                     "held up?");
    else if (!what->gives_up)
        hvdl_put(to, "do all ranks take the same path through the program?");
}

const char *hvdl_put_uneven(const char *text, char to[HVDL_TEXT_BYTES])
{
    snprintf(to, HVDL_TEXT_BYTES, "%s; %s", text, hvdl_uneven);
    return to;
}

void hvdl_describe_late(const hvdl_late *what, const char *posted, const char *missing,
                        hvdl_advice advice, const char *asker, char text[HVDL_TEXT_BYTES])
{
    hvdl_writer to = {text, HVDL_TEXT_BYTES, 0};
    bool again = what->report && !what->gives_up;
    put_title(&to, what);
    if (*what->site)
        hvdl_put(&to, " (%s)", what->site);
    hvdl_put(&to,
             again ? " still waits, after %.0f s, for %s; called by rank%s %s; "
                   : " has waited %.0f s for %s; called by rank%s %s; ",
             (double)what->age_ns / 1e9, missing, strpbrk(posted, ",-") ? "s" : "", posted);
    if (what->gives_up)
        hvdl_put(&to, "all operations fail now (HVDLITE_STALL_SHUTDOWN_TIME_SECONDS)");
    else if (advice == HVDL_ASK_HOST)
        hvdl_put(&to, "is that host cut off, or are its processes stopped?");
    if (advice != HVDL_ASK_HOST)
        put_question(&to, what, advice);
    if (asker && advice == HVDL_ASK_HOST && !what->gives_up)
        hvdl_put(&to, " Or is the link between it and %s slow?", asker);
}

void hvdl_describe_going_on(const hvdl_late *what, char text[HVDL_TEXT_BYTES])
{
    hvdl_writer to = {text, HVDL_TEXT_BYTES, 0};
    put_title(&to, what);
    hvdl_put(&to, " goes on after %.0f s", (double)what->age_ns / 1e9);
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

void hvdl_give_up_here(hvdl_engine *e, const char *text)
{
    hvdl_announce(e, (hvdl_entry){.type = HVDL_ENTRY_GIVE_UP}, text, strlen(text) + 1);
}

void hvdl_give_up_everywhere(hvdl_engine *e, const char *text)
{
    for (int h = 0; e->placement.is_leader && h < e->config.num_hosts; h++)
        if (h != e->placement.host) {
            hvdl_message message = {.type = HVDL_MSG_GIVE_UP};
            hvdl_send_message(e, h, &message, text, strlen(text) + 1);
        }
    hvdl_give_up_here(e, text);
}

void hvdl_say_going_on(hvdl_engine *e, hvdl_late what)
{
    char text[HVDL_TEXT_BYTES];
    hvdl_describe_going_on(&what, text);
    hvdl_say(e, text);
}
