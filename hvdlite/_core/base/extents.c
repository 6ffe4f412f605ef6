#include "base/extents.h"

#include <stdlib.h>
#include <string.h>

hvdl_err hvdl_extents_copy(hvdl_extents extents, hvdl_extents *to)
{
    size_t bytes = extents.count * sizeof *extents.list;
    hvdl_extents copy = {malloc(bytes ? bytes : 1), extents.count};
    if (!copy.list)
        return HVDL_ENOMEM;
    if (bytes)
        memcpy(copy.list, extents.list, bytes);
    *to = copy;
    return HVDL_OK;
}

/* The number of the first extent that ends behind a byte. */
static size_t first_behind(hvdl_extents extents, size_t byte)
{
    size_t low = 0, high = extents.count;
    while (low < high) {
        size_t middle = low + (high - low) / 2;
        if (extents.list[middle].bytes.end > byte)
            high = middle;
        else
            low = middle + 1;
    }
    return low;
}

bool hvdl_next_extent(hvdl_extents extents, hvdl_range *range, hvdl_extent *part)
{
    size_t i = first_behind(extents, range->begin);
    if (range->begin >= range->end || i == extents.count ||
        extents.list[i].bytes.begin >= range->end)
        return false;
    hvdl_extent all = extents.list[i];
    size_t begin = all.bytes.begin > range->begin ? all.bytes.begin : range->begin;
    size_t end = all.bytes.end < range->end ? all.bytes.end : range->end;
    *part = (hvdl_extent){{begin, end}, all.at + (begin - all.bytes.begin)};
    range->begin = end;
    return true;
}

uint64_t hvdl_extents_hash(hvdl_extents extents)
{
    uint64_t hash = hvdl_mix(extents.count + 1);
    for (size_t i = 0; i < extents.count; i++) {
        hash = hvdl_mix(hash ^ extents.list[i].bytes.begin);
        hash = hvdl_mix(hash ^ extents.list[i].bytes.end) + 1;
    }
    return hash ? hash : 1;
}
