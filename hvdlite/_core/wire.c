#define _GNU_SOURCE
#include "wire.h"

#include <sched.h>

/* MPI_Status is 20 bytes in MPICH and 24 in Open MPI; a buffer larger than any is passed. */
typedef struct {
    _Alignas(16) char bytes[256];
} any_status;

hvdl_err hvdl_wire_send(hvdl_wire *wire, const void *buf, size_t bytes, int dest, int tag,
                        hvdl_request *request)
{
    request->word = 0;
    if (wire->isend(buf, (int)bytes, wire->byte, dest, tag, wire->comm, &request->word))
        return HVDL_EMPI;
    request->active = true;
    return HVDL_OK;
}

hvdl_err hvdl_wire_recv(hvdl_wire *wire, void *buf, size_t bytes, int source, int tag,
                        hvdl_request *request)
{
    request->word = 0;
    if (wire->irecv(buf, (int)bytes, wire->byte, source, tag, wire->comm, &request->word))
        return HVDL_EMPI;
    request->active = true;
    return HVDL_OK;
}

hvdl_err hvdl_wire_test(hvdl_wire *wire, hvdl_request *request, bool *done)
{
    if (!request->active) {
        *done = true;
        return HVDL_OK;
    }
    any_status status;
    int flag = 0;
    if (wire->test(&request->word, &flag, &status)) {
        request->active = false; /* MPI has freed it */
        return HVDL_EMPI;
    }
    request->active = !flag;
    *done = flag;
    return HVDL_OK;
}

bool hvdl_wire_cancel_recv(hvdl_wire *wire, hvdl_request *request)
{
    bool done = false;
    if (!request->active)
        return true;
    if (wire->cancel(&request->word))
        return false;
    for (int i = 0; i < 10000; i++) {
        if (hvdl_wire_test(wire, request, &done) || done)
            return true;
        sched_yield();
    }
    return false;
}
