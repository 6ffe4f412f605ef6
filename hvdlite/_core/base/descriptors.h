/* Finds out whether all ranks posted the same operation: collects the different descriptors of one
 * operation and writes the text that tells them apart. The text does not depend on the order of
 * arrival, so every rank shows the same one. */
#ifndef HVDL_DESCRIPTORS_H
#define HVDL_DESCRIPTORS_H

#include "base/kinds.h"

#define HVDL_MAX_VARIANTS 4 /* those of the lowest ranks; the ranks of others are counted */
#define HVDL_MAX_NAMED 4    /* ranks that a text names one by one */
#define HVDL_NAME_BYTES 256 /* of an operation's name, with its NUL, that stand in a text */
#define HVDL_SITE_BYTES 64  /* of a site, with its NUL */
#define HVDL_TITLE_BYTES (HVDL_NAME_BYTES + 64)
/* Stands in a text for the title of its operation, as only the ranks that have posted it know the words.
 * kind: as hvdl_put_title's, or a format's "%s". */
#define HVDL_TITLE_HERE(kind) HVDL_TITLE_MARK kind HVDL_TITLE_MARK
#define HVDL_TITLE_MARK "\001"

/* The end of the text where ranks have posted one operation on GPUs with its data, and others without: they
 * differ in nothing that the user has given, and the callers post it again. */
#define HVDL_SOME_WITHOUT_DATA "some ranks have posted it without its data"

typedef struct {
    hvdl_desc desc;
    int32_t num_ranks;
    int32_t ranks[HVDL_MAX_NAMED]; /* the lowest ones, ascending */
    char site[HVDL_SITE_BYTES]; /* where the script of the lowest one posted it; empty: not known */
} hvdl_variant;

typedef struct {
    int32_t count;      /* 1: they agree */
    int32_t num_others; /* ranks in none of these variants, where there were more */
    hvdl_variant variants[HVDL_MAX_VARIANTS];
} hvdl_variants;

/* Adds what one rank posted. Returns its variant; NULL: it is one of the others. */
hvdl_variant *hvdl_variants_add(hvdl_variants *all, const hvdl_desc *desc, int rank);
/* Where that rank posted it: `site` has site_bytes < HVDL_SITE_BYTES bytes and no NUL. Once one rank has a
 * site, to be called for those without one, too. */
void hvdl_variant_place(hvdl_variant *variant, int rank, const char *site, size_t site_bytes);

/* Adds what the ranks of another host posted. */
void hvdl_variants_merge(hvdl_variants *all, const hvdl_variants *more);

/* How texts name the ranks. */
typedef struct {
    const int *world_ranks;   /* by rank */
    const char *const *hosts; /* the host's name, by rank */
} hvdl_naming;

/* Writes the text of the disagreement (count > 1). */
void hvdl_variants_describe(const hvdl_variants *all, const hvdl_naming *naming,
                            char text[HVDL_TEXT_BYTES]);

/* A name that does not fit is cut between two UTF-8 characters and ends in dots. */
void hvdl_copy_name(char *to, size_t room, const char *name);
/* The same without what would break a line: names are the user's. */
void hvdl_copy_plain_name(char *to, size_t room, const char *name);
/* The name that an operation of Horovod's API gets which the script has not named. */
bool hvdl_is_number(const char *name);
/* What users read of an operation: "allreduce 'loss'", "an unnamed allreduce (no. 3)", or its words. name: these,
 * if in_words. */
void hvdl_put_title(char *to, size_t room, const char *kind, bool in_words, const char *name);

#endif
