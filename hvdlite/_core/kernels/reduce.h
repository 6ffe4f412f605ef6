/* Kernels: element-wise reduction of several inputs into one output.
 *
 * The inputs are combined in their order. float16 and bfloat16 are widened to float32, computed there,
 * and rounded once, to nearest even. Integer sums wrap. Min and Max propagate NaN; of equal numbers (0.0
 * and -0.0) they take the last. bool: Sum and Max are or, Min and Product are and. The bitwise ops take
 * integers and bool, which they leave a bool.
 * Every variant (one per instruction set) gives the same bits; only which NaN a sum or
 * product of NaNs is stays open, as the CPU takes it from the operand that the compiler put first. */
#ifndef HVDL_REDUCE_H
#define HVDL_REDUCE_H

#include "base/sum_tree.h"

/* Each input is multiplied by `prescale` as it is read, and the result by `postscale` / `divisor`. Of the
 * first `num_first` elements, sums of floats, input k also by factors[k], unless `factors` is NULL; and the
 * result by first_postscale / divisor.
 *
 * Floats: each factor is computed in double, rounded once to the type of the computation, and multiplied
 * in that type, so that a product has the bits of torch's `factor * tensor`.
 * Integers: multiplied in double and cut toward zero; the result is first divided by `divisor`,
 * exactly, toward zero. */
typedef struct {
    double prescale;
    int64_t divisor;
    double postscale;
    size_t num_first;
    const double *factors;
    double first_postscale;
} hvdl_scale;

#define HVDL_UNSCALED ((hvdl_scale){.prescale = 1.0, .divisor = 1, .postscale = 1.0})

static inline bool hvdl_is_unscaled(const hvdl_scale *scale)
{
    return scale->prescale == 1.0 && scale->divisor == 1 && scale->postscale == 1.0 &&
           !scale->num_first;
}

/* Of the elements from `begin` on. */
static inline hvdl_scale hvdl_scale_from(const hvdl_scale *scale, size_t begin)
{
    hvdl_scale rest = *scale;
    rest.num_first = scale->num_first > begin ? scale->num_first - begin : 0;
    rest.factors = rest.num_first ? scale->factors : NULL;
    return rest;
}

/* Cut toward zero, and to the range of int64_t; NaN becomes 0. */
static inline int64_t hvdl_whole_product(int64_t x, double factor)
{
    const double product = (double)x * factor;
    if (product != product)
        return 0;
    if (product >= 0x1p63)
        return INT64_MAX;
    return product <= -0x1p63 ? INT64_MIN : (int64_t)product;
}

/* dst[i] = the combination of src[0][i], src[1][i], ..., scaled, for i < count. dst may be one of the
 * inputs, and must not overlap one otherwise. num_src >= 1; HVDL_AVERAGE counts as HVDL_SUM (the
 * scale has the divisor). */
void hvdl_reduce(hvdl_dtype dtype, hvdl_op op, void *dst, const void *const *src, int num_src,
                 size_t count, const hvdl_scale *scale);

/* dst[i] = the combination of the inputs along a tree: see base/sum_tree.h. Floats; the scale is the same for all
 * elements. dst has the inputs' type, or, of 16-bit floats and float32, the other one; if it has the same, dst may
 * be one of the inputs. */
void hvdl_reduce_tree(hvdl_dtype dtype, hvdl_dtype to_dtype, hvdl_op op, void *dst,
                      const void *const *src, const uint8_t *merges, int num_src, size_t count,
                      const hvdl_scale *scale);

/* hvdl_reduce, and a copy, for data that a distant core will read: on x86-64 the result goes past
 * the caches to memory (non-temporal stores). dst of the reduction begins at a cache line. */
void hvdl_reduce_past_cache(hvdl_dtype dtype, hvdl_op op, void *dst, const void *const *src,
                            int num_src, size_t count, const hvdl_scale *scale);
void hvdl_copy_past_cache(void *dst, const void *src, size_t bytes);

/* Copies of what lies in memory and in no cache: they ask for it further ahead than the CPU does by itself. (Of
 * what is in a cache they are slower.) */
void hvdl_copy_fetching(void *dst, const void *src, size_t bytes);
void hvdl_copy_past_cache_fetching(void *dst, const void *src, size_t bytes);

#if defined(__x86_64__)
#define HVDL_HAS_PAST_CACHE 1
#else
#define HVDL_HAS_PAST_CACHE 0
#endif

/* Values that change nothing when an op combines them with others. Adasum's are zeros. */
void hvdl_fill_neutral(hvdl_dtype dtype, hvdl_op op, void *to, size_t count);

/* Every element, multiplied by the factor as an hvdl_scale's prescale, as a double (16-bit products are
 * not rounded); and back: cut to the type of the computation (integers toward zero and to their
 * range), multiplied by the factor as above, and rounded to nearest even. */
void hvdl_to_doubles(int dtype, double *to, const void *from, size_t count, double factor);
void hvdl_from_doubles(int dtype, void *to, const double *from, size_t count, double factor);

typedef void hvdl_reduce_variant_fn(hvdl_dtype dtype, hvdl_op op, void *dst, const void *const *src,
                                    int num_src, size_t count, const hvdl_scale *scale);

typedef void hvdl_reduce_tree_fn(hvdl_dtype dtype, hvdl_dtype to_dtype, hvdl_op op, void *dst,
                                 const void *const *src, const uint8_t *merges, int num_src,
                                 size_t count, const hvdl_scale *scale);

/* The variants that this CPU can run, the one that hvdl_reduce uses first; a NULL name ends the list.
 * "avx512", "avx2", "neon", "baseline". */
typedef struct {
    const char *name;
    hvdl_reduce_variant_fn *reduce;
    hvdl_reduce_tree_fn *reduce_tree;
} hvdl_reduce_variant;

const hvdl_reduce_variant *hvdl_reduce_variants(void);

/* hvdl_reduce with one of them, where all elements have the same scale: for tests and benchmarks. */
void hvdl_reduce_with(const hvdl_reduce_variant *variant, hvdl_dtype dtype, hvdl_op op, void *dst,
                      const void *const *src, int num_src, size_t count, const hvdl_scale *scale);
void hvdl_reduce_tree_with(const hvdl_reduce_variant *variant, hvdl_dtype dtype,
                           hvdl_dtype to_dtype, hvdl_op op, void *dst, const void *const *src,
                           const uint8_t *merges, int num_src, size_t count,
                           const hvdl_scale *scale);

#endif
