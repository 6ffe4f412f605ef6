#include "net/faulty_wire.h"

#include "base/faults.h"

#define AN_ERROR 1 /* any number but MPI_SUCCESS, which is 0 */

static hvdl_wire mpi; /* MPI's own functions: these have no place for a context */

static bool fails(const char *name)
{
    return hvdl_fault_happens(HVDL_FAULT_CALL, name);
}

static int isend(const void *buf, int count, hvdl_word type, int dest, int tag, hvdl_word comm,
                 void *request)
{
    if (fails("MPI_Isend"))
        return AN_ERROR;
    /* MPI discards what is sent to MPI_PROC_NULL, and completes the request. */
    if (tag >= HVDL_TAG_DATA && hvdl_fault_happens(HVDL_FAULT_MESSAGE, "a message of data"))
        dest = mpi.proc_null;
    return mpi.isend(buf, count, type, dest, tag, comm, request);
}

static int irecv(void *buf, int count, hvdl_word type, int source, int tag, hvdl_word comm,
                 void *request)
{
    return fails("MPI_Irecv") ? AN_ERROR : mpi.irecv(buf, count, type, source, tag, comm, request);
}

static int test(void *request, int *flag, void *status)
{
    return fails("MPI_Test") ? AN_ERROR : mpi.test(request, flag, status);
}

static int testsome(int count, void *requests, int *num_ended, int *ended, void *statuses)
{
    return fails("MPI_Testsome") ? AN_ERROR
                                 : mpi.testsome(count, requests, num_ended, ended, statuses);
}

static int cancel(void *request)
{
    return fails("MPI_Cancel") ? AN_ERROR : mpi.cancel(request);
}

void hvdl_wire_may_fail(hvdl_wire *wire)
{
    if (!hvdl_fault_any(HVDL_FAULT_CALL) && !hvdl_fault_any(HVDL_FAULT_MESSAGE))
        return;
    if (!mpi.isend) /* else other threads may read it */
        mpi = *wire;
    wire->isend = isend;
    wire->irecv = irecv;
    wire->test = test;
    wire->testsome = testsome;
    wire->cancel = cancel;
}
