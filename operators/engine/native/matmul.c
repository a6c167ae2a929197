/* Matrix products over packed weights: rows [n, in] times weight [out, in], with what follows in the same pass.

   Packed weights are panels of PANEL outputs: [out / PANEL, in, PANEL], the last one filled up with zeros. An output
   is one chain of multiply-adds over `in`, from its bias or 0: the same bits whatever rows stand beside it. Weights in
   bfloat16 are packed by pairs of inputs, [out / PANEL, in / 2, PANEL, 2]; rows are rounded to bfloat16 for them, sums
   are float32. */

#define PANEL (2 * LANES)
#if defined(__AVX512F__) || defined(__aarch64__)
#define TILE_ROWS 14
#else
#define TILE_ROWS 6
#endif

enum { PLAIN, ADDED, GATED };

typedef struct {
    const float *packed; /* floats, or pairs of bfloat16 */
    const float *bias;   /* [panels, PANEL] or null */
    int64_t in, out, panels, halves;
} Matrix;

/* sum + a pair of rows' elements times LANES pairs of weights. */
INLINE vec add_products(vec sum, uint32_t pair, vec weights) {
#ifdef __AVX512BF16__
    return (vec)_mm512_dpbf16_ps((__m512)sum, (__m512bh)_mm512_set1_epi32(pair), (__m512bh)weights);
#else
    bits both = (bits)weights;
    float first, second;
    uint32_t low = pair << 16, high = pair & 0xffff0000u;
    memcpy(&first, &low, sizeof first);
    memcpy(&second, &high, sizeof second);
    sum += first * (vec)(both << 16);
    return sum + second * (vec)(both & 0xffff0000u);
#endif
}

/* What happens to a tile: PLAIN stores it, ADDED adds it to what is there, GATED (a panel is LANES gates and LANES
   ups) stores silu(gate) * up. */
INLINE void finish(int end, vec low, vec high, float *to, int64_t columns) {
    if (end == GATED) {
        low = low / (1.0f + exponential(-low)) * high;
        if (columns >= LANES) {
            store(to, low);
            return;
        }
        high = low;
    } else if (columns >= PANEL) {
        if (end == ADDED) low += load(to), high += load(to + LANES);
        store(to, low);
        store(to + LANES, high);
        return;
    }
    float tail[PANEL];
    store(tail, low);
    store(tail + LANES, high);
    for (int64_t i = 0; i < columns; i++) to[i] = end == ADDED ? to[i] + tail[i] : tail[i];
}

INLINE void multiply_tile(const int count, const int halves, int end, const float *rows,
                          const float *panel, const float *bias, int64_t in, float *to, int64_t to_line,
                          int64_t columns) {
    vec sums[TILE_ROWS][2];
    vec low = bias ? load(bias) : (vec){0}, high = bias ? load(bias + LANES) : (vec){0};
    UNROLL for (int i = 0; i < count; i++) sums[i][0] = low, sums[i][1] = high;
    if (halves)
        for (int64_t k = 0; k < in; k++) {
            vec first = load(panel + k * PANEL), second = load(panel + k * PANEL + LANES);
            UNROLL for (int i = 0; i < count; i++) {
                uint32_t pair = ((const uint32_t_anywhere *)rows)[i * in + k];
                sums[i][0] = add_products(sums[i][0], pair, first);
                sums[i][1] = add_products(sums[i][1], pair, second);
            }
        }
    else
        for (int64_t k = 0; k < in; k++) {
            vec first = load(panel + k * PANEL), second = load(panel + k * PANEL + LANES);
            UNROLL for (int i = 0; i < count; i++) {
                vec x = spread(rows[i * in + k]);
                sums[i][0] += x * first;
                sums[i][1] += x * second;
            }
        }
    UNROLL for (int i = 0; i < count; i++) finish(end, sums[i][0], sums[i][1], to + i * to_line, columns);
}

/* One function for each number of rows: the compiler keeps a tile's sums in registers only in a function of its own. */
typedef void Tile(int end, const float *rows, const float *panel, const float *bias, int64_t in, float *to,
                  int64_t to_line, int64_t columns);
#define TILE(n, halves, name) \
    static ALONE void name##n(int end, const float *rows, const float *panel, const float *bias, \
                              int64_t in, float *to, int64_t to_line, int64_t columns) { \
        multiply_tile(n, halves, end, rows, panel, bias, in, to, to_line, columns); \
    }
#define TILES(n) TILE(n, 0, floats) TILE(n, 1, halves)
TILES(1) TILES(2) TILES(3) TILES(4) TILES(5) TILES(6)
#if TILE_ROWS == 14
TILES(7) TILES(8) TILES(9) TILES(10) TILES(11) TILES(12) TILES(13) TILES(14)
#define ALL(name) \
    { name##1, name##2, name##3, name##4, name##5, name##6, name##7, name##8, name##9, name##10, name##11, name##12, \
      name##13, name##14 }
#else
#define ALL(name) { name##1, name##2, name##3, name##4, name##5, name##6 }
#endif
static Tile *const tiles[2][TILE_ROWS] = {ALL(floats), ALL(halves)};
#undef ALL
#undef TILES
#undef TILE

/* Rows [n, in] rounded to bfloat16, in pairs [n, in / 2]. */
static void round_rows(int64_t n, int64_t in, const float *rows, uint16_t *to) {
    int64_t whole = in / LANES * LANES, line = (in + 1) / 2 * 2;
    for (int64_t i = 0; i < n; i++) {
        for (int64_t k = 0; k < whole; k += LANES) narrow(to + i * line + k, load(rows + i * in + k));
        for (int64_t k = whole; k < line; k++) to[i * line + k] = k < in ? narrow_one(rows[i * in + k]) : 0;
    }
}

/* rows [n, in] to [n, out] (GATED: [n, out / 2]) with `to_line` between rows; rounded: room for n * (in + 1) halves. */
static void multiply(const Matrix *m, int end, int64_t n, const float *rows, float *to, int64_t to_line,
                     float *rounded) {
    if (n == 0) return;
    int64_t step = evenly(n, TILE_ROWS), wide = end == GATED ? LANES : PANEL, out = end == GATED ? m->out / 2 : m->out;
    int64_t in = m->halves ? (m->in + 1) / 2 : m->in;
    if (m->halves) {
        round_rows(n, m->in, rows, (uint16_t *)rounded);
        rows = rounded;
    }
    for (int64_t p = 0; p < m->panels; p++)
        for (int64_t i = 0; i < n; i += step)
            tiles[m->halves][least(step, n - i) - 1](end, rows + i * in, m->packed + p * in * PANEL,
                                                     m->bias ? m->bias + p * PANEL : 0, in, to + i * to_line + p * wide,
                                                     to_line, out - p * wide);
}

/* Packs panel p of a weight [out, in]; gate and up (`part` 0 and 1 of `parts` 2) lie side by side in their panels. */
INLINE void pack_panel(const float *weight, int64_t out, int64_t in, int64_t part, int64_t parts, int64_t p,
                       float *packed) {
    float *panel = packed + p * in * PANEL + part * LANES;
    for (int64_t o = 0; o < PANEL / parts; o += LANES) {
        int64_t row = p * PANEL / parts + o, whole = row + LANES <= out ? in / LANES * LANES : 0;
        for (int64_t k = 0; k < whole; k += LANES) {
            vec block[LANES];
            const float *line = weight + row * in + k;
            UNROLL for (int i = 0; i < LANES; i++) {
                block[i] = load(line);
                NEXT_ROW(line, in * sizeof(float));
            }
            transpose(block);
            UNROLL for (int i = 0; i < LANES; i++) store(panel + (k + i) * PANEL + o, block[i]);
        }
        for (int64_t k = whole; k < in; k++)
            for (int64_t i = 0; i < LANES; i++)
                panel[k * PANEL + o + i] = row + i < out ? weight[(row + i) * in + k] : 0;
    }
}

int64_t dataflow_lanes(void) { return LANES; }

typedef struct {
    const float *weight;
    int64_t out, in, part, parts;
    float *packed;
} Packing;

void dataflow_pack(const Packing *all, int64_t count, int64_t threads) {
#pragma omp parallel num_threads(threads) if (threads > 1)
    for (int64_t i = 0; i < count; i++) {
        Packing one = all[i];
        int64_t panels = (one.out * one.parts + PANEL - 1) / PANEL;
#pragma omp for schedule(static) nowait
        for (int64_t p = 0; p < panels; p++)
            pack_panel(one.weight, one.out, one.in, one.part, one.parts, p, one.packed);
    }
}
