#define _GNU_SOURCE
#include "host/mailbox.h"

#include <string.h>

#include "base/sizes.h"

size_t hvdl_mail_block_bytes(size_t block_bytes)
{
    return block_bytes < 128 ? 64 : block_bytes / 2 / 64 * 64;
}

/* Of one rank: the heads, then the blocks. */
static size_t rank_bytes(size_t block_bytes)
{
    size_t bytes = sizeof(hvdl_mail_head) + hvdl_mail_block_bytes(block_bytes);
    return (bytes * HVDL_NUM_MAIL_BLOCKS + 4095) / 4096 * 4096;
}

hvdl_err hvdl_mail_bytes(int local_size, size_t block_bytes, size_t *bytes)
{
    if (block_bytes > SIZE_MAX / 8)
        return HVDL_ENOMEM;
    return hvdl_multiply(rank_bytes(block_bytes), local_size > 1 ? (size_t)local_size : 0, bytes);
}

static hvdl_mail_head *head_of(const hvdl_shm *shm, int local, int block)
{
    char *own = shm->mail + (size_t)local * rank_bytes(shm->block_bytes);
    return (hvdl_mail_head *)own + block;
}

static char *block_of(const hvdl_shm *shm, int local, int block)
{
    char *blocks = (char *)head_of(shm, local, HVDL_NUM_MAIL_BLOCKS);
    return blocks + (size_t)block * hvdl_mail_block_bytes(shm->block_bytes);
}

int hvdl_mail_find_free(const hvdl_shm *shm)
{
    for (int block = 0; block < HVDL_NUM_MAIL_BLOCKS; block++)
        /* Acquire: pairs with the release in hvdl_mail_empty; the reader is done with the bytes. */
        if (!atomic_load_explicit(&head_of(shm, shm->local_rank, block)->reader,
                                  memory_order_acquire))
            return block;
    return -1;
}

void hvdl_mail_fill(hvdl_shm *shm, int block, int reader, uint64_t receive, uint64_t offset,
                    const void *from, size_t bytes, bool is_of_large, hvdl_timed *timed)
{
    hvdl_mail_head *head = head_of(shm, shm->local_rank, block);
    hvdl_shm_copy_timed(shm, block_of(shm, shm->local_rank, block), from, bytes, is_of_large,
                        timed);
    head->bytes = (uint32_t)bytes;
    head->receive = receive;
    head->offset = offset;
    /* Release: pairs with the acquire in hvdl_mail_find_full. */
    atomic_store_explicit(&head->reader, (uint32_t)reader + 1, memory_order_release);
    hvdl_shm_ring_one(shm, reader);
}

const hvdl_mail_head *hvdl_mail_find_full(const hvdl_shm *shm, int writer, const char **bytes)
{
    for (int block = 0; block < HVDL_NUM_MAIL_BLOCKS; block++) {
        const hvdl_mail_head *head = head_of(shm, writer, block);
        if (atomic_load_explicit(&head->reader, memory_order_acquire) ==
            (uint32_t)shm->local_rank + 1) {
            *bytes = block_of(shm, writer, block);
            return head;
        }
    }
    return NULL;
}

void hvdl_mail_empty(hvdl_shm *shm, int writer, const hvdl_mail_head *head)
{
    hvdl_mail_head *full = head_of(shm, writer, (int)(head - head_of(shm, writer, 0)));
    atomic_store_explicit(&full->reader, 0, memory_order_release);
    hvdl_shm_ring_one(shm, writer);
}
