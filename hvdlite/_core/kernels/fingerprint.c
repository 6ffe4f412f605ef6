#include "kernels/fingerprint.h"

#include <string.h>

typedef uint32_t word __attribute__((aligned(1), may_alias));

/* Factors that have nothing to do with each other: the finalizer of SplitMix64. Macros, so that a row's factors
 * are a constant: a tensor of a few words costs a few products. */
#define MIXED(x, shift) ((x) ^ (x) >> (shift))
#define FACTOR(index)                                                                              \
    (MIXED(MIXED(MIXED(((uint64_t)(index) + 1) * 0x9E3779B97F4A7C15u, 30) * 0xBF58476D1CE4E5B9u,   \
                 27) *                                                                             \
               0x94D049BB133111EBu,                                                                \
           31) |                                                                                   \
     1)

#define FACTORS_4(i)                                                                               \
    (uint32_t)FACTOR(i), (uint32_t)FACTOR((i) + 1), (uint32_t)FACTOR((i) + 2),                     \
        (uint32_t)FACTOR((i) + 3)
#define FACTORS_16(i) FACTORS_4(i), FACTORS_4((i) + 4), FACTORS_4((i) + 8), FACTORS_4((i) + 12)
#define FACTORS_64(i)                                                                              \
    FACTORS_16(i), FACTORS_16((i) + 16), FACTORS_16((i) + 32), FACTORS_16((i) + 48)
#define FACTORS_256(i)                                                                             \
    FACTORS_64(i), FACTORS_64((i) + 64), FACTORS_64((i) + 128), FACTORS_64((i) + 192)

static const uint32_t factors[] = {FACTORS_256(0), FACTORS_256(256), FACTORS_256(512),
                                   FACTORS_256(768)};
_Static_assert(sizeof factors / sizeof *factors == HVDL_ROW_WORDS,
               "a factor for each word of a row");

static uint64_t factor(uint64_t index)
{
    return FACTOR(index);
}

/* Products of 32 bits each, which every instruction set multiplies several of at once. */
static uint64_t row_sum(const word *words, size_t count)
{
    uint64_t sum = 0;
    for (size_t i = 0; i < count; i++)
        sum += (uint64_t)words[i] * factors[i];
    return sum;
}

uint64_t hvdl_fingerprint(const void *data, size_t bytes)
{
    const char *from = data;
    uint32_t last = 0;
    uint64_t sum = 0, row = 0;
    size_t num_words = bytes / sizeof(word), rest = bytes % sizeof(word);
    for (size_t done = 0; done < num_words; done += HVDL_ROW_WORDS, row++) {
        size_t count = num_words - done < HVDL_ROW_WORDS ? num_words - done : HVDL_ROW_WORDS;
        sum += factor(row) * row_sum((const word *)(from + done * sizeof(word)), count);
    }
    if (rest) { /* a row of its own */
        memcpy(&last, from + num_words * sizeof(word), rest);
        sum += factor(row) * last;
    }
    return sum;
}
