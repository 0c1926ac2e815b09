/* The Lion step over a range of elements (optim/lion.py defines it). Always-inlined: cpu_kernels.c builds it for each
 * CPU level. */
#ifndef OFFLOADKIT_CPU_LION_H
#define OFFLOADKIT_CPU_LION_H
#include "cpu_step.h"

/* optim/lion.py, LionScalars */
struct lion_scalars {
    float beta1, beta2, one_minus_beta1, one_minus_beta2, decay, lr;
};

INLINE void lion_elements(int weights_kind, int gradient_kind, const struct step_arrays *arrays, struct lion_scalars s,
                          float grad_scale, int64_t start, int64_t end) {
    void *weights = arrays->weights, *remainder = arrays->remainder;
    float *exp_avg = arrays->moments[0];
    const void *gradient = arrays->gradient;
    INDEPENDENT
    for (int64_t i = start; i < end; i++) {
        float g = load_gradient(gradient_kind, gradient, i) * grad_scale, m = exp_avg[i];
        float mean = s.beta1 * m + s.one_minus_beta1 * g;
        float direction = (float)((mean > 0.0f) - (mean < 0.0f));
        float w = load_master(weights_kind, weights, remainder, i) * s.decay - direction * s.lr;
        exp_avg[i] = s.beta2 * m + s.one_minus_beta2 * g;
        store_master(weights_kind, weights, remainder, i, w);
    }
}

INLINE void lion_body(int weights_kind, int gradient_kind, const struct step_arrays *arrays,
                      const struct segment *segment, float grad_scale, int64_t start, int64_t end) {
    struct lion_scalars scalars;
    memcpy(&scalars, segment->scalars, sizeof scalars);
    int64_t i = start;
    for (; i + PREFETCH_ELEMENTS <= end; i += PREFETCH_ELEMENTS) {
        prefetch_elements(arrays->moments[0], 4, i + PREFETCH_DISTANCE);
        prefetch_weights(weights_kind, gradient_kind, arrays, i + PREFETCH_DISTANCE);
        lion_elements(weights_kind, gradient_kind, arrays, scalars, grad_scale, i, i + PREFETCH_ELEMENTS);
    }
    lion_elements(weights_kind, gradient_kind, arrays, scalars, grad_scale, i, end);
}

#endif
