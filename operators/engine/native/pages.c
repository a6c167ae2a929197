/* What attention computes with one page of PAGE keys or values: scores with its tokens in the lanes, mixtures of its
   values with the width in the lanes. Axes: D width of a head. */

#include <math.h>

#define PARTS (PAGE / LANES)
#if LANES == 16
#define SCORE_ROWS 12
#else
#define SCORE_ROWS 6
#endif
#if defined(__AVX512F__) || defined(__aarch64__)
#define MIX_ROWS 6
#else
#define MIX_ROWS 3
#endif

INLINE int64_t padded(int64_t width) { return (width + LANES - 1) / LANES * LANES; }

INLINE int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }

INLINE int64_t most(int64_t a, int64_t b) { return a > b ? a : b; }

INLINE int64_t evenly(int64_t count, int64_t room) {
    int64_t parts = (count + room - 1) / room;
    return (count + parts - 1) / parts;
}

INLINE const void *at(const void *base, int64_t place, int64_t halves) {
    return (const char *)base + place * (halves ? 2 : 4);
}

INLINE void turn_as(const void *from, const int halves, int64_t width, float *to) {
    const float *floats = from;
    const uint16_t *shorts = from;
    int64_t whole = width / LANES * LANES;
    for (int64_t part = 0; part < PAGE; part += LANES)
        for (int64_t d = 0; d < whole; d += LANES) {
            vec block[LANES];
            const void *row = at(from, part * width + d, halves);
            UNROLL for (int i = 0; i < LANES; i++) {
                block[i] = halves ? widen(row) : load(row);
                NEXT_ROW(row, width * (halves ? 2 : 4));
            }
            transpose(block);
            UNROLL for (int i = 0; i < LANES; i++) store(to + (d + i) * PAGE + part, block[i]);
        }
    for (int64_t d = whole; d < width; d++)
        for (int64_t t = 0; t < PAGE; t++)
            to[d * PAGE + t] = halves ? widen_one(shorts[t * width + d]) : floats[t * width + d];
}

/* Keys of a page [PAGE, D] to [D, PAGE]. */
static ALONE void turn(const void *from, int64_t halves, int64_t width, float *to) {
    if (halves) turn_as(from, 1, width, to);
    else turn_as(from, 0, width, to);
}

/* Values of a page as float32 [PAGE, padded D]: the page itself where it is that already. */
INLINE const float *values_of(const void *from, int64_t halves, int64_t width, float *to) {
    int64_t wide = padded(width);
    if (!halves && wide == width) return from;
    for (int64_t t = 0; t < PAGE; t++)
        if (halves && wide == width)
            for (int64_t d = 0; d < width; d += LANES)
                store(to + t * wide + d, widen((const uint16_t *)from + t * width + d));
        else
            for (int64_t d = 0; d < wide; d++)
                to[t * wide + d] = d >= width ? 0.0f
                                   : halves   ? widen_one(((const uint16_t *)from)[t * width + d])
                                              : ((const float *)from)[t * width + d];
    return to;
}

INLINE void score_tile(const int count, const float *queries, const float *turned, int64_t width, float *scores,
                       int64_t line) {
    vec sums[SCORE_ROWS][PARTS];
    UNROLL for (int i = 0; i < count; i++)
        UNROLL for (int j = 0; j < PARTS; j++) sums[i][j] = (vec){0};
    for (int64_t d = 0; d < width; d++) {
        vec key[PARTS];
        UNROLL for (int j = 0; j < PARTS; j++) key[j] = load(turned + d * PAGE + j * LANES);
        UNROLL for (int i = 0; i < count; i++) {
            vec query = spread(queries[i * width + d]);
            UNROLL for (int j = 0; j < PARTS; j++) sums[i][j] += query * key[j];
        }
    }
    UNROLL for (int i = 0; i < count; i++)
        UNROLL for (int j = 0; j < PARTS; j++) store(scores + i * line + j * LANES, sums[i][j]);
}

/* Tiles are functions of their own, as in matmul.c. */
#define TILE(n) \
    static ALONE void score##n(const float *queries, const float *turned, int64_t width, float *scores, \
                               int64_t line) { \
        score_tile(n, queries, turned, width, scores, line); \
    }
typedef void ScoreTile(const float *queries, const float *turned, int64_t width, float *scores, int64_t line);
TILE(1) TILE(2) TILE(3) TILE(4) TILE(5) TILE(6)
#if SCORE_ROWS == 12
TILE(7) TILE(8) TILE(9) TILE(10) TILE(11) TILE(12)
static ScoreTile *const score_tiles[] = {score1, score2, score3, score4, score5, score6,
                                         score7, score8, score9, score10, score11, score12};
#else
static ScoreTile *const score_tiles[] = {score1, score2, score3, score4, score5, score6};
#endif
#undef TILE

/* Scores of some queries with the PAGE keys in `turned`. */
INLINE void score(int64_t count, const float *queries, const float *turned, int64_t width, float *scores,
                  int64_t line) {
    int64_t step = evenly(count, SCORE_ROWS);
    for (int64_t i = 0; i < count; i += step)
        score_tiles[least(step, count - i) - 1](queries + i * width, turned, width, scores + i * line, line);
}

INLINE void mix_tile(const int count, const int vectors, const float *weights, int64_t line, const float *const *pages,
                     int64_t tokens, int64_t column, float *mixed, int64_t wide) {
    vec sums[MIX_ROWS][4];
    UNROLL for (int i = 0; i < count; i++)
        UNROLL for (int j = 0; j < vectors; j++) sums[i][j] = load(mixed + i * wide + column + j * LANES);
    for (int64_t start = 0; start < tokens; start += PAGE) {
        const float *page = pages[start / PAGE] + column;
        int64_t here = least(PAGE, tokens - start);
        for (int64_t t = 0; t < here; t++) {
            vec value[4];
            UNROLL for (int j = 0; j < vectors; j++) value[j] = load(page + t * wide + j * LANES);
            UNROLL for (int i = 0; i < count; i++) {
                vec weight = spread(weights[i * line + start + t]);
                UNROLL for (int j = 0; j < vectors; j++) sums[i][j] += weight * value[j];
            }
        }
    }
    UNROLL for (int i = 0; i < count; i++)
        UNROLL for (int j = 0; j < vectors; j++) store(mixed + i * wide + column + j * LANES, sums[i][j]);
}

#define TILE(n, v) \
    static ALONE void mix##n##v(const float *weights, int64_t line, const float *const *pages, int64_t tokens, \
                                int64_t column, float *mixed, int64_t wide) { \
        mix_tile(n, v, weights, line, pages, tokens, column, mixed, wide); \
    }
#define TILES(n) TILE(n, 1) TILE(n, 2) TILE(n, 3) TILE(n, 4)
#define NAMES(n) {mix##n##1, mix##n##2, mix##n##3, mix##n##4}
typedef void MixTile(const float *weights, int64_t line, const float *const *pages, int64_t tokens, int64_t column,
                     float *mixed, int64_t wide);
TILES(1) TILES(2) TILES(3)
#if MIX_ROWS == 6
TILES(4) TILES(5) TILES(6)
static MixTile *const mix_tiles[MIX_ROWS][4] = {NAMES(1), NAMES(2), NAMES(3), NAMES(4), NAMES(5), NAMES(6)};
#else
static MixTile *const mix_tiles[MIX_ROWS][4] = {NAMES(1), NAMES(2), NAMES(3)};
#endif
#undef NAMES
#undef TILES
#undef TILE

/* Adds the weighted values of `tokens` tokens, which lie in `pages`, to the outcome of some queries. */
INLINE void mix(int64_t count, const float *weights, int64_t line, const float *const *pages, int64_t tokens,
                float *mixed, int64_t wide) {
    int64_t step = evenly(count, MIX_ROWS);
    for (int64_t i = 0; i < count; i += step)
        for (int64_t column = 0; column < wide; column += 4 * LANES)
            mix_tiles[least(step, count - i) - 1][least(4, (wide - column) / LANES) - 1](
                weights + i * line, line, pages, tokens, column, mixed + i * wide, wide);
}
