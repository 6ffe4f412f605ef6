/* The kernels for x86-64 CPUs with AVX-512 (F, BW, DQ, VL) and F16C. */
#if defined(__x86_64__)
#if defined(__clang__)
#pragma clang attribute push(                                                                      \
    __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx2,f16c"))), apply_to = function)
#else
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,avx2,f16c,prefer-vector-width=512")
#endif
#define HAVE_F16C 1
#define VARIANT avx512
#include "reduce_kernels.h"
#if defined(__clang__)
#pragma clang attribute pop
#endif
#else
typedef int hvdl_no_avx512; /* a translation unit may not be empty */
#endif
