#include "host/locality.h"

#include <stdlib.h>
#include <string.h>

/* A shared cache takes a third of it, one far away three times as long. Memory that is touched for the
 * first time takes longer, too: there the trial changes nothing. */
#define SLOW_NS_PER_BYTE 0.15
#define WORTHWHILE 0.7 /* of the time that it took */
/* In windows. Little at first, so that an error costs little; it doubles with each trial in a row. A look
 * costs twelve slow blocks: in the end less than a hundredth of the time. */
#define LEAST_PATIENCE 8
#define MOST_PATIENCE 512
#define MOST_UNTIMED 1024 /* blocks */

static int compare(const void *a, const void *b)
{
    double first = *(const double *)a, second = *(const double *)b;
    return (first > second) - (first < second);
}

/* Disturbances (a rank that had to wait for its core) only ever add time. */
static double take_quartile(hvdl_locality_times *of)
{
    qsort(of->times, HVDL_LOCALITY_WINDOW, sizeof *of->times, compare);
    of->num_times = 0;
    return of->times[HVDL_LOCALITY_WINDOW / 4];
}

/* Times of before mean nothing after it. */
static void change(hvdl_locality *locality, uint64_t in_flight)
{
    locality->past_cache = !locality->past_cache;
    locality->to_skip = in_flight;
    for (int work = 0; work < HVDL_NUM_TIMED; work++)
        locality->of[work].num_times = 0;
}

static void be_patient(hvdl_locality_times *of)
{
    uint64_t patience = 2 * of->patience;
    patience = patience < LEAST_PATIENCE ? LEAST_PATIENCE : patience;
    of->patience = patience > MOST_PATIENCE ? MOST_PATIENCE : patience;
    of->windows_left = of->patience;
}

bool hvdl_locality_note(hvdl_locality *locality, hvdl_timed_work work, size_t bytes, uint64_t ns,
                        uint64_t in_flight)
{
    if (locality->is_trial && work != locality->tried)
        return hvdl_locality_untimed(locality); /* the other work may not come again */
    locality->untimed = 0;
    if (locality->to_skip) {
        locality->to_skip--;
        return false;
    }
    hvdl_locality_times *of = &locality->of[work];
    of->times[of->num_times++] = (double)ns / (double)bytes;
    if (of->num_times < HVDL_LOCALITY_WINDOW)
        return false;
    double time = take_quartile(of);
    if (locality->past_cache) /* of either work: a look back is due after so many */
        of = &locality->of[locality->tried];
    if (of->windows_left)
        of->windows_left--;
    if (!locality->past_cache) {
        if (time < SLOW_NS_PER_BYTE) {
            of->patience = 0;
            return false;
        }
        if (of->windows_left)
            return false; /* it did not help */
        of->cached = time;
        locality->is_trial = true;
        locality->tried = work;
        change(locality, in_flight);
        return true;
    }
    if (locality->is_trial) {
        locality->is_trial = false;
        be_patient(of);
        if (time < WORTHWHILE * of->cached)
            return false;
        change(locality, in_flight); /* memory is slow here, too */
        return true;
    }
    if (of->windows_left)
        return false;
    change(locality, in_flight); /* to see what it is like now */
    return true;
}

bool hvdl_locality_untimed(hvdl_locality *locality)
{
    if (!locality->past_cache || ++locality->untimed < MOST_UNTIMED)
        return false;
    memset(locality, 0, sizeof *locality);
    return true;
}
