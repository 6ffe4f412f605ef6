#define _GNU_SOURCE
#include "engine/fatal.h"

#include <stdarg.h>
#include <stdio.h>

#include "engine/state.h"

static void record(hvdl_engine *e, int culprit, bool tells, const char *format, va_list arguments)
{
    hvdl_failure *failure = &e->failure;
    if (failure->broken)
        return;
    vsnprintf(failure->text, sizeof failure->text, format, arguments);
    failure->broken = true;
    failure->culprit = culprit;
    failure->tells = tells;
}

void hvdl_fatal(hvdl_engine *e, const char *format, ...)
{
    va_list arguments;
    va_start(arguments, format);
    record(e, e->config.rank, true, format, arguments);
    va_end(arguments);
}

void hvdl_fatal_because_of(hvdl_engine *e, int culprit, const char *format, ...)
{
    va_list arguments;
    va_start(arguments, format);
    record(e, culprit, true, format, arguments);
    va_end(arguments);
}

__attribute__((format(printf, 2, 3))) static void break_silently(hvdl_engine *e, const char *format,
                                                                 ...)
{
    va_list arguments;
    va_start(arguments, format);
    record(e, e->config.rank, false, format, arguments);
    va_end(arguments);
}

void hvdl_fatal_on_all(hvdl_engine *e, const char *text)
{
    break_silently(e, "%s", text);
}

void hvdl_fatal_for_wire(hvdl_engine *e, hvdl_err err)
{
    if (err == HVDL_ENOMEM)
        hvdl_out_of_memory(e);
    else
        hvdl_fatal(e, "rank %d on %s: MPI reported an error", hvdl_own_number(e),
                   e->placement.name_of[e->config.rank]);
}

void hvdl_out_of_memory(hvdl_engine *e)
{
    hvdl_fatal(e, "rank %d on %s is out of memory", hvdl_own_number(e),
               e->placement.name_of[e->config.rank]);
}

void hvdl_out_of_memory_in(hvdl_engine *e, const hvdl_operation *op)
{
    char title[HVDL_TITLE_BYTES];
    hvdl_put_title_of(title, sizeof title, op);
    hvdl_fatal(e, "rank %d on %s is out of memory in %s", hvdl_own_number(e),
               e->placement.name_of[e->config.rank], title);
}

void hvdl_note_gone(hvdl_engine *e, int rank)
{
    hvdl_failure *failure = &e->failure;
    if (*failure->text)
        return;
    failure->first_gone = rank;
    snprintf(failure->text, sizeof failure->text,
             "rank %d on %s has left (it called shutdown or ended); an operation needs every rank",
             hvdl_world_rank(e, rank), e->placement.name_of[rank]);
}
