/* Types that every file of the core uses: error codes, element types, reduce ops, descriptors. */
#ifndef HVDL_TYPES_H
#define HVDL_TYPES_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* Functions return 0 or one of these; outputs are written only on success. */
typedef enum {
    HVDL_OK = 0,
    HVDL_ENOMEM = -1, /* no memory */
    HVDL_EINVAL = -2, /* an argument that the caller should have checked */
    HVDL_EDUP = -3,   /* an operation of this kind and name is in flight */
    HVDL_EAGAIN = -4, /* no room now; try again after some progress */
    HVDL_EMPI = -5,   /* an MPI function returned an error */
    HVDL_ECLOSED = -6 /* the engine is closed, or this is a forked child */
} hvdl_err;

typedef enum {
    HVDL_AVERAGE = 0,
    HVDL_SUM,
    HVDL_MIN,
    HVDL_MAX,
    HVDL_PRODUCT,
    HVDL_ADASUM,
    HVDL_BAND, /* bitwise: of integers and bool */
    HVDL_BOR,
    HVDL_BXOR,
    HVDL_NUM_OPS
} hvdl_op;

static inline bool hvdl_is_bitwise(int op)
{
    return op >= HVDL_BAND && op <= HVDL_BXOR;
}

typedef enum {
    HVDL_UINT8 = 0,
    HVDL_INT8,
    HVDL_INT16,
    HVDL_INT32,
    HVDL_INT64,
    HVDL_FLOAT16,
    HVDL_BFLOAT16,
    HVDL_FLOAT32,
    HVDL_FLOAT64,
    HVDL_BOOL,
    HVDL_NUM_DTYPES
} hvdl_dtype;

static inline bool hvdl_is_float(int dtype)
{
    return dtype >= HVDL_FLOAT16 && dtype <= HVDL_FLOAT64;
}

static inline size_t hvdl_dtype_bytes(int dtype)
{
    static const uint8_t bytes[HVDL_NUM_DTYPES] = {1, 1, 2, 4, 8, 2, 2, 4, 8, 1};
    return bytes[dtype];
}

#define HVDL_MAX_DIMS 8

/* Where the tensors lie. */
typedef enum {
    HVDL_ON_HOST = 0,
    HVDL_STAGED = 1, /* on a device, and pass through host memory */
    HVDL_ORDERED =
        2 /* on a device, and stay there: the engine only matches and numbers the operations */
} hvdl_place;

/* The sequence number of an ordered operation that a joined rank does not post: there is none, and the other ranks
 * run the operation as a staged one. */
#define HVDL_NO_SEQUENCE (-1)

/* What the ranks must agree on. Compared with memcmp, so it is zeroed before it is filled. */
typedef struct {
    uint8_t kind, dtype, op, ndim; /* hvdl_kind: see kinds.h */
    int32_t root;                  /* broadcast: rank; else -1 */
    int32_t num_tensors;           /* of a group that is reduced as one; 0: no group */
    uint8_t place;                 /* hvdl_place */
    uint8_t runs;                  /* the making of a plan: the kind of its runs; else 0 */
    uint8_t cut_as; /* kinds with owners: the hvdl_dtype whose cut says who owns what; else 0 */
    uint8_t zero;
    uint64_t layout; /* of a group: a hash of its tensors' shapes */
    double prescale, postscale;
    int64_t count;               /* elements; of one row where rows travel beside it */
    int64_t dims[HVDL_MAX_DIMS]; /* dims[0] is -1 where rows travel beside it */
} hvdl_desc;

/* Names an operation: a hash of kind and name. 128 bits: equality is taken for
 * identity (2^64 names in flight would make a collision likely). */
typedef struct {
    uint64_t lo, hi;
} hvdl_key;

static inline bool hvdl_key_equal(hvdl_key a, hvdl_key b)
{
    return a.lo == b.lo && a.hi == b.hi;
}

/* Spreads the bits of a number over all 64: the finalizer of MurmurHash3. */
static inline uint64_t hvdl_mix(uint64_t h)
{
    h = (h ^ h >> 33) * 0xff51afd7ed558ccdull;
    h = (h ^ h >> 33) * 0xc4ceb9fe1a85ec53ull;
    return h ^ h >> 33;
}

#define HVDL_TEXT_BYTES 1024 /* the longest text of a failure, with its NUL */

#endif
