/* Faults on purpose (HVDLITE_FAULT): what of the core fails, when it happens for the nth time in this process.
 *
 * Nothing asks in a process without faults: net/faulty_wire.c and base/allocations.c replace functions where
 * there are some. The state is the process's, as neither MPI's functions nor the allocator have a place for a
 * context, and counts go on from engine to engine. */
#ifndef HVDL_FAULTS_H
#define HVDL_FAULTS_H

#include "base/types.h"

#define HVDL_MOST_FAULTS 16

typedef enum {
    HVDL_FAULT_MESSAGE,    /* a message of data is not sent, and its sender is not told */
    HVDL_FAULT_CALL,       /* a function of MPI returns an error, and has done nothing */
    HVDL_FAULT_ALLOCATION, /* there is no memory */
    HVDL_NUM_FAULTS
} hvdl_fault_kind;

/* Events nth to nth + times - 1 of those of the kind fail. name: of the events that are counted; "": all of the
 * kind. rank, say: for the line about the first that fails. HVDL_ENOMEM: there are HVDL_MOST_FAULTS.
 * While there is no engine; one thread. */
hvdl_err hvdl_fault_add(hvdl_fault_kind kind, const char *name, uint64_t nth, uint64_t times,
                        int rank, void (*say)(const char *line));

/* While there is no engine; one thread. */
void hvdl_fault_remove_all(void);

bool hvdl_fault_any(hvdl_fault_kind kind);

/* One more event: whether it fails. Any thread. */
bool hvdl_fault_happens(hvdl_fault_kind kind, const char *name);

/* Makes allocations fail, if faults of that kind are there, and else no longer (base/allocations.c). */
void hvdl_allocations_may_fail(void);

#endif
