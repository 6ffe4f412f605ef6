/* Tensors as doubles, for what is worked out in float64 whatever the dtype. */
#include <math.h>

#include "reduce.h"
#include "sixteen.h"

#define WIDEN(type, of)                                                                            \
    do {                                                                                           \
        const type *x = from;                                                                      \
        for (size_t i = 0; i < count; i++)                                                         \
            to[i] = (double)of(x[i]);                                                              \
    } while (0)

#define PLAIN(x) (x)

void hvdl_to_doubles(int dtype, double *to, const void *from, size_t count)
{
    switch (dtype) {
    case HVDL_UINT8:
    case HVDL_BOOL: WIDEN(uint8_t, PLAIN); break;
    case HVDL_INT8: WIDEN(int8_t, PLAIN); break;
    case HVDL_INT16: WIDEN(int16_t, PLAIN); break;
    case HVDL_INT32: WIDEN(int32_t, PLAIN); break;
    case HVDL_INT64: WIDEN(int64_t, PLAIN); break;
    case HVDL_FLOAT16: WIDEN(uint16_t, float_of_half); break;
    case HVDL_BFLOAT16: WIDEN(uint16_t, float_of_bfloat16); break;
    case HVDL_FLOAT32: WIDEN(float, PLAIN); break;
    default: WIDEN(double, PLAIN); break;
    }
}

/* Cut toward zero, and to the range; NaN becomes 0. `below` is the least double that is too large. */
static int64_t whole(double value, double least, double below)
{
    if (!(value > least))
        return isnan(value) ? 0 : (int64_t)least;
    return value >= below ? (int64_t)(below - 1.0 < 0x1p62 ? below - 1.0 : 0x1.fffffffffffffp62)
                          : (int64_t)value;
}

#define NARROW(type, value_of)                                                                     \
    do {                                                                                           \
        type *x = to;                                                                              \
        for (size_t i = 0; i < count; i++)                                                         \
            x[i] = (type)value_of;                                                                 \
    } while (0)

void hvdl_from_doubles(int dtype, void *to, const double *from, size_t count)
{
    switch (dtype) {
    case HVDL_UINT8: NARROW(uint8_t, whole(from[i], 0.0, 256.0)); break;
    case HVDL_INT8: NARROW(int8_t, whole(from[i], -128.0, 128.0)); break;
    case HVDL_INT16: NARROW(int16_t, whole(from[i], -32768.0, 32768.0)); break;
    case HVDL_INT32: NARROW(int32_t, whole(from[i], -0x1p31, 0x1p31)); break;
    case HVDL_INT64: NARROW(int64_t, whole(from[i], -0x1p63, 0x1p63)); break;
    case HVDL_FLOAT16: NARROW(uint16_t, half_of_float((float)from[i])); break;
    case HVDL_BFLOAT16: NARROW(uint16_t, bfloat16_of_float((float)from[i])); break;
    case HVDL_FLOAT32: NARROW(float, from[i]); break;
    case HVDL_BOOL: NARROW(uint8_t, (from[i] != 0.0)); break;
    default: NARROW(double, from[i]); break;
    }
}
