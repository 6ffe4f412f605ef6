/* Converts tensors to and from doubles, for algorithms that compute in float64 whatever the dtype. */
#include <math.h>

#include "kernels/reduce.h"
#include "kernels/sixteen.h"

#define WIDEN(type, product)                                                                       \
    do {                                                                                           \
        const type *x = from;                                                                      \
        for (size_t i = 0; i < count; i++)                                                         \
            to[i] = (double)(product);                                                             \
    } while (0)

void hvdl_to_doubles(int dtype, double *to, const void *from, size_t count, double factor)
{
    const float by = (float)factor;
    switch (dtype) {
    case HVDL_BOOL:
    case HVDL_UINT8: WIDEN(uint8_t, (uint8_t)hvdl_whole_product(x[i], factor)); break;
    case HVDL_INT8: WIDEN(int8_t, (int8_t)hvdl_whole_product(x[i], factor)); break;
    case HVDL_INT16: WIDEN(int16_t, (int16_t)hvdl_whole_product(x[i], factor)); break;
    case HVDL_INT32: WIDEN(int32_t, (int32_t)hvdl_whole_product(x[i], factor)); break;
    case HVDL_INT64: WIDEN(int64_t, hvdl_whole_product(x[i], factor)); break;
    case HVDL_FLOAT16: WIDEN(uint16_t, float_of_half(x[i]) * by); break;
    case HVDL_BFLOAT16: WIDEN(uint16_t, float_of_bfloat16(x[i]) * by); break;
    case HVDL_FLOAT32: WIDEN(float, x[i] * by); break;
    default: WIDEN(double, x[i] * factor); break;
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

#define NARROW(type, product)                                                                      \
    do {                                                                                           \
        type *x = to;                                                                              \
        for (size_t i = 0; i < count; i++)                                                         \
            x[i] = (type)(product);                                                                \
    } while (0)

#define WHOLE_PRODUCT(least, below) hvdl_whole_product(whole(from[i], least, below), factor)

void hvdl_from_doubles(int dtype, void *to, const double *from, size_t count, double factor)
{
    const float by = (float)factor;
    switch (dtype) {
    case HVDL_UINT8: NARROW(uint8_t, WHOLE_PRODUCT(0.0, 256.0)); break;
    case HVDL_INT8: NARROW(int8_t, WHOLE_PRODUCT(-128.0, 128.0)); break;
    case HVDL_INT16: NARROW(int16_t, WHOLE_PRODUCT(-32768.0, 32768.0)); break;
    case HVDL_INT32: NARROW(int32_t, WHOLE_PRODUCT(-0x1p31, 0x1p31)); break;
    case HVDL_INT64: NARROW(int64_t, WHOLE_PRODUCT(-0x1p63, 0x1p63)); break;
    case HVDL_FLOAT16: NARROW(uint16_t, half_of_float((float)from[i] * by)); break;
    case HVDL_BFLOAT16: NARROW(uint16_t, bfloat16_of_float((float)from[i] * by)); break;
    case HVDL_FLOAT32: NARROW(float, (float)from[i] * by); break;
    case HVDL_BOOL: NARROW(uint8_t, from[i] != 0.0); break;
    default: NARROW(double, from[i] * factor); break;
    }
}
