/* The names that the linker makes of wrapped functions (--wrap): __wrap_X is called for X, and __real_X is
 * the C library's. For base/allocations.c, and for test programs that have allocators of their own. */
#ifndef HVDL_ALLOCATIONS_H
#define HVDL_ALLOCATIONS_H

#include <stddef.h>

void *__real_malloc(size_t bytes);
void *__real_calloc(size_t count, size_t bytes);
void *__real_realloc(void *memory, size_t bytes);
int __real_posix_memalign(void **to, size_t alignment, size_t bytes);
char *__real_strdup(const char *text);
void *__wrap_malloc(size_t bytes);
void *__wrap_calloc(size_t count, size_t bytes);
void *__wrap_realloc(void *memory, size_t bytes);
int __wrap_posix_memalign(void **to, size_t alignment, size_t bytes);
char *__wrap_strdup(const char *text);

#endif
