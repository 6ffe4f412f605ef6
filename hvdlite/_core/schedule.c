#include "schedule.h"

hvdl_range hvdl_part(size_t count, size_t parts, size_t index, size_t align)
{
    /* In units of `align`, the first `units % parts` parts get one unit more. */
    size_t units = hvdl_ceil_div(count, align);
    size_t each = units / parts, more = units % parts;
    size_t begin = (index * each + (index < more ? index : more)) * align;
    size_t end = begin + (each + (index < more)) * align;
    hvdl_range range = {begin < count ? begin : count, end < count ? end : count};
    return range;
}

int hvdl_ring_send_chunk(int host, int step, int num_hosts)
{
    return ((host - step) % num_hosts + num_hosts) % num_hosts;
}

int hvdl_ring_recv_chunk(int host, int step, int num_hosts)
{
    return hvdl_ring_send_chunk(host, step + 1, num_hosts);
}
