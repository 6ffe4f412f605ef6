/* The kernels for any CPU of the architecture. */
#define VECTOR_BYTES 16
#define VARIANT baseline
#include "kernels/reduce_kernels.h"
#include "kernels/tree_kernels.h"
