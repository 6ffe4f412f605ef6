/* Runs the core's kernels for an instruction set that this machine's CPU lacks: built by a cross
 * compiler together with the core's reduce*.c, and run by an emulator (test_kernels.py).
 *
 *   driver           prints the names of the variants
 *   driver VARIANT   reads cases from stdin: int64 dtype, op, inputs, elements, bytes per element,
 *                    index of the input that is the output too (-1: none), bytes that all buffers
 *                    are away from a cache line; the scale (double, int64, double); the inputs;
 *                    writes each result, to stdout. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "kernels/reduce.h"

#define MOST_INPUTS 16

typedef struct {
    int64_t dtype, op, num_inputs, count, item_bytes, in_place, offset;
    double prescale;
    int64_t divisor;
    double postscale;
} case_head;

static int run_case(const hvdl_reduce_variant *variant, const case_head *head)
{
    char *memory[MOST_INPUTS + 1];
    const void *inputs[MOST_INPUTS];
    const size_t bytes = (size_t)(head->count * head->item_bytes);
    for (int64_t i = 0; i <= head->num_inputs; i++) {
        memory[i] = aligned_alloc(64, (bytes + (size_t)head->offset) / 64 * 64 + 64);
        if (!memory[i])
            return 1;
        if (i == head->num_inputs)
            break;
        inputs[i] = memory[i] + head->offset;
        if (fread(memory[i] + head->offset, 1, bytes, stdin) != bytes)
            return 1;
    }
    const hvdl_scale scale = {
        .prescale = head->prescale, .divisor = head->divisor, .postscale = head->postscale};
    const int64_t to = head->in_place < 0 ? head->num_inputs : head->in_place;
    hvdl_reduce_with(variant, (hvdl_dtype)head->dtype, (hvdl_op)head->op, memory[to] + head->offset,
                     inputs, (int)head->num_inputs, (size_t)head->count, &scale);
    const bool failed = fwrite(memory[to] + head->offset, 1, bytes, stdout) != bytes;
    for (int64_t i = 0; i <= head->num_inputs; i++)
        free(memory[i]);
    return failed;
}

int main(int num_arguments, char **arguments)
{
    const hvdl_reduce_variant *variant = hvdl_reduce_variants();
    if (num_arguments != 2) {
        for (; variant->name; variant++)
            puts(variant->name);
        return 0;
    }
    while (variant->name && strcmp(variant->name, arguments[1]) != 0)
        variant++;
    if (!variant->name)
        return 2;
    for (case_head head; fread(&head, sizeof head, 1, stdin) == 1;)
        if (head.num_inputs > MOST_INPUTS || run_case(variant, &head))
            return 1;
    return fflush(stdout) != 0;
}
