/* The stall check: which ranks wait for which. The driver. */
#ifndef HVDL_STALL_H
#define HVDL_STALL_H

#include "engine/state.h"

/* The question about what all ranks call once for each batch. */
extern const char hvdl_uneven[];

/* An allreduce has ended well. */
void hvdl_note_reduced(hvdl_engine *engine, const hvdl_operation *operation);
/* Is it an allreduce once more, as in a loop over batches: of a name that has ended well before, unnamed after
 * another unnamed one, or the run of a plan? Then a rank that is not there may have had fewer of them. (Not
 * for what a process group of torch.distributed has numbered: it knows no join.) */
bool hvdl_comes_again(const hvdl_engine *engine, const hvdl_operation *operation);
/* A failure's text, and that a rank may have run out of batches; in `to`, which is returned. */
const char *hvdl_put_uneven(const char *text, char to[HVDL_TEXT_BYTES]);
/* Looks for operations that are late, now and then. Returns whether it did. */
bool hvdl_stall_look(hvdl_engine *engine);
void hvdl_read_reported(hvdl_engine *engine, const hvdl_entry *entry);
void hvdl_read_taken(hvdl_engine *engine, const hvdl_entry *entry);
/* Says what is due of this host's ranks, if enough of the journal can be read. *progressed is set,
 * never cleared. */
void hvdl_stall_tell(hvdl_engine *engine, bool (*read_journal)(hvdl_engine *), bool *progressed);
/* Describes this host's ranks to the coordinator on `host` that asks, when that is due. */
void hvdl_describe_to(hvdl_engine *engine, int host, const hvdl_late *what);
/* An operation ends: the inquiries about it end, too. */
void hvdl_stall_ended(hvdl_engine *engine, hvdl_operation *operation, bool ok);
/* Everything fails: all inquiries and reports end. */
void hvdl_stall_end(hvdl_engine *engine);
void hvdl_stall_free(hvdl_engine *engine);

#endif
