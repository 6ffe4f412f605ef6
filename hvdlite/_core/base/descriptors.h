/* Do all ranks ask for the same? The different descriptors that were posted for one operation, and
 * the text that tells them apart. The text depends on what was posted and not on the order in which
 * it arrived, so that every rank shows the same. */
#ifndef HVDL_DESCRIPTORS_H
#define HVDL_DESCRIPTORS_H

#include "base/kinds.h"

#define HVDL_MAX_VARIANTS 4 /* those of the lowest ranks; the ranks of others are counted */
#define HVDL_MAX_NAMED 4    /* ranks that a text names one by one */
#define HVDL_NAME_BYTES 256 /* of an operation's name, with its NUL, that stand in a text */

typedef struct {
    hvdl_desc desc;
    int32_t num_ranks;
    int32_t ranks[HVDL_MAX_NAMED]; /* the lowest ones, ascending */
} hvdl_variant;

typedef struct {
    int32_t count;      /* 1: they agree */
    int32_t num_others; /* ranks that stand in none of these, as there were more */
    hvdl_variant variants[HVDL_MAX_VARIANTS];
} hvdl_variants;

/* Adds what one rank posted. */
void hvdl_variants_add(hvdl_variants *all, const hvdl_desc *desc, int rank);

/* Adds what the ranks of another host posted. */
void hvdl_variants_merge(hvdl_variants *all, const hvdl_variants *more);

/* How texts name the ranks. */
typedef struct {
    const int *world_ranks;   /* by rank */
    const char *const *hosts; /* the host's name, by rank */
} hvdl_naming;

/* Writes the text of the disagreement (count > 1). */
void hvdl_variants_describe(const hvdl_variants *all, const char *name, const hvdl_naming *naming,
                            char text[HVDL_TEXT_BYTES]);

/* What does not fit is cut between characters of UTF-8 and ends in dots. */
void hvdl_copy_name(char *to, size_t room, const char *name);

#endif
