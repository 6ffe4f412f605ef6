/* The kernels for x86-64 CPUs with AVX-512 (F, BW, DQ, VL) and F16C. */
#if defined(__x86_64__)
#if defined(__clang__)
#pragma clang attribute push(                                                                      \
    __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx2,f16c"))), apply_to = function)
#else
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,avx2,f16c,prefer-vector-width=512")
#endif
#include <immintrin.h>
#define WIDEN_FLOAT16(from) _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)(from)))
#define NARROW_FLOAT16(to, value)                                                                  \
    _mm256_storeu_si256((__m256i *)(to), _mm512_cvtps_ph((__m512)(value), 0))
#define VECTOR_BYTES 64
#define VARIANT avx512
#include "kernels/reduce_kernels.h"
#include "kernels/tree_kernels.h"
#if defined(__clang__)
#pragma clang attribute pop
#endif
#else
typedef int hvdl_no_avx512; /* a translation unit may not be empty */
#endif
