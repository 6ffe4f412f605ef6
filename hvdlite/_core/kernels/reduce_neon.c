/* The kernels for 64-bit ARM, which always has NEON. */
#if defined(__aarch64__)
#include <arm_neon.h>
#define WIDEN_FLOAT16(from) vcvt_f32_f16(vld1_f16((const __fp16 *)(from)))
#define NARROW_FLOAT16(to, value) vst1_f16((__fp16 *)(to), vcvt_f16_f32((float32x4_t)(value)))
#define VECTOR_BYTES 16
#define VARIANT neon
#include "kernels/reduce_kernels.h"
#include "kernels/tree_kernels.h"
#else
typedef int hvdl_no_neon; /* a translation unit may not be empty */
#endif
