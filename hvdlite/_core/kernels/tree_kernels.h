/* The kernels of sums along a tree (base/sum_tree.h), for each variant: included after reduce_kernels.h, whose
 * types and functions they use. Those of 16-bit floats read or write float32 where hosts send each other partials. */

/* bfloat16 beside float32 in memory: four vectors of elements that follow each other, and not in pairs. */
typedef uint16_t sixteen_v __attribute__((vector_size(VECTOR_BYTES / 2)));
typedef uint16_t sixteen_u __attribute__((vector_size(VECTOR_BYTES / 2), aligned(1), may_alias));

INLINE float32_v widened_bfloat16(sixteen_v x)
{
    return (float32_v)(__builtin_convertvector(x, uint32_v) << 16);
}

INLINE sixteen_v narrowed_bfloat16(float32_v x)
{
    return __builtin_convertvector(round_to_bfloat16(x) >> 16, sixteen_v);
}

INLINE float32_quad load_bfloat16s(const void *from)
{
    const sixteen_u *x = from;
    return (float32_quad){widened_bfloat16(x[0]), widened_bfloat16(x[1]), widened_bfloat16(x[2]),
                          widened_bfloat16(x[3])};
}

INLINE void store_bfloat16s(void *to, float32_quad q)
{
    sixteen_u *x = to;
    x[0] = narrowed_bfloat16(q.a), x[1] = narrowed_bfloat16(q.b);
    x[2] = narrowed_bfloat16(q.c), x[3] = narrowed_bfloat16(q.d);
}

DEFINE_INPUT(bfloat16s, uint16_t, float32)

/* `in`, `out`: how inputs and result are stored; acc: the type of the computation. */
#define DEFINE_TREE(in, out, out_type, acc, verb)                                                  \
    INLINE void in##_to_##out##_##verb##_group(                                                    \
        out_type *dst, const void *const *src, const uint8_t *merges, int num_src, size_t at,      \
        size_t size, const acc##_scale *scale, bool pre, bool post)                                \
    {                                                                                              \
        acc##_quad stack[HVDL_TREE_DEPTH], *top = stack;                                           \
        for (int k = 0; k < num_src; k++) {                                                        \
            acc##_quad sum = in##_input(src[k], at, size, scale, pre);                             \
            for (uint8_t left = merges[k]; left; left--)                                           \
                sum = acc##_##verb(*--top, sum);                                                   \
            *top++ = sum;                                                                          \
        }                                                                                          \
        acc##_quad sum = post ? postscaled_##acc(stack[0], size, scale) : stack[0];                \
        out_type edge[acc##_group];                                                                \
        const bool whole = size == acc##_group;                                                    \
        store_##out(whole ? dst + at : edge, sum);                                                 \
        if (!whole)                                                                                \
            memcpy(dst + at, edge, size * sizeof(out_type));                                       \
    }                                                                                              \
    static void in##_to_##out##_##verb##_tree(void *dst, const void *const *src,                   \
                                              const uint8_t *merges, int num_src, size_t count,    \
                                              const hvdl_scale *given)                             \
    {                                                                                              \
        const acc##_scale scale = scale_of_##acc(given);                                           \
        const bool pre = given->prescale != 1.0;                                                   \
        const bool post = given->divisor != 1 || given->postscale != 1.0;                          \
        size_t at = 0;                                                                             \
        for (; count - at >= acc##_group; at += acc##_group)                                       \
            in##_to_##out##_##verb##_group(dst, src, merges, num_src, at, acc##_group, &scale,     \
                                           pre, post);                                             \
        if (at < count)                                                                            \
            in##_to_##out##_##verb##_group(dst, src, merges, num_src, at, count - at, &scale, pre, \
                                           post);                                                  \
    }

#define DEFINE_TREES(in, out, out_type, acc)                                                       \
    DEFINE_TREE(in, out, out_type, acc, sum)                                                       \
    DEFINE_TREE(in, out, out_type, acc, product)                                                   \
    DEFINE_TREE(in, out, out_type, acc, min)                                                       \
    DEFINE_TREE(in, out, out_type, acc, max)

DEFINE_TREES(float16, float16, uint16_t, float32)
DEFINE_TREES(float16, float32, float, float32)
DEFINE_TREES(float32, float16, uint16_t, float32)
DEFINE_TREES(bfloat16, bfloat16, uint16_t, float32)
DEFINE_TREES(bfloat16s, float32, float, float32)
DEFINE_TREES(float32, bfloat16s, uint16_t, float32)
DEFINE_TREES(float32, float32, float, float32)
DEFINE_TREES(float64, float64, double, float64)

typedef void tree_fn(void *dst, const void *const *src, const uint8_t *merges, int num_src,
                     size_t count, const hvdl_scale *scale);

#define TREES(in, out)                                                                             \
    [HVDL_AVERAGE] = in##_to_##out##_sum_tree, [HVDL_SUM] = in##_to_##out##_sum_tree,              \
    [HVDL_MIN] = in##_to_##out##_min_tree, [HVDL_MAX] = in##_to_##out##_max_tree,                  \
    [HVDL_PRODUCT] = in##_to_##out##_product_tree

/* Which of its types inputs and result have. */
enum { AS_IT_IS, WIDENED, NARROWED };

hvdl_reduce_tree_fn PASTE(hvdl_reduce_tree_, VARIANT);

void PASTE(hvdl_reduce_tree_, VARIANT)(hvdl_dtype dtype, hvdl_dtype to_dtype, hvdl_op op, void *dst,
                                       const void *const *src, const uint8_t *merges, int num_src,
                                       size_t count, const hvdl_scale *scale)
{
    static tree_fn *const all[3][HVDL_NUM_DTYPES][HVDL_NUM_OPS] = {
        [AS_IT_IS] = {[HVDL_FLOAT16] = {TREES(float16, float16)},
                      [HVDL_BFLOAT16] = {TREES(bfloat16, bfloat16)},
                      [HVDL_FLOAT32] = {TREES(float32, float32)},
                      [HVDL_FLOAT64] = {TREES(float64, float64)}},
        [WIDENED] = {[HVDL_FLOAT16] = {TREES(float16, float32)},
                     [HVDL_BFLOAT16] = {TREES(bfloat16s, float32)}},
        [NARROWED] = {[HVDL_FLOAT16] = {TREES(float32, float16)},
                      [HVDL_BFLOAT16] = {TREES(float32, bfloat16s)}},
    };
    int form = dtype == to_dtype ? AS_IT_IS : dtype == HVDL_FLOAT32 ? NARROWED : WIDENED;
    hvdl_dtype narrow = form == NARROWED ? to_dtype : dtype;
    all[form][narrow][op](dst, src, merges, num_src, count, scale);
}
