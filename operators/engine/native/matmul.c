/* Matrix products over packed weights: rows [n, in] times weight [out, in], with what follows in the same pass.

   Packed weights are panels of PANEL outputs: [out / PANEL, in, PANEL], the last one filled up with zeros. An output
   is one chain of multiply-adds over `in`, from its bias or 0: the same bits whatever rows stand beside it. */

#define PANEL (2 * LANES)
#if defined(__AVX512F__) || defined(__aarch64__)
#define TILE_ROWS 14
#else
#define TILE_ROWS 6
#endif

enum { PLAIN, ADDED, GATED };

typedef struct {
    const float *packed; /* [panels, in, PANEL] */
    const float *bias;   /* [panels, PANEL] or null */
    int64_t in, out, panels;
} Matrix;

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

INLINE void multiply_tile(const int count, int end, const float *rows, int64_t line, const float *panel,
                          const float *bias, int64_t in, float *to, int64_t to_line, int64_t columns) {
    vec sums[TILE_ROWS][2];
    vec low = bias ? load(bias) : (vec){0}, high = bias ? load(bias + LANES) : (vec){0};
    UNROLL for (int i = 0; i < count; i++) sums[i][0] = low, sums[i][1] = high;
    for (int64_t k = 0; k < in; k++) {
        vec first = load(panel + k * PANEL), second = load(panel + k * PANEL + LANES);
        UNROLL for (int i = 0; i < count; i++) {
            vec x = spread(rows[i * line + k]);
            sums[i][0] += x * first;
            sums[i][1] += x * second;
        }
    }
    UNROLL for (int i = 0; i < count; i++) finish(end, sums[i][0], sums[i][1], to + i * to_line, columns);
}

/* rows [n, in] to [n, out] (GATED: [n, out / 2]), with distances `line` and `to_line` between rows. */
static void multiply(const Matrix *m, int end, int64_t n, const float *rows, int64_t line, float *to, int64_t to_line) {
    if (n == 0) return;
    int64_t step = evenly(n, TILE_ROWS), wide = end == GATED ? LANES : PANEL, out = end == GATED ? m->out / 2 : m->out;
    for (int64_t p = 0; p < m->panels; p++) {
        const float *panel = m->packed + p * m->in * PANEL, *bias = m->bias ? m->bias + p * PANEL : 0;
        for (int64_t i = 0; i < n; i += step) {
            const float *from = rows + i * line;
            float *into = to + i * to_line + p * wide;
            switch (least(step, n - i)) {
#define CASE(r) case r: multiply_tile(r, end, from, line, panel, bias, m->in, into, to_line, out - p * wide); break;
                CASE(1) CASE(2) CASE(3) CASE(4) CASE(5) CASE(6)
#if TILE_ROWS == 14
                CASE(7) CASE(8) CASE(9) CASE(10) CASE(11) CASE(12) CASE(13) CASE(14)
#endif
#undef CASE
            }
        }
    }
}

/* Packs panel p of a weight [out, in]; gate and up (`part` 0 and 1 of `parts` 2) lie side by side in their panels. */
INLINE void pack_panel(const float *weight, int64_t out, int64_t in, int64_t part, int64_t parts, int64_t p,
                       float *packed) {
    float *panel = packed + p * in * PANEL + part * LANES;
    for (int64_t o = 0; o < PANEL / parts; o += LANES) {
        int64_t row = p * PANEL / parts + o, whole = row + LANES <= out ? in / LANES * LANES : 0;
        for (int64_t k = 0; k < whole; k += LANES) {
            vec block[LANES];
            UNROLL for (int i = 0; i < LANES; i++) block[i] = load(weight + (row + i) * in + k);
            transpose(block);
            UNROLL for (int i = 0; i < LANES; i++) store(panel + (k + i) * PANEL + o, block[i]);
        }
        for (int64_t k = whole; k < in; k++)
            for (int64_t i = 0; i < LANES; i++) panel[k * PANEL + o + i] = row + i < out ? weight[(row + i) * in + k] : 0;
    }
}

int64_t dataflow_lanes(void) { return LANES; }

void dataflow_pack(const float *weight, int64_t out, int64_t in, int64_t part, int64_t parts, float *packed,
                   int64_t threads) {
    int64_t panels = (out * parts + PANEL - 1) / PANEL;
#pragma omp parallel for schedule(static) num_threads(threads) if (threads > 1 && out * in > 65536)
    for (int64_t p = 0; p < panels; p++) pack_panel(weight, out, in, part, parts, p, packed);
}
