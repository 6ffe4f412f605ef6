/* Picks the kernels for the CPU at hand. */
#include "reduce.h"

#if defined(__x86_64__)
#include <xmmintrin.h>
#endif

typedef void reduce_fn(hvdl_dtype dtype, hvdl_op op, void *dst, const void *const *src, int num_src,
                       size_t count, const hvdl_scale *scale);

reduce_fn hvdl_reduce_baseline;
#if defined(__x86_64__)
reduce_fn hvdl_reduce_avx2, hvdl_reduce_avx512;
#endif

typedef struct {
    const char *name;
    reduce_fn *reduce;
} variant;

static variant best_variant(void)
{
#if defined(__x86_64__)
    __builtin_cpu_init();
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
        __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl"))
        return (variant){"avx512", hvdl_reduce_avx512};
    if (__builtin_cpu_supports("avx2")) /* every CPU with AVX2 has F16C */
        return (variant){"avx2", hvdl_reduce_avx2};
#endif
    return (variant){"baseline", hvdl_reduce_baseline};
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

void hvdl_reduce(hvdl_dtype dtype, hvdl_op op, void *dst, const void *const *src, int num_src,
                 size_t count, const hvdl_scale *scale)
{
    float_mode mode = set_default_float_mode();
    best_variant().reduce(dtype, op, dst, src, num_src, count, scale);
    restore_float_mode(mode);
}

const char *hvdl_reduce_variant(void)
{
    return best_variant().name;
}
