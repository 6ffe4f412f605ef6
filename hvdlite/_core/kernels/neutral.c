/* Values that change nothing in a reduction: what a rank gives that has joined. */
#include <math.h>
#include <string.h>

#include "kernels/reduce.h"

#define FILL(type, value)                                                                          \
    do {                                                                                           \
        type *x = to;                                                                              \
        for (size_t i = 0; i < count; i++)                                                         \
            x[i] = (type)(value);                                                                  \
    } while (0)

static void fill_extreme(int dtype, bool largest, void *to, size_t count)
{
    switch (dtype) {
    case HVDL_UINT8: FILL(uint8_t, largest ? UINT8_MAX : 0); break;
    case HVDL_INT8: FILL(int8_t, largest ? INT8_MAX : INT8_MIN); break;
    case HVDL_INT16: FILL(int16_t, largest ? INT16_MAX : INT16_MIN); break;
    case HVDL_INT32: FILL(int32_t, largest ? INT32_MAX : INT32_MIN); break;
    case HVDL_INT64: FILL(int64_t, largest ? INT64_MAX : INT64_MIN); break;
    case HVDL_FLOAT16: FILL(uint16_t, largest ? 0x7c00 : 0xfc00); break;
    case HVDL_BFLOAT16: FILL(uint16_t, largest ? 0x7f80 : 0xff80); break;
    case HVDL_FLOAT32: FILL(float, largest ? INFINITY : -INFINITY); break;
    case HVDL_FLOAT64: FILL(double, largest ? INFINITY : -INFINITY); break;
    default: FILL(uint8_t, largest); break;
    }
}

static void fill_ones(int dtype, void *to, size_t count)
{
    const double one = 1.0;
    size_t size = hvdl_dtype_bytes(dtype);
    for (size_t i = 0; i < count; i++)
        hvdl_from_doubles(dtype, (char *)to + i * size, &one, 1, 1.0);
}

/* Of floats -0.0: 0.0 would make a 0.0 of it. */
static void fill_zeros(int dtype, void *to, size_t count)
{
    switch (dtype) {
    case HVDL_FLOAT16:
    case HVDL_BFLOAT16: FILL(uint16_t, 0x8000); break;
    case HVDL_FLOAT32: FILL(float, -0.0f); break;
    case HVDL_FLOAT64: FILL(double, -0.0); break;
    default: memset(to, 0, count * hvdl_dtype_bytes(dtype)); break;
    }
}

void hvdl_fill_neutral(hvdl_dtype dtype, hvdl_op op, void *to, size_t count)
{
    size_t bytes = count * hvdl_dtype_bytes((int)dtype);
    switch (op) {
    case HVDL_AVERAGE:
    case HVDL_SUM: fill_zeros((int)dtype, to, count); break;
    case HVDL_MIN:
    case HVDL_MAX: fill_extreme((int)dtype, op == HVDL_MIN, to, count); break;
    case HVDL_PRODUCT: fill_ones((int)dtype, to, count); break;
    case HVDL_BAND: memset(to, dtype == HVDL_BOOL ? 1 : 0xff, bytes); break;
    default: memset(to, 0, bytes); break;
    }
}
