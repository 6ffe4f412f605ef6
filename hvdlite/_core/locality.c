#include "locality.h"

#include <stdlib.h>
#include <string.h>

#define SLOW_NS_PER_BYTE                                                                           \
    0.15               /* a shared cache takes a third of it, one far away three times as long */
#define WORTHWHILE 0.7 /* of the time that it took */
#define LEAST_PATIENCE 128 /* windows: a quarter of a GiB of a tensor, in blocks of 256 KiB */
#define MOST_PATIENCE 512  /* a look costs twelve slow blocks: less than a hundredth of the time */

static int compare(const void *a, const void *b)
{
    double first = *(const double *)a, second = *(const double *)b;
    return (first > second) - (first < second);
}

static double take_median(hvdl_locality *locality)
{
    qsort(locality->times, HVDL_LOCALITY_WINDOW, sizeof *locality->times, compare);
    locality->num_times = 0;
    return locality->times[HVDL_LOCALITY_WINDOW / 2];
}

static void change(hvdl_locality *locality, uint64_t in_flight)
{
    locality->past_cache = !locality->past_cache;
    locality->to_skip = in_flight;
}

static void be_patient(hvdl_locality *locality)
{
    uint64_t patience = 2 * locality->patience;
    patience = patience < LEAST_PATIENCE ? LEAST_PATIENCE : patience;
    locality->patience = patience > MOST_PATIENCE ? MOST_PATIENCE : patience;
    locality->windows_left = locality->patience;
}

bool hvdl_locality_note(hvdl_locality *locality, size_t bytes, uint64_t ns, uint64_t in_flight)
{
    if (locality->to_skip) {
        locality->to_skip--;
        return false;
    }
    locality->times[locality->num_times++] = (double)ns / (double)bytes;
    if (locality->num_times < HVDL_LOCALITY_WINDOW)
        return false;
    double median = take_median(locality);
    if (locality->windows_left)
        locality->windows_left--;
    if (!locality->past_cache) {
        if (median < SLOW_NS_PER_BYTE) {
            locality->patience = 0;
            return false;
        }
        if (locality->windows_left)
            return false; /* it did not help */
        locality->cached = median;
        locality->is_trial = true;
        change(locality, in_flight);
        return true;
    }
    if (locality->is_trial) {
        locality->is_trial = false;
        be_patient(locality);
        if (median < WORTHWHILE * locality->cached)
            return false;
        change(locality, in_flight); /* memory is slow here, too */
        return true;
    }
    if (locality->windows_left)
        return false;
    change(locality, in_flight); /* to see what it is like now */
    return true;
}
