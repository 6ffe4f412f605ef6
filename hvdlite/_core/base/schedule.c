#include "base/schedule.h"

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

hvdl_range hvdl_chunk(size_t count, int num_hosts, int chunk, size_t elem_bytes)
{
    return hvdl_part(count, (size_t)num_hosts, (size_t)chunk, 64 / elem_bytes);
}

int hvdl_ring_send_chunk(int host, int step, int num_hosts)
{
    return ((host - step) % num_hosts + num_hosts) % num_hosts;
}

int hvdl_ring_recv_chunk(int host, int step, int num_hosts)
{
    return hvdl_ring_send_chunk(host, step + 1, num_hosts);
}

/* R: 2^R is the largest power of two up to num_hosts. */
static int doubling_rounds(int num_hosts)
{
    int rounds = 0;
    while (2 << rounds <= num_hosts)
        rounds++;
    return rounds;
}

int hvdl_doubling_num_steps(int num_hosts)
{
    int rounds = doubling_rounds(num_hosts);
    return 1 << rounds == num_hosts ? rounds : rounds + 2;
}

hvdl_doubling_step hvdl_doubling_step_of(int host, int step, int num_hosts)
{
    int rounds = doubling_rounds(num_hosts), paired = 1 << rounds;
    int round = paired == num_hosts ? step : step - 1;
    bool folded = host >= paired;
    hvdl_doubling_step nothing = {.peer = -1};
    if (round >= 0 && round < rounds) {
        int peer = host ^ 1 << round;
        hvdl_doubling_step both = {peer, true, true, true, peer < host, round == rounds - 1};
        return folded ? nothing : both;
    }
    int peer = folded ? host - paired : host + paired;
    if (peer >= num_hosts)
        return nothing;
    bool sends = folded == (round < 0);
    return (hvdl_doubling_step){
        .peer = peer, .sends = sends, .receives = !sends, .adds = round < 0};
}
