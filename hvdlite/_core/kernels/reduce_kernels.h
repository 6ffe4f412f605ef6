/* The kernels, written once and compiled per instruction set: the including file sets VARIANT,
 * VECTOR_BYTES and the target. Each group of elements, four vectors of accumulators, is read once
 * from every input, scaled, combined, scaled and stored once, without leaving the registers. */
#include <math.h>
#include <string.h>

#include "kernels/reduce.h"
#include "kernels/sixteen.h"

#define PASTE2(a, b) a##b
#define PASTE(a, b) PASTE2(a, b)
#define INLINE static inline __attribute__((always_inline))

/* ---- vectors, and quads: the four vectors that one iteration works on ---- */

#define DEFINE_QUAD(name, type)                                                                    \
    typedef type name##_v __attribute__((vector_size(VECTOR_BYTES)));                              \
    typedef type name##_u __attribute__((vector_size(VECTOR_BYTES), aligned(1), may_alias));       \
    typedef struct {                                                                               \
        name##_v a, b, c, d;                                                                       \
    } name##_quad;                                                                                 \
    enum { name##_group = 4 * VECTOR_BYTES / sizeof(type) }; /* elements of a quad */

#define DEFINE_LOAD_STORE(name)                                                                    \
    INLINE name##_quad load_##name(const void *from)                                               \
    {                                                                                              \
        const name##_u *x = from;                                                                  \
        return (name##_quad){x[0], x[1], x[2], x[3]};                                              \
    }                                                                                              \
    INLINE void store_##name(void *to, name##_quad q)                                              \
    {                                                                                              \
        name##_u *x = to;                                                                          \
        x[0] = q.a, x[1] = q.b, x[2] = q.c, x[3] = q.d;                                            \
    }

DEFINE_QUAD(uint8, uint8_t)
DEFINE_QUAD(int8, int8_t)
DEFINE_QUAD(uint16, uint16_t)
DEFINE_QUAD(int16, int16_t)
DEFINE_QUAD(uint32, uint32_t)
DEFINE_QUAD(int32, int32_t)
DEFINE_QUAD(uint64, uint64_t)
DEFINE_QUAD(int64, int64_t)
DEFINE_QUAD(float32, float)
DEFINE_QUAD(float64, double)

DEFINE_LOAD_STORE(uint8)
DEFINE_LOAD_STORE(int8)
DEFINE_LOAD_STORE(int16)
DEFINE_LOAD_STORE(int32)
DEFINE_LOAD_STORE(int64)
DEFINE_LOAD_STORE(float32)
DEFINE_LOAD_STORE(float64)

/* bfloat16: a pair in each 32 bits. Its first is shifted to where float32 has it, the second is there
 * already; the accumulators of the even and the odd elements are separate vectors. */

INLINE float32_v even_of_bfloat16(uint32_v pairs)
{
    return (float32_v)(pairs << 16);
}

INLINE float32_v odd_of_bfloat16(uint32_v pairs)
{
    return (float32_v)(pairs & 0xffff0000u);
}

/* The upper half of each element becomes the bfloat16. NaN stays NaN: those that come from bfloat16,
 * and the CPU's own, have zeros in the lower half. (AVX512_BF16 would flush denormals.) */
INLINE uint32_v round_to_bfloat16(float32_v value)
{
    const uint32_v bits = (uint32_v)value;
    return bits + 0x7fffu + (bits >> 16 & 1u);
}

INLINE uint32_v bfloat16_pairs(float32_v even, float32_v odd)
{
    return round_to_bfloat16(even) >> 16 | (round_to_bfloat16(odd) & 0xffff0000u);
}

INLINE float32_quad load_bfloat16(const void *from)
{
    const uint32_u *x = from;
    const uint32_v one = x[0], two = x[1];
    return (float32_quad){even_of_bfloat16(one), odd_of_bfloat16(one), even_of_bfloat16(two),
                          odd_of_bfloat16(two)};
}

INLINE void store_bfloat16(void *to, float32_quad q)
{
    uint32_u *x = to;
    x[0] = bfloat16_pairs(q.a, q.b), x[1] = bfloat16_pairs(q.c, q.d);
}

/* float16: with the CPU's conversions where the including file names them. */
#ifdef WIDEN_FLOAT16
INLINE float32_quad load_float16(const void *from)
{
    const char *x = from;
    return (float32_quad){(float32_v)WIDEN_FLOAT16(x),
                          (float32_v)WIDEN_FLOAT16(x + VECTOR_BYTES / 2),
                          (float32_v)WIDEN_FLOAT16(x + VECTOR_BYTES),
                          (float32_v)WIDEN_FLOAT16(x + VECTOR_BYTES / 2 * 3)};
}

INLINE void store_float16(void *to, float32_quad q)
{
    char *x = to;
    NARROW_FLOAT16(x, q.a);
    NARROW_FLOAT16(x + VECTOR_BYTES / 2, q.b);
    NARROW_FLOAT16(x + VECTOR_BYTES, q.c);
    NARROW_FLOAT16(x + VECTOR_BYTES / 2 * 3, q.d);
}
#else
INLINE float32_quad load_float16(const void *from)
{
    uint16_t halves[VECTOR_BYTES];
    float wide[VECTOR_BYTES];
    memcpy(halves, from, sizeof halves);
    for (int i = 0; i < VECTOR_BYTES; i++)
        wide[i] = float_of_half(halves[i]);
    return load_float32(wide);
}

INLINE void store_float16(void *to, float32_quad q)
{
    uint16_t halves[VECTOR_BYTES];
    float wide[VECTOR_BYTES];
    store_float32(wide, q);
    for (int i = 0; i < VECTOR_BYTES; i++)
        halves[i] = half_of_float(wide[i]);
    memcpy(to, halves, sizeof halves);
}
#endif

/* ---- combining ---- */

#define ADD(a, b) ((a) + (b))
#define MULTIPLY(a, b) ((a) * (b))
#define OR(a, b) ((a) | (b))
#define AND(a, b) ((a) & (b))
#define XOR(a, b) ((a) ^ (b))
/* Of a comparison: all bits of an element, or none. The first NaN is passed on unchanged. */
#define CHOOSE(mask, a, b)                                                                         \
    ((__typeof__(a))(((mask) & (__typeof__(mask))(a)) | (~(mask) & (__typeof__(mask))(b))))
#define MINIMUM(a, b) CHOOSE((a) < (b), a, b)
#define MAXIMUM(a, b) CHOOSE((a) > (b), a, b)
#define MINIMUM_NAN(a, b) CHOOSE(((a) != (a)) | ((a) < (b)), a, b)
#define MAXIMUM_NAN(a, b) CHOOSE(((a) != (a)) | ((a) > (b)), a, b)

/* `word`: unsigned, so that sums and products wrap. */
#define DEFINE_COMBINE(name, word, verb, f)                                                        \
    INLINE name##_quad name##_##verb(name##_quad p, name##_quad q)                                 \
    {                                                                                              \
        return (name##_quad){                                                                      \
            (name##_v)f((word##_v)p.a, (word##_v)q.a), (name##_v)f((word##_v)p.b, (word##_v)q.b),  \
            (name##_v)f((word##_v)p.c, (word##_v)q.c), (name##_v)f((word##_v)p.d, (word##_v)q.d)}; \
    }

#define DEFINE_COMBINES(name, word, minimum, maximum)                                              \
    DEFINE_COMBINE(name, word, sum, ADD)                                                           \
    DEFINE_COMBINE(name, word, product, MULTIPLY)                                                  \
    DEFINE_COMBINE(name, name, min, minimum)                                                       \
    DEFINE_COMBINE(name, name, max, maximum)

DEFINE_COMBINES(uint8, uint8, MINIMUM, MAXIMUM)
DEFINE_COMBINES(int8, uint8, MINIMUM, MAXIMUM)
DEFINE_COMBINES(int16, uint16, MINIMUM, MAXIMUM)
DEFINE_COMBINES(int32, uint32, MINIMUM, MAXIMUM)
DEFINE_COMBINES(int64, uint64, MINIMUM, MAXIMUM)
DEFINE_COMBINES(float32, float32, MINIMUM_NAN, MAXIMUM_NAN)
DEFINE_COMBINES(float64, float64, MINIMUM_NAN, MAXIMUM_NAN)

#define DEFINE_BITWISE_COMBINES(name)                                                              \
    DEFINE_COMBINE(name, name, and, AND)                                                           \
    DEFINE_COMBINE(name, name, or, OR)                                                             \
    DEFINE_COMBINE(name, name, xor, XOR)

DEFINE_BITWISE_COMBINES(uint8)
DEFINE_BITWISE_COMBINES(int8)
DEFINE_BITWISE_COMBINES(int16)
DEFINE_BITWISE_COMBINES(int32)
DEFINE_BITWISE_COMBINES(int64)

/* ---- the scale ---- */

/* For each type of computation: NAME_scale prepares the factors for a whole reduction, prescaled_NAME
 * scales an input, postscaled_NAME the result. `size`: how many of the quad's elements count. */

/* In double, which is fast, and exact for integers of up to 32 bits: where x / y is no whole number
 * it is at least 1 / y away from the next one, far more than double's rounding. */
#define QUOTIENT(x, y) (int32_t)((double)(x) / (double)(y))
#define LONG_QUOTIENT(x, y) ((x) / (y))

/* Integers are scaled one by one, in memory. */
#define DEFINE_SCALE_INTEGER(name, type, quotient)                                                 \
    typedef hvdl_scale name##_scale;                                                               \
    INLINE name##_scale scale_of_##name(const hvdl_scale *scale)                                   \
    {                                                                                              \
        return *scale;                                                                             \
    }                                                                                              \
    static void multiply_each_##name(type *x, size_t size, double factor)                          \
    {                                                                                              \
        for (size_t i = 0; i < size; i++)                                                          \
            x[i] = (type)hvdl_whole_product(x[i], factor);                                         \
    }                                                                                              \
    static void divide_each_##name(type *x, size_t size, int64_t divisor)                          \
    {                                                                                              \
        for (size_t i = 0; i < size; i++)                                                          \
            x[i] = (type)quotient(x[i], divisor);                                                  \
    }                                                                                              \
    INLINE name##_quad prescaled_##name(name##_quad q, size_t size, const name##_scale *scale)     \
    {                                                                                              \
        type x[name##_group];                                                                      \
        store_##name(x, q);                                                                        \
        multiply_each_##name(x, size, scale->prescale);                                            \
        return load_##name(x);                                                                     \
    }                                                                                              \
    INLINE name##_quad postscaled_##name(name##_quad q, size_t size, const name##_scale *scale)    \
    {                                                                                              \
        type x[name##_group];                                                                      \
        store_##name(x, q);                                                                        \
        if (scale->divisor != 1)                                                                   \
            divide_each_##name(x, size, scale->divisor);                                           \
        if (scale->postscale != 1.0)                                                               \
            multiply_each_##name(x, size, scale->postscale);                                       \
        return load_##name(x);                                                                     \
    }

DEFINE_SCALE_INTEGER(uint8, uint8_t, QUOTIENT)
DEFINE_SCALE_INTEGER(int8, int8_t, QUOTIENT)
DEFINE_SCALE_INTEGER(int16, int16_t, QUOTIENT)
DEFINE_SCALE_INTEGER(int32, int32_t, QUOTIENT)
DEFINE_SCALE_INTEGER(int64, int64_t, LONG_QUOTIENT)

/* NAN has zeros in its lower half, as round_to_bfloat16 needs. */
static double canonical(double factor)
{
    return factor != factor ? (double)NAN : factor;
}

#define DEFINE_SCALE_FLOAT(name, type)                                                             \
    typedef struct {                                                                               \
        type prescale, postscale;                                                                  \
    } name##_scale;                                                                                \
    INLINE name##_scale scale_of_##name(const hvdl_scale *scale)                                   \
    {                                                                                              \
        return (name##_scale){                                                                     \
            (type)canonical(scale->prescale),                                                      \
            (type)canonical(scale->postscale / (double)scale->divisor),                            \
        };                                                                                         \
    }                                                                                              \
    INLINE name##_quad multiplied_##name(name##_quad q, type by)                                   \
    {                                                                                              \
        return (name##_quad){q.a * by, q.b * by, q.c * by, q.d * by};                              \
    }                                                                                              \
    INLINE name##_quad prescaled_##name(name##_quad q, size_t size, const name##_scale *scale)     \
    {                                                                                              \
        (void)size;                                                                                \
        return multiplied_##name(q, scale->prescale);                                              \
    }                                                                                              \
    INLINE name##_quad postscaled_##name(name##_quad q, size_t size, const name##_scale *scale)    \
    {                                                                                              \
        (void)size;                                                                                \
        return multiplied_##name(q, scale->postscale);                                             \
    }

DEFINE_SCALE_FLOAT(float32, float)
DEFINE_SCALE_FLOAT(float64, double)

/* ---- whole reductions ---- */

/* acc: the type of the computation. The elements after the last whole group go through memory of a
 * group's size, so that the same instructions work on them. */
#define DEFINE_INPUT(name, type, acc)                                                              \
    INLINE acc##_quad name##_input(const void *src, size_t at, size_t size,                        \
                                   const acc##_scale *scale, bool pre)                             \
    {                                                                                              \
        type edge[acc##_group] = {0};                                                              \
        const type *x = (const type *)src + at;                                                    \
        const bool whole = size == acc##_group;                                                    \
        acc##_quad q = load_##name(whole ? x : memcpy(edge, x, size * sizeof(type)));              \
        return pre ? prescaled_##acc(q, size, scale) : q;                                          \
    }

DEFINE_INPUT(uint8, uint8_t, uint8)
DEFINE_INPUT(int8, int8_t, int8)
DEFINE_INPUT(int16, int16_t, int16)
DEFINE_INPUT(int32, int32_t, int32)
DEFINE_INPUT(int64, int64_t, int64)
DEFINE_INPUT(float16, uint16_t, float32)
DEFINE_INPUT(bfloat16, uint16_t, float32)
DEFINE_INPUT(float32, float, float32)
DEFINE_INPUT(float64, double, float64)

#define DEFINE_REDUCE(name, type, acc, verb)                                                       \
    INLINE void name##_##verb##_group(type *dst, const void *const *src, int num_src, size_t at,   \
                                      size_t size, const acc##_scale *scale, bool pre, bool post)  \
    {                                                                                              \
        acc##_quad sum = name##_input(src[0], at, size, scale, pre);                               \
        for (int k = 1; k < num_src; k++)                                                          \
            sum = acc##_##verb(sum, name##_input(src[k], at, size, scale, pre));                   \
        if (post)                                                                                  \
            sum = postscaled_##acc(sum, size, scale);                                              \
        type edge[acc##_group];                                                                    \
        const bool whole = size == acc##_group;                                                    \
        store_##name(whole ? dst + at : edge, sum);                                                \
        if (!whole)                                                                                \
            memcpy(dst + at, edge, size * sizeof(type));                                           \
    }                                                                                              \
    static void name##_##verb##_reduce(void *dst, const void *const *src, int num_src,             \
                                       size_t count, const hvdl_scale *given)                      \
    {                                                                                              \
        const acc##_scale scale = scale_of_##acc(given);                                           \
        const bool pre = given->prescale != 1.0;                                                   \
        const bool post = given->divisor != 1 || given->postscale != 1.0;                          \
        const void *const two[2] = {src[0], src[num_src > 1]};                                     \
        size_t at = 0;                                                                             \
        if (num_src == 2 && !pre && !post) /* the sums of training */                              \
            for (; count - at >= acc##_group; at += acc##_group)                                   \
                name##_##verb##_group(dst, two, 2, at, acc##_group, &scale, false, false);         \
        for (; count - at >= acc##_group; at += acc##_group)                                       \
            name##_##verb##_group(dst, src, num_src, at, acc##_group, &scale, pre, post);          \
        if (at < count)                                                                            \
            name##_##verb##_group(dst, src, num_src, at, count - at, &scale, pre, post);           \
    }

#define DEFINE_REDUCES(name, type, acc)                                                            \
    DEFINE_REDUCE(name, type, acc, sum)                                                            \
    DEFINE_REDUCE(name, type, acc, min)                                                            \
    DEFINE_REDUCE(name, type, acc, max)                                                            \
    DEFINE_REDUCE(name, type, acc, product)

DEFINE_REDUCES(uint8, uint8_t, uint8)
DEFINE_REDUCES(int8, int8_t, int8)
DEFINE_REDUCES(int16, int16_t, int16)
DEFINE_REDUCES(int32, int32_t, int32)
DEFINE_REDUCES(int64, int64_t, int64)
DEFINE_REDUCES(float16, uint16_t, float32)
DEFINE_REDUCES(bfloat16, uint16_t, float32)
DEFINE_REDUCES(float32, float, float32)
DEFINE_REDUCES(float64, double, float64)

#define DEFINE_BITWISE_REDUCES(name, type)                                                         \
    DEFINE_REDUCE(name, type, name, and)                                                           \
    DEFINE_REDUCE(name, type, name, or)                                                            \
    DEFINE_REDUCE(name, type, name, xor)

DEFINE_BITWISE_REDUCES(uint8, uint8_t)
DEFINE_BITWISE_REDUCES(int8, int8_t)
DEFINE_BITWISE_REDUCES(int16, int16_t)
DEFINE_BITWISE_REDUCES(int32, int32_t)
DEFINE_BITWISE_REDUCES(int64, int64_t)

/* Sums of inputs that have a factor each. */
#define DEFINE_WEIGHTED_SUM(name, type, acc)                                                       \
    INLINE void name##_weighted_group(type *dst, const void *const *src, int num_src, size_t at,   \
                                      size_t size, const acc##_scale *scales)                      \
    {                                                                                              \
        acc##_quad sum = name##_input(src[0], at, size, &scales[0], true);                         \
        for (int k = 1; k < num_src; k++)                                                          \
            sum = acc##_sum(sum, name##_input(src[k], at, size, &scales[k], true));                \
        sum = postscaled_##acc(sum, size, &scales[0]);                                             \
        type edge[acc##_group];                                                                    \
        const bool whole = size == acc##_group;                                                    \
        store_##name(whole ? dst + at : edge, sum);                                                \
        if (!whole)                                                                                \
            memcpy(dst + at, edge, size * sizeof(type));                                           \
    }                                                                                              \
    static void name##_weighted_sum(void *dst, const void *const *src, int num_src, size_t count,  \
                                    const hvdl_scale *given)                                       \
    {                                                                                              \
        acc##_scale scales[num_src];                                                               \
        for (int k = 0; k < num_src; k++) {                                                        \
            hvdl_scale of_input = *given;                                                          \
            of_input.prescale *= given->factors[k];                                                \
            scales[k] = scale_of_##acc(&of_input);                                                 \
        }                                                                                          \
        size_t at = 0;                                                                             \
        if (num_src == 2)                                                                          \
            for (; count - at >= acc##_group; at += acc##_group)                                   \
                name##_weighted_group(dst, src, 2, at, acc##_group, scales);                       \
        for (; count - at >= acc##_group; at += acc##_group)                                       \
            name##_weighted_group(dst, src, num_src, at, acc##_group, scales);                     \
        if (at < count)                                                                            \
            name##_weighted_group(dst, src, num_src, at, count - at, scales);                      \
    }

DEFINE_WEIGHTED_SUM(float16, uint16_t, float32)
DEFINE_WEIGHTED_SUM(bfloat16, uint16_t, float32)
DEFINE_WEIGHTED_SUM(float32, float, float32)
DEFINE_WEIGHTED_SUM(float64, double, float64)

typedef void reduce_fn(void *dst, const void *const *src, int num_src, size_t count,
                       const hvdl_scale *scale);

/* HVDL_ADASUM has no kernel. */
#define ARITHMETIC(name)                                                                           \
    [HVDL_AVERAGE] = name##_sum_reduce, [HVDL_SUM] = name##_sum_reduce,                            \
    [HVDL_MIN] = name##_min_reduce, [HVDL_MAX] = name##_max_reduce,                                \
    [HVDL_PRODUCT] = name##_product_reduce
#define BITWISE(name)                                                                              \
    [HVDL_BAND] = name##_and_reduce, [HVDL_BOR] = name##_or_reduce, [HVDL_BXOR] = name##_xor_reduce

hvdl_reduce_variant_fn PASTE(hvdl_reduce_, VARIANT);

void PASTE(hvdl_reduce_, VARIANT)(hvdl_dtype dtype, hvdl_op op, void *dst, const void *const *src,
                                  int num_src, size_t count, const hvdl_scale *scale)
{
    static reduce_fn *const all[HVDL_NUM_DTYPES][HVDL_NUM_OPS] = {
        [HVDL_UINT8] = {ARITHMETIC(uint8), BITWISE(uint8)},
        [HVDL_INT8] = {ARITHMETIC(int8), BITWISE(int8)},
        [HVDL_INT16] = {ARITHMETIC(int16), BITWISE(int16)},
        [HVDL_INT32] = {ARITHMETIC(int32), BITWISE(int32)},
        [HVDL_INT64] = {ARITHMETIC(int64), BITWISE(int64)},
        [HVDL_FLOAT16] = {ARITHMETIC(float16)},
        [HVDL_BFLOAT16] = {ARITHMETIC(bfloat16)},
        [HVDL_FLOAT32] = {ARITHMETIC(float32)},
        [HVDL_FLOAT64] = {ARITHMETIC(float64)},
        /* the callers refuse factors for bool */
        [HVDL_BOOL] = {[HVDL_AVERAGE] = uint8_or_reduce,
                       [HVDL_SUM] = uint8_or_reduce,
                       [HVDL_MIN] = uint8_and_reduce,
                       [HVDL_MAX] = uint8_or_reduce,
                       [HVDL_PRODUCT] = uint8_and_reduce,
                       BITWISE(uint8)},
    };
    static reduce_fn *const weighted_sums[HVDL_NUM_DTYPES] = {
        [HVDL_FLOAT16] = float16_weighted_sum,
        [HVDL_BFLOAT16] = bfloat16_weighted_sum,
        [HVDL_FLOAT32] = float32_weighted_sum,
        [HVDL_FLOAT64] = float64_weighted_sum};
    if (scale->factors)
        weighted_sums[dtype](dst, src, num_src, count, scale);
    else
        all[dtype][op](dst, src, num_src, count, scale);
}
