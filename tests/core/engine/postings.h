/* Operations that the C programs of the tests give to engines. */
#ifndef TEST_POSTINGS_H
#define TEST_POSTINGS_H

#include "engine/engine.h"

/* A sum of float32, in place. */
static hvdl_posting sum_posting(const char *name, float *data, int64_t count)
{
    hvdl_posting posting = {.name = name, .input = data, .output = data};
    posting.desc = (hvdl_desc){.kind = HVDL_ALLREDUCE,
                               .dtype = HVDL_FLOAT32,
                               .op = HVDL_SUM,
                               .ndim = 1,
                               .root = -1,
                               .prescale = 1,
                               .postscale = 1,
                               .count = count,
                               .dims = {count}};
    return posting;
}

#endif
