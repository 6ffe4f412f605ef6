/* The kernels for x86-64 CPUs with AVX2 and F16C. */
#if defined(__x86_64__)
#pragma GCC target("avx2,f16c")
#define HAVE_F16C 1
#define VARIANT avx2
#include "reduce_kernels.h"
#else
typedef int hvdl_no_avx2; /* a translation unit may not be empty */
#endif
