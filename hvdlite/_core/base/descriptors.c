#include "base/descriptors.h"

#include <inttypes.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <string.h>

/* ---- collecting ---- */

static void add_rank(hvdl_variant *variant, int32_t rank)
{
    int named = variant->num_ranks < HVDL_MAX_NAMED ? variant->num_ranks : HVDL_MAX_NAMED;
    int at = named;
    while (at > 0 && variant->ranks[at - 1] > rank)
        at--;
    for (int i = named < HVDL_MAX_NAMED ? named : HVDL_MAX_NAMED - 1; i > at; i--)
        variant->ranks[i] = variant->ranks[i - 1];
    if (at < HVDL_MAX_NAMED)
        variant->ranks[at] = rank;
    variant->num_ranks++;
}

/* The variant to which `lowest`, and perhaps more ranks, must be added. NULL: the list is full of lower
 * ranks. */
static hvdl_variant *variant_of(hvdl_variants *all, const hvdl_desc *desc, int32_t lowest)
{
    for (int i = 0; i < all->count; i++)
        if (!memcmp(&all->variants[i].desc, desc, sizeof *desc))
            return &all->variants[i];
    hvdl_variant *variant = &all->variants[0];
    if (all->count < HVDL_MAX_VARIANTS) {
        variant = &all->variants[all->count++];
    } else {
        for (int i = 1; i < all->count; i++)
            if (all->variants[i].ranks[0] > variant->ranks[0])
                variant = &all->variants[i];
        if (variant->ranks[0] < lowest)
            return NULL;
        all->num_others += variant->num_ranks;
    }
    memset(variant, 0, offsetof(hvdl_variant, site));
    variant->site[0] = '\0';
    variant->desc = *desc;
    return variant;
}

hvdl_variant *hvdl_variants_add(hvdl_variants *all, const hvdl_desc *desc, int rank)
{
    hvdl_variant *variant = variant_of(all, desc, rank);
    if (variant)
        add_rank(variant, rank);
    else
        all->num_others++;
    return variant;
}

void hvdl_variant_place(hvdl_variant *variant, int rank, const char *site, size_t site_bytes)
{
    if (variant->ranks[0] != rank)
        return;
    memcpy(variant->site, site, site_bytes);
    variant->site[site_bytes] = '\0';
}

void hvdl_variants_merge(hvdl_variants *all, const hvdl_variants *more)
{
    for (int i = 0; i < more->count; i++) {
        const hvdl_variant *from = &more->variants[i];
        hvdl_variant *to = variant_of(all, &from->desc, from->ranks[0]);
        if (!to) {
            all->num_others += from->num_ranks;
            continue;
        }
        int named = from->num_ranks < HVDL_MAX_NAMED ? from->num_ranks : HVDL_MAX_NAMED;
        for (int k = 0; k < named; k++)
            add_rank(to, from->ranks[k]);
        if (to->ranks[0] == from->ranks[0])
            memcpy(to->site, from->site, strlen(from->site) + 1);
        to->num_ranks += from->num_ranks - named;
    }
    all->num_others += more->num_others;
}

/* ---- describing ---- */

void hvdl_copy_name(char *to, size_t room, const char *name)
{
    static const char dots[] = "...";
    size_t length = strlen(name);
    if (length < room) {
        memcpy(to, name, length + 1);
        return;
    }
    length = room - sizeof dots;
    while (length && ((unsigned char)name[length] & 0xc0) == 0x80)
        length--; /* to where a character of UTF-8 begins */
    memcpy(to, name, length);
    memcpy(to + length, dots, sizeof dots);
}

void hvdl_copy_plain_name(char *to, size_t room, const char *name)
{
    hvdl_copy_name(to, room, name);
    for (char *c = to; *c; c++)
        if ((unsigned char)*c < ' ' || *c == 0x7f)
            *c = '?';
}

static const char unnamed[] = "unnamed."; /* hvdlite's world/teams/team.py */

bool hvdl_is_number(const char *name)
{
    return !strncmp(name, unnamed, sizeof unnamed - 1);
}

void hvdl_put_title(char *to, size_t room, const char *kind, bool in_words, const char *name)
{
    static const char own[] = "hvdlite."; /* of the function that the user has called */
    char title[HVDL_TITLE_BYTES], shown[HVDL_NAME_BYTES];
    const char *called = shown + sizeof own - 1;
    hvdl_copy_name(shown, sizeof shown, name);
    if (in_words)
        snprintf(title, sizeof title, "%s%s",
                 strcmp(kind, hvdl_kind_name(HVDL_PLAN)) ? "" : "the set-up of ", shown);
    else if (hvdl_is_number(shown))
        snprintf(title, sizeof title, "an unnamed %s (no. %s)", kind, shown + sizeof unnamed - 1);
    else if (!strncmp(shown, own, sizeof own - 1))
        snprintf(title, sizeof title, "the %s in %.*s", kind, (int)strcspn(called, "."), called);
    else
        snprintf(title, sizeof title, "%s '%s'", kind, shown);
    hvdl_copy_plain_name(to, room, title);
}

typedef struct {
    char *text;
    size_t used;
} writer;

static void put(writer *to, const char *format, ...)
{
    va_list arguments;
    va_start(arguments, format);
    size_t room = HVDL_TEXT_BYTES - to->used;
    int wrote = vsnprintf(to->text + to->used, room, format, arguments);
    va_end(arguments);
    if (wrote > 0)
        to->used += (size_t)wrote < room ? (size_t)wrote : room - 1;
}

static void put_tensor(writer *to, const hvdl_desc *desc)
{
    bool has_owners = hvdl_facts_of(desc)->owners || hvdl_facts_of_kind(desc->runs)->owners;
    static const char *const names[HVDL_NUM_DTYPES] = {"uint8",   "int8",    "int16",    "int32",
                                                       "int64",   "float16", "bfloat16", "float32",
                                                       "float64", "bool"};
    if (desc->num_tensors) {
        put(to, "%s in a group of %d tensors with %" PRId64 " elements (layout %08" PRIx64 ")",
            names[desc->dtype], desc->num_tensors, desc->count, desc->layout & 0xffffffff);
        return;
    }
    put(to, "%s[", names[desc->dtype]);
    /* The last one stands for all dimensions that do not fit. */
    int shown = desc->ndim > HVDL_MAX_DIMS ? HVDL_MAX_DIMS - 1 : desc->ndim;
    for (int i = 0; i < shown; i++) {
        put(to, i ? ", " : "");
        if (desc->dims[i] < 0)
            put(to, "*"); /* the first dimension may differ */
        else
            put(to, "%" PRId64, desc->dims[i]);
    }
    if (desc->layout)
        put(to, "] cut by splits (hash %08" PRIx64 ")", desc->layout & 0xffffffff);
    else if (desc->ndim > shown)
        put(to, ", ...] of %d dimensions and %" PRId64 " elements%s", desc->ndim, desc->count,
            desc->dims[0] < 0 ? " in a row" : "");
    else
        put(to, "]");
    if (has_owners && desc->cut_as != desc->dtype)
        put(to, " cut as %s", names[desc->cut_as]);
}

/* The kind, told from others of the same name. */
static void put_kind(writer *to, const hvdl_desc *desc)
{
    const hvdl_kind_facts *facts =
        hvdl_facts_of_kind(desc->kind == HVDL_PLAN ? desc->runs : desc->kind);
    put(to, desc->kind == HVDL_PLAN ? "plan of %s" : "%s",
        facts->called ? facts->called : facts->name);
}

/* The fields in which the descriptors differ, and their names in the text. */
enum { KIND = 1, DTYPE = 2, SHAPE = 4, OP = 8, ROOT = 16, SCALE = 32, PLACE = 64 };

static int difference(const hvdl_desc *a, const hvdl_desc *b)
{
    if (a->kind != b->kind || a->runs != b->runs)
        return KIND;
    int found = 0;
    if (a->dtype != b->dtype || a->cut_as != b->cut_as)
        found |= DTYPE;
    if (a->ndim != b->ndim || a->count != b->count || memcmp(a->dims, b->dims, sizeof a->dims) ||
        a->num_tensors != b->num_tensors || a->layout != b->layout)
        found |= SHAPE;
    if (a->op != b->op)
        found |= OP;
    if (a->root != b->root)
        found |= ROOT;
    /* Compared bytewise, as in the check itself: NaN equals NaN. */
    if (memcmp(&a->prescale, &b->prescale, sizeof a->prescale) ||
        memcmp(&a->postscale, &b->postscale, sizeof a->postscale))
        found |= SCALE;
    if ((a->place == HVDL_ON_HOST) != (b->place == HVDL_ON_HOST))
        found |= PLACE;
    return found;
}

static void put_values(writer *to, const hvdl_desc *desc, int differing, const hvdl_naming *naming)
{
    static const char *const ops[HVDL_NUM_OPS] = {"Average",     "Sum",        "Min",
                                                  "Max",         "Product",    "Adasum",
                                                  "bitwise and", "bitwise or", "bitwise xor"};
    static const char *const places[] = {"a tensor in host memory", "a tensor on a GPU",
                                         "a tensor on a GPU"};
    const char *between = "";
    if (differing & KIND) {
        put_kind(to, desc);
        return;
    }
    if (differing & (DTYPE | SHAPE)) {
        put_tensor(to, desc);
        between = " with ";
    }
    if (differing & OP) {
        put(to, "%sop %s", between, ops[desc->op]);
        between = ", ";
    }
    if (differing & ROOT) {
        put(to, "%sroot_rank %d", between, naming->world_ranks[desc->root]);
        between = ", ";
    }
    if (differing & SCALE) {
        put(to, "%sprescale_factor %g and postscale_factor %g", between, desc->prescale,
            desc->postscale);
        between = ", ";
    }
    if (differing & PLACE)
        put(to, "%s%s", between, places[desc->place]);
}

static void put_ranks(writer *to, const hvdl_variant *variant, const hvdl_naming *naming)
{
    if (variant->num_ranks == 1) {
        int rank = variant->ranks[0];
        put(to, "rank %d on %s", naming->world_ranks[rank], naming->hosts[rank]);
        return;
    }
    int named = variant->num_ranks < HVDL_MAX_NAMED ? variant->num_ranks : HVDL_MAX_NAMED;
    put(to, "ranks ");
    for (int i = 0; i < named; i++)
        put(to, i ? ", %d" : "%d", naming->world_ranks[variant->ranks[i]]);
    if (variant->num_ranks > named)
        put(to, " and %d more", variant->num_ranks - named);
}

/* Of the lowest of its ranks. */
static void put_site(writer *to, const hvdl_variant *variant)
{
    if (*variant->site)
        put(to, " (%s)", variant->site);
}

/* Whoever gives lines of the script numbers the operations: their callers can't name them. */
static bool are_numbered(const hvdl_variants *all)
{
    bool any = false;
    for (int i = 0; i < all->count; i++)
        any |= *all->variants[i].site != '\0';
    return any;
}

static void put_remedy(writer *to, int differing, bool is_numbered)
{
    static const struct {
        int bit;
        const char *name;
    } parts[] = {{DTYPE, "dtype"},    {SHAPE, "shape"},         {OP, "op"},
                 {ROOT, "root_rank"}, {SCALE, "scale factors"}, {PLACE, "device"}};
    if (differing & KIND) {
        put(to, "; call the same operations in the same order on every rank%s",
            is_numbered ? "" : ", or give each a name");
        return;
    }
    const char *between = "; make the ";
    for (size_t i = 0; i < sizeof parts / sizeof *parts; i++)
        if (differing & parts[i].bit) {
            put(to, "%s%s", between, parts[i].name);
            between = " and the ";
        }
    put(to, " the same on every rank");
}

/* Of one that some have posted as HVDL_STAGED, and others as HVDL_ORDERED. */
static void describe_some_without_data(const hvdl_desc *desc, char text[HVDL_TEXT_BYTES])
{
    writer to = {text, 0};
    put(&to, HVDL_TITLE_HERE("%s") ": %s", hvdl_kind_name(desc->kind), HVDL_SOME_WITHOUT_DATA);
}

void hvdl_variants_describe(const hvdl_variants *all, const hvdl_naming *naming,
                            char text[HVDL_TEXT_BYTES])
{
    /* The order: by lowest rank, but what most ranks sent comes last. */
    const hvdl_variant *order[HVDL_MAX_VARIANTS] = {NULL};
    int differing = 0, most = 0;
    for (int i = 0; i < all->count; i++) {
        const hvdl_variant *variant = &all->variants[i];
        int at = i;
        for (; at > 0 && order[at - 1]->ranks[0] > variant->ranks[0]; at--)
            order[at] = order[at - 1];
        order[at] = variant;
    }
    for (int i = 0; i < all->count; i++) {
        differing |= difference(&order[0]->desc, &order[i]->desc);
        if (order[i]->num_ranks > order[most]->num_ranks)
            most = i;
    }
    if (all->count > 1 && order[most]->num_ranks == 1)
        most = all->count - 1;
    const hvdl_variant *majority = order[most];
    for (int i = most; i + 1 < all->count; i++)
        order[i] = order[i + 1];
    order[all->count - 1] = majority;

    if (!differing) {
        describe_some_without_data(&majority->desc, text);
        return;
    }
    if (differing & KIND)
        differing = KIND;
    const char *verb = differing & KIND ? "called" : differing & (DTYPE | SHAPE) ? "sent" : "gave";
    writer to = {text, 0};
    text[0] = '\0';
    put(&to, HVDL_TITLE_HERE("%s") ": ",
        differing & KIND ? "operation" : hvdl_kind_name(majority->desc.kind));
    for (int i = 0; i < all->count; i++) {
        bool last = i == all->count - 1;
        if (i)
            put(&to, ", ");
        if (last && !all->num_others && order[i]->num_ranks > 1)
            put(&to, "the other %d ranks", order[i]->num_ranks);
        else
            put_ranks(&to, order[i], naming);
        put_site(&to, order[i]);
        put(&to, i && !*order[i]->site ? " " : " %s ", verb);
        put_values(&to, &order[i]->desc, differing, naming);
    }
    if (all->num_others)
        put(&to, ", and %d more %s not shown", all->num_others,
            all->num_others == 1 ? "rank is" : "ranks are");
    put_remedy(&to, differing, are_numbered(all));
}
