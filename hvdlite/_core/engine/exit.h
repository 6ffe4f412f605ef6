/* How a process ends MPI: from the C library's exit handlers, the only place where the code of an
 * uncaught exception, of sys.exit(3) and of raise SystemExit(3) is known alike.
 *
 * A rank that ends with a code other than 0 must not enter MPI_Finalize, where it would wait for the
 * others, which may wait for it: it calls MPI_Abort, or simply goes where somebody (hvdrun) sees that and
 * ends the job: an MPI's own abort ends all ranks at once, and drowns in their complaints which was the
 * first. One that ends with 0 waits for the others without
 * using a core (MPI_Finalize itself polls under both MPIs), then finalizes. */
#ifndef HVDL_EXIT_H
#define HVDL_EXIT_H

#include "engine/engine.h"

typedef struct {
    int (*abort)(hvdl_word comm, int code); /* NULL: do nothing at exit */
    int (*ibarrier)(hvdl_word comm, hvdl_word *request);
    int (*test)(hvdl_word *request, int *flag, void *status);
    int (*finalized)(int *flag);
    int (*finalize)(void); /* NULL: MPI is not ours to finalize */
    hvdl_word comm;
    bool supervised; /* somebody ends the job when this process ends with a code other than 0 */
} hvdl_exit_functions;

/* The engines that a process which ends with code 0 closes first, in this order. They must stay. */
hvdl_err hvdl_exit_close(hvdl_engine *const *engines, size_t count);

/* Communicators that are not used any more, on which messages may still come: what ranks say last as
 * they leave, to those that have left before. */
typedef struct {
    int (*iprobe)(int source, int tag, hvdl_word comm, int *flag, void *status);
    int (*get_count)(const void *status, hvdl_word type, int *count);
    int (*recv)(void *buf, int count, hvdl_word type, int source, int tag, hvdl_word comm,
                void *status);
    hvdl_word byte;
    int any_tag;
    const hvdl_word *comms;
    const int *sizes; /* of each: its number of ranks */
    size_t num_comms;
} hvdl_exit_leftovers;

/* Says which messages to receive and drop before MPI_Finalize, as UCX warns about each message that is
 * never received. Copies both arrays. */
hvdl_err hvdl_exit_receive(const hvdl_exit_leftovers *leftovers);

/* Replaces what an earlier call said. Called with the GIL, which orders the calls. */
hvdl_err hvdl_exit_set(const hvdl_exit_functions *functions);

#endif
