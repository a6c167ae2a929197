/* What a core can do at most: multiply-adds on sums that stay in registers, and reading memory from end to end.

   Each product returns a number that depends on all sums, so that none is left out. */

#include <stdint.h>

#ifdef __AVX512F__
#include <immintrin.h>
#define LANES 16
#elif defined(__AVX2__)
#define LANES 8
#else
#define LANES 4
#endif
#define CHAINS 12
#define STREAMS 8
#define UNROLL _Pragma("GCC unroll 16")

typedef float vec __attribute__((vector_size(LANES * 4), may_alias));
typedef int32_t ints __attribute__((vector_size(LANES * 4), may_alias));

/* Operations in a round of a product: two for each multiply-add. */
#define OPERATIONS(width) (2 * CHAINS * LANES * (width))

#define ROUNDS(sum) \
    for (int64_t round = 0; round < rounds; round++) UNROLL for (int i = 0; i < CHAINS; i++) { \
            sum; \
            __asm__("" : "+v"(sums[i])); \
        } \
    for (int i = 1; i < CHAINS; i++) sums[0] += sums[i]; \
    return sums[0][0];

#if defined(__AVX512F__) || defined(__AVX2__)
int64_t peak_float32(void) { return OPERATIONS(1); }

double multiply_float32(int64_t rounds) {
    vec sums[CHAINS] = {0}, x = {0}, y = {0};
    __asm__("" : "+v"(x), "+v"(y));
    ROUNDS(sums[i] += x * y)
}
#else
int64_t peak_float32(void) { return 0; }
double multiply_float32(int64_t rounds) { return 0; }
#endif

#ifdef __AVX512BF16__
int64_t peak_bfloat16(void) { return OPERATIONS(2); }

double multiply_bfloat16(int64_t rounds) {
    vec sums[CHAINS] = {0}, x = {0}, y = {0};
    __asm__("" : "+v"(x), "+v"(y));
    ROUNDS(sums[i] = (vec)_mm512_dpbf16_ps((__m512)sums[i], (__m512bh)x, (__m512bh)y))
}
#else
int64_t peak_bfloat16(void) { return 0; }
double multiply_bfloat16(int64_t rounds) { return 0; }
#endif

#ifdef __AVX512VNNI__
int64_t peak_int8(void) { return OPERATIONS(4); }

double multiply_int8(int64_t rounds) {
    ints sums[CHAINS] = {0}, x = {0}, y = {0};
    __asm__("" : "+v"(x), "+v"(y));
    ROUNDS(sums[i] = (ints)_mm512_dpbusd_epi32((__m512i)sums[i], (__m512i)x, (__m512i)y))
}
#else
int64_t peak_int8(void) { return 0; }
double multiply_int8(int64_t rounds) { return 0; }
#endif

/* Reads `bytes` bytes, a multiple of STREAMS vectors. */
double read_memory(const char *from, int64_t bytes) {
    ints all[STREAMS] = {0};
    for (int64_t at = 0; at < bytes; at += sizeof all)
        UNROLL for (int i = 0; i < STREAMS; i++) all[i] ^= *(const ints *)(from + at + i * sizeof(ints));
    for (int i = 1; i < STREAMS; i++) all[0] ^= all[i];
    return all[0][0];
}
