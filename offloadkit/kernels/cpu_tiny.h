/* The AdamW step for moments in 8 bits, which moments.py defines. The portable code, built for each CPU level, computes
 * codes as moments.py does. AVX2 and AVX-512 find most codes by lines, with the same result. */
#ifndef OFFLOADKIT_CPU_TINY_H
#define OFFLOADKIT_CPU_TINY_H
#include "cpu_adamw.h"
#if defined(__x86_64__)
#include <immintrin.h>
#endif

/* The block's elements in fp32. What follows works on one array after the other, in the L1 cache, so it is built once
 * for all kinds of weights and gradients. */
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

INLINE void load_weights(const struct step_arrays *arrays, int64_t start, int64_t count, struct block *b) {
    WITH_CONSTANT_KIND(arrays->gradient_kind, load_gradients(kind, arrays->gradient, start, count, b->gradient))
    WITH_CONSTANT_KIND(arrays->weights_kind, load_masters(kind, arrays, start, count, b->master))
}

INLINE void adamw_step_block(struct adamw_scalars s, float grad_scale, int64_t count, struct block *b) {
    INDEPENDENT
    for (int64_t i = 0; i < count; i++) {
        float g = b->gradient[i] * grad_scale;
        float m = s.beta1 * b->exp_avg[i] + s.one_minus_beta1 * g;
        float v = s.beta2 * b->exp_avg_sq[i] + (s.one_minus_beta2 * g) * g;
        float denominator = sqrtf(v) * s.inv_sqrt_bias_correction2 + s.eps;
        b->master[i] = b->master[i] * s.decay - s.step_size * (m / denominator);
        b->exp_avg[i] = m;
        b->exp_avg_sq[i] = v;
    }
}

INLINE void store_codes_of_block(const struct step_arrays *arrays, const struct segment *segment, int64_t start,
                                 int64_t count, struct block *b) {
    struct random_source source = random_from(segment, start);
    for (int64_t i = 0; i < count; i++) b->random[i] = random_bits(source, (uint32_t)i);
    store_codes(1, arrays->moments[0], arrays->scales[0], start, count, b->exp_avg, b->random);
    store_codes(0, arrays->moments[1], arrays->scales[1], start, count, b->exp_avg_sq, b->random);
}

INLINE void adamw_tiny_block(const struct step_arrays *arrays, const struct segment *segment, float grad_scale,
                             int64_t start, int64_t count) {
    struct block b;
    load_weights(arrays, start, count, &b);
    load_codes(1, arrays->moments[0], arrays->scales[0], start, count, b.exp_avg);
    load_codes(0, arrays->moments[1], arrays->scales[1], start, count, b.exp_avg_sq);
    adamw_step_block(adamw_scalars_of(segment), grad_scale, count, &b);
    WITH_CONSTANT_KIND(arrays->weights_kind, store_masters(kind, arrays, start, count, b.master))
    store_codes_of_block(arrays, segment, start, count, &b);
}

INLINE void adamw_tiny_body(const struct step_arrays *arrays, const struct segment *segment, float grad_scale,
                            int64_t start, int64_t end) {
    int64_t i = start;
    for (; i + MOMENT_BLOCK <= end; i += MOMENT_BLOCK) adamw_tiny_block(arrays, segment, grad_scale, i, MOMENT_BLOCK);
    if (i < end) adamw_tiny_block(arrays, segment, grad_scale, i, end - i);
}

/* ---- Codes by lines --------------------------------------------------------------------------------------------- */

/* A share of the scale between two levels gets the upper code with the probability (share - lower level) / (upper level
 * - lower level). So code + probability is a piecewise linear function of the share. Between the first levels of two
 * decades it is the lesser of two lines: one through the decade's levels, a later one from the last level to the next
 * decade. Its value less the random bits, rounded down, is the code, unless the value is so close to a whole number
 * that the roundings of moments.py decide: such elements, one in 4,000 to 8,000, are computed as moments.py does.
 * benchmarks/tiny_codes.c compares all codes.
 *
 * Values and slopes are in 2^-24 of a code. `from`: a decade's first level; before the first decade, the line from
 * zero; after the last one, in EXP_AVG_SQ_LINES, the line to 1. */
struct lines {
    float from[9], slope[9], start[9], later_slope[9], later_start[9];
};

static const struct lines EXP_AVG_LINES = {
    {0.0f, 5.49999868e-07f, 3.24999996e-06f, 2.12499926e-05f, 0.000156249938f, 0.00128124945f, 0.0114062494f,
     0.107031226f},
    {3.05040364e+13f, 6.21378348e+12f, 3.72827103e+12f, 7.45653973e+11f, 1.49130814e+11f, 2.98261643e+10f,
     5.96523288e+09f, 1.19304649e+09f},
    {0.0f, 13359635.9f, 21437551.3f, 51263722.6f, 110916047.0f, 230220699.0f, 468829978.0f, 946048596.0f},
    {3.05040364e+13f, 6.21378348e+12f, 1.24275732e+12f, 2.48551572e+11f, 4.97103369e+10f, 9.94205024e+09f,
     1.98841444e+09f, 795362966.0f},
    {0.0f, 13359635.9f, 40700280.0f, 95381560.2f, 204744114.0f, 423469408.0f, 860919389.0f, 1.33534347e+09f},
};
static const struct lines EXP_AVG_SQ_LINES = {
    {0.0f, 3.24999974e-07f, 2.12499913e-06f, 1.56249935e-05f, 0.000128124957f, 0.00114062487f, 0.0107031232f,
     0.103515565f, 0.996484339f},
    {5.16222073e+13f, 3.72827056e+13f, 7.45653918e+12f, 1.491308e+12f, 2.98261651e+11f, 5.96523309e+10f,
     1.19304644e+10f, 2.38609288e+09f, 4.77213734e+09f},
    {0.0f, 4660337.66f, 34486508.8f, 94138834.3f, 213443479.0f, 452052764.0f, 929271378.0f, 1.88370868e+09f,
     -493947260.0f},
    {5.16222073e+13f, 1.24275748e+13f, 2.48551599e+12f, 4.97103305e+11f, 9.94205367e+10f, 1.98841224e+10f,
     3.97687804e+09f, 2.38609288e+09f, 4.77213734e+09f},
    {0.0f, 23923062.4f, 78604340.9f, 187966900.0f, 406692160.0f, 844142396.0f, 1.71903765e+09f, 1.88370868e+09f,
     -493947260.0f},
};

/* Whether the inverse of a scale is precise. */
INLINE int has_inverse(int32_t scale_bits) {
    return scale_bits == 0 || (scale_bits >= 0x00800000 && scale_bits < 0x7E800000);
}

/* Codes as moments.py computes them, without a sign. */
INLINE void exact_codes(int has_sign, const float *values, float scale, const uint32_t *random, int64_t count,
                        uint32_t *codes) {
    struct map map = has_sign ? EXP_AVG_MAP : EXP_AVG_SQ_MAP;
    float divisor = scale > 0.0f ? scale : 1.0f;
    INDEPENDENT
    for (int64_t i = 0; i < count; i++) {
        float share = float_of(bits_of(values[i]) & 0x7FFFFFFFu) / divisor;
        uint32_t bits = has_sign ? random[i] & 0xFFFFu : random[i] >> 16;
        codes[i] = (uint32_t)(number_of(share, bits, map) - map.least);
    }
}

#if defined(__x86_64__)
#define AVX2_TARGET "avx2,fma"
/* ---- AVX2: eight elements --------------------------------------------------------------------------------------- */

#define INLINE_256 __attribute__((target(AVX2_TARGET))) INLINE
#define SHARED_256 __attribute__((target(AVX2_TARGET), noinline)) static

INLINE_256 __m256i all_256(int32_t value) { return _mm256_set1_epi32(value); }
INLINE_256 __m256 all_ps_256(float value) { return _mm256_set1_ps(value); }

/* level_of: the powers of ten by the last three bits of the exponent of number + 0.5, 0 for the least number. */
INLINE_256 void load_codes_256(int has_sign, const void *array, float scale, int64_t start, float *out) {
    __m256 powers = has_sign ? _mm256_setr_ps(1e1f, 1e2f, 1e3f, 1e4f, 1e5f, 1e6f, 0.0f, 1.0f)
                             : _mm256_setr_ps(1.0f, 1e1f, 1e2f, 1e3f, 1e4f, 1e5f, 1e6f, 0.0f);
    for (int64_t i = 0; i < MOMENT_BLOCK; i += 8) {
        __m256i code = _mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)((const uint8_t *)array + start + i)));
        __m256i number = has_sign ? _mm256_and_si256(code, all_256(0x7F)) : code;
        __m256 y = _mm256_add_ps(_mm256_cvtepi32_ps(number), all_ps_256(has_sign ? 0.5f : 1.5f));
        __m256i bits = _mm256_castps_si256(y);
        __m256i mantissa = _mm256_or_si256(_mm256_and_si256(bits, all_256(0x7FFFFF)), all_256(0x3F800000));
        __m256 within = _mm256_castsi256_ps(mantissa);
        within = _mm256_sub_ps(_mm256_mul_ps(within, all_ps_256(0.9f)), all_ps_256(0.8f));
        __m256 power = _mm256_permutevar8x32_ps(powers, _mm256_srli_epi32(bits, 23));
        __m256 value = _mm256_mul_ps(_mm256_mul_ps(within, power), all_ps_256(1e-6f));
        __m256i is_largest = _mm256_cmpeq_epi32(number, all_256(has_sign ? 127 : 255));
        value = _mm256_blendv_ps(value, all_ps_256(1.0f), _mm256_castsi256_ps(is_largest));
        value = _mm256_mul_ps(value, all_ps_256(scale));
        __m256i sign = _mm256_and_si256(_mm256_slli_epi32(code, 24), all_256((int32_t)0x80000000));
        if (has_sign) value = _mm256_xor_ps(value, _mm256_castsi256_ps(sign));
        _mm256_store_ps(out + i, value);
    }
}

/* The lines of one map, by decade, in 2^-23 of a code. */
struct lines_256 {
    __m256 inverse_scale, middle, quarters, from, slope, start, later_slope, later_start;
    __m256 last, last_slope, last_start;
    __m256i doubtful;
};

INLINE_256 struct lines_256 lines_256(int has_sign, float inverse_scale) {
    const struct lines *lines = has_sign ? &EXP_AVG_LINES : &EXP_AVG_SQ_LINES;
    int32_t margin = has_sign ? 1 << 9 : 1 << 10;
    __m256 half = all_ps_256(0.5f), offset = all_ps_256(0x1p23f + (float)margin - (has_sign ? 64.0f : 0.0f));
    const float *from = lines->from;
    struct lines_256 found = {
        all_ps_256(inverse_scale),
        all_ps_256(from[4]),
        _mm256_setr_ps(from[2], from[2], from[2], from[2], from[6], from[6], from[6], from[6]),
        _mm256_setr_ps(from[1], from[1], from[3], from[3], from[5], from[5], from[7], from[7]),
        _mm256_mul_ps(_mm256_loadu_ps(lines->slope), half),
        _mm256_fmadd_ps(_mm256_loadu_ps(lines->start), half, offset),
        _mm256_mul_ps(_mm256_loadu_ps(lines->later_slope), half),
        _mm256_fmadd_ps(_mm256_loadu_ps(lines->later_start), half, offset),
        all_ps_256(from[8]),
        all_ps_256(0.5f * lines->slope[8]),
        all_ps_256(0.5f * lines->start[8] + 0x1p23f + (float)margin),
        all_256(0x7FFFFF & ~(2 * margin - 1)),
    };
    return found;
}

/* The codes above bit 23, without a sign; the lower bits say how far an element is from another code. */
INLINE_256 __m256i places_256(int has_sign, const struct lines_256 *lines, __m256 magnitude, __m256i random) {
    __m256 share = _mm256_mul_ps(magnitude, lines->inverse_scale), border;
    __m256i at = _mm256_and_si256(_mm256_castps_si256(_mm256_cmp_ps(share, lines->middle, _CMP_GE_OQ)), all_256(4));
    border = _mm256_permutevar8x32_ps(lines->quarters, at);
    __m256i above = _mm256_castps_si256(_mm256_cmp_ps(share, border, _CMP_GE_OQ));
    at = _mm256_or_si256(at, _mm256_and_si256(above, all_256(2)));
    border = _mm256_permutevar8x32_ps(lines->from, at);
    at = _mm256_sub_epi32(at, _mm256_castps_si256(_mm256_cmp_ps(share, border, _CMP_GE_OQ)));
    __m256 slope = _mm256_permutevar8x32_ps(lines->slope, at), start = _mm256_permutevar8x32_ps(lines->start, at);
    __m256 later_slope = _mm256_permutevar8x32_ps(lines->later_slope, at);
    __m256 later_start = _mm256_permutevar8x32_ps(lines->later_start, at);
    __m256 place = _mm256_fmadd_ps(share, slope, start), later = _mm256_fmadd_ps(share, later_slope, later_start);
    place = _mm256_min_ps(place, later);
    if (!has_sign) {
        __m256 last = _mm256_fmadd_ps(share, lines->last_slope, lines->last_start);
        place = _mm256_blendv_ps(place, last, _mm256_cmp_ps(share, lines->last, _CMP_GE_OQ));
    }
    return _mm256_sub_epi32(_mm256_cvtps_epi32(place), random);
}

INLINE_256 __m256i in_doubt_256(const struct lines_256 *lines, __m256i place) {
    return _mm256_cmpeq_epi32(_mm256_and_si256(place, lines->doubtful), _mm256_setzero_si256());
}

SHARED_256 __m256i exact_codes_256(int has_sign, const float *values, float scale, __m256i random) {
    _Alignas(32) uint32_t bits[8], codes[8];
    _mm256_store_si256((__m256i *)bits, random);
    exact_codes(has_sign, values, scale, bits, 8, codes);
    return _mm256_load_si256((const __m256i *)codes);
}

INLINE_256 void store_bytes_256(uint8_t *out, const __m256i *four) {
    __m256i bytes = _mm256_packus_epi16(_mm256_packus_epi32(four[0], four[1]), _mm256_packus_epi32(four[2], four[3]));
    __m256i in_order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
    _mm256_storeu_si256((__m256i *)out, _mm256_permutevar8x32_epi32(bytes, in_order));
}

INLINE_256 void store_codes_256(const struct step_arrays *arrays, const struct segment *segment, int64_t start,
                                const struct block *b, float scale, float scale_sq) {
    struct lines_256 lines = lines_256(1, scale > 0.0f ? 1.0f / scale : 0.0f);
    struct lines_256 lines_sq = lines_256(0, scale_sq > 0.0f ? 1.0f / scale_sq : 0.0f);
    struct random_source source = random_from(segment, start);
    __m256i number = _mm256_add_epi32(all_256((int32_t)source.first), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
    __m256i codes[4], codes_sq[4];
    for (int64_t i = 0; i < MOMENT_BLOCK; i += 32) {
        for (int part = 0; part < 4; part++, number = _mm256_add_epi32(number, all_256(8))) {
            const float *from = b->exp_avg + i + 8 * part, *from_sq = b->exp_avg_sq + i + 8 * part;
            __m256i bits = _mm256_load_si256((const __m256i *)from);
            __m256 value_sq = _mm256_load_ps(from_sq);
            __m256i state = _mm256_xor_si256(number, _mm256_srli_epi32(number, 16));
            state = _mm256_mullo_epi32(state, all_256(0x7FEB352D));
            state = _mm256_xor_si256(state, _mm256_srli_epi32(state, 15));
            state = _mm256_xor_si256(state, all_256((int32_t)source.upper));
            state = _mm256_mullo_epi32(state, all_256((int32_t)0x846CA68B));
            __m256i right = _mm256_srli_epi32(state, 9), random = _mm256_xor_si256(_mm256_slli_epi32(state, 7), right);
            __m256 magnitude = _mm256_castsi256_ps(_mm256_and_si256(bits, all_256(0x7FFFFFFF)));
            __m256i place = places_256(1, &lines, magnitude, _mm256_and_si256(random, all_256(0x7FFF80)));
            __m256i place_sq = places_256(0, &lines_sq, value_sq, right);
            __m256i in_doubt = _mm256_or_si256(in_doubt_256(&lines, place), in_doubt_256(&lines_sq, place_sq));
            __m256i code = _mm256_srli_epi32(place, 23), code_sq = _mm256_srli_epi32(place_sq, 23);
            if (__builtin_expect(!_mm256_testz_si256(in_doubt, in_doubt), 0)) {
                random = _mm256_xor_si256(state, _mm256_srli_epi32(state, 16));
                code = exact_codes_256(1, from, scale, random);
                code_sq = exact_codes_256(0, from_sq, scale_sq, random);
            }
            codes[part] = _mm256_or_si256(code, _mm256_and_si256(_mm256_srli_epi32(bits, 24), all_256(0x80)));
            __m256i above = _mm256_castps_si256(_mm256_cmp_ps(value_sq, _mm256_setzero_ps(), _CMP_GT_OQ));
            codes_sq[part] = _mm256_max_epi32(code_sq, _mm256_srli_epi32(above, 31));
        }
        store_bytes_256((uint8_t *)arrays->moments[0] + start + i, codes);
        store_bytes_256((uint8_t *)arrays->moments[1] + start + i, codes_sq);
    }
    arrays->scales[0][start / MOMENT_BLOCK] = scale;
    arrays->scales[1][start / MOMENT_BLOCK] = scale_sq;
}

INLINE int32_t largest_magnitude(const float *values) {
    int32_t largest = 0;
    for (int64_t i = 0; i < MOMENT_BLOCK; i++) {
        int32_t magnitude = (int32_t)(bits_of(values[i]) & 0x7FFFFFFFu);
        largest = magnitude > largest ? magnitude : largest;
    }
    return largest;
}

INLINE_256 void adamw_tiny_avx2(const struct step_arrays *arrays, const struct segment *segment, float grad_scale,
                                int64_t start, int64_t end) {
    struct adamw_scalars s = adamw_scalars_of(segment);
    struct block b;
    int64_t i = start;
    for (; i + MOMENT_BLOCK <= end; i += MOMENT_BLOCK) {
        load_weights(arrays, i, MOMENT_BLOCK, &b);
        load_codes_256(1, arrays->moments[0], arrays->scales[0][i / MOMENT_BLOCK], i, b.exp_avg);
        load_codes_256(0, arrays->moments[1], arrays->scales[1][i / MOMENT_BLOCK], i, b.exp_avg_sq);
        adamw_step_block(s, grad_scale, MOMENT_BLOCK, &b);
        WITH_CONSTANT_KIND(arrays->weights_kind, store_masters(kind, arrays, i, MOMENT_BLOCK, b.master))
        int32_t most = largest_magnitude(b.exp_avg), most_sq = largest_magnitude(b.exp_avg_sq);
        if (has_inverse(most) && has_inverse(most_sq))
            store_codes_256(arrays, segment, i, &b, float_of((uint32_t)most), float_of((uint32_t)most_sq));
        else
            store_codes_of_block(arrays, segment, i, MOMENT_BLOCK, &b);
    }
    if (i < end) adamw_tiny_block(arrays, segment, grad_scale, i, end - i);
}

/* ---- AVX-512: sixteen elements ---------------------------------------------------------------------------------- */

#define AVX512_TARGET "avx512f,avx512bw,avx512dq,avx512vl"
#define INLINE_512 __attribute__((target(AVX512_TARGET))) INLINE
#define SHARED_512 __attribute__((target(AVX512_TARGET), noinline)) static

INLINE_512 __m512i all(int32_t value) { return _mm512_set1_epi32(value); }
INLINE_512 __m512 all_ps(float value) { return _mm512_set1_ps(value); }

INLINE_512 __m512 load_gradient_512(int kind, const void *gradient, int64_t i) {
    if (kind == FP32) return _mm512_loadu_ps((const float *)gradient + i);
    __m256i halves = _mm256_loadu_si256((const __m256i *)((const uint16_t *)gradient + i));
    if (kind == FP16) return _mm512_cvtph_ps(halves);
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(halves), 16));
}

INLINE_512 __m512 load_master_512(int kind, const struct step_arrays *arrays, int64_t i) {
    if (kind == FP32) return _mm512_loadu_ps((const float *)arrays->weights + i);
    if (kind == FP16) return _mm512_loadu_ps((const float *)arrays->remainder + i);
    __m256i low = _mm256_loadu_si256((const __m256i *)((const int16_t *)arrays->remainder + i));
    __m512i high = _mm512_castps_si512(load_gradient_512(BF16, arrays->weights, i));
    return _mm512_castsi512_ps(_mm512_add_epi32(high, _mm512_cvtepi16_epi32(low)));
}

INLINE_512 void store_master_512(int kind, const struct step_arrays *arrays, int64_t i, __m512 value) {
    __m512i bits = _mm512_castps_si512(value);
    __mmask16 is_nan = _mm512_cmp_ps_mask(value, value, _CMP_UNORD_Q);
    __m256i *weights = (__m256i *)((uint16_t *)arrays->weights + i);
    if (kind == FP32) {
        _mm512_storeu_ps((float *)arrays->weights + i, value);
    } else if (kind == FP16) {
        __m512i sign = _mm512_and_si512(bits, all((int32_t)0x80000000));
        __m512 one_nan = _mm512_castsi512_ps(_mm512_mask_or_epi32(bits, is_nan, sign, all(0x7FC00000)));
        _mm256_storeu_si256(weights, _mm512_cvtps_ph(one_nan, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
        _mm512_storeu_ps((float *)arrays->remainder + i, value);
    } else {
        bits = _mm512_mask_mov_epi32(bits, is_nan, all(0x7FC00000));
        __m512i high = _mm512_srli_epi32(_mm512_add_epi32(bits, all(0x8000)), 16);
        _mm256_storeu_si256(weights, _mm512_cvtepi32_epi16(high));
        _mm256_storeu_si256((__m256i *)((int16_t *)arrays->remainder + i), _mm512_cvtepi32_epi16(bits));
    }
}

/* level_of: the powers of ten by the last four bits of the exponent of number + 0.5, 0 for the least number. */
INLINE_512 __m512 levels_512(int has_sign, __m512i number) {
    __m512 powers = has_sign ? _mm512_setr_ps(1e1f, 1e2f, 1e3f, 1e4f, 1e5f, 1e6f, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1.0f)
                             : _mm512_setr_ps(1.0f, 1e1f, 1e2f, 1e3f, 1e4f, 1e5f, 1e6f, 0, 0, 0, 0, 0, 0, 0, 0, 0);
    __m512 y = _mm512_add_ps(_mm512_cvtepi32_ps(number), all_ps(0.5f));
    __m512 within = _mm512_getmant_ps(y, _MM_MANT_NORM_1_2, _MM_MANT_SIGN_src);
    within = _mm512_sub_ps(_mm512_mul_ps(within, all_ps(0.9f)), all_ps(0.8f));
    __m512 power = _mm512_permutexvar_ps(_mm512_srli_epi32(_mm512_castps_si512(y), 23), powers);
    __m512 value = _mm512_mul_ps(_mm512_mul_ps(within, power), all_ps(1e-6f));
    __mmask16 is_largest = _mm512_cmpeq_epi32_mask(number, all(has_sign ? 127 : 256));
    return _mm512_mask_mov_ps(value, is_largest, all_ps(1.0f));
}

INLINE_512 __m512 load_codes_512(int has_sign, const void *array, float scale, int64_t i) {
    __m512i code = _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)((const uint8_t *)array + i)));
    if (!has_sign) return _mm512_mul_ps(levels_512(0, _mm512_add_epi32(code, all(1))), all_ps(scale));
    __m512 value = _mm512_mul_ps(levels_512(1, _mm512_and_si512(code, all(0x7F))), all_ps(scale));
    __m512i sign = _mm512_slli_epi32(_mm512_and_si512(code, all(0x80)), 24);
    return _mm512_castsi512_ps(_mm512_xor_si512(_mm512_castps_si512(value), sign));
}

/* The lines of one map, by the last four bits of half the exponent of share + shift: such an interval is shorter than a
 * decade, so that it has the first level of at most one. A share below that level has the lines of the interval before.
 */
struct lines_512 {
    __m512 inverse_scale, shift, from, slope, start, later_slope, later_start;
    __m512i doubtful;
};

INLINE_512 __m512 in_intervals(__m512i decade, const float *of_decades) {
    return _mm512_permutexvar_ps(decade, _mm512_maskz_loadu_ps(0x1FF, of_decades));
}

INLINE_512 struct lines_512 lines_512(int has_sign, float inverse_scale) {
    const struct lines *lines = has_sign ? &EXP_AVG_LINES : &EXP_AVG_SQ_LINES;
    __m512i decade = has_sign ? _mm512_setr_epi32(0, 0, 0, 0, 0, 1, 2, 3, 3, 4, 5, 5, 6, 7, 7, 7)
                              : _mm512_setr_epi32(0, 0, 0, 0, 1, 1, 2, 3, 3, 4, 5, 5, 6, 7, 7, 8);
    __m512 shift = all_ps(has_sign ? 0x1p-21f : 0x1p-23f);
    int32_t margin = has_sign ? 1 << 10 : 1 << 11;
    __m512 offset = all_ps(0x1p24f + (float)margin - (has_sign ? 128.0f : 0.0f));
    __m512 slope = in_intervals(decade, lines->slope), later_slope = in_intervals(decade, lines->later_slope);
    __m512 start = _mm512_add_ps(in_intervals(decade, lines->start), offset);
    __m512 later_start = _mm512_add_ps(in_intervals(decade, lines->later_start), offset);
    struct lines_512 found = {
        all_ps(inverse_scale),
        shift,
        _mm512_add_ps(in_intervals(decade, lines->from), shift),
        slope,
        _mm512_fnmadd_ps(slope, shift, start),
        later_slope,
        _mm512_fnmadd_ps(later_slope, shift, later_start),
        all(0xFFFFFF & ~(2 * margin - 1)),
    };
    return found;
}

/* The codes in the upper bytes, without a sign; the other bytes say how far an element is from another code. */
INLINE_512 __m512i places_512(const struct lines_512 *lines, __m512 magnitude, __m512i random) {
    __m512 share = _mm512_fmadd_ps(magnitude, lines->inverse_scale, lines->shift);
    __m512i at = _mm512_srli_epi32(_mm512_castps_si512(share), 24);
    __mmask16 below = _mm512_cmp_ps_mask(share, _mm512_permutexvar_ps(at, lines->from), _CMP_LT_OQ);
    at = _mm512_mask_sub_epi32(at, below, at, all(1));
    __m512 slope = _mm512_permutexvar_ps(at, lines->slope), start = _mm512_permutexvar_ps(at, lines->start);
    __m512 later_slope = _mm512_permutexvar_ps(at, lines->later_slope);
    __m512 later_start = _mm512_permutexvar_ps(at, lines->later_start);
    __m512 place = _mm512_fmadd_ps(share, slope, start), later = _mm512_fmadd_ps(share, later_slope, later_start);
    return _mm512_sub_epi32(_mm512_cvtps_epu32(_mm512_min_ps(place, later)), random);
}

/* 64 codes from the upper bytes. */
INLINE_512 void store_upper_bytes(uint8_t *out, const __m512i *four) {
    __m512i low = _mm512_packus_epi32(_mm512_srli_epi32(four[0], 24), _mm512_srli_epi32(four[1], 24));
    __m512i high = _mm512_packus_epi32(_mm512_srli_epi32(four[2], 24), _mm512_srli_epi32(four[3], 24));
    __m512i in_order = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
    _mm512_storeu_si512(out, _mm512_permutexvar_epi32(in_order, _mm512_packus_epi16(low, high)));
}

SHARED_512 __m512i exact_places_512(int has_sign, const float *values, float scale, __m512i random) {
    _Alignas(CACHE_LINE) uint32_t bits[16], codes[16];
    _mm512_store_si512(bits, random);
    exact_codes(has_sign, values, scale, bits, 16, codes);
    return _mm512_slli_epi32(_mm512_load_si512(codes), 24);
}

SHARED_512 void store_codes_exactly_512(const struct step_arrays *arrays, const struct segment *segment, int64_t start,
                                        struct block *b) {
    store_codes_of_block(arrays, segment, start, MOMENT_BLOCK, b);
}

SHARED_512 void store_codes_512(const struct step_arrays *arrays, const struct segment *segment, int64_t start,
                                const struct block *b, float scale, float scale_sq) {
    struct lines_512 lines = lines_512(1, scale > 0.0f ? 1.0f / scale : 0.0f);
    struct lines_512 lines_sq = lines_512(0, scale_sq > 0.0f ? 1.0f / scale_sq : 0.0f);
    struct random_source source = random_from(segment, start);
    __m512i sixteen = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    __m512i state, number = _mm512_add_epi32(all((int32_t)source.first), sixteen), sign = all((int32_t)0x80000000);
    __m512i codes[4], codes_sq[4];
    for (int64_t i = 0; i < MOMENT_BLOCK; i += 64) {
        for (int part = 0; part < 4; part++, number = _mm512_add_epi32(number, all(16))) {
            const float *from = b->exp_avg + i + 16 * part, *from_sq = b->exp_avg_sq + i + 16 * part;
            __m512i bits = _mm512_load_si512(from);
            __m512 value_sq = _mm512_load_ps(from_sq);
            state = _mm512_mullo_epi32(_mm512_xor_si512(number, _mm512_srli_epi32(number, 16)), all(0x7FEB352D));
            state = _mm512_ternarylogic_epi32(state, _mm512_srli_epi32(state, 15), all((int32_t)source.upper), 0x96);
            state = _mm512_mullo_epi32(state, all((int32_t)0x846CA68B));
            __m512i left = _mm512_slli_epi32(state, 8), right = _mm512_srli_epi32(state, 8);
            __m512i random = _mm512_ternarylogic_epi32(left, right, all(0xFFFF00), 0x28); /* (left ^ right) & mask */
            __m512 magnitude = _mm512_castsi512_ps(_mm512_andnot_si512(sign, bits));
            __m512i place = places_512(&lines, magnitude, random), place_sq = places_512(&lines_sq, value_sq, right);
            __mmask16 in_doubt = _mm512_testn_epi32_mask(place, lines.doubtful);
            in_doubt |= _mm512_testn_epi32_mask(place_sq, lines_sq.doubtful);
            if (__builtin_expect(in_doubt != 0, 0)) {
                random = _mm512_xor_si512(state, _mm512_srli_epi32(state, 16));
                place = exact_places_512(1, from, scale, random);
                place_sq = exact_places_512(0, from_sq, scale_sq, random);
            }
            codes[part] = _mm512_ternarylogic_epi32(sign, bits, place, 0xCA); /* sign ? bits : place */
            __mmask16 above = _mm512_cmp_ps_mask(value_sq, all_ps(0.0f), _CMP_GT_OQ);
            codes_sq[part] = _mm512_mask_max_epu32(place_sq, above, place_sq, all(1 << 24));
        }
        store_upper_bytes((uint8_t *)arrays->moments[0] + start + i, codes);
        store_upper_bytes((uint8_t *)arrays->moments[1] + start + i, codes_sq);
    }
    arrays->scales[0][start / MOMENT_BLOCK] = scale;
    arrays->scales[1][start / MOMENT_BLOCK] = scale_sq;
}

INLINE_512 void adamw_tiny_block_512(int weights_kind, int gradient_kind, const struct step_arrays *arrays,
                                     const struct segment *segment, struct adamw_scalars s, float grad_scale,
                                     int64_t start) {
    struct block b; /* only the moments */
    float scale = arrays->scales[0][start / MOMENT_BLOCK], scale_sq = arrays->scales[1][start / MOMENT_BLOCK];
    __m512i largest = all(0), largest_sq = all(0);
    for (int64_t i = 0; i < MOMENT_BLOCK; i += 16) {
        if (i % PREFETCH_ELEMENTS == 0) {
            prefetch_elements(arrays->moments[0], 1, start + i + PREFETCH_DISTANCE);
            prefetch_elements(arrays->moments[1], 1, start + i + PREFETCH_DISTANCE);
            prefetch_weights(weights_kind, gradient_kind, arrays, start + i + PREFETCH_DISTANCE);
        }
        __m512 g = _mm512_mul_ps(load_gradient_512(gradient_kind, arrays->gradient, start + i), all_ps(grad_scale));
        __m512 m = load_codes_512(1, arrays->moments[0], scale, start + i);
        __m512 v = load_codes_512(0, arrays->moments[1], scale_sq, start + i);
        __m512 w = load_master_512(weights_kind, arrays, start + i);
        m = _mm512_add_ps(_mm512_mul_ps(all_ps(s.beta1), m), _mm512_mul_ps(all_ps(s.one_minus_beta1), g));
        __m512 square = _mm512_mul_ps(_mm512_mul_ps(all_ps(s.one_minus_beta2), g), g);
        v = _mm512_add_ps(_mm512_mul_ps(all_ps(s.beta2), v), square);
        __m512 denominator = _mm512_mul_ps(_mm512_sqrt_ps(v), all_ps(s.inv_sqrt_bias_correction2));
        denominator = _mm512_add_ps(denominator, all_ps(s.eps));
        __m512 change = _mm512_mul_ps(all_ps(s.step_size), _mm512_div_ps(m, denominator));
        w = _mm512_sub_ps(_mm512_mul_ps(w, all_ps(s.decay)), change);
        store_master_512(weights_kind, arrays, start + i, w);
        _mm512_store_ps(b.exp_avg + i, m);
        _mm512_store_ps(b.exp_avg_sq + i, v);
        __m512i magnitudes = all(0x7FFFFFFF);
        largest = _mm512_max_epi32(largest, _mm512_and_si512(_mm512_castps_si512(m), magnitudes));
        largest_sq = _mm512_max_epi32(largest_sq, _mm512_and_si512(_mm512_castps_si512(v), magnitudes));
    }
    int32_t most = _mm512_reduce_max_epi32(largest), most_sq = _mm512_reduce_max_epi32(largest_sq);
    scale = float_of((uint32_t)most);
    scale_sq = float_of((uint32_t)most_sq);
    if (has_inverse(most) && has_inverse(most_sq))
        store_codes_512(arrays, segment, start, &b, scale, scale_sq);
    else
        store_codes_exactly_512(arrays, segment, start, &b);
}

SHARED_512 void adamw_tiny_tail_512(const struct step_arrays *arrays, const struct segment *segment, float grad_scale,
                                    int64_t start, int64_t end) {
    adamw_tiny_body(arrays, segment, grad_scale, start, end);
}

INLINE_512 void adamw_tiny_avx512(int weights_kind, int gradient_kind, const struct step_arrays *arrays,
                                  const struct segment *segment, float grad_scale, int64_t start, int64_t end) {
    struct adamw_scalars s = adamw_scalars_of(segment);
    int64_t i = start;
    for (; i + MOMENT_BLOCK <= end; i += MOMENT_BLOCK)
        adamw_tiny_block_512(weights_kind, gradient_kind, arrays, segment, s, grad_scale, i);
    if (i < end) adamw_tiny_tail_512(arrays, segment, grad_scale, i, end);
}
#endif

#endif
