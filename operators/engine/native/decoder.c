/* One forward pass of a decoder over rows of one token each: embedding, layers, logits.

   Rows are divided among threads. Rows are decoded tokens, each with pages of its own behind those that its run shares,
   and after them prompts: the tokens of a prompt are rows of one run with the same pages, in order. Without prompts a
   thread takes its rows, a block at a time, through all layers without waiting for another; with them threads take
   their parts of a block together, and wait in each layer until the block's keys and values are there. Activations are
   float32, and so is what lies between products where weights are bfloat16.
   Axes: n rows, H hidden, K key/value heads, R query heads for each, D width of a head. */

#define BLOCK_ROWS 128
#define MOST_QUERIES 64

typedef struct {
    Matrix qkv, mixed, gates, down; /* qkv: each of the three filled up to whole panels; gates: GATED */
    const float *before_attention, *before_gates, *query_norm, *key_norm; /* the last two may be null */
    void *keys, *values;
    int64_t window;
} Layer;

typedef struct {
    const Layer *layers;
    int64_t layer_count, hidden, inner, heads, repeats, width, vocabulary, cache_halves, embedding_halves;
    const void *embedding; /* [vocabulary, H] */
    const float *last_norm;
    Matrix head;
    const float *cosines, *sines; /* [positions, D / 2] */
    float epsilon, scale;
} Decoder;

typedef struct {
    const int64_t *tokens, *positions;
    const int32_t *table, *table_rows;
    int64_t table_width, n;
    Runs runs;
    const int32_t *near, *alike; /* page that a run's first begins like, for how many tokens; null: no prompts */
    const int64_t *wanted; /* rows whose logits are asked for, ascending; null: all */
    int64_t wanted_count;
    float *logits; /* [wanted, vocabulary] */
} Work;

INLINE int64_t in_panels(int64_t out) { return (out + PANEL - 1) / PANEL * PANEL; }

INLINE int64_t qkv_width(const Decoder *d) {
    return in_panels(d->heads * d->repeats * d->width) + 2 * in_panels(d->heads * d->width);
}

INLINE int64_t mixed_width(const Decoder *d) { return d->heads * d->repeats * d->width; }

INLINE int64_t most_unit_rows(const Decoder *d) { return most(1, MOST_QUERIES / d->repeats); }

int64_t dataflow_step_scratch(const Decoder *d, int64_t longest) {
    int64_t row = d->hidden + most(d->hidden, mixed_width(d)) + qkv_width(d) + d->inner + 2 * 3;
    row += most(most(d->hidden, mixed_width(d)), d->inner) / 2 + 1; /* rounded rows */
    return (BLOCK_ROWS * row + scratch_floats(most_unit_rows(d) * d->repeats, d->width, longest) + 15) / 16 * 16;
}

/* x / root mean square of x, times the weight; to may be x. */
INLINE void normalise(const float *x, const float *weight, int64_t width, float epsilon, float *to) {
    vec squares = {0};
    int64_t whole = width / LANES * LANES;
    for (int64_t i = 0; i < whole; i += LANES) squares += load(x + i) * load(x + i);
    float sum = sum_lanes(squares);
    for (int64_t i = whole; i < width; i++) sum += x[i] * x[i];
    float share = 1.0f / __builtin_sqrtf(sum / width + epsilon);
    for (int64_t i = 0; i < whole; i += LANES) store(to + i, load(x + i) * share * load(weight + i));
    for (int64_t i = whole; i < width; i++) to[i] = x[i] * share * weight[i];
}

/* Rotates the pairs (x[i], x[i + D / 2]) by the angles of a position. */
INLINE void rotate(float *x, const float *cosines, const float *sines, int64_t half) {
    int64_t whole = half / LANES * LANES;
    for (int64_t i = 0; i < whole; i += LANES) {
        vec a = load(x + i), b = load(x + half + i), cosine = load(cosines + i), sine = load(sines + i);
        store(x + i, a * cosine - b * sine);
        store(x + half + i, b * cosine + a * sine);
    }
    for (int64_t i = whole; i < half; i++) {
        float a = x[i], b = x[half + i];
        x[i] = a * cosines[i] - b * sines[i];
        x[half + i] = b * cosines[i] + a * sines[i];
    }
}

/* Queries and keys of a row as attention sees them: normalised if the model does, rotated; keys and values kept. */
static void prepare_row(const Decoder *d, const Layer *layer, const Attention *a, int64_t row, float *qkv) {
    int64_t width = d->width, queries = d->heads * d->repeats;
    float *keys = qkv + in_panels(queries * width), *values = keys + in_panels(d->heads * width);
    int64_t angles = a->positions[row] * (width / 2);
    const float *cosines = d->cosines + angles, *sines = d->sines + angles;
    for (int64_t i = 0; i < queries + d->heads; i++) {
        float *x = i < queries ? qkv + i * width : keys + (i - queries) * width;
        const float *norm = i < queries ? layer->query_norm : layer->key_norm;
        if (norm) normalise(x, norm, width, d->epsilon, x);
        rotate(x, cosines, sines, width / 2);
    }
    for (int64_t head = 0; head < d->heads; head++)
        remember_floats(a, head, row, keys + head * width, values + head * width);
}

/* Gives the runs that begin among the rows [from, to) the keys and values of the tokens that others' pages have too. */
static void copy_alike(const Work *w, const Attention *a, int64_t from, int64_t to) {
    for (int64_t run = 0; run < w->runs.count; run++) {
        int64_t row = w->runs.starts[run], bytes = w->alike[run] * a->width * (a->halves ? 2 : 4);
        if (bytes == 0 || row < from || row >= to) continue;
        for (int64_t head = 0; head < a->heads; head++) {
            int64_t origin = (w->near[run] * a->heads + head) * PAGE * a->width;
            int64_t target = page_place(a, head, row, a->positions[row] / PAGE);
            memcpy((char *)at(a->keys, target, a->halves), at(a->keys, origin, a->halves), bytes);
            memcpy((char *)at(a->values, target, a->halves), at(a->values, origin, a->halves), bytes);
        }
    }
}

/* Attention of the rows from `start`, whose qkv are given, into mixed [., K * R * D]. */
static void attend_block(const Decoder *d, const Attention *a, int64_t start, const Unit *units, int64_t count,
                         const float *qkv, float *mixed, Scratch s) {
    int64_t width = d->width, repeats = d->repeats, wide = padded(width), line = qkv_width(d), out = mixed_width(d);
    for (int64_t u = 0; u < count; u++)
        for (int64_t head = 0; head < d->heads; head++) {
            Unit unit = units[u];
            int64_t first = head * repeats * width;
            for (int64_t i = 0; i < unit.rows; i++)
                scaled(qkv + (unit.row - start + i) * line + first, 0, repeats * width, d->scale,
                       s.queries + i * repeats * width);
            attend(a, head, unit.row, unit.rows, unit.shared, s);
            for (int64_t i = 0; i < unit.rows * repeats; i++)
                memcpy(mixed + (unit.row - start + i / repeats) * out + first + i % repeats * width, s.mixed + i * wide,
                       width * sizeof(float));
        }
}

static void embed(const Decoder *d, int64_t token, float *x) {
    if (d->embedding_halves)
        for (int64_t i = 0; i < d->hidden; i++)
            x[i] = widen_one(((const uint16_t *)d->embedding)[token * d->hidden + i]);
    else
        memcpy(x, (const float *)d->embedding + token * d->hidden, d->hidden * sizeof(float));
}

/* Logits of those of the rows [from, to) that are asked for; x [to - from, H], h has room for as much. */
static void predict(const Decoder *d, const Work *w, int64_t from, int64_t to, const float *x, float *h,
                    float *rounded) {
    int64_t first = from, count = to - from;
    if (w->wanted) {
        for (first = 0; first < w->wanted_count && w->wanted[first] < from;) first++;
        for (count = 0; first + count < w->wanted_count && w->wanted[first + count] < to;) count++;
    }
    for (int64_t i = 0; i < count; i++) {
        int64_t row = w->wanted ? w->wanted[first + i] : from + i;
        normalise(x + (row - from) * d->hidden, d->last_norm, d->hidden, d->epsilon, h + i * d->hidden);
    }
    multiply(&d->head, PLAIN, count, h, w->logits + first * d->vocabulary, d->vocabulary, rounded);
}

/* Takes the rows [from, to) through all layers: a thread's part of the block [first, last). */
static void forward(const Decoder *d, const Work *w, int64_t first, int64_t last, int64_t from, int64_t to,
                    float *memory) {
    int64_t n = to - from, hidden = d->hidden, line = qkv_width(d), out = mixed_width(d);
    float *x = memory, *h = x + BLOCK_ROWS * hidden, *qkv = h + BLOCK_ROWS * most(hidden, out);
    float *inner = qkv + BLOCK_ROWS * line;
    float *rounded = inner + BLOCK_ROWS * d->inner;
    Unit *units = (Unit *)(rounded + BLOCK_ROWS * (most(most(hidden, out), d->inner) / 2 + 1));
    Scratch s = carve((float *)(units + BLOCK_ROWS), most_unit_rows(d) * d->repeats, d->width);
    int64_t count = cut(w->runs, from, to, most_unit_rows(d), units);
    for (int64_t i = 0; i < n; i++) embed(d, w->tokens[from + i], x + i * hidden);
    for (int64_t l = 0; l < d->layer_count; l++) {
        const Layer *layer = d->layers + l;
        const Attention a = {layer->keys, layer->values, d->cache_halves, d->heads, d->repeats, d->width, w->table,
                             w->table_rows, w->table_width, w->positions, layer->window, 0.0f};
        for (int64_t i = 0; i < n; i++)
            normalise(x + i * hidden, layer->before_attention, hidden, d->epsilon, h + i * hidden);
        multiply(&layer->qkv, PLAIN, n, h, qkv, line, rounded);
        for (int64_t i = 0; i < n; i++) prepare_row(d, layer, &a, from + i, qkv + i * line);
        if (w->alike) {
#pragma omp barrier
#pragma omp single
            copy_alike(w, &a, first, last);
        }
        attend_block(d, &a, from, units, count, qkv, h, s);
        multiply(&layer->mixed, ADDED, n, h, x, hidden, rounded);
        for (int64_t i = 0; i < n; i++)
            normalise(x + i * hidden, layer->before_gates, hidden, d->epsilon, h + i * hidden);
        multiply(&layer->gates, GATED, n, h, inner, d->inner, rounded);
        multiply(&layer->down, ADDED, n, inner, x, hidden, rounded);
    }
    predict(d, w, from, to, x, h, rounded);
}

/* What a row costs, in multiply-adds, about: its matrix products and its pages, own ones thrice. */
INLINE int64_t cost_of(const Decoder *d, const Work *w, int64_t row, int64_t shared, int64_t weights) {
    int64_t pages = w->positions[row] / PAGE + 1;
    return weights + (3 * pages - 2 * least(shared, pages)) * PAGE * 2 * mixed_width(d) * d->layer_count;
}

/* Rows at which each of `parts` threads begins, [parts + 1]: of equal cost; runs are not divided where that unbalances
   by less than a sixteenth. */
static void divide(const Decoder *d, const Work *w, int64_t parts, int64_t *begins) {
    int64_t weights = d->vocabulary * d->hidden, total = 0, count = w->runs.starts ? w->runs.count : w->n;
    weights += d->layer_count * (d->hidden * (qkv_width(d) + 3 * d->inner) + mixed_width(d) * d->hidden);
    for (int pass = 0; pass < 2; pass++) {
        int64_t sum = 0, part = 1, slack = total / parts / 16;
        begins[0] = 0;
        for (int64_t run = 0; run < count; run++) {
            int64_t row = w->runs.starts ? w->runs.starts[run] : run, same = w->runs.starts ? w->runs.pages[run] : 0;
            int64_t end = w->runs.starts ? w->runs.starts[run + 1] : run + 1, before = sum;
            for (int64_t i = row; i < end; i++) sum += cost_of(d, w, i, same, weights);
            for (; pass && part < parts && total * part / parts <= sum; part++) {
                int64_t ahead = total * part / parts - before, left = sum - before - ahead;
                if (least(ahead, left) <= slack) begins[part] = ahead < left ? row : end;
                else
                    for (begins[part] = row; ahead > 0; begins[part]++)
                        ahead -= cost_of(d, w, begins[part], same, weights);
            }
        }
        total = sum;
        for (; pass && part <= parts; part++) begins[part] = w->n;
    }
}

/* A team of threads takes blocks through all layers, one after the other, each thread its part of the rows. */
static void forward_together(const Decoder *d, const Work *w, float *scratch, int64_t scratch_size) {
    int64_t team = thread_count(), thread = thread_number(), step = evenly(w->n, team * BLOCK_ROWS);
    for (int64_t row = 0; row < w->n; row += step) {
        int64_t end = least(row + step, w->n), share = (end - row + team - 1) / team;
        int64_t from = least(row + thread * share, end);
        forward(d, w, row, end, from, least(from + share, end), scratch + thread * scratch_size);
    }
}

/* One pass. scratch: dataflow_step_scratch floats for each thread; begins: a number for each thread, and one.
   Returns -1, or the first row whose token or position is out of range, with nothing done. */
int64_t dataflow_step(const Decoder *d, const Work *w, int64_t longest, float *scratch, int64_t scratch_size,
                      int64_t *begins, int64_t threads) {
    for (int64_t i = 0; i < w->n; i++)
        if (w->tokens[i] < 0 || w->tokens[i] >= d->vocabulary || w->positions[i] < 0 || w->positions[i] >= longest ||
            w->positions[i] / PAGE >= w->table_width)
            return i;
    if (w->alike) {
#pragma omp parallel num_threads(threads) if (threads > 1)
        forward_together(d, w, scratch, scratch_size);
        return -1;
    }
    divide(d, w, threads, begins);
#pragma omp parallel for schedule(static, 1) num_threads(threads) if (threads > 1 && begins[1] < w->n)
    for (int64_t part = 0; part < threads; part++) {
        int64_t step = evenly(most(1, begins[part + 1] - begins[part]), BLOCK_ROWS);
        for (int64_t row = begins[part]; row < begins[part + 1]; row += step)
            forward(d, w, 0, 0, row, least(row + step, begins[part + 1]), scratch + part * scratch_size);
    }
    return -1;
}
