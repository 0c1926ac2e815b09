/* The AdamW step over a range of elements, for moments in fp32, and for moments in bf16 or 8 bits (moments.py defines
 * these). Always-inlined: cpu_kernels.c builds it for each CPU level. */
#ifndef OFFLOADKIT_CPU_ADAMW_H
#define OFFLOADKIT_CPU_ADAMW_H
#include "cpu_step.h"

/* optim/adamw.py, AdamWScalars */
struct adamw_scalars {
    float beta1, beta2, one_minus_beta1, one_minus_beta2, eps, decay, step_size, inv_sqrt_bias_correction2;
};

INLINE struct adamw_scalars adamw_scalars_of(const struct segment *segment) {
    struct adamw_scalars scalars;
    memcpy(&scalars, segment->scalars, sizeof scalars);
    return scalars;
}

/* ---- exp_avg and exp_avg_sq in fp32 or bf16 --------------------------------------------------------------------- */

/* What the random bits of elements that share the upper half of their number have in common. */
struct random_source {
    uint32_t first, upper;
};

/* Element `number` of a parameter and those after it, up to the next multiple of 2**32. */
INLINE struct random_source random_source_of(uint64_t number, uint64_t key) {
    struct random_source source = {(uint32_t)number + (uint32_t)key,
                                   (uint32_t)(key >> 32) + (uint32_t)(number >> 32) * 0x9E3779B9u};
    return source;
}

/* `element` of its parameter and those after it, up to the next multiple of MOMENT_BLOCK at least. */
INLINE struct random_source random_from(const struct segment *segment, int64_t element) {
    return random_source_of((uint64_t)(segment->offset + element - segment->start), segment->random_key);
}

/* moments.random_bits */
INLINE uint32_t random_bits(struct random_source source, uint32_t i) {
    uint32_t state = source.first + i;
    state = (state ^ state >> 16) * 0x7FEB352Du;
    state = (state ^ state >> 15 ^ source.upper) * 0x846CA68Bu;
    return state ^ state >> 16;
}

INLINE float load_moment(int precision, const void *moment, int64_t i) {
    return precision == EXACT ? ((const float *)moment)[i] : float_of((uint32_t)((const uint16_t *)moment)[i] << 16);
}

/* In bf16: moments.round_stochastically by `random`, 0 .. 65535. */
INLINE void store_moment(int precision, void *moment, int64_t i, float value, uint32_t random) {
    if (precision == EXACT) {
        ((float *)moment)[i] = value;
    } else {
        uint32_t bits = bits_of(value), magnitude = bits & 0x7FFFFFFFu;
        bits += select_bits(magnitude < 0x7F800000u, random, 0u);
        ((uint16_t *)moment)[i] = (uint16_t)(select_bits(magnitude > 0x7F800000u, 0x7FC00000u, bits) >> 16);
    }
}

/* Elements start .. end, at most PREFETCH_ELEMENTS of one MOMENT_BLOCK of their parameter. */
INLINE void adamw_elements(int precision, int weights_kind, int gradient_kind, const struct step_arrays *arrays,
                          struct adamw_scalars s, struct random_source source, float grad_scale, int64_t start,
                          int64_t end) {
    void *weights = arrays->weights, *remainder = arrays->remainder;
    void *exp_avg = arrays->moments[0], *exp_avg_sq = arrays->moments[1];
    const void *gradient = arrays->gradient;
    INDEPENDENT
    for (int64_t i = start; i < end; i++) {
        uint32_t random = precision == EXACT ? 0u : random_bits(source, (uint32_t)(i - start));
        float g = load_gradient(gradient_kind, gradient, i) * grad_scale;
        float m = s.beta1 * load_moment(precision, exp_avg, i) + s.one_minus_beta1 * g;
        float v = s.beta2 * load_moment(precision, exp_avg_sq, i) + (s.one_minus_beta2 * g) * g;
        float denominator = sqrtf(v) * s.inv_sqrt_bias_correction2 + s.eps;
        float w = load_master(weights_kind, weights, remainder, i) * s.decay - s.step_size * (m / denominator);
        store_moment(precision, exp_avg, i, m, random & 0xFFFFu);
        store_moment(precision, exp_avg_sq, i, v, random >> 16);
        store_master(weights_kind, weights, remainder, i, w);
    }
}

INLINE void adamw_body(int precision, int weights_kind, int gradient_kind, const struct step_arrays *arrays,
                      const struct segment *segment, float grad_scale, int64_t start, int64_t end) {
    struct adamw_scalars scalars = adamw_scalars_of(segment);
    int64_t i = start, moment_bytes = precision == EXACT ? 4 : 2;
    for (; i + PREFETCH_ELEMENTS <= end; i += PREFETCH_ELEMENTS) {
        int64_t ahead = i + PREFETCH_DISTANCE;
        prefetch_elements(arrays->moments[0], moment_bytes, ahead);
        prefetch_elements(arrays->moments[1], moment_bytes, ahead);
        prefetch_weights(weights_kind, gradient_kind, arrays, ahead);
        adamw_elements(precision, weights_kind, gradient_kind, arrays, scalars, random_from(segment, i), grad_scale, i,
                      i + PREFETCH_ELEMENTS);
    }
    adamw_elements(precision, weights_kind, gradient_kind, arrays, scalars, random_from(segment, i), grad_scale, i, end);
}

#endif
