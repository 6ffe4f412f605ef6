#define _GNU_SOURCE
#include "net/wire.h"

#include <sched.h>
#include <stdlib.h>
#include <string.h>

/* MPI_Status is 20 bytes in MPICH and 24 in Open MPI; room larger than any's is passed. */
typedef struct {
    _Alignas(16) char bytes[64];
} any_status;

#define POLLED_AT_ONCE 128

#define FIRST_ROOM 64

static void *handle_at(const hvdl_wire *wire, size_t slot)
{
    return wire->handles + slot * wire->handle_bytes;
}

/* A slot for one more request. */
static hvdl_err make_room(hvdl_wire *wire)
{
    if (wire->num_active < wire->room)
        return HVDL_OK;
    size_t room = wire->room ? 2 * wire->room : FIRST_ROOM;
    char *handles = realloc(wire->handles, room * wire->handle_bytes);
    if (handles)
        wire->handles = handles;
    hvdl_request **owners = realloc(wire->owners, room * sizeof(hvdl_request *));
    if (owners)
        wire->owners = owners;
    if (!handles || !owners)
        return HVDL_ENOMEM;
    wire->room = room;
    return HVDL_OK;
}

static hvdl_err started(hvdl_wire *wire, hvdl_request *request, int mpi_error)
{
    if (mpi_error)
        return HVDL_EMPI;
    *request = (hvdl_request){.slot = wire->num_active, .active = true};
    wire->owners[wire->num_active++] = request;
    return HVDL_OK;
}

/* The last request moves into its slot. */
static void leave_slot(hvdl_wire *wire, size_t slot)
{
    size_t last = --wire->num_active;
    if (slot == last)
        return;
    memcpy(handle_at(wire, slot), handle_at(wire, last), wire->handle_bytes);
    wire->owners[slot] = wire->owners[last];
    wire->owners[slot]->slot = slot;
}

hvdl_err hvdl_wire_open(hvdl_wire *wire, int num_ranks)
{
    wire->sent_to = calloc((size_t)num_ranks, sizeof *wire->sent_to);
    return wire->sent_to ? HVDL_OK : HVDL_ENOMEM;
}

hvdl_err hvdl_wire_send(hvdl_wire *wire, const void *buf, size_t bytes, int dest, int tag,
                        hvdl_request *request)
{
    hvdl_err err = make_room(wire);
    if (err)
        return err;
    return started(wire, request,
                   wire->isend(buf, (int)bytes, wire->byte, dest, tag, wire->comm,
                               handle_at(wire, wire->num_active)));
}

hvdl_err hvdl_wire_recv(hvdl_wire *wire, void *buf, size_t bytes, int source, int tag,
                        hvdl_request *request)
{
    hvdl_err err = make_room(wire);
    if (err)
        return err;
    return started(wire, request,
                   wire->irecv(buf, (int)bytes, wire->byte, source, tag, wire->comm,
                               handle_at(wire, wire->num_active)));
}

static hvdl_err poll_slots(hvdl_wire *wire, size_t begin, size_t end)
{
    any_status statuses[POLLED_AT_ONCE];
    int ended[POLLED_AT_ONCE], num_ended = 0;
    int error =
        wire->testsome((int)(end - begin), handle_at(wire, begin), &num_ended, ended, statuses);
    for (int i = 0; i < num_ended; i++) { /* none where it is MPI_UNDEFINED, which is negative */
        hvdl_request **owner = &wire->owners[begin + (size_t)ended[i]];
        (*owner)->active = false;
        (*owner)->ended = true;
        *owner = NULL;
    }
    for (size_t slot = end; num_ended > 0 && slot-- > begin;)
        if (!wire->owners[slot])
            leave_slot(wire, slot);
    return error ? HVDL_EMPI : HVDL_OK;
}

hvdl_err hvdl_wire_poll(hvdl_wire *wire)
{
    hvdl_err err = HVDL_OK;
    /* From the last slots on: requests move into slots that were looked at. */
    for (size_t begin, end = wire->num_active; end > 0 && !err; end = begin) {
        begin = end > POLLED_AT_ONCE ? end - POLLED_AT_ONCE : 0;
        err = poll_slots(wire, begin, end);
    }
    return err;
}

bool hvdl_wire_cancel_recv(hvdl_wire *wire, hvdl_request *request)
{
    if (!request->active)
        return true;
    if (wire->cancel(handle_at(wire, request->slot)))
        return false;
    for (int i = 0; i < 10000; i++) {
        any_status status;
        int ended = 0;
        bool error = wire->test(handle_at(wire, request->slot), &ended, &status);
        if (error || ended) { /* MPI has freed it */
            request->active = false;
            leave_slot(wire, request->slot);
            return true;
        }
        sched_yield();
    }
    return false;
}

void hvdl_wire_close(hvdl_wire *wire)
{
    free(wire->handles);
    free(wire->owners);
    free(wire->sent_to);
    wire->sent_to = NULL;
    wire->handles = NULL;
    wire->owners = NULL;
    wire->num_active = wire->room = 0;
}
