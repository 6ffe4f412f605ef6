/* Picks the kernels for the CPU at hand. */
#include "kernels/reduce.h"

#include <stdatomic.h>
#include <string.h>

#if defined(__x86_64__)
#include <emmintrin.h>
#endif

hvdl_reduce_variant_fn hvdl_reduce_baseline;
hvdl_reduce_tree_fn hvdl_reduce_tree_baseline;
#if defined(__x86_64__)
hvdl_reduce_variant_fn hvdl_reduce_avx2, hvdl_reduce_avx512;
hvdl_reduce_tree_fn hvdl_reduce_tree_avx2, hvdl_reduce_tree_avx512;
#elif defined(__aarch64__)
hvdl_reduce_variant_fn hvdl_reduce_neon;
hvdl_reduce_tree_fn hvdl_reduce_tree_neon;
#endif

/* Best first: a CPU that has the variant of one row has those of all rows after it. */
static const hvdl_reduce_variant variants[] = {
#if defined(__x86_64__)
    {"avx512", hvdl_reduce_avx512, hvdl_reduce_tree_avx512},
    {"avx2", hvdl_reduce_avx2, hvdl_reduce_tree_avx2},
#elif defined(__aarch64__)
    {"neon", hvdl_reduce_neon, hvdl_reduce_tree_neon},
#endif
    {"baseline", hvdl_reduce_baseline, hvdl_reduce_tree_baseline},
    {NULL, NULL, NULL},
};

static const hvdl_reduce_variant *find_best(void)
{
#if defined(__x86_64__)
    __builtin_cpu_init();
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
        __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl"))
        return variants;
    return variants + (__builtin_cpu_supports("avx2") ? 1 : 2); /* with AVX2 comes F16C */
#else
    return variants;
#endif
}

const hvdl_reduce_variant *hvdl_reduce_variants(void)
{
    static _Atomic(const hvdl_reduce_variant *) best; /* every thread finds the same variant */
    const hvdl_reduce_variant *found = atomic_load_explicit(&best, memory_order_relaxed);
    if (!found) {
        found = find_best();
        atomic_store_explicit(&best, found, memory_order_relaxed);
    }
    return found;
}

/* The thread that happens to run a kernel must not decide whether denormals are kept:
 * torch.set_flush_denormal sets that per thread, and the ranks' results must be equal. */
typedef uint64_t float_mode;

static float_mode set_default_float_mode(void)
{
#if defined(__x86_64__)
    unsigned mode = _mm_getcsr();
    if (mode & 0xe040u) /* flush to zero, a rounding mode, denormals are zero */
        _mm_setcsr(mode & ~0xe040u);
    return mode;
#elif defined(__aarch64__)
    uint64_t mode;
    __asm__ volatile("mrs %0, fpcr" : "=r"(mode));
    if (mode)
        __asm__ volatile("msr fpcr, %0" : : "r"((uint64_t)0));
    return mode;
#else
    return 0;
#endif
}

static void restore_float_mode(float_mode mode)
{
#if defined(__x86_64__)
    if (mode & 0xe040u)
        _mm_setcsr((unsigned)mode);
#elif defined(__aarch64__)
    if (mode)
        __asm__ volatile("msr fpcr, %0" : : "r"(mode));
#else
    (void)mode;
#endif
}

void hvdl_reduce_with(const hvdl_reduce_variant *variant, hvdl_dtype dtype, hvdl_op op, void *dst,
                      const void *const *src, int num_src, size_t count, const hvdl_scale *scale)
{
    float_mode mode = set_default_float_mode();
    variant->reduce(dtype, op, dst, src, num_src, count, scale);
    restore_float_mode(mode);
}

/* The first elements, then the others. */
static __attribute__((noinline)) void reduce_in_two(hvdl_dtype dtype, hvdl_op op, void *dst,
                                                    const void *const *src, int num_src,
                                                    size_t count, const hvdl_scale *scale)
{
    size_t first = scale->num_first < count ? scale->num_first : count;
    size_t bytes = first * hvdl_dtype_bytes((int)dtype);
    hvdl_scale of_first = *scale, rest = hvdl_scale_from(scale, count);
    const void *inputs[num_src];
    of_first.postscale = scale->first_postscale;
    of_first.num_first = 0;
    for (int k = 0; k < num_src; k++)
        inputs[k] = (const char *)src[k] + bytes;
    hvdl_reduce(dtype, op, dst, src, num_src, first, &of_first);
    if (count > first)
        hvdl_reduce(dtype, op, (char *)dst + bytes, inputs, num_src, count - first, &rest);
}

void hvdl_reduce(hvdl_dtype dtype, hvdl_op op, void *dst, const void *const *src, int num_src,
                 size_t count, const hvdl_scale *scale)
{
    if (scale->num_first)
        reduce_in_two(dtype, op, dst, src, num_src, count, scale);
    else
        hvdl_reduce_with(hvdl_reduce_variants(), dtype, op, dst, src, num_src, count, scale);
}

void hvdl_reduce_tree_with(const hvdl_reduce_variant *variant, hvdl_dtype dtype,
                           hvdl_dtype to_dtype, hvdl_op op, void *dst, const void *const *src,
                           const uint8_t *merges, int num_src, size_t count,
                           const hvdl_scale *scale)
{
    float_mode mode = set_default_float_mode();
    variant->reduce_tree(dtype, to_dtype, op, dst, src, merges, num_src, count, scale);
    restore_float_mode(mode);
}

/* Along a chain there is a faster kernel. (Extremes do not depend on the tree, but on the order.) */
void hvdl_reduce_tree(hvdl_dtype dtype, hvdl_dtype to_dtype, hvdl_op op, void *dst,
                      const void *const *src, const uint8_t *merges, int num_src, size_t count,
                      const hvdl_scale *scale)
{
    const hvdl_reduce_variant *variant = hvdl_reduce_variants();
    bool plain = op == HVDL_MIN || op == HVDL_MAX || hvdl_merges_are_chain(merges, num_src);
    if (dtype == to_dtype && plain) {
        hvdl_reduce_with(variant, dtype, op, dst, src, num_src, count, scale);
        return;
    }
    hvdl_reduce_tree_with(variant, dtype, to_dtype, op, dst, src, merges, num_src, count, scale);
}

/* ---- copies that read ahead ---- */

enum { LINE = 64, FETCH_AHEAD_BYTES = 512 };

/* What is read once need not stay in the caches. Past the end of the source this asks in vain. */
static inline void fetch_ahead(const char *src)
{
    __builtin_prefetch(src + FETCH_AHEAD_BYTES, 0, 0);
}

void hvdl_copy_fetching(void *dst, const void *src, size_t bytes)
{
    char *to = dst;
    const char *from = src;
    size_t lines = bytes / LINE * LINE;
    for (size_t at = 0; at < lines; at += LINE) {
        fetch_ahead(from + at);
        memcpy(to + at, from + at, LINE);
    }
    memcpy(to + lines, from + lines, bytes - lines);
}

/* ---- past the caches ---- */

#if HVDL_HAS_PAST_CACHE
enum { TILE_BYTES = 8192 }; /* stays in the first-level cache */

/* Whole cache lines first; the rest of the last line goes through the caches. */
static inline void stream(char *dst, const char *src, size_t bytes, bool fetches)
{
    size_t lines = bytes / LINE * LINE;
    for (size_t at = 0; at < lines; at += sizeof(__m128i)) {
        if (fetches && at % LINE == 0)
            fetch_ahead(src + at);
        _mm_stream_si128((__m128i *)(dst + at), _mm_loadu_si128((const __m128i *)(src + at)));
    }
    memcpy(dst + lines, src + lines, bytes - lines);
}

static inline void copy_past_cache(char *dst, const char *src, size_t bytes, bool fetches)
{
    size_t head = -(uintptr_t)dst % LINE;
    head = head < bytes ? head : bytes;
    memcpy(dst, src, head);
    stream(dst + head, src + head, bytes - head, fetches);
    _mm_sfence(); /* before another rank learns of the result and reads it */
}

void hvdl_copy_past_cache(void *dst, const void *src, size_t bytes)
{
    copy_past_cache(dst, src, bytes, false);
}

void hvdl_copy_past_cache_fetching(void *dst, const void *src, size_t bytes)
{
    copy_past_cache(dst, src, bytes, true);
}

void hvdl_reduce_past_cache(hvdl_dtype dtype, hvdl_op op, void *dst, const void *const *src,
                            int num_src, size_t count, const hvdl_scale *scale)
{
    _Alignas(LINE) char tile[TILE_BYTES];
    const void *inputs[num_src];
    size_t esize = hvdl_dtype_bytes((int)dtype), per_tile = TILE_BYTES / esize;
    for (size_t at = 0; at < count; at += per_tile) {
        size_t size = count - at < per_tile ? count - at : per_tile;
        for (int k = 0; k < num_src; k++)
            inputs[k] = (const char *)src[k] + at * esize;
        hvdl_scale of_tile = hvdl_scale_from(scale, at);
        hvdl_reduce(dtype, op, tile, inputs, num_src, size, &of_tile);
        stream((char *)dst + at * esize, tile, size * esize, false);
    }
    _mm_sfence();
}
#else
void hvdl_copy_past_cache(void *dst, const void *src, size_t bytes)
{
    memcpy(dst, src, bytes);
}

void hvdl_copy_past_cache_fetching(void *dst, const void *src, size_t bytes)
{
    hvdl_copy_fetching(dst, src, bytes);
}

void hvdl_reduce_past_cache(hvdl_dtype dtype, hvdl_op op, void *dst, const void *const *src,
                            int num_src, size_t count, const hvdl_scale *scale)
{
    hvdl_reduce(dtype, op, dst, src, num_src, count, scale);
}
#endif
