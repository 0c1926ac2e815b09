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

/* `element` of its parameter and those after it, up to the next multiple of MOMENT_BLOCK at least. */
INLINE struct random_source random_from(const struct segment *segment, int64_t element) {
    uint64_t number = (uint64_t)(segment->offset + element - segment->start), key = segment->random_key;
    struct random_source source = {(uint32_t)number + (uint32_t)key,
                                   (uint32_t)(key >> 32) + (uint32_t)(number >> 32) * 0x9E3779B9u};
    return source;
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

/* ---- exp_avg and exp_avg_sq in 8 bits --------------------------------------------------------------------------- */

/* The block's elements in fp32. What follows works on one array after the other, in the L1 cache, so it is built once for
 * all kinds of weights and gradients. */
struct block {
    _Alignas(CACHE_LINE) float gradient[MOMENT_BLOCK], master[MOMENT_BLOCK];
    _Alignas(CACHE_LINE) float exp_avg[MOMENT_BLOCK], exp_avg_sq[MOMENT_BLOCK];
    _Alignas(CACHE_LINE) uint32_t random[MOMENT_BLOCK];
};

#define WITH_CONSTANT_KIND(KIND, STATEMENT)                                                                         \
    if (KIND == BF16) { enum { kind = BF16 }; STATEMENT; }                                                          \
    else if (KIND == FP16) { enum { kind = FP16 }; STATEMENT; }                                                     \
    else { enum { kind = FP32 }; STATEMENT; }

INLINE void load_gradients(int kind, const void *gradient, int64_t start, int64_t count, float *out) {
    INDEPENDENT
    for (int64_t i = 0; i < count; i++) out[i] = load_gradient(kind, gradient, start + i);
}

INLINE void load_masters(int kind, const struct step_arrays *arrays, int64_t start, int64_t count, float *out) {
    const void *weights = arrays->weights, *remainder = arrays->remainder;
    INDEPENDENT
    for (int64_t i = 0; i < count; i++) out[i] = load_master(kind, weights, remainder, start + i);
}

INLINE void store_masters(int kind, const struct step_arrays *arrays, int64_t start, int64_t count, const float *in) {
    void *weights = arrays->weights, *remainder = arrays->remainder;
    INDEPENDENT
    for (int64_t i = 0; i < count; i++) store_master(kind, weights, remainder, start + i, in[i]);
}

/* moments.Map */
struct map {
    int32_t least, largest, first_exponent;
};

static const struct map EXP_AVG_MAP = {0, 127, 0}, EXP_AVG_SQ_MAP = {1, 256, 1};

INLINE float select_float(int condition, float if_true, float if_false) {
    return float_of(select_bits(condition, bits_of(if_true), bits_of(if_false)));
}

/* 10 to the power of 0 .. 7; exact */
INLINE float power_of_ten(int32_t exponent) {
    float low = select_float(exponent & 1, 10.0f, 1.0f) * select_float(exponent & 2, 100.0f, 1.0f);
    return low * select_float(exponent & 4, 10000.0f, 1.0f);
}

/* moments.level */
INLINE float level_of(int32_t number, struct map map) {
    uint32_t bits = bits_of((float)number + 0.5f);
    int32_t decade = (int32_t)(bits >> 23) - 127 - map.first_exponent;
    float within = float_of((bits & 0x7FFFFFu) | 0x3F800000u) * 0.9f - 0.8f;
    float value = within * power_of_ten(decade) * 1e-6f;
    value = select_float(number == map.least, 0.0f, value);
    return select_float(number == map.largest, 1.0f, value);
}

/* moments.round_to_number */
INLINE int32_t number_of(float share, uint32_t random, struct map map) {
    int32_t decade = (share >= 1e-6f) + (share >= 1e-5f) + (share >= 1e-4f) + (share >= 1e-3f) + (share >= 1e-2f) +
                     (share >= 1e-1f);
    float first = float_of((uint32_t)(decade + 127 + map.first_exponent) << 23);
    float place = (share * power_of_ten(6 - decade) + 0.8f) * 1.1111112f * first - 0.5f;
    int32_t lower = (int32_t)place;
    lower = lower < map.largest - 1 ? lower : map.largest - 1;
    float below = level_of(lower, map);
    return lower + ((float)(int32_t)random * 0x1p-16f * (level_of(lower + 1, map) - below) < share - below);
}

/* moments.decode_8_bit */
INLINE void load_codes(int has_sign, const void *array, const float *scales, int64_t start, int64_t count, float *out) {
    const uint8_t *in = (const uint8_t *)array + start;
    float scale = scales[start / MOMENT_BLOCK];
    INDEPENDENT
    for (int64_t i = 0; i < count; i++) {
        int32_t code = in[i];
        float value = has_sign ? level_of(code & 0x7F, EXP_AVG_MAP) : level_of(code + 1, EXP_AVG_SQ_MAP);
        out[i] = float_of(bits_of(value * scale) ^ (has_sign ? (uint32_t)(code & 0x80) << 24 : 0u));
    }
}

/* moments.encode_8_bit, by the lower halves of `random`, or by the upper ones where there is no sign. */
INLINE void store_codes(int has_sign, void *array, float *scales, int64_t start, int64_t count, const float *in,
                        const uint32_t *random) {
    uint8_t *out = (uint8_t *)array + start;
    int32_t largest = 0;
    for (int64_t i = 0; i < count; i++) {
        int32_t magnitude = (int32_t)(bits_of(in[i]) & 0x7FFFFFFFu);
        largest = magnitude > largest ? magnitude : largest;
    }
    int finite = largest < 0x7F800000;
    float scale = float_of(finite ? (uint32_t)largest : 0x7FC00000u), divisor = largest > 0 ? scale : 1.0f;
    scales[start / MOMENT_BLOCK] = scale;
    if (!finite) {
        memset(out, 0, (size_t)count);
        return;
    }
    INDEPENDENT
    for (int64_t i = 0; i < count; i++) {
        uint32_t bits = bits_of(in[i]);
        float share = float_of(bits & 0x7FFFFFFFu) / divisor;
        if (has_sign) {
            out[i] = (uint8_t)(number_of(share, random[i] & 0xFFFFu, EXP_AVG_MAP) | (int32_t)(bits >> 24 & 0x80u));
        } else {
            int32_t code = number_of(share, random[i] >> 16, EXP_AVG_SQ_MAP) - 1;
            out[i] = (uint8_t)(code | ((code == 0) & (in[i] > 0.0f)));
        }
    }
}

INLINE void adamw_tiny_block(const struct step_arrays *arrays, const struct segment *segment, float grad_scale,
                       int64_t start, int64_t count) {
    struct adamw_scalars s = adamw_scalars_of(segment);
    struct block b;
    WITH_CONSTANT_KIND(arrays->gradient_kind, load_gradients(kind, arrays->gradient, start, count, b.gradient))
    WITH_CONSTANT_KIND(arrays->weights_kind, load_masters(kind, arrays, start, count, b.master))
    load_codes(1, arrays->moments[0], arrays->scales[0], start, count, b.exp_avg);
    load_codes(0, arrays->moments[1], arrays->scales[1], start, count, b.exp_avg_sq);
    INDEPENDENT
    for (int64_t i = 0; i < count; i++) {
        float g = b.gradient[i] * grad_scale;
        float m = s.beta1 * b.exp_avg[i] + s.one_minus_beta1 * g;
        float v = s.beta2 * b.exp_avg_sq[i] + (s.one_minus_beta2 * g) * g;
        float denominator = sqrtf(v) * s.inv_sqrt_bias_correction2 + s.eps;
        b.master[i] = b.master[i] * s.decay - s.step_size * (m / denominator);
        b.exp_avg[i] = m;
        b.exp_avg_sq[i] = v;
    }
    WITH_CONSTANT_KIND(arrays->weights_kind, store_masters(kind, arrays, start, count, b.master))
    struct random_source source = random_from(segment, start);
    for (int64_t i = 0; i < count; i++) b.random[i] = random_bits(source, (uint32_t)i);
    store_codes(1, arrays->moments[0], arrays->scales[0], start, count, b.exp_avg, b.random);
    store_codes(0, arrays->moments[1], arrays->scales[1], start, count, b.exp_avg_sq, b.random);
}

INLINE void adamw_tiny_body(const struct step_arrays *arrays, const struct segment *segment, float grad_scale,
                      int64_t start, int64_t end) {
    int64_t i = start;
    for (; i + MOMENT_BLOCK <= end; i += MOMENT_BLOCK) adamw_tiny_block(arrays, segment, grad_scale, i, MOMENT_BLOCK);
    if (i < end) adamw_tiny_block(arrays, segment, grad_scale, i, end - i);
}

#endif
