/* The kernels, written once and compiled per instruction set: the including file sets VARIANT and
 * the target. Work goes through a tile of accumulators that stays in the first-level cache. */
#include <math.h>
#include <string.h>

#include "reduce.h"
#include "sixteen.h"

#define PASTE2(a, b) a##b
#define PASTE(a, b) PASTE2(a, b)

enum { TILE = 512 }; /* elements */

/* ---- 16-bit floats ---- */

static void widen_bfloat16(float *dst, const uint16_t *src, size_t count)
{
    for (size_t i = 0; i < count; i++)
        dst[i] = float_of_bfloat16(src[i]);
}

static void narrow_bfloat16(uint16_t *dst, const float *src, size_t count)
{
    for (size_t i = 0; i < count; i++)
        dst[i] = bfloat16_of_float(src[i]);
}

#ifdef HAVE_F16C
#include <immintrin.h>

static void widen_float16(float *dst, const uint16_t *src, size_t count)
{
    size_t i = 0;
    for (; i + 8 <= count; i += 8)
        _mm256_storeu_ps(dst + i, _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(src + i))));
    for (; i < count; i++)
        dst[i] = _cvtsh_ss(src[i]);
}

static void narrow_float16(uint16_t *dst, const float *src, size_t count)
{
    size_t i = 0;
    for (; i + 8 <= count; i += 8)
        _mm_storeu_si128((__m128i *)(dst + i), _mm256_cvtps_ph(_mm256_loadu_ps(src + i), 0));
    for (; i < count; i++)
        dst[i] = _cvtss_sh(src[i], 0);
}
#else
static void widen_float16(float *dst, const uint16_t *src, size_t count)
{
    for (size_t i = 0; i < count; i++)
        dst[i] = float_of_half(src[i]);
}

static void narrow_float16(uint16_t *dst, const float *src, size_t count)
{
    for (size_t i = 0; i < count; i++)
        dst[i] = half_of_float(src[i]);
}
#endif

/* ---- combining: acc[i] = acc[i] op x[i] ---- */

#define ADD(a, b) ((a) + (b))
#define MULTIPLY(a, b) ((a) * (b))
#define MINIMUM(a, b) ((b) < (a) ? (b) : (a))
#define MAXIMUM(a, b) ((b) > (a) ? (b) : (a))
#define MINIMUM_NAN(a, b) ((a) != (a) || (a) < (b) ? (a) : (b))
#define MAXIMUM_NAN(a, b) ((a) != (a) || (a) > (b) ? (a) : (b))
#define OR(a, b) ((a) | (b))
#define AND(a, b) ((a) & (b))

#define LOOP(type, word, f)                                                                        \
    for (size_t i = 0; i < count; i++)                                                             \
        acc[i] = (type)f((word)acc[i], (word)x[i]);

/* `word`: unsigned, at least as wide as int, so that sums and products wrap without overflow. */
#define DEFINE_COMBINE(name, type, word, min, max)                                                 \
    static void combine_##name(hvdl_op op, type *restrict acc, const type *restrict x,             \
                               size_t count)                                                       \
    {                                                                                              \
        switch (op) {                                                                              \
        case HVDL_MIN: LOOP(type, type, min) break;                                                \
        case HVDL_MAX: LOOP(type, type, max) break;                                                \
        case HVDL_PRODUCT: LOOP(type, word, MULTIPLY) break;                                       \
        default: LOOP(type, word, ADD) break;                                                      \
        }                                                                                          \
    }

DEFINE_COMBINE(uint8, uint8_t, uint32_t, MINIMUM, MAXIMUM)
DEFINE_COMBINE(int8, int8_t, uint32_t, MINIMUM, MAXIMUM)
DEFINE_COMBINE(int16, int16_t, uint32_t, MINIMUM, MAXIMUM)
DEFINE_COMBINE(int32, int32_t, uint32_t, MINIMUM, MAXIMUM)
DEFINE_COMBINE(int64, int64_t, uint64_t, MINIMUM, MAXIMUM)
DEFINE_COMBINE(float32, float, float, MINIMUM_NAN, MAXIMUM_NAN)
DEFINE_COMBINE(float64, double, double, MINIMUM_NAN, MAXIMUM_NAN)

static void combine_bool(hvdl_op op, uint8_t *restrict acc, const uint8_t *restrict x, size_t count)
{
    if (op == HVDL_MIN || op == HVDL_PRODUCT)
        LOOP(uint8_t, uint8_t, AND)
    else
        LOOP(uint8_t, uint8_t, OR)
}

/* ---- the scale ---- */

static int64_t int64_of_double(double value)
{
    if (value != value)
        return 0;
    if (value >= 0x1p63)
        return INT64_MAX;
    return value <= -0x1p63 ? INT64_MIN : (int64_t)value;
}

#define DEFINE_SCALE_INTEGER(name, type)                                                           \
    static void scale_##name(type *acc, size_t count, const hvdl_scale *scale)                     \
    {                                                                                              \
        if (scale->divisor != 1)                                                                   \
            for (size_t i = 0; i < count; i++)                                                     \
                acc[i] = (type)((int64_t)acc[i] / scale->divisor);                                 \
        if (scale->factor != 1.0)                                                                  \
            for (size_t i = 0; i < count; i++)                                                     \
                acc[i] = (type)int64_of_double((double)acc[i] * scale->factor);                    \
    }

#define DEFINE_SCALE_FLOAT(name, type)                                                             \
    static void scale_##name(type *acc, size_t count, const hvdl_scale *scale)                     \
    {                                                                                              \
        if (scale->divisor != 1) {                                                                 \
            const type divisor = (type)scale->divisor;                                             \
            for (size_t i = 0; i < count; i++)                                                     \
                acc[i] = acc[i] / divisor;                                                         \
        }                                                                                          \
        if (scale->factor != 1.0)                                                                  \
            for (size_t i = 0; i < count; i++)                                                     \
                acc[i] = (type)((double)acc[i] * scale->factor);                                   \
    }

DEFINE_SCALE_INTEGER(uint8, uint8_t)
DEFINE_SCALE_INTEGER(int8, int8_t)
DEFINE_SCALE_INTEGER(int16, int16_t)
DEFINE_SCALE_INTEGER(int32, int32_t)
DEFINE_SCALE_INTEGER(int64, int64_t)
DEFINE_SCALE_FLOAT(float32, float)
DEFINE_SCALE_FLOAT(float64, double)

static void scale_bool(uint8_t *acc, size_t count, const hvdl_scale *scale)
{
    (void)acc, (void)count, (void)scale; /* the callers refuse factors for bool */
}

/* ---- whole reductions ---- */

#define DEFINE_REDUCE(function, name, type)                                                        \
    static void function(hvdl_op op, type *dst, const void *const *src, int num_src, size_t count, \
                         const hvdl_scale *scale)                                                  \
    {                                                                                              \
        const bool unscaled = hvdl_scale_is_one(scale);                                            \
        type tile[TILE];                                                                           \
        for (size_t at = 0; at < count; at += TILE) {                                              \
            size_t size = count - at < TILE ? count - at : TILE;                                   \
            memcpy(tile, (const type *)src[0] + at, size * sizeof(type));                          \
            for (int k = 1; k < num_src; k++)                                                      \
                combine_##name(op, tile, (const type *)src[k] + at, size);                         \
            if (!unscaled)                                                                         \
                scale_##name(tile, size, scale);                                                   \
            memcpy(dst + at, tile, size * sizeof(type));                                           \
        }                                                                                          \
    }

DEFINE_REDUCE(reduce_uint8, uint8, uint8_t)
DEFINE_REDUCE(reduce_int8, int8, int8_t)
DEFINE_REDUCE(reduce_int16, int16, int16_t)
DEFINE_REDUCE(reduce_int32, int32, int32_t)
DEFINE_REDUCE(reduce_int64, int64, int64_t)
DEFINE_REDUCE(reduce_float64, float64, double)
DEFINE_REDUCE(reduce_bool, bool, uint8_t)
DEFINE_REDUCE(reduce_tiled_float32, float32, float)

/* The case that training is made of, in one pass over registers: the sum of two. */
static void reduce_float32(hvdl_op op, float *dst, const void *const *src, int num_src,
                           size_t count, const hvdl_scale *scale)
{
    if (num_src != 2 || (op != HVDL_SUM && op != HVDL_AVERAGE) || scale->factor != 1.0) {
        reduce_tiled_float32(op, dst, src, num_src, count, scale);
        return;
    }
    const float *a = src[0],
                *b = src[1]; /* each may be dst: element i is read before it is written */
    if (scale->divisor == 1) {
#pragma GCC ivdep
        for (size_t i = 0; i < count; i++)
            dst[i] = a[i] + b[i];
    } else {
        const float divisor = (float)scale->divisor;
#pragma GCC ivdep
        for (size_t i = 0; i < count; i++)
            dst[i] = (a[i] + b[i]) / divisor;
    }
}

#define DEFINE_REDUCE_16(name)                                                                     \
    static void reduce_##name(hvdl_op op, uint16_t *dst, const void *const *src, int num_src,      \
                              size_t count, const hvdl_scale *scale)                               \
    {                                                                                              \
        const bool unscaled = hvdl_scale_is_one(scale);                                            \
        float acc[TILE], x[TILE];                                                                  \
        for (size_t at = 0; at < count; at += TILE) {                                              \
            size_t size = count - at < TILE ? count - at : TILE;                                   \
            widen_##name(acc, (const uint16_t *)src[0] + at, size);                                \
            for (int k = 1; k < num_src; k++) {                                                    \
                widen_##name(x, (const uint16_t *)src[k] + at, size);                              \
                combine_float32(op, acc, x, size);                                                 \
            }                                                                                      \
            if (!unscaled)                                                                         \
                scale_float32(acc, size, scale);                                                   \
            narrow_##name(dst + at, acc, size);                                                    \
        }                                                                                          \
    }

DEFINE_REDUCE_16(float16)
DEFINE_REDUCE_16(bfloat16)

void PASTE(hvdl_reduce_, VARIANT)(hvdl_dtype dtype, hvdl_op op, void *dst, const void *const *src,
                                  int num_src, size_t count, const hvdl_scale *scale);

void PASTE(hvdl_reduce_, VARIANT)(hvdl_dtype dtype, hvdl_op op, void *dst, const void *const *src,
                                  int num_src, size_t count, const hvdl_scale *scale)
{
    switch (dtype) {
    case HVDL_UINT8: reduce_uint8(op, dst, src, num_src, count, scale); break;
    case HVDL_INT8: reduce_int8(op, dst, src, num_src, count, scale); break;
    case HVDL_INT16: reduce_int16(op, dst, src, num_src, count, scale); break;
    case HVDL_INT32: reduce_int32(op, dst, src, num_src, count, scale); break;
    case HVDL_INT64: reduce_int64(op, dst, src, num_src, count, scale); break;
    case HVDL_FLOAT16: reduce_float16(op, dst, src, num_src, count, scale); break;
    case HVDL_BFLOAT16: reduce_bfloat16(op, dst, src, num_src, count, scale); break;
    case HVDL_FLOAT32: reduce_float32(op, dst, src, num_src, count, scale); break;
    case HVDL_FLOAT64: reduce_float64(op, dst, src, num_src, count, scale); break;
    case HVDL_BOOL: reduce_bool(op, dst, src, num_src, count, scale); break;
    case HVDL_NUM_DTYPES: break;
    }
}
