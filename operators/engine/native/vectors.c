/* Vectors of floats as wide as the processor's registers, and what is computed on them lane by lane.

   Every sum has a fixed order, so that equal inputs give equal bits however the work is divided. */

#include <stdint.h>
#include <string.h>

#if defined(__AVX512F__)
#include <immintrin.h>
#define LANES 16
#elif defined(__AVX2__)
#define LANES 8
#else
#define LANES 4
#endif

#define INLINE static inline __attribute__((always_inline))
#define ALONE __attribute__((noinline))
#define UNROLL _Pragma("GCC unroll 16")

typedef float vec __attribute__((vector_size(LANES * 4), may_alias));
typedef float vec_anywhere __attribute__((vector_size(LANES * 4), aligned(4), may_alias));
typedef int32_t ints __attribute__((vector_size(LANES * 4), may_alias));
typedef uint32_t bits __attribute__((vector_size(LANES * 4), may_alias));
typedef uint32_t uint32_t_anywhere __attribute__((aligned(4), may_alias));
typedef uint16_t halves __attribute__((vector_size(LANES * 2), aligned(2), may_alias));

#if LANES == 8
#define LOW_LANES {0, 8, 1, 9, 2, 10, 3, 11}
#define HIGH_LANES {4, 12, 5, 13, 6, 14, 7, 15}
#elif LANES == 4
#define LOW_LANES {0, 4, 1, 5}
#define HIGH_LANES {2, 6, 3, 7}
#endif

INLINE vec load(const float *from) { return *(const vec_anywhere *)from; }

INLINE void store(float *to, vec x) { *(vec_anywhere *)to = x; }

INLINE vec spread(float x) { return x - (vec){0}; }

INLINE vec choose(ints where, vec yes, vec no) {
    return (vec)((where & (ints)yes) | (~where & (ints)no));
}

INLINE vec larger(vec a, vec b) { return choose(a > b, a, b); }

/* bfloat16 is the upper half of a float; rounds to nearest even and keeps what is not a number. */
INLINE vec widen(const uint16_t *from) {
    return (vec)(__builtin_convertvector(*(const halves *)from, bits) << 16);
}

INLINE uint16_t narrow_one(float x) {
    uint32_t b;
    memcpy(&b, &x, sizeof b);
    return x != x ? (b >> 16) | 64 : (b + 0x7fff + (b >> 16 & 1)) >> 16;
}

INLINE float widen_one(uint16_t x) {
    uint32_t b = (uint32_t)x << 16;
    float y;
    memcpy(&y, &b, sizeof y);
    return y;
}

INLINE void narrow(uint16_t *to, vec x) {
    bits b = (bits)x, rounded = (b + 0x7fff + (b >> 16 & 1)) >> 16, kept = (b >> 16) | 64;
    bits broken = (bits)(x != x);
    *(halves *)to = __builtin_convertvector((broken & kept) | (~broken & rounded), halves);
}

INLINE float sum_lanes(vec x) {
    float lane[LANES];
    store(lane, x);
    for (int width = LANES / 2; width > 0; width /= 2)
        for (int i = 0; i < width; i++) lane[i] += lane[i + width];
    return lane[0];
}

INLINE float largest_lane(vec x) {
    float lane[LANES];
    store(lane, x);
    for (int width = LANES / 2; width > 0; width /= 2)
        for (int i = 0; i < width; i++) lane[i] = lane[i] > lane[i + width] ? lane[i] : lane[i + width];
    return lane[0];
}

/* e^x to 1e-7 of itself; 0 below -87, infinite above 89, not a number for what is not one. */
INLINE vec exponential(vec x) {
    vec high = spread(89.0f), low = spread(-87.0f);
    vec y = choose(x < low, low, choose(x > high, high, x));
    vec turns = y * 1.44269504088896341f + 12582912.0f;
    vec n = turns - 12582912.0f;
    vec r = y - n * 0.693359375f;
    r = r + n * 2.12194440e-4f;
    vec p = spread(1.9875691500e-4f);
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * r * r + r + 1.0f;
    vec power = (vec)(((ints)turns + (127 - 0x4b400000)) << 23);
    return choose(x < low, (vec){0}, p * power);
}

/* tanh(x), by an odd polynomial near 0 where 1 - 2 / (e^2x + 1) would cancel. */
INLINE vec hyperbolic_tangent(vec x) {
    vec size = choose(x < 0.0f, -x, x), z = x * x;
    vec far = 1.0f - 2.0f / (exponential(size + size) + 1.0f);
    vec near = spread(-5.70498872745e-3f);
    near = near * z + 2.06390887954e-2f;
    near = near * z - 5.37397155531e-2f;
    near = near * z + 1.33314422036e-1f;
    near = near * z - 3.33332819422e-1f;
    near = near * z * x + x;
    return choose(size < 0.625f, near, choose(x < 0.0f, -far, far));
}

/* Transposes LANES vectors of LANES floats. */
#if LANES == 16
INLINE void transpose(vec block[LANES]) {
    __m512 a[LANES], b[LANES];
    UNROLL for (int i = 0; i < 16; i += 2) {
        a[i] = _mm512_unpacklo_ps((__m512)block[i], (__m512)block[i + 1]);
        a[i + 1] = _mm512_unpackhi_ps((__m512)block[i], (__m512)block[i + 1]);
    }
    UNROLL for (int i = 0; i < 16; i += 4)
        UNROLL for (int j = 0; j < 2; j++) {
            b[i + 2 * j] = (__m512)_mm512_unpacklo_pd((__m512d)a[i + j], (__m512d)a[i + j + 2]);
            b[i + 2 * j + 1] = (__m512)_mm512_unpackhi_pd((__m512d)a[i + j], (__m512d)a[i + j + 2]);
        }
    UNROLL for (int i = 0; i < 16; i += 8)
        UNROLL for (int j = 0; j < 4; j++) {
            a[i + j] = _mm512_shuffle_f32x4(b[i + j], b[i + j + 4], 0x88);
            a[i + j + 4] = _mm512_shuffle_f32x4(b[i + j], b[i + j + 4], 0xdd);
        }
    UNROLL for (int i = 0; i < 8; i++) {
        block[i] = (vec)_mm512_shuffle_f32x4(a[i], a[i + 8], 0x88);
        block[i + 8] = (vec)_mm512_shuffle_f32x4(a[i], a[i + 8], 0xdd);
    }
}
#else
/* Interleaves the halves log2(LANES) times. */
INLINE void transpose(vec block[LANES]) {
    const ints low = LOW_LANES, high = HIGH_LANES;
    UNROLL for (int width = 1; width < LANES; width *= 2) {
        vec next[LANES];
        UNROLL for (int i = 0; i < LANES / 2; i++) {
            next[2 * i] = __builtin_shuffle(block[i], block[i + LANES / 2], low);
            next[2 * i + 1] = __builtin_shuffle(block[i], block[i + LANES / 2], high);
        }
        UNROLL for (int i = 0; i < LANES; i++) block[i] = next[i];
    }
}
#endif

/* The next of several rows to load: kept from the optimiser, which would spill a pointer for each of them. */
#define NEXT_ROW(pointer, bytes) \
    pointer = (const void *)((const char *)pointer + (bytes)); \
    __asm__("" : "+r"(pointer))
