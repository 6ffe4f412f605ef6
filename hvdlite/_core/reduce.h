/* Kernels: element-wise reduction of several inputs into one output.
 *
 * The inputs are combined in the order in which they are given. float16 and bfloat16 are widened to
 * float32, and rounded once, to nearest even, after the scale. Integer sums wrap. Min and Max hand
 * on NaN; of numbers that are equal (0.0 and -0.0) they take the last. bool: Sum and Max are or, Min
 * and Product are and.
 * Every variant (one per instruction set) gives the same bits; only which NaN is the sum or product
 * of NaNs is left open, as the CPU takes it from whichever operand the compiler put first. */
#ifndef HVDL_REDUCE_H
#define HVDL_REDUCE_H

#include "types.h"

/* What is done to a result: divided by `divisor` (integers: toward zero), then multiplied by
 * `factor` (integers: in double, cut toward zero). {1, 1.0} does nothing. */
typedef struct {
    int64_t divisor;
    double factor;
} hvdl_scale;

static inline bool hvdl_scale_is_one(const hvdl_scale *scale)
{
    return scale->divisor == 1 && scale->factor == 1.0;
}

/* dst[i] = scale(src[0][i] op src[1][i] op ...), for i < count. dst may be one of the inputs, and
 * must not overlap one otherwise. num_src >= 1; HVDL_AVERAGE is taken as HVDL_SUM (the divisor is
 * the scale's). */
void hvdl_reduce(hvdl_dtype dtype, hvdl_op op, void *dst, const void *const *src, int num_src,
                 size_t count, const hvdl_scale *scale);

/* The same, and a copy, for what somebody far away will read: on x86-64 the result goes past the caches
 * to memory (non-temporal stores). The sum's dst begins a cache line. */
void hvdl_reduce_past_cache(hvdl_dtype dtype, hvdl_op op, void *dst, const void *const *src,
                            int num_src, size_t count, const hvdl_scale *scale);
void hvdl_copy_past_cache(void *dst, const void *src, size_t bytes);
#if defined(__x86_64__)
#define HVDL_HAS_PAST_CACHE 1
#else
#define HVDL_HAS_PAST_CACHE 0
#endif

/* Every element as a double, and back: rounded to nearest even, integers cut toward zero and to their
 * range. */
void hvdl_to_doubles(int dtype, double *to, const void *from, size_t count);
void hvdl_from_doubles(int dtype, void *to, const double *from, size_t count);

typedef void hvdl_reduce_variant_fn(hvdl_dtype dtype, hvdl_op op, void *dst, const void *const *src,
                                    int num_src, size_t count, const hvdl_scale *scale);

/* The variants that this CPU can run, the one that hvdl_reduce uses first; ended by a name of NULL.
 * "avx512", "avx2", "neon", "baseline". */
typedef struct {
    const char *name;
    hvdl_reduce_variant_fn *reduce;
} hvdl_reduce_variant;

const hvdl_reduce_variant *hvdl_reduce_variants(void);

/* hvdl_reduce with one of them: for tests and benchmarks. */
void hvdl_reduce_with(const hvdl_reduce_variant *variant, hvdl_dtype dtype, hvdl_op op, void *dst,
                      const void *const *src, int num_src, size_t count, const hvdl_scale *scale);

#endif
