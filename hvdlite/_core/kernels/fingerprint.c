#include "kernels/fingerprint.h"

#include <string.h>

typedef uint32_t word __attribute__((aligned(1), may_alias));

/* Factors that have nothing to do with each other: the finalizer of SplitMix64. */
static uint64_t factor(uint64_t index)
{
    uint64_t mixed = (index + 1) * 0x9E3779B97F4A7C15u;
    mixed = (mixed ^ mixed >> 30) * 0xBF58476D1CE4E5B9u;
    mixed = (mixed ^ mixed >> 27) * 0x94D049BB133111EBu;
    return (mixed ^ mixed >> 31) | 1;
}

/* Products of 32 bits each, which every instruction set multiplies several of at once. */
static uint64_t row_sum(const word *words, const uint32_t *factors, size_t count)
{
    uint64_t sum = 0;
    for (size_t i = 0; i < count; i++)
        sum += (uint64_t)words[i] * factors[i];
    return sum;
}

uint64_t hvdl_fingerprint(const void *data, size_t bytes)
{
    const char *from = data;
    uint32_t factors[HVDL_ROW_WORDS], last = 0;
    uint64_t sum = 0, row = 0;
    size_t num_words = bytes / sizeof(word), rest = bytes % sizeof(word);
    size_t num_factors = num_words < HVDL_ROW_WORDS ? num_words : HVDL_ROW_WORDS;
    for (size_t i = 0; i < num_factors; i++)
        factors[i] = (uint32_t)factor(i);
    for (size_t done = 0; done < num_words; done += HVDL_ROW_WORDS, row++) {
        size_t count = num_words - done < HVDL_ROW_WORDS ? num_words - done : HVDL_ROW_WORDS;
        sum += factor(row) * row_sum((const word *)(from + done * sizeof(word)), factors, count);
    }
    if (rest) { /* a row of its own */
        memcpy(&last, from + num_words * sizeof(word), rest);
        sum += factor(row) * last;
    }
    return sum;
}
