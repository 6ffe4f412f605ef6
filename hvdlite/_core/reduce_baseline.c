/* The kernels for any CPU of the architecture. */
#define VARIANT baseline
#include "reduce_kernels.h"
