/* Faults on purpose on the wire: see base/faults.h. */
#ifndef HVDL_FAULTY_WIRE_H
#define HVDL_FAULTY_WIRE_H

#include "net/wire.h"

/* Replaces the functions of a new wire, if this process has faults of messages or of calls of MPI. All wires of a
 * process have the same functions. */
void hvdl_wire_may_fail(hvdl_wire *wire);

#endif
