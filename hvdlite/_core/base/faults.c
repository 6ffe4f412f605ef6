#define _GNU_SOURCE
#include "base/faults.h"

#include <stdatomic.h>
#include <stdio.h>
#include <string.h>

static const char *const kind_names[HVDL_NUM_FAULTS] = {"drop", "fail-mpi", "fail-alloc"};

static struct {
    hvdl_fault_kind kind;
    char name[32];
    uint64_t nth, times;
    int rank;
    void (*say)(const char *line);
    _Atomic uint64_t seen;
} faults[HVDL_MOST_FAULTS];
static int num_faults;

hvdl_err hvdl_fault_add(hvdl_fault_kind kind, const char *name, uint64_t nth, uint64_t times,
                        int rank, void (*say)(const char *line))
{
    if (num_faults == HVDL_MOST_FAULTS)
        return HVDL_ENOMEM;
    snprintf(faults[num_faults].name, sizeof faults->name, "%s", name);
    faults[num_faults].kind = kind;
    faults[num_faults].nth = nth;
    faults[num_faults].times = times;
    faults[num_faults].rank = rank;
    faults[num_faults].say = say;
    atomic_store_explicit(&faults[num_faults].seen, 0, memory_order_relaxed);
    num_faults++;
    return HVDL_OK;
}

void hvdl_fault_remove_all(void)
{
    num_faults = 0;
}

bool hvdl_fault_any(hvdl_fault_kind kind)
{
    for (int i = 0; i < num_faults; i++)
        if (faults[i].kind == kind)
            return true;
    return false;
}

bool hvdl_fault_happens(hvdl_fault_kind kind, const char *name)
{
    bool happens = false;
    for (int i = 0; i < num_faults; i++) {
        if (faults[i].kind != kind || (*faults[i].name && strcmp(faults[i].name, name)))
            continue;
        /* A count: nothing else depends on its order. */
        uint64_t number = atomic_fetch_add_explicit(&faults[i].seen, 1, memory_order_relaxed) + 1;
        if (number < faults[i].nth || number - faults[i].nth >= faults[i].times)
            continue;
        happens = true;
        if (number > faults[i].nth)
            continue;
        char line[160];
        snprintf(line, sizeof line,
                 "hvdlite: HVDLITE_FAULT: %s on rank %d, on purpose: %s, no. %llu\n",
                 kind_names[kind], faults[i].rank, name, (unsigned long long)number);
        faults[i].say(line);
    }
    return happens;
}
