/* Vectors of WIDTH floats in the compiler's own notation, and what arithmetic they lack. */
#ifdef __x86_64__
#include <immintrin.h>
#endif
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "operations.h"
#include "pool.h"

#define INLINE static inline __attribute__((always_inline))
#define UNROLL _Pragma("GCC unroll 16")

typedef float vec __attribute__((vector_size(WIDTH * 4)));
typedef int32_t ivec __attribute__((vector_size(WIDTH * 4)));

INLINE vec load(const float *from) {
    vec value;
    memcpy(&value, from, sizeof value);
    return value;
}

INLINE void store(float *to, vec value) { memcpy(to, &value, sizeof value); }

INLINE vec all(float value) { return value - (vec){0}; }

INLINE float sum(vec value) {
#if WIDTH == 16
    typedef float half __attribute__((vector_size(32)));
    half low, high;
    memcpy(&low, &value, 32);
    memcpy(&high, (char *)&value + 32, 32);
    half value8 = low + high;
#elif WIDTH == 8
    vec value8 = value;
#endif
#if WIDTH >= 8
    typedef float quarter __attribute__((vector_size(16)));
    quarter lower, upper;
    memcpy(&lower, &value8, 16);
    memcpy(&upper, (char *)&value8 + 16, 16);
    quarter value4 = lower + upper;
#else
    vec value4 = value;
#endif
    return (value4[0] + value4[2]) + (value4[1] + value4[3]);
}

/* Compilers make several instructions of the general form. */
INLINE vec larger(vec a, vec b) {
#if WIDTH == 16 && defined(__AVX512F__)
    return (vec)_mm512_max_ps((__m512)a, (__m512)b);
#elif WIDTH == 8 && defined(__AVX__)
    return (vec)_mm256_max_ps((__m256)a, (__m256)b);
#else
    ivec first = (ivec)(a > b);
    return (vec)(((ivec)a & first) | ((ivec)b & ~first));
#endif
}

/* e^x to within 2 units in the last place for x <= 88; 0 is not reached: below -87 it stays at e^-87. */
INLINE vec exponential(vec x) {
    x = larger(x, all(-87.0f));
    /* x = n ln 2 + r with |r| <= ln 2 / 2; ln 2 in two parts, of which the first times n is exact. */
    const vec shift = all(12582912.0f); /* 1.5 * 2^23: adding it rounds to an integer */
    vec n = (x * all(1.44269504f) + shift) - shift;
    vec r = x - n * all(0.693359375f) - n * all(-2.12194440e-4f);
    /* Taylor's series to the seventh power: the rest is below 6e-9. */
    vec y = all(1.0f / 5040);
    y = y * r + all(1.0f / 720);
    y = y * r + all(1.0f / 120);
    y = y * r + all(1.0f / 24);
    y = y * r + all(1.0f / 6);
    y = y * r + all(0.5f);
    y = y * r + all(1.0f);
    y = y * r + all(1.0f);
    ivec bits = (__builtin_convertvector(n, ivec) + 127) << 23;
    vec power;
    memcpy(&power, &bits, sizeof power);
    return y * power;
}

/* From vectors with sums in groups of 2 * half floats to one with groups of half: those of `a`, then of `b`. */
#define FROM(i, half) \
    ((i) / (half) * 2 * (half) + (i) % (half)) /* counts on into `b`, as the shuffle does */
#if WIDTH == 16
#define FIRSTS(h)                                                                                         \
    {FROM(0, h), FROM(1, h), FROM(2, h),  FROM(3, h),  FROM(4, h),  FROM(5, h),  FROM(6, h),  FROM(7, h), \
     FROM(8, h), FROM(9, h), FROM(10, h), FROM(11, h), FROM(12, h), FROM(13, h), FROM(14, h), FROM(15, h)}
#elif WIDTH == 8
#define FIRSTS(h)                                                                                         \
    {FROM(0, h), FROM(1, h), FROM(2, h), FROM(3, h), FROM(4, h), FROM(5, h), FROM(6, h), FROM(7, h)}
#else
#define FIRSTS(h) {FROM(0, h), FROM(1, h), FROM(2, h), FROM(3, h)}
#endif
#define HALVED(a, b, h)                                                                                   \
    (__builtin_shuffle(a, b, (ivec)FIRSTS(h)) + __builtin_shuffle(a, b, (ivec)FIRSTS(h) + (h)))

/* Float i of the result is the sum of vector i. */
INLINE vec sums_of(vec parts[WIDTH]) {
    for (int i = 0; i < WIDTH / 2; i++)
        parts[i] = HALVED(parts[2 * i], parts[2 * i + 1], WIDTH / 2);
#if WIDTH >= 16
    for (int i = 0; i < 4; i++)
        parts[i] = HALVED(parts[2 * i], parts[2 * i + 1], 4);
#endif
#if WIDTH >= 8
    for (int i = 0; i < 2; i++)
        parts[i] = HALVED(parts[2 * i], parts[2 * i + 1], 2);
#endif
    return HALVED(parts[0], parts[1], 1);
}

/* Which lanes are below `count`, in all bits of each. */
INLINE ivec lanes_below(int64_t count) { return (ivec)FIRSTS(WIDTH) < (ivec){0} + (int32_t)count; }

INLINE vec choose(ivec which, vec a, vec b) { return (vec)(((ivec)a & which) | ((ivec)b & ~which)); }

INLINE float largest_lane(vec value) {
    UNROLL for (int half = WIDTH / 2; half > 0; half /= 2)
        value = larger(value, __builtin_shuffle(value, (ivec)FIRSTS(WIDTH) + half));
    return value[0];
}

/* The first `count` of a vector's floats; the others are 0. */
INLINE vec load_part(const float *from, int64_t count) {
    float padded[WIDTH] __attribute__((aligned(64))) = {0};
    memcpy(padded, from, (size_t)count * 4);
    return load(padded);
}

INLINE void store_part(float *to, vec value, int64_t count) {
    float padded[WIDTH] __attribute__((aligned(64)));
    store(padded, value);
    memcpy(to, padded, (size_t)count * 4);
}
