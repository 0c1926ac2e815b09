/* Floating-point formats of weights and gradients, bit by bit, in code that vectorises. */
#ifndef OFFLOADKIT_CPU_FLOATS_H
#define OFFLOADKIT_CPU_FLOATS_H
#include <stdint.h>
#include <string.h>
#if defined(__clang__)
#pragma STDC FP_CONTRACT OFF
#define INDEPENDENT _Pragma("clang loop vectorize(assume_safety)")
#else
#define INDEPENDENT _Pragma("GCC ivdep")
#endif
#define INLINE static inline __attribute__((always_inline))

/* Kinds of weights and gradients; numbers known to cpu.py. */
enum { BF16 = 0, FP16 = 1, FP32 = 2, NUM_KINDS = 3 };

INLINE float float_of(uint32_t bits) {
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

INLINE uint32_t bits_of(float value) {
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    return bits;
}

/* Without a branch: a float operation behind a `?:` keeps gcc from vectorising, since it might trap. */
INLINE uint32_t select_bits(int condition, uint32_t if_true, uint32_t if_false) {
    uint32_t mask = 0u - (uint32_t)(condition != 0);
    return (if_true & mask) | (if_false & ~mask);
}

/* Exact. The scaling makes fp16 subnormals (fp32 subnormals once shifted) normal; Inf and NaN get the top exponent. */
INLINE float float_of_fp16(uint16_t half) {
    uint32_t magnitude = half & 0x7FFFu;
    uint32_t bits = bits_of(float_of(magnitude << 13) * 0x1p112f);
    uint32_t special = (magnitude << 13) | 0x7F800000u | select_bits(magnitude > 0x7C00u, 0x00400000u, 0u);
    bits = select_bits(magnitude >= 0x7C00u, special, bits);
    return float_of(bits | (uint32_t)(half & 0x8000u) << 16);
}

/* Round to nearest even. Below 2^-14 the addition of 0.5, whose last bit is worth 2^-24, rounds to a subnormal. */
INLINE uint16_t fp16_of_float(float value) {
    uint32_t bits = bits_of(value);
    uint32_t magnitude = bits & 0x7FFFFFFFu;
    uint32_t normal = (magnitude - 0x38000000u + 0xFFFu + ((magnitude >> 13) & 1u)) >> 13;
    uint32_t subnormal = bits_of(float_of(magnitude) + 0.5f) - 0x3F000000u;
    uint32_t half = select_bits(magnitude < 0x38800000u, subnormal, normal);
    half = select_bits(magnitude >= 0x477FF000u, 0x7C00u, half);
    half = select_bits(magnitude > 0x7F800000u, 0x7E00u, half);
    return (uint16_t)(half | ((bits >> 16) & 0x8000u));
}

INLINE float load_gradient(int kind, const void *gradient, int64_t i) {
    if (kind == BF16) return float_of((uint32_t)((const uint16_t *)gradient)[i] << 16);
    if (kind == FP16) return float_of_fp16(((const uint16_t *)gradient)[i]);
    return ((const float *)gradient)[i];
}

INLINE float load_master(int kind, const void *weights, const void *remainder, int64_t i) {
    if (kind == BF16) {
        uint32_t high = (uint32_t)((const uint16_t *)weights)[i] << 16;
        return float_of(high + (uint32_t)(int32_t)((const int16_t *)remainder)[i]);
    }
    return kind == FP16 ? ((const float *)remainder)[i] : ((const float *)weights)[i];
}

/* The split of a NaN would give Inf or zero as its high half: NaN is stored as the one pattern 0x7FC0 | 0. */
INLINE void store_master(int kind, void *weights, void *remainder, int64_t i, float value) {
    if (kind == BF16) {
        uint32_t bits = bits_of(value);
        bits = select_bits((bits & 0x7FFFFFFFu) > 0x7F800000u, 0x7FC00000u, bits);
        ((uint16_t *)weights)[i] = (uint16_t)((bits + 0x8000u) >> 16);
        ((uint16_t *)remainder)[i] = (uint16_t)bits;
    } else if (kind == FP16) {
        ((uint16_t *)weights)[i] = fp16_of_float(value);
        ((float *)remainder)[i] = value;
    } else {
        ((float *)weights)[i] = value;
    }
}

#endif
