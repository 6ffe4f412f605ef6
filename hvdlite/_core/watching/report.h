/* Texts about operations that wait, and what they are made of. */
#ifndef HVDL_REPORT_H
#define HVDL_REPORT_H

#include "engine/state.h"

/* A text that is put together. */
typedef struct {
    char *text;
    size_t room, used;
} hvdl_writer;

/* What has no room is cut, and ends in dots. */
void hvdl_put(hvdl_writer *to, const char *format, ...) __attribute__((format(printf, 2, 3)));
/* "rank 1 on b (which last finished …)". */
void hvdl_put_rank(const hvdl_engine *engine, hvdl_writer *to, int local,
                   const hvdl_shm_last *last);

/* Whether a report is due of what has waited for so long, if the first one is due after `first_ns` (0: never). */
bool hvdl_report_is_due(uint64_t first_ns, uint64_t age_ns, int report);

/* Is it an allreduce once more, as in a loop over batches: of a name that has ended well before, unnamed after
 * another unnamed one, or the run of a plan? Then a rank that is not there may have had fewer of them. (Not
 * for what a process group of torch.distributed has numbered: it knows no join.) */
bool hvdl_comes_again(const hvdl_engine *engine, const hvdl_operation *operation);
/* The question about what all ranks call once for each batch. */
extern const char hvdl_uneven[];
/* A failure's text, and that a rank may have run out of batches; in `to`, which is returned. */
const char *hvdl_put_uneven(const char *text, char to[HVDL_TEXT_BYTES]);

/* To the user. */
void hvdl_say(const hvdl_engine *engine, const char *text);
/* To the user, and to the launcher, which can find out where the ranks are. */
void hvdl_report(const hvdl_engine *engine, const char *text);

#endif
