/* Mailboxes: how data goes from one rank of a host to another one. Each rank has a few blocks of shared
 * memory that it alone fills; a block is for one reader, which empties it.
 *
 *   free   the writer alone touches the block
 *   full   the reader alone does
 *
 * A block says where its bytes belong, so blocks need no order. A writer fills blocks only for a receive
 * whose memory is known, so whatever is full can be emptied at once: a full block waits for its reader's
 * core alone, and mailboxes can't deadlock.
 * All functions are called by the thread that drives the engine. */
#ifndef HVDL_MAILBOX_H
#define HVDL_MAILBOX_H

#include "host/shm.h"

#define HVDL_NUM_MAIL_BLOCKS 4 /* per rank */

/* A block's head. Its line is its own: the reader polls it. */
typedef struct {
    _Alignas(128) _Atomic uint32_t reader; /* 1 + local rank for which it is full; 0: free */
    uint32_t bytes;
    uint64_t receive,
        offset; /* where they belong: the reader's number for it, and from which byte on */
} hvdl_mail_head;

/* Bytes of one block of a rank, and of the mailboxes of a host. */
size_t hvdl_mail_block_bytes(size_t block_bytes);
hvdl_err hvdl_mail_bytes(int local_size, size_t block_bytes, size_t *bytes);

/* One of this rank's blocks that is free, or -1. */
int hvdl_mail_find_free(const hvdl_shm *shm);
/* Fills it for local rank `reader`, and wakes that. is_of_large, timed: see hvdl_shm_copy_timed. */
void hvdl_mail_fill(hvdl_shm *shm, int block, int reader, uint64_t receive, uint64_t offset,
                    const void *from, size_t bytes, bool is_of_large, hvdl_timed *timed);

/* A block of local rank `writer` that is full for this rank, and its bytes; NULL: none. */
const hvdl_mail_head *hvdl_mail_find_full(const hvdl_shm *shm, int writer, const char **bytes);
/* It is the writer's again. */
void hvdl_mail_empty(hvdl_shm *shm, int writer, const hvdl_mail_head *head);

#endif
