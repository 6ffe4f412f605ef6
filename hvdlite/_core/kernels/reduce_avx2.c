/* The kernels for x86-64 CPUs with AVX2 and F16C. */
#if defined(__x86_64__)
#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2,f16c"))), apply_to = function)
#else
#pragma GCC target("avx2,f16c")
#endif
#include <immintrin.h>
#define WIDEN_FLOAT16(from) _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(from)))
#define NARROW_FLOAT16(to, value)                                                                  \
    _mm_storeu_si128((__m128i *)(to), _mm256_cvtps_ph((__m256)(value), 0))
#define VECTOR_BYTES 32
#define VARIANT avx2
#include "kernels/reduce_kernels.h"
#include "kernels/tree_kernels.h"
#if defined(__clang__)
#pragma clang attribute pop
#endif
#else
typedef int hvdl_no_avx2; /* a translation unit may not be empty */
#endif
