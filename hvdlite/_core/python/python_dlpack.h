/* DLPack's structures, as far as they are used here (https://dmlc.github.io/dlpack): its version-0
 * capsule, which every consumer takes, and the table of functions of its version 1.3, by which a
 * tensor's memory is found without calling Python. */
#ifndef HVDL_PYTHON_DLPACK_H
#define HVDL_PYTHON_DLPACK_H

#include <stdint.h>

enum { DL_CPU = 1 };
enum { DL_INT = 0, DL_UINT = 1, DL_FLOAT = 2, DL_BFLOAT = 4, DL_COMPLEX = 5, DL_BOOL = 6 };

typedef struct {
    void *data;
    struct {
        int32_t device_type, device_id;
    } device;
    int32_t ndim;
    struct {
        uint8_t code, bits;
        uint16_t lanes;
    } dtype;
    int64_t *shape, *strides;
    uint64_t byte_offset;
} dl_tensor;

typedef struct {
    struct {
        uint32_t major, minor;
    } version;
    const void *previous; /* table, of an older version */
    void *allocate, *export_managed, *import_managed;
    /* Fills what the tensor owns; -1: an exception. */
    int (*describe)(void *tensor, dl_tensor *to);
} dl_exchange_api;

#endif
