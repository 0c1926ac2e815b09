/* Compares the 8-bit codes that AVX2 and AVX-512 find by lines with those of moments.py's formula: every STRIDE-th
 * magnitude up to each of four scales, with random bits close to those at which the code changes.
 *
 *     gcc -O3 -ffp-contract=off -fno-math-errno -I offloadkit/kernels benchmarks/tiny_codes.c -o tiny_codes -lm
 *     ./tiny_codes [STRIDE]      without STRIDE every magnitude: ten minutes on one core */
#include "cpu_tiny.h"
#include <stdio.h>
#include <stdlib.h>

enum { LANES = 16 };

struct found {
    int64_t compared, in_doubt, wrong;
};

/* Random bits at a distance of 1 .. 12 from those at which the code changes, on either side. */
static uint32_t near_border(float share, struct map map, uint32_t turn) {
    int32_t lower = number_of(share, 0xFFFF, map);
    lower = lower < map.largest ? lower : map.largest - 1;
    float below = level_of(lower, map), gap = level_of(lower + 1, map) - below;
    int32_t distance = (int32_t)(turn % 12) + 1, border = (int32_t)((double)(share - below) / gap * 65536.0);
    int32_t random = border + (turn & 0x1000 ? distance : -distance);
    return (uint32_t)(random < 0 ? 0 : random > 0xFFFF ? 0xFFFF : random);
}

static void compare(const uint32_t *places, uint32_t doubtful, int shift, const uint32_t *expected,
                    struct found *found) {
    for (int i = 0; i < LANES; i++) {
        found->compared++;
        if ((places[i] & doubtful) == 0) found->in_doubt++;
        else if (places[i] >> shift != expected[i]) found->wrong++;
    }
}

__attribute__((target(AVX512_TARGET "," AVX2_TARGET))) static void check(int has_sign, float scale, uint32_t stride) {
    struct map map = has_sign ? EXP_AVG_MAP : EXP_AVG_SQ_MAP;
    struct lines_512 wide = lines_512(has_sign, 1.0f / scale);
    struct lines_256 narrow = lines_256(has_sign, 1.0f / scale);
    struct found by_512 = {0, 0, 0}, by_256 = {0, 0, 0};
    uint64_t most = bits_of(scale);
    for (uint64_t first = 0; first <= most; first += (uint64_t)LANES * stride) {
        float values[LANES];
        uint32_t random[LANES], shifted[LANES], expected[LANES], places[LANES];
        for (uint32_t i = 0; i < LANES; i++) {
            uint64_t bits = first + (uint64_t)i * stride;
            values[i] = float_of((uint32_t)(bits < most ? bits : most));
            random[i] = near_border(values[i] / scale, map, (uint32_t)bits * 0x9E3779B9u >> 16);
            if (!has_sign) random[i] = random[i] << 16 | ((uint32_t)bits * 0x85EBCA6Bu >> 16);
        }
        exact_codes(has_sign, values, scale, random, LANES, expected);
        for (int i = 0; i < LANES; i++) shifted[i] = has_sign ? random[i] << 8 : random[i] >> 8;
        __m512i place = places_512(&wide, _mm512_loadu_ps(values), _mm512_loadu_si512(shifted));
        _mm512_storeu_si512(places, place);
        compare(places, (uint32_t)_mm512_cvtsi512_si32(wide.doubtful), 24, expected, &by_512);
        for (int i = 0; i < LANES; i++) shifted[i] = has_sign ? random[i] << 7 : random[i] >> 9;
        for (int i = 0; i < LANES; i += 8) {
            __m256i half = _mm256_loadu_si256((const __m256i *)(shifted + i));
            half = places_256(has_sign, &narrow, _mm256_loadu_ps(values + i), half);
            _mm256_storeu_si256((__m256i *)(places + i), half);
        }
        compare(places, (uint32_t)_mm256_cvtsi256_si32(narrow.doubtful), 23, expected, &by_256);
    }
    printf("%s, scale %g: of %lld wrong by AVX-512 %lld (%lld in doubt), by AVX2 %lld (%lld in doubt)\n",
           has_sign ? "exp_avg" : "exp_avg_sq", scale, (long long)by_512.compared, (long long)by_512.wrong,
           (long long)by_512.in_doubt, (long long)by_256.wrong, (long long)by_256.in_doubt);
}

int main(int count, char **arguments) {
    const float scales[] = {1.0f, 3.7e-5f, 1.9999999f, 8e37f};
    for (int i = 0; i < 8; i++) check(i % 2, scales[i / 2], count > 1 ? (uint32_t)atoi(arguments[1]) : 1);
    return 0;
}
