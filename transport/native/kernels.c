/* Copies boxes of tensors and sums what they write, in one pass; and sums a buffer while another process writes it.

   The sums of n bytes: with w_0, w_1, .. as their 64-bit words, little-endian, the last one filled up with zeros,
   s1 = sum w_i and s2 = sum (i + 1) w_i, modulo 2^64. Those of pieces add up once s2 has been told where its piece
   begins, so pieces may be summed in any order and by any thread. */

#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdint.h>
#include <string.h>
#include <time.h>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

#if defined(__AVX512F__)
#define VECTOR 64 /* bytes of a register: wider vectors would be taken apart, at a quarter of the speed */
#elif defined(__AVX2__)
#define VECTOR 32
#else
#define VECTOR 16
#endif
#define INLINE static inline __attribute__((always_inline))
#define LINE 64 /* bytes of the caches, and of a block */
#define LANES (LINE / 8)
#define PARTS (LINE / VECTOR)
#define AHEAD 1024              /* bytes that are on their way from memory at once, about */
#define STAGE 4096              /* bytes that are cast at once; they stay in the first cache */
#define CHUNK ((int64_t)1 << 20) /* bytes between two looks at the clock, the watermark or the next piece of work */
#define STREAMED ((int64_t)1 << 20) /* copies of that many bytes and more are written past the caches, */
#define STREAMED_ROW 1024           /* where their rows are that long */
#define MOST_THREADS 64
#define SHORTEST_NAP_NS 20000
#define LONGEST_NAP_NS 500000
#define PATIENT_AFTER_NS 20000000
#define PATIENCE_NS 30000000000

typedef uint64_t vec __attribute__((vector_size(VECTOR)));
typedef uint64_t loose __attribute__((vector_size(VECTOR), aligned(1), may_alias));

typedef struct { uint64_t s1, s2; } Sum;

/* The sum of a run of bytes that arrives in parts of any size. */
typedef struct {
    Sum sum;
    uint64_t words;  /* whole words so far */
    uint64_t broken; /* the bytes of the next one that are there */
    int64_t bytes;   /* how many */
} Running;

INLINE uint64_t word_at(const char *from) {
    uint64_t w;
    memcpy(&w, from, 8);
#if __BYTE_ORDER__ == __ORDER_BIG_ENDIAN__
    w = __builtin_bswap64(w);
#endif
    return w;
}

INLINE void add_word(Running *r, uint64_t w) {
    r->sum.s1 += w;
    r->sum.s2 += ++r->words * w;
}

INLINE void add_bytes(Running *r, const char *from, int64_t n) {
    for (int64_t i = 0; i < n; i++) {
        r->broken |= (uint64_t)(unsigned char)from[i] << 8 * r->bytes;
        if (++r->bytes == 8) {
            add_word(r, r->broken);
            r->broken = 0, r->bytes = 0;
        }
    }
}

INLINE void stream(char *to, vec w) {
#if defined(__AVX512F__)
    _mm512_stream_si512((void *)to, (__m512i)w);
#elif defined(__AVX2__)
    _mm256_stream_si256((void *)to, (__m256i)w);
#elif defined(__SSE2__)
    _mm_stream_si128((void *)to, (__m128i)w);
#else
    *(loose *)to = w;
#endif
}

enum { SUM_ONLY, STORE, STREAM };

/* Per lane: a = sum w_k, p = sum of a after each k = sum (blocks - k) w_k; so sum k w_k = blocks * a - p. */
INLINE int64_t add_blocks(Running *r, char *to, const char *from, int64_t n, const int how) {
    vec a[PARTS] = {{0}}, p[PARTS] = {{0}};
    int64_t blocks = n / LINE;
    for (int64_t i = 0; i < blocks * LINE; i += LINE) {
        if (how != SUM_ONLY) __builtin_prefetch(from + i + AHEAD, 0, 3);
        for (int part = 0; part < PARTS; part++) {
            vec w = *(const loose *)(from + i + part * VECTOR);
            if (how == STREAM) stream(to + i + part * VECTOR, w);
            if (how == STORE) *(loose *)(to + i + part * VECTOR) = w;
#if __BYTE_ORDER__ == __ORDER_BIG_ENDIAN__
            for (int lane = 0; lane < VECTOR / 8; lane++) w[lane] = __builtin_bswap64(w[lane]);
#endif
            a[part] += w;
            p[part] += a[part];
        }
    }
    uint64_t sums[LANES], before[LANES];
    memcpy(sums, a, sizeof sums);
    memcpy(before, p, sizeof before);
    for (uint64_t lane = 0; lane < LANES; lane++) {
        r->sum.s1 += sums[lane];
        r->sum.s2 += LANES * ((uint64_t)blocks * sums[lane] - before[lane]) + (r->words + lane + 1) * sums[lane];
    }
    r->words += (uint64_t)(blocks * LANES);
    return blocks * LINE;
}

/* Add n bytes to the sum, and copy them too unless `to` is null. */
static void copy_run(Running *r, char *to, const char *from, int64_t n, int streamed) {
    if (r->bytes) { /* the last part broke a word: go on behind it */
        int64_t rest = 8 - r->bytes < n ? 8 - r->bytes : n;
        if (to) memcpy(to, from, rest), to += rest;
        add_bytes(r, from, rest);
        from += rest, n -= rest;
    }
    while (streamed && n >= 8 && (uintptr_t)to % 8 == 0 && (uintptr_t)to % LINE) {
        memcpy(to, from, 8);
        add_word(r, word_at(from));
        to += 8, from += 8, n -= 8;
    }
    int64_t done;
    if (!to) done = add_blocks(r, to, from, n, SUM_ONLY);
    else if (streamed && (uintptr_t)to % LINE == 0) done = add_blocks(r, to, from, n, STREAM);
    else done = add_blocks(r, to, from, n, STORE);
    if (to) memcpy(to + done, from + done, n - done);
    for (; done + 8 <= n; done += 8) add_word(r, word_at(from + done));
    add_bytes(r, from + done, n - done);
}

INLINE uint16_t brain(float x) {
    uint32_t u;
    memcpy(&u, &x, 4);
    uint32_t rounded = (u + 0x7FFF + (u >> 16 & 1)) >> 16;
    return (uint16_t)((u & 0x7FFFFFFF) > 0x7F800000 ? u >> 16 | 0x40 : rounded);
}

INLINE uint16_t half(float x) {
    uint32_t u, tiny;
    memcpy(&u, &x, 4);
    uint32_t sign = u >> 16 & 0x8000;
    u &= 0x7FFFFFFF;
    float magnitude;
    memcpy(&magnitude, &u, 4);
    magnitude += 0.5f; /* the lowest bit of a float at 0.5 is the lowest of a half below 2^-14: the addition rounds */
    memcpy(&tiny, &magnitude, 4);
    uint32_t normal = (u - (112u << 23) + 0xFFF + (u >> 13 & 1)) >> 13;
    uint32_t large = u > 0x7F800000 ? 0x7E00 : 0x7C00;
    return (uint16_t)(sign | (u >= 0x477FF000 ? large : u < 0x38800000 ? tiny - 0x3F000000 : normal));
}

enum { AS_IS, TO_BRAIN, TO_HALF }; /* what happens on the way; casts are from float */

typedef struct {
    char *to; /* null: only sum */
    const char *from;
    int64_t rows, row;              /* rows of so many bytes at the destination, one after the other */
    int64_t to_stride, from_stride; /* bytes from row to row */
    int64_t cast;
} Box;

static void cast_run(Running *r, char *to, const char *from, int64_t n, int64_t cast, int streamed) {
    uint16_t stage[STAGE / 2] __attribute__((aligned(64)));
    for (int64_t at = 0; at < n; at += STAGE) {
        int64_t now = n - at < STAGE ? n - at : STAGE;
        const char *source = from + 2 * at;
        for (int64_t i = 0; i < now / 2; i++) {
            float x;
            memcpy(&x, source + 4 * i, 4);
            stage[i] = cast == TO_BRAIN ? brain(x) : half(x);
        }
        copy_run(r, to + at, (const char *)stage, now, streamed);
    }
}

/* Bytes [begin, end) of what a box writes, counted without the gaps between its rows; begin is a multiple of 8. */
static Sum copy_piece(const Box *b, int64_t begin, int64_t end, int streamed) {
    Running r = {.words = (uint64_t)begin / 8};
    for (int64_t at = begin; at < end;) {
        int64_t row = at / b->row, column = at - row * b->row;
        int64_t n = b->row - column < end - at ? b->row - column : end - at;
        char *to = b->to ? b->to + row * b->to_stride + column : 0;
        if (b->cast == AS_IS) copy_run(&r, to, b->from + row * b->from_stride + column, n, streamed);
        else cast_run(&r, to, b->from + row * b->from_stride + 2 * column, n, b->cast, streamed);
        at += n;
    }
    if (r.bytes) add_word(&r, r.broken);
#if defined(__SSE2__)
    _mm_sfence();
#endif
    return r.sum;
}

typedef struct {
    const Box *boxes;
    int64_t bytes, count, box, at; /* the next piece begins at byte `at` of box `box` */
    Sum *sums;
    const char *base;
    _Atomic int64_t *watermark; /* everything from base up to here is written; may be null */
    int64_t threads, working[MOST_THREADS]; /* where each thread's piece begins, in bytes from base; -1: it has none */
    pthread_mutex_t lock;
} Work;

INLINE int64_t place(const Work *w, int64_t box, int64_t at) {
    const Box *b = w->boxes + box;
    return b->to - w->base + (at && b->row ? at / b->row * b->to_stride + at % b->row : 0);
}

/* The next piece for this thread: its box, or -1; what the last one gave is entered, and the watermark raised. */
static int64_t next_piece(Work *w, int64_t thread, int64_t *begin, int64_t *end, int64_t done, Sum sum) {
    pthread_mutex_lock(&w->lock);
    if (done >= 0) w->sums[done].s1 += sum.s1, w->sums[done].s2 += sum.s2;
    while (w->box < w->count && w->at >= w->boxes[w->box].rows * w->boxes[w->box].row) w->box++, w->at = 0;
    int64_t box = w->box < w->count ? w->box : -1;
    w->working[thread] = -1;
    if (box >= 0) {
        int64_t size = w->boxes[box].rows * w->boxes[box].row;
        *begin = w->at;
        *end = w->at = size - w->at < CHUNK ? size : w->at + CHUNK;
        w->working[thread] = place(w, box, *begin);
    }
    if (w->watermark) {
        int64_t low = INT64_MAX;
        for (int64_t t = 0; t < w->threads; t++)
            if (w->working[t] >= 0 && w->working[t] < low) low = w->working[t];
        if (low != INT64_MAX) atomic_store_explicit(w->watermark, low, memory_order_release);
    }
    pthread_mutex_unlock(&w->lock);
    return box;
}

static void labour(Work *w, int64_t thread) {
    int64_t begin = 0, end = 0, box = -1;
    Sum sum = {0, 0};
    while ((box = next_piece(w, thread, &begin, &end, box, sum)) >= 0) {
        const Box *b = w->boxes + box;
        sum = copy_piece(b, begin, end, w->bytes >= STREAMED && b->row >= STREAMED_ROW);
    }
}

/* A thread that leaves the process's signals to the others. */
static int begin_thread(pthread_t *thread, void *(*does)(void *), void *of) {
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    int error = pthread_create(thread, 0, does, of);
    pthread_sigmask(SIG_SETMASK, &before, 0);
    return error;
}

typedef struct { Work *work; int64_t thread; } Labourer;

static void *labourer(void *of) {
    Labourer *l = of;
    labour(l->work, l->thread);
    return 0;
}

/* Copy all boxes; sums[i] becomes the sums of what box i wrote, added to what is there. With a watermark the boxes lie in the order of
   their places, and while they are written it rises to where the first unwritten byte is, counted from base, and to
   `end` when all are. */
void dataflow_copy(const Box *boxes, int64_t count, Sum *sums, const char *base, void *watermark, int64_t end,
                   int64_t threads) {
    Work w = {.boxes = boxes, .count = count, .sums = sums, .base = base, .watermark = watermark};
    w.threads = threads < 1 ? 1 : threads > MOST_THREADS ? MOST_THREADS : threads;
    for (int64_t i = 0; i < count; i++) w.bytes += boxes[i].rows * boxes[i].row;
    for (int64_t t = 0; t < w.threads; t++) w.working[t] = -1;
    pthread_mutex_init(&w.lock, 0);
    pthread_t others[MOST_THREADS];
    Labourer labourers[MOST_THREADS];
    int64_t started = 1;
    for (; started < w.threads; started++) {
        labourers[started] = (Labourer){&w, started};
        if (begin_thread(&others[started], labourer, &labourers[started])) break;
    }
    labour(&w, 0);
    for (int64_t t = 1; t < started; t++) pthread_join(others[t], 0);
    pthread_mutex_destroy(&w.lock);
    if (watermark) atomic_store_explicit(w.watermark, end, memory_order_release);
}

/* The sums of count ranges of data. */
void dataflow_sums(const char *data, const int64_t *offsets, const int64_t *sizes, int64_t count, Sum *sums) {
    for (int64_t i = 0; i < count; i++) {
        Running r = {{0, 0}, 0, 0, 0};
        copy_run(&r, 0, data + offsets[i], sizes[i], 0);
        if (r.bytes) add_word(&r, r.broken);
        sums[i] = r.sum;
    }
}

enum { RUNNING, SUMMED, LOST };

/* Sums ranges of a buffer on a thread of its own, behind the one who writes it. */
typedef struct {
    const char *data;
    const int64_t *offsets, *sizes; /* ascending */
    int64_t count;
    Sum *sums;
    const _Atomic int64_t *progress; /* the version that is written, and its watermark; null: all is there */
    int64_t version;
    _Atomic int64_t stop, state;
    pthread_t thread;
} Follow;

/* Until the bytes before `end` are written; 0 when that will not happen, or has not within PATIENCE_NS. */
static int written(Follow *f, int64_t end) {
    for (int64_t nap = SHORTEST_NAP_NS, slept = 0; slept < PATIENCE_NS; slept += nap) {
        if (atomic_load_explicit(&f->stop, memory_order_relaxed)) return 0;
        if (!f->progress) return 1;
        if (atomic_load_explicit(f->progress, memory_order_acquire) != f->version) return 0;
        if (atomic_load_explicit(f->progress + 1, memory_order_acquire) >= end) return 1;
        if (slept > PATIENT_AFTER_NS) nap = LONGEST_NAP_NS;
        nanosleep(&(struct timespec){0, nap}, 0);
    }
    return 0;
}

static void *follower(void *of) {
    Follow *f = of;
    int64_t state = SUMMED;
    for (int64_t i = 0; i < f->count && state == SUMMED; i++) {
        Running r = {{0, 0}, 0, 0, 0};
        for (int64_t at = 0; at < f->sizes[i] && state == SUMMED; at += CHUNK) {
            int64_t n = f->sizes[i] - at < CHUNK ? f->sizes[i] - at : CHUNK;
            if (written(f, f->offsets[i] + at + n)) copy_run(&r, 0, f->data + f->offsets[i] + at, n, 0);
            else state = LOST;
        }
        if (r.bytes) add_word(&r, r.broken);
        f->sums[i] = r.sum;
    }
    atomic_store_explicit(&f->state, state, memory_order_release);
    return 0;
}

/* Begin; 0, or the error number that says why there is no thread. */
int64_t dataflow_follow(Follow *f) { return begin_thread(&f->thread, follower, f); }

/* Stop if it has not ended, and wait until its thread is gone. */
void dataflow_forget(Follow *f) {
    atomic_store(&f->stop, 1);
    pthread_join(f->thread, 0);
}
