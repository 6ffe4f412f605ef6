#define _GNU_SOURCE
#include "engine/exit.h"

#include <stdio.h>
#include <stdlib.h>
#include <time.h>
#include <unistd.h>

/* A process ends once, so what it does then is one for the process. */
static hvdl_exit_functions functions;
static hvdl_engine **engines_to_close;
static size_t num_engines;
static pid_t owner;
static bool registered;

#define FIRST_PAUSE_NS 50000L
#define LONGEST_PAUSE_NS 10000000L

static void wait_for_all(void)
{
    hvdl_word request = 0;
    _Alignas(16) char status[256];
    struct timespec pause = {0, FIRST_PAUSE_NS};
    int done = 0;
    if (functions.ibarrier(functions.comm, &request))
        return;
    while (!functions.test(&request, &done, status) && !done) {
        nanosleep(&pause, NULL);
        if (pause.tv_nsec < LONGEST_PAUSE_NS)
            pause.tv_nsec *= 2;
    }
}

static void at_exit(int code, void *unused)
{
    int finalized = 1;
    (void)unused;
    if (!functions.abort || getpid() != owner || functions.finalized(&finalized) || finalized)
        return;
    code &= 0xff; /* all that anybody will see of it: sys.exit(256) is 0 */
    if (code) {
        fflush(NULL); /* nobody comes back to do it */
        if (!functions.supervised)
            functions.abort(functions.comm, code);
        _exit(code);
    }
    for (size_t i = 0; i < num_engines; i++)
        hvdl_engine_close(engines_to_close[i], true);
    if (functions.finalize) {
        wait_for_all();
        functions.finalize();
    }
}

hvdl_err hvdl_exit_close(hvdl_engine *const *engines, size_t count)
{
    hvdl_engine **copy = malloc((count + 1) * sizeof *copy);
    if (!copy)
        return HVDL_ENOMEM;
    for (size_t i = 0; i < count; i++)
        copy[i] = engines[i];
    free(engines_to_close);
    engines_to_close = copy;
    num_engines = count;
    return HVDL_OK;
}

hvdl_err hvdl_exit_set(const hvdl_exit_functions *to)
{
    functions = *to;
    owner = getpid();
    if (!registered && on_exit(at_exit, NULL))
        return HVDL_ENOMEM;
    registered = true;
    return HVDL_OK;
}
