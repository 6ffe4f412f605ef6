/* float16 and bfloat16, one at a time, on any CPU. Rounded to nearest even; NaN stays NaN. */
#ifndef HVDL_SIXTEEN_H
#define HVDL_SIXTEEN_H

#include <stdint.h>
#include <string.h>

static inline float float_of_bits(uint32_t bits)
{
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

static inline uint32_t bits_of_float(float value)
{
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    return bits;
}

static inline float float_of_bfloat16(uint16_t value)
{
    return float_of_bits((uint32_t)value << 16);
}

static inline uint16_t bfloat16_of_float(float value)
{
    uint32_t bits = bits_of_float(value);
    uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
    uint32_t is_nan = (bits & 0x7fffffffu) > 0x7f800000u;
    return (uint16_t)(is_nan ? (bits >> 16) | 0x40u : rounded);
}

static inline float float_of_half(uint16_t half)
{
    uint32_t sign = (uint32_t)(half & 0x8000u) << 16, exponent = (half >> 10) & 31u;
    uint32_t mantissa = half & 0x3ffu;
    if (exponent == 31)
        return float_of_bits(sign | 0x7f800000u | mantissa << 13 | (mantissa ? 0x400000u : 0));
    if (exponent)
        return float_of_bits(sign | (exponent + 112) << 23 | mantissa << 13);
    float value = (float)mantissa * 0x1p-24f;
    return sign ? -value : value;
}

static inline uint16_t half_of_float(float value)
{
    uint32_t bits = bits_of_float(value);
    uint16_t sign = (uint16_t)((bits >> 16) & 0x8000u);
    bits &= 0x7fffffffu;
    if (bits > 0x7f800000u)
        return (uint16_t)(sign | 0x7e00u | ((bits >> 13) & 0x3ffu));
    if (bits >= 0x477ff000u) /* 65520 and above round to infinity */
        return (uint16_t)(sign | 0x7c00u);
    if (bits < 0x38800000u) { /* below 2^-14: adding 0.5 aligns the mantissa, and rounds to even */
        float shifted = float_of_bits(bits) + 0.5f;
        return (uint16_t)(sign | (bits_of_float(shifted) - 0x3f000000u));
    }
    return (uint16_t)(sign | ((bits + 0xfffu + ((bits >> 13) & 1u) - 0x38000000u) >> 13));
}

#endif
