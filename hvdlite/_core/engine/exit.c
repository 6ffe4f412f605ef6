#define _GNU_SOURCE
#include "engine/exit.h"

#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

/* A process ends once, so what it does then is one for the process. */
static hvdl_exit_functions functions;
static hvdl_exit_leftovers leftovers;
static hvdl_engine **engines_to_close;
static size_t num_engines;
static pid_t owner;
static bool registered;

#define FIRST_PAUSE_NS 50000L
#define LONGEST_PAUSE_NS 10000000L

/* While hvdrun ends the job, the keeper (our parent) has this name: see ENDING in
 * launcher/machine/environment.py. Other ranks may have ended by a signal, and never come. */
#define ENDING "hvdrun-ending\n"

static bool is_being_ended(void)
{
    char path[32], name[sizeof ENDING] = "";
    if (!functions.supervised)
        return false;
    snprintf(path, sizeof path, "/proc/%d/comm", (int)getppid());
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    if (fd < 0)
        return false;
    ssize_t size = read(fd, name, sizeof name - 1);
    close(fd);
    return size > 0 && !strcmp(name, ENDING);
}

/* Returns false if the job is being ended: no rank may enter MPI_Finalize then, as one that has left
 * in mid-wait may have completed the barrier for another. */
static bool wait_for_all(void)
{
    hvdl_word request = 0;
    _Alignas(16) char status[256];
    struct timespec pause = {0, FIRST_PAUSE_NS};
    int done = 0;
    if (functions.ibarrier(functions.comm, &request))
        return !is_being_ended();
    while (!functions.test(&request, &done, status) && !done) {
        nanosleep(&pause, NULL);
        if (pause.tv_nsec < LONGEST_PAUSE_NS)
            pause.tv_nsec *= 2;
        else if (is_being_ended())
            return false;
    }
    return !is_being_ended();
}

/* What ranks say last is short. A longer message may come from a rank that failed in its middle, and
 * end never. */
#define LONGEST_LEFTOVER_BYTES 65536

/* The next message from a rank, if one is there. */
static bool receive_from(hvdl_word comm, int source)
{
    static char message[LONGEST_LEFTOVER_BYTES];
    _Alignas(16) char status[256];
    int found = 0, bytes = 0;
    return !leftovers.iprobe(source, leftovers.any_tag, comm, &found, status) && found &&
           !leftovers.get_count(status, leftovers.byte, &bytes) && bytes >= 0 &&
           bytes <= LONGEST_LEFTOVER_BYTES &&
           !leftovers.recv(message, bytes, leftovers.byte, source, leftovers.any_tag, comm, status);
}

#define QUIET_NS 1000000L
#define QUIET_TIMES 5

/* All ranks have sent what they send, but MPI says of no message when it arrives: it is awaited until
 * nothing has come for some milliseconds. */
static void receive_leftovers(void)
{
    struct timespec pause = {0, QUIET_NS};
    for (int quiet = 0; leftovers.num_comms && quiet < QUIET_TIMES; quiet++) {
        for (size_t i = 0; i < leftovers.num_comms; i++)
            for (int source = 0; source < leftovers.sizes[i]; source++)
                while (receive_from(leftovers.comms[i], source))
                    quiet = 0;
        nanosleep(&pause, NULL);
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
        if (!wait_for_all()) {
            fflush(NULL);
            _exit(code);
        }
        receive_leftovers();
        functions.finalize();
    }
}

hvdl_err hvdl_exit_receive(const hvdl_exit_leftovers *from)
{
    size_t count = from->num_comms;
    hvdl_word *comms = malloc((count + 1) * sizeof *comms);
    int *sizes = malloc((count + 1) * sizeof *sizes);
    if (!comms || !sizes) {
        free(comms);
        free(sizes);
        return HVDL_ENOMEM;
    }
    for (size_t i = 0; i < count; i++) {
        comms[i] = from->comms[i];
        sizes[i] = from->sizes[i];
    }
    free((void *)leftovers.comms);
    free((void *)leftovers.sizes);
    leftovers = *from;
    leftovers.comms = comms;
    leftovers.sizes = sizes;
    return HVDL_OK;
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
