/* Matrix products of floats whose factors are rounded to bfloat16 and whose sums are float32, for processors that
   multiply pairs of bfloat16 (AVX-512 BF16).

   A [m, k] times B [k, n] is added to C [m, n], or written there. A factor may lie in memory either way; it is rounded
   and packed into panels of pairs along k on its way, so that nothing has to be kept in bfloat16. A number of C is one
   chain of multiply-adds over each DEPTH of k: the same bits whatever stands beside it, on any number of threads. */

#ifdef _OPENMP
#include <omp.h>
#endif
#include "../../engine/native/vectors.c"

#ifdef __AVX512BF16__

#define ROWS 14
#define COLUMNS (2 * LANES)
#define DEPTH 512 /* pairs of k at once: a panel of B then takes 64 KiB */

typedef struct {
    const float *at;
    int64_t across, along; /* floats from one row of A (column of B) to the next, and along k; one of them is 1 */
} Factor;

INLINE int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }

INLINE __mmask16 first_lanes(int64_t count) { return count >= LANES ? 0xffff : count <= 0 ? 0 : (1u << count) - 1; }

/* Lines [first, first + width) of a factor as one panel [pairs, width] of pairs; zeros behind `lines` and `depth`. */
INLINE void pack(Factor f, int64_t first, int64_t lines, int64_t depth, const int width, uint32_t *to) {
    int64_t pairs = (depth + 1) / 2;
    const __m512i both = _mm512_set_epi16(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8, 23, 7, 22, 6,
                                          21, 5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
    UNROLL for (int part = 0; part < width; part += LANES) {
        int64_t have = least(lines - first - part, least(width - part, LANES));
        __mmask16 wanted = first_lanes(width - part), kept = first_lanes(have);
        const float *from = f.at + (first + part) * f.across;
        if (f.across == 1)
            for (int64_t k = 0; k < pairs; k++) {
                const float *line = from + 2 * k * f.along;
                __m512 low = _mm512_maskz_loadu_ps(kept, line);
                __m512 high = _mm512_maskz_loadu_ps(2 * k + 1 < depth ? kept : 0, line + f.along);
                __m512i words = (__m512i)_mm512_cvtne2ps_pbh(high, low);
                _mm512_mask_storeu_epi32(to + k * width + part, wanted, _mm512_permutexvar_epi16(both, words));
            }
        else
            for (int64_t k = 0; k < pairs; k += LANES) {
                int64_t left = depth - 2 * k;
                vec block[LANES];
                const float *line = from + 2 * k;
                UNROLL for (int i = 0; i < LANES; i++) {
                    __m512 low = _mm512_maskz_loadu_ps(i < have ? first_lanes(left) : 0, line);
                    __m512 high = _mm512_maskz_loadu_ps(i < have ? first_lanes(left - LANES) : 0, line + LANES);
                    block[i] = (vec)_mm512_cvtne2ps_pbh(high, low);
                    NEXT_ROW(line, f.across * sizeof(float));
                }
                transpose(block);
                for (int64_t i = 0; i < least(LANES, pairs - k); i++)
                    _mm512_mask_storeu_ps(to + (k + i) * width + part, wanted, (__m512)block[i]);
            }
    }
}

static ALONE void pack_rows(Factor f, int64_t first, int64_t lines, int64_t depth, uint32_t *to) {
    pack(f, first, lines, depth, ROWS, to);
}

static ALONE void pack_columns(Factor f, int64_t first, int64_t lines, int64_t depth, uint32_t *to) {
    pack(f, first, lines, depth, COLUMNS, to);
}

INLINE void multiply_tile(const int count, const uint32_t *a, const uint32_t *b, int64_t pairs, float *c,
                          int64_t line, int64_t columns, int64_t added) {
    __m512 sums[ROWS][2];
    UNROLL for (int i = 0; i < count; i++) sums[i][0] = sums[i][1] = _mm512_setzero_ps();
    for (int64_t k = 0; k < pairs; k++, a += ROWS, b += COLUMNS) {
        __m512bh low = (__m512bh)_mm512_loadu_si512(b), high = (__m512bh)_mm512_loadu_si512(b + LANES);
        UNROLL for (int i = 0; i < count; i++) {
            __m512bh pair = (__m512bh)_mm512_set1_epi32(a[i]);
            sums[i][0] = _mm512_dpbf16_ps(sums[i][0], pair, low);
            sums[i][1] = _mm512_dpbf16_ps(sums[i][1], pair, high);
        }
    }
    __mmask16 low = first_lanes(columns), high = first_lanes(columns - LANES);
    UNROLL for (int i = 0; i < count; i++) {
        if (added) {
            sums[i][0] = _mm512_add_ps(sums[i][0], _mm512_maskz_loadu_ps(low, c));
            sums[i][1] = _mm512_add_ps(sums[i][1], _mm512_maskz_loadu_ps(high, c + LANES));
        }
        _mm512_mask_storeu_ps(c, low, sums[i][0]);
        _mm512_mask_storeu_ps(c + LANES, high, sums[i][1]);
        c += line;
    }
}

/* One function for each number of rows: the compiler keeps a tile's sums in registers only in a function of its own. */
typedef void Tile(const uint32_t *a, const uint32_t *b, int64_t pairs, float *c, int64_t line, int64_t columns,
                  int64_t added);
#define TILE(n) \
    static ALONE void tile##n(const uint32_t *a, const uint32_t *b, int64_t pairs, float *c, int64_t line, \
                              int64_t columns, int64_t added) { \
        multiply_tile(n, a, b, pairs, c, line, columns, added); \
    }
TILE(1) TILE(2) TILE(3) TILE(4) TILE(5) TILE(6) TILE(7) TILE(8) TILE(9) TILE(10) TILE(11) TILE(12) TILE(13) TILE(14)
#undef TILE
static Tile *const tiles[ROWS] = {tile1, tile2, tile3, tile4, tile5, tile6, tile7, tile8, tile9, tile10, tile11,
                                  tile12, tile13, tile14};

/* Words of scratch that a product takes on so many threads. */
int64_t dataflow_product_scratch(int64_t m, int64_t k, int64_t threads) {
    int64_t pairs = least((k + 1) / 2, DEPTH);
    return ((m + ROWS - 1) / ROWS * ROWS + threads * COLUMNS) * pairs;
}

/* `line`: floats from one row of C to the next. added: to what is there; else it is not read. */
void dataflow_product(const float *a, int64_t a_across, int64_t a_along, const float *b, int64_t b_across,
                      int64_t b_along, float *c, int64_t line, int64_t m, int64_t n, int64_t k, int64_t added,
                      uint32_t *scratch, int64_t threads) {
    int64_t panels = (m + ROWS - 1) / ROWS, most = least((k + 1) / 2, DEPTH);
    uint32_t *columns = scratch + panels * ROWS * most;
#pragma omp parallel num_threads(threads) if (threads > 1)
    for (int64_t begin = 0; begin < k; begin += 2 * DEPTH) {
        int64_t depth = least(k - begin, 2 * DEPTH), pairs = (depth + 1) / 2;
        Factor left = {a + begin * a_along, a_across, a_along}, right = {b + begin * b_along, b_across, b_along};
#pragma omp for schedule(static)
        for (int64_t p = 0; p < panels; p++) pack_rows(left, p * ROWS, m, depth, scratch + p * ROWS * pairs);
#pragma omp for schedule(static)
        for (int64_t j = 0; j < n; j += COLUMNS) {
#ifdef _OPENMP
            uint32_t *own = columns + omp_get_thread_num() * COLUMNS * most;
#else
            uint32_t *own = columns;
#endif
            pack_columns(right, j, n, depth, own);
            for (int64_t i = 0; i < m; i += ROWS)
                tiles[least(ROWS, m - i) - 1](scratch + i * pairs, own, pairs, c + i * line + j, line, n - j,
                                              added || begin);
        }
    }
}

int64_t dataflow_multiplies_pairs(void) { return 1; }
#else
int64_t dataflow_multiplies_pairs(void) { return 0; }
#endif
