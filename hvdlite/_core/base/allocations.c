/* The one place through which all allocations of the core pass. The linker leads its calls of malloc and the like
 * here (--wrap, setup.py), and the table leads them on to the C library: an indirect jump, as a call of a shared
 * library's function is anyway. Only where a fault is asked for is there anything to count. */
#define _GNU_SOURCE
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "base/allocations.h"
#include "base/faults.h"

typedef struct {
    void *(*malloc)(size_t);
    void *(*calloc)(size_t, size_t);
    void *(*realloc)(void *, size_t);
    int (*posix_memalign)(void **, size_t, size_t);
    char *(*strdup)(const char *);
} allocators;

static const allocators libcs = {__real_malloc, __real_calloc, __real_realloc,
                                 __real_posix_memalign, __real_strdup};
static allocators allocate = {__real_malloc, __real_calloc, __real_realloc, __real_posix_memalign,
                              __real_strdup};

void *__wrap_malloc(size_t bytes)
{
    return allocate.malloc(bytes);
}

void *__wrap_calloc(size_t count, size_t bytes)
{
    return allocate.calloc(count, bytes);
}

void *__wrap_realloc(void *memory, size_t bytes)
{
    return allocate.realloc(memory, bytes);
}

int __wrap_posix_memalign(void **to, size_t alignment, size_t bytes)
{
    return allocate.posix_memalign(to, alignment, bytes);
}

char *__wrap_strdup(const char *text)
{
    return allocate.strdup(text);
}

/* ---- with faults ---- */

static bool fails(const char *name)
{
    bool does = hvdl_fault_happens(HVDL_FAULT_ALLOCATION, name);
    if (does)
        errno = ENOMEM;
    return does;
}

static void *failing_malloc(size_t bytes)
{
    return fails("malloc") ? NULL : __real_malloc(bytes);
}

static void *failing_calloc(size_t count, size_t bytes)
{
    return fails("calloc") ? NULL : __real_calloc(count, bytes);
}

static void *failing_realloc(void *memory, size_t bytes)
{
    return fails("realloc") ? NULL : __real_realloc(memory, bytes);
}

static int failing_posix_memalign(void **to, size_t alignment, size_t bytes)
{
    return fails("posix_memalign") ? ENOMEM : __real_posix_memalign(to, alignment, bytes);
}

static char *failing_strdup(const char *text)
{
    return fails("strdup") ? NULL : __real_strdup(text);
}

static const allocators failing = {failing_malloc, failing_calloc, failing_realloc,
                                   failing_posix_memalign, failing_strdup};

void hvdl_allocations_may_fail(void)
{
    allocate = hvdl_fault_any(HVDL_FAULT_ALLOCATION) ? failing : libcs;
}
