/* What every optimizer's step over a flat layer is given, and prefetching. */
#ifndef OFFLOADKIT_CPU_STEP_H
#define OFFLOADKIT_CPU_STEP_H
#include "cpu_floats.h"
#include <math.h>

/* Numbers known to cpu.py. */
enum { EXACT = 0, COMPACT = 1, TINY = 2, NUM_PRECISIONS = 3 };

enum { PREFETCH_ELEMENTS = 64, PREFETCH_DISTANCE = 512, CACHE_LINE = 64 };
enum { MOMENT_BLOCK = 256, MAX_MOMENTS = 2, MAX_SCALARS = 8 };

struct segment {
    int64_t start, length;
    float scalars[MAX_SCALARS]; /* the optimizer's own, in its order */
    uint64_t random_key;
    int64_t offset; /* elements of the parameter before `start` */
};

struct step_arrays {
    int weights_kind, gradient_kind, precision;
    void *weights;   /* bf16, fp16 or fp32 */
    void *remainder; /* int16 low halves for bf16, fp32 master weights for fp16, unused for fp32 */
    const void *gradient;
    void *moments[MAX_MOMENTS]; /* fp32, bf16 or uint8, in the order of optim/table.py */
    float *scales[MAX_MOMENTS]; /* TINY: one for each MOMENT_BLOCK elements */
};

/* Five streams at once are more than the hardware prefetches well: asking ahead gave a tenth more GB/s (Zen 5); the
 * triad, with two streams, gains nothing. */
INLINE void prefetch_elements(const void *array, int64_t width, int64_t i) {
    const char *first = (const char *)array + i * width;
    for (int64_t offset = 0; offset < PREFETCH_ELEMENTS * width; offset += CACHE_LINE)
        __builtin_prefetch(first + offset, 1, 3);
}

/* Weights, their remainder and the gradient, from element `i` on. */
INLINE void prefetch_weights(int weights_kind, int gradient_kind, const struct step_arrays *arrays, int64_t i) {
    prefetch_elements(arrays->weights, weights_kind == FP32 ? 4 : 2, i);
    if (weights_kind != FP32) prefetch_elements(arrays->remainder, weights_kind == FP16 ? 4 : 2, i);
    prefetch_elements(arrays->gradient, gradient_kind == FP32 ? 4 : 2, i);
}

#endif
