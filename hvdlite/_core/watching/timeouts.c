/* What a caller reads whose time is over. */
#define _GNU_SOURCE
#include <stdlib.h>

#include "engine/state.h"
#include "operations/facts.h"
#include "transfers/transfer_texts.h"
#include "watching/missing_query.h"

/* How long a caller waits for the answer: there may be another call first. */
#define FOR_CALLER_NS (2 * HVDL_PATIENCE_NS + 500000000ull)
#define CALLER_LOOK_NS 2000000L

void hvdl_describe_timeout(hvdl_engine *e, hvdl_operation *op, double seconds,
                           char text[HVDL_TEXT_BYTES])
{
    hvdl_writer to = {text, HVDL_TEXT_BYTES, 0};
    char title[HVDL_TITLE_BYTES];
    uint64_t deadline = hvdl_now_ns() + FOR_CALLER_NS;
    if (op->transfer) {
        hvdl_describe_transfer_timeout(e, op->transfer, seconds, text);
        return;
    }
    pthread_mutex_lock(&e->stall.lock);
    free(op->stall.answer); /* of an earlier wait */
    op->stall.answer = NULL;
    pthread_mutex_unlock(&e->stall.lock);
    atomic_store(&op->stall.wanted, true);
    atomic_store(&e->stall.wanted, true);
    atomic_store(&e->driving.has_more, true);
    while (atomic_load(&op->stall.wanted) && hvdl_now_ns() < deadline &&
           !hvdl_operation_wait(e, op, CALLER_LOOK_NS))
        ;
    atomic_store(&op->stall.wanted, false);
    hvdl_put_title_of(title, sizeof title, op);
    hvdl_put(&to, "%s", title);
    if (op->site)
        hvdl_put(&to, " (%s)", op->site);
    hvdl_put(&to, " has not ended within %g s: ", seconds);
    pthread_mutex_lock(&e->stall.lock);
    hvdl_put(&to, "%s",
             op->stall.answer ? op->stall.answer : "which ranks have not called it is not known");
    pthread_mutex_unlock(&e->stall.lock);
}
