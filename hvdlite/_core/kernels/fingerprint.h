/* Fingerprints of memory: checks/fingerprints.py says why a flipped bit is always noticed. */
#ifndef HVDL_FINGERPRINT_H
#define HVDL_FINGERPRINT_H

#include <stddef.h>
#include <stdint.h>

/* How many words of 32 bits each of the bytes' rows has; the last one may have fewer. */
#define HVDL_ROW_WORDS 1024

/* The sum over the rows r, modulo 2^64, of factor(r) times the sum over the row's words w of factor(w) % 2^32 times
 * the word; factor(i) is odd. The same on every CPU of the same byte order. data: at any address. */
uint64_t hvdl_fingerprint(const void *data, size_t bytes);

#endif
