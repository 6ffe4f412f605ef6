/* The pipelines of some ranks in one process, under a clock of the test's: every reading of it is so much
 * later than the one before. */
#define _GNU_SOURCE
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

#include "host/pipeline.h"

#define MOST_RANKS 32

static uint64_t now_ns, readings;
static uint64_t cached_ns, past_ns; /* from one reading to the next, by the answer of the moment */
static uint64_t outlier_at, outlier_ns;
static const hvdl_shm *watched;

int test_clock_gettime(clockid_t clock, struct timespec *time)
{
    (void)clock;
    bool past = watched && atomic_load(&watched->control->past_cache);
    now_ns += past ? past_ns : cached_ns;
    now_ns += ++readings == outlier_at ? outlier_ns : 0;
    *time = (struct timespec){(time_t)(now_ns / 1000000000u), (long)(now_ns % 1000000000u)};
    return 0;
}

/* A pass of this type with `count` elements (of each rank in all), `times` times, the ranks taking turns
 * after each step. Counts in past_bytes, by rank, what went past the caches. Returns 0, or 1: it failed. */
int run(int ranks, int type, int dtype, size_t count, int times, size_t block_bytes,
        uint64_t cached, uint64_t past, uint64_t outlier, uint64_t outlier_by, uint64_t *past_bytes)
{
    static hvdl_shm shm[MOST_RANKS];
    static hvdl_pipeline pipelines[MOST_RANKS];
    size_t bytes = count * hvdl_dtype_bytes(dtype);
    int fd = memfd_create("pipelines", 0), failed = 0;
    size_t shared_bytes;
    if (fd < 0 || hvdl_shm_bytes(ranks, 4096, block_bytes, &shared_bytes) ||
        ftruncate(fd, (off_t)shared_bytes))
        return 1;
    char *memory = calloc((size_t)ranks, 2 * bytes);
    watched = NULL;
    now_ns = readings = 0;
    cached_ns = cached;
    past_ns = past;
    outlier_at = outlier;
    outlier_ns = outlier_by;
    for (int r = 0; r < ranks; r++) {
        failed |= hvdl_shm_open(&shm[r], fd, ranks, r, 4096, block_bytes) != HVDL_OK;
        hvdl_pipeline_init(&pipelines[r], &shm[r]);
    }
    watched = &shm[0];
    for (int i = 0; i < times && memory && !failed; i++) {
        int left = ranks;
        for (int r = 0; r < ranks; r++) {
            char *in = memory + (size_t)r * 2 * bytes, *out = in + bytes;
            hvdl_pass *pass =
                hvdl_pass_new((hvdl_pass_type)type, type == HVDL_PASS_ALLREDUCE ? 0 : ranks);
            pass->dtype = (hvdl_dtype)dtype;
            pass->op = HVDL_SUM;
            pass->in = in;
            pass->out = out;
            pass->count = type == HVDL_PASS_PARTS ? 0 : count;
            for (int to = 0; to < pass->num_sources; to++) {
                hvdl_range slice = hvdl_slice(count, ranks, to, pass->dtype);
                size_t esize = hvdl_dtype_bytes(dtype), at = slice.begin * esize;
                size_t bytes_of = hvdl_range_size(slice) * esize;
                hvdl_range all = {0, type == HVDL_PASS_SCATTER ? 0 : bytes_of};
                pass->sources[to] = (hvdl_source){
                    .local = to, .from = in + at, .bytes = bytes_of, .take = all, .to = out + at};
                if (type == HVDL_PASS_PARTS) {
                    pass->count = bytes_of > pass->count ? bytes_of : pass->count;
                    pass->num_slots = ranks - 1;
                }
            }
            hvdl_pipeline_add(&pipelines[r], pass);
        }
        while (left)
            for (int r = 0; r < ranks; r++) {
                hvdl_pass *finished;
                hvdl_pipeline_step(&pipelines[r], &finished);
                left -= finished != NULL;
                free(finished);
            }
    }
    for (int r = 0; r < ranks; r++) {
        past_bytes[r] = shm[r].past_cache_bytes;
        hvdl_shm_close(&shm[r]);
    }
    free(memory);
    close(fd);
    return failed || !memory;
}
