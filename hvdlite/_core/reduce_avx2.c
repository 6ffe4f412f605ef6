/* The kernels for x86-64 CPUs with AVX2 and F16C. */
#if defined(__x86_64__)
#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2,f16c"))), apply_to = function)
#else
#pragma GCC target("avx2,f16c")
#endif
#define HAVE_F16C 1
#define VARIANT avx2
#include "reduce_kernels.h"
#if defined(__clang__)
#pragma clang attribute pop
#endif
#else
typedef int hvdl_no_avx2; /* a translation unit may not be empty */
#endif
