/* A hash table of structs that embed their node; the keys are compared by the caller. */
#ifndef HVDL_TABLE_H
#define HVDL_TABLE_H

#include <stdlib.h>

#include "base/types.h"

typedef struct hvdl_node {
    struct hvdl_node *next;
    uint64_t hash;
} hvdl_node;

typedef struct {
    hvdl_node **slots; /* NULL until the first insertion */
    size_t num_slots;  /* a power of two */
    size_t count;
} hvdl_table;

#define HVDL_CONTAINER(node, type, member) ((type *)((char *)(node) - offsetof(type, member)))

static inline hvdl_node **hvdl_table_slot(const hvdl_table *table, uint64_t hash)
{
    /* Ids are multiples of 64: the multiplication spreads them over the upper bits. */
    return &table->slots[(hash * 0x9e3779b97f4a7c15ull >> 20) & (table->num_slots - 1)];
}

/* First node with this hash, or NULL; hvdl_table_next goes on from one. */
static inline hvdl_node *hvdl_table_next(hvdl_node *node, uint64_t hash)
{
    while (node && node->hash != hash)
        node = node->next;
    return node;
}

static inline hvdl_node *hvdl_table_first(const hvdl_table *table, uint64_t hash)
{
    return table->slots ? hvdl_table_next(*hvdl_table_slot(table, hash), hash) : NULL;
}

static inline hvdl_err hvdl_table_insert(hvdl_table *table, hvdl_node *node, uint64_t hash)
{
    if (table->count >= table->num_slots) {
        hvdl_table larger = {NULL, table->num_slots ? 2 * table->num_slots : 64, table->count};
        larger.slots = calloc(larger.num_slots, sizeof *larger.slots);
        if (!larger.slots)
            return HVDL_ENOMEM;
        for (size_t i = 0; i < table->num_slots; i++)
            for (hvdl_node *each = table->slots[i], *next; each; each = next) {
                hvdl_node **slot = hvdl_table_slot(&larger, each->hash);
                next = each->next;
                each->next = *slot;
                *slot = each;
            }
        free(table->slots);
        *table = larger;
    }
    hvdl_node **slot = hvdl_table_slot(table, hash);
    node->hash = hash;
    node->next = *slot;
    *slot = node;
    table->count++;
    return HVDL_OK;
}

/* The node must be in the table. */
static inline void hvdl_table_remove(hvdl_table *table, hvdl_node *node)
{
    hvdl_node **at = hvdl_table_slot(table, node->hash);
    while (*at != node)
        at = &(*at)->next;
    *at = node->next;
    table->count--;
}

#endif
