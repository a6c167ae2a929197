/* Attention over a paged cache of keys and values, for neighbouring rows that may share their first pages.

   Axes: P pages of PAGE tokens, K key/value heads, R query heads for each, D width of a head, M = rows * R queries.
   The scores of a page are computed with its tokens in the lanes, its values are mixed with the width in the lanes;
   what is summed, and in which order, depends on the row alone: never on its neighbours or on what they share. */

#define PAGES_AT_ONCE 8
#define PAGES_AHEAD 2

typedef struct {
    void *keys, *values;       /* of one layer, [P, K, PAGE, D] */
    int64_t halves;            /* whether they are bfloat16, not float32 */
    int64_t heads, repeats, width;
    const int32_t *table;      /* pages of each row of the table, [., table_width] */
    const int32_t *table_rows; /* which row of the table each row has, [n]; null: its own */
    int64_t table_width;
    const int64_t *positions;  /* of each row's token, [n] */
    int64_t window;            /* positions that a row attends to; 0: all */
    float softcap;             /* 0: none */
} Attention;

typedef struct {
    float *queries; /* [M, D], scaled; filled by the caller */
    float *mixed;   /* [M, padded D], the outcome */
    float *scores, *turned, *plain, *shares;
} Scratch;

static int64_t scratch_floats(int64_t queries, int64_t width, int64_t longest) {
    int64_t pages = longest / PAGE + 1, wide = padded(width);
    return queries * (2 * wide + (pages + 1) * PAGE + LANES) + (PAGES_AT_ONCE + 1) * PAGE * wide;
}

static Scratch carve(float *memory, int64_t queries, int64_t width) {
    int64_t wide = padded(width);
    Scratch s = {.queries = memory};
    s.mixed = s.queries + queries * wide;
    s.turned = s.mixed + queries * wide;
    s.plain = s.turned + PAGE * wide;
    s.shares = s.plain + PAGES_AT_ONCE * PAGE * wide;
    s.scores = s.shares + queries * LANES;
    return s;
}

INLINE int64_t page_place(const Attention *a, int64_t head, int64_t row, int64_t page) {
    int64_t line = a->table_rows ? a->table_rows[row] : row;
    return (a->table[line * a->table_width + page] * a->heads + head) * PAGE * a->width;
}

/* Scores in [0, count) to weights e^(score - largest), 0 outside of [first, end); returns 1 / their sum. */
static ALONE float weigh(float *scores, int64_t first, int64_t end, int64_t count, float softcap) {
    if (softcap > 0.0f)
        for (int64_t t = 0; t < count; t += LANES)
            store(scores + t, softcap * hyperbolic_tangent(load(scores + t) / softcap));
    for (int64_t t = 0; t < first; t++) scores[t] = -INFINITY;
    for (int64_t t = end; t < count; t++) scores[t] = -INFINITY;
    vec top = spread(-3.4028234e38f), sum = {0};
    for (int64_t t = 0; t < count; t += LANES) top = larger(load(scores + t), top);
    float largest = largest_lane(top);
    for (int64_t t = 0; t < count; t += LANES) {
        vec weight = exponential(load(scores + t) - largest);
        sum += weight;
        store(scores + t, weight);
    }
    return 1.0f / sum_lanes(sum);
}

INLINE int64_t first_of(const Attention *a, int64_t row) {
    int64_t end = a->positions[row] + 1;
    return a->window > 0 && end > a->window ? end - a->window : 0;
}

/* Walks the pages that a unit reads, in order: its shared ones, then each row's own. */
typedef struct {
    int64_t first_row, row, page, end, stop, shared;
} Walk;

INLINE int64_t page_count(const Attention *a, int64_t row) { return a->positions[row] / PAGE + 1; }

/* Fetches the page that the walk has reached into the caches, its values into the second, and goes on. */
INLINE void walk(const Attention *a, int64_t head, Walk *w) {
    int64_t bytes = PAGE * a->width * (a->halves ? 2 : 4);
    while (w->page >= w->end) {
        if (++w->row >= w->stop) return;
        w->page = most(first_of(a, w->row) / PAGE, w->shared);
        w->end = page_count(a, w->row);
    }
    int64_t place = page_place(a, head, most(w->row, w->first_row), w->page++);
    for (int64_t i = 0; i < bytes; i += 64) {
        __builtin_prefetch((const char *)at(a->keys, place, a->halves) + i);
        __builtin_prefetch((const char *)at(a->values, place, a->halves) + i, 0, 2);
    }
}

/* Scores of `count` queries with pages [from, to) of `row`, whose scores begin at page `base`. */
INLINE void score_pages(const Attention *a, int64_t head, int64_t row, int64_t from, int64_t to, int64_t base,
                        int64_t count, const float *queries, float *scores, int64_t line, float *turned, Walk *ahead) {
    for (int64_t page = from; page < to; page++) {
        walk(a, head, ahead);
        turn(at(a->keys, page_place(a, head, row, page), a->halves), a->halves, a->width, turned);
        score(count, queries, turned, a->width, scores + (page - base) * PAGE, line);
    }
}

/* Mixes the values of pages [from, to) of `row`, up to position `end`, into the outcome of `count` queries. */
INLINE void mix_pages(const Attention *a, int64_t head, int64_t row, int64_t from, int64_t to, int64_t end,
                      int64_t base, int64_t count, const float *weights, int64_t line, float *mixed, float *plain) {
    int64_t wide = padded(a->width);
    const float *pages[PAGES_AT_ONCE];
    for (int64_t start = from; start < to; start += PAGES_AT_ONCE) {
        int64_t stop = least(to, start + PAGES_AT_ONCE);
        for (int64_t page = start; page < stop; page++)
            pages[page - start] = values_of(at(a->values, page_place(a, head, row, page), a->halves), a->halves,
                                            a->width, plain + (page - start) * PAGE * wide);
        mix(count, weights + (start - base) * PAGE, line, pages, least(stop * PAGE, end) - start * PAGE, mixed, wide);
    }
}

/* Attends with the rows [row, row + rows) of one run and head; their first `shared` pages are the same.

   s.queries holds rows * repeats queries, times the scale; s.mixed receives as many outcomes. */
static void attend(const Attention *a, int64_t head, int64_t row, int64_t rows, int64_t shared, Scratch s) {
    int64_t repeats = a->repeats, width = a->width, wide = padded(width), count = rows * repeats;
    int64_t base = INT64_MAX, last = 0;
    for (int64_t i = row; i < row + rows; i++) {
        base = least(base, first_of(a, i) / PAGE);
        last = most(last, a->positions[i]);
    }
    shared = rows > 1 ? least(shared, last / PAGE + 1) : 0;
    int64_t line = (last / PAGE + 1 - base) * PAGE;
    memset(s.mixed, 0, count * wide * sizeof(float));
    Walk ahead = {row, row - 1, base, shared, row + rows, shared};
    for (int i = 0; i < PAGES_AHEAD; i++) walk(a, head, &ahead);
    if (base < shared)
        score_pages(a, head, row, base, shared, base, count, s.queries, s.scores, line, s.turned, &ahead);
    for (int64_t i = 0; i < rows; i++) {
        int64_t end = a->positions[row + i] + 1, first = first_of(a, row + i), pages = (end + PAGE - 1) / PAGE;
        float *scores = s.scores + i * repeats * line;
        score_pages(a, head, row + i, most(first / PAGE, shared), pages, base, repeats, s.queries + i * repeats * width,
                    scores, line, s.turned, &ahead);
        int64_t filled = most(pages, shared) - base;
        for (int64_t r = 0; r < repeats; r++)
            s.shares[i * repeats + r] = weigh(scores + r * line, first - base * PAGE, end - base * PAGE, filled * PAGE,
                                              a->softcap);
    }
    if (base < shared)
        mix_pages(a, head, row, base, shared, last + 1, base, count, s.scores, line, s.mixed, s.plain);
    for (int64_t i = 0; i < rows; i++) {
        int64_t end = a->positions[row + i] + 1, first = first_of(a, row + i), pages = (end + PAGE - 1) / PAGE;
        mix_pages(a, head, row + i, most(first / PAGE, shared), pages, end, base, repeats,
                  s.scores + i * repeats * line, line, s.mixed + i * repeats * wide, s.plain);
    }
    for (int64_t i = 0; i < count; i++)
        for (int64_t d = 0; d < wide; d += LANES)
            store(s.mixed + i * wide + d, load(s.mixed + i * wide + d) * s.shares[i]);
}

/* Writes a row's new key and value [K, D] where they belong. */
INLINE void remember(const Attention *a, int64_t head, int64_t row, const void *key, const void *value) {
    int64_t offset = a->positions[row] % PAGE * a->width, size = a->halves ? 2 : 4;
    int64_t place = page_place(a, head, row, a->positions[row] / PAGE) + offset;
    memcpy((char *)a->keys + place * size, key, a->width * size);
    memcpy((char *)a->values + place * size, value, a->width * size);
}

/* The same from float32, rounded where the cache is. */
INLINE void remember_floats(const Attention *a, int64_t head, int64_t row, const float *key, const float *value) {
    if (!a->halves) {
        remember(a, head, row, key, value);
        return;
    }
    int64_t place = page_place(a, head, row, a->positions[row] / PAGE) + a->positions[row] % PAGE * a->width;
    for (int64_t i = 0; i < a->width; i++) {
        ((uint16_t *)a->keys)[place + i] = narrow_one(key[i]);
        ((uint16_t *)a->values)[place + i] = narrow_one(value[i]);
    }
}

/* A query as float32 times the scale. */
INLINE void scaled(const void *from, int64_t halves, int64_t width, float scale, float *to) {
    for (int64_t d = 0; d < width; d++)
        to[d] = (halves ? widen_one(((const uint16_t *)from)[d]) : ((const float *)from)[d]) * scale;
}

/* The rows of a unit of work: a run, or some of its rows where it has many. */
typedef struct {
    int64_t row, rows, shared;
} Unit;

/* Runs of siblings: rows starts[i] .. starts[i + 1] share their first pages[i] pages; null: every row is alone. */
typedef struct {
    const int32_t *starts, *pages;
    int64_t count;
} Runs;

/* Cuts the rows [from, to) into units of at most `most_rows` rows of a run; rows that share nothing stand alone.
   Returns how many. */
static int64_t cut(Runs runs, int64_t from, int64_t to, int64_t most_rows, Unit *units) {
    int64_t made = 0;
    if (!runs.starts)
        for (int64_t row = from; row < to; row++) units[made++] = (Unit){row, 1, 0};
    for (int64_t run = 0; run < runs.count; run++) {
        int64_t row = most(from, runs.starts[run]), end = least(to, runs.starts[run + 1]), same = runs.pages[run];
        int64_t step = same > 0 && end > row ? evenly(end - row, most_rows) : 1;
        for (; row < end; row += step) units[made++] = (Unit){row, least(step, end - row), same};
    }
    return made;
}

int64_t dataflow_attention_scratch(int64_t queries, int64_t width, int64_t longest) {
    return scratch_floats(queries, width, longest);
}

/* One new token per row: query [n, K * R, D], key and value [n, K, D] with strides, out [n, K * R, D] dense.

   Elements are bfloat16 where `halves`, else float32. units: room for n; scratch: dataflow_attention_scratch floats for
   each thread. */
void dataflow_decode_attention(const char *query, int64_t query_row, int64_t query_head, const char *key,
                               int64_t key_row, int64_t key_head, const char *value, int64_t value_row,
                               int64_t value_head, void *keys, void *values, int64_t halves, char *out,
                               const int32_t *table, int64_t table_width, const int64_t *positions,
                               const int32_t *starts, const int32_t *pages, int64_t count, int64_t n, int64_t heads,
                               int64_t repeats, int64_t width, int64_t window, float scale, float softcap,
                               int64_t most_rows, Unit *units, float *scratch, int64_t scratch_size,
                               int64_t threads) {
    const Attention a = {keys, values, halves, heads, repeats, width, table, NULL, table_width, positions, window,
                         softcap};
    int64_t made = cut((Runs){starts, pages, count}, 0, n, most_rows, units);
    int64_t size = halves ? 2 : 4, wide = padded(width);
#pragma omp parallel for schedule(dynamic, 1) num_threads(threads) if (threads > 1 && made * heads > 1)
    for (int64_t task = 0; task < made * heads; task++) {
        Unit unit = units[task / heads];
        int64_t head = task % heads;
        Scratch s = carve(scratch + thread_number() * scratch_size, most_rows * repeats, width);
        for (int64_t i = 0; i < unit.rows; i++) {
            int64_t row = unit.row + i;
            remember(&a, head, row, key + (row * key_row + head * key_head) * size,
                     value + (row * value_row + head * value_head) * size);
            for (int64_t r = 0; r < repeats; r++)
                scaled(query + (row * query_row + (head * repeats + r) * query_head) * size, halves, width, scale,
                       s.queries + (i * repeats + r) * width);
        }
        attend(&a, head, unit.row, unit.rows, unit.shared, s);
        for (int64_t i = 0; i < unit.rows * repeats; i++) {
            int64_t row = unit.row + i / repeats, place = (row * heads + head) * repeats + i % repeats;
            const float *mixed = s.mixed + i * wide;
            for (int64_t d = 0; d < width; d++)
                if (halves) ((uint16_t *)out)[place * width + d] = narrow_one(mixed[d]);
                else ((float *)out)[place * width + d] = mixed[d];
        }
    }
}
