/* One decoded token per active row: writes its key and value into the row's slot and attends to the slot's positions.

   Axes: n rows, S slots, K key/value heads, R query heads for each of them, T positions of a slot, D width of a head.
   float32; keys and values are [S, K, T, D]; strides of the new tensors in floats, their last axis dense. A window of 0
   means all positions, a softcap of 0 none. scratch: T floats. */

#include <stdint.h>
#include <string.h>

static inline float exponential(float x) {
    x = x < -87.0f ? -87.0f : x;
    float n = __builtin_rintf(x * 1.44269504088896341f);
    float r = x - n * 0.693359375f;
    r = r + n * 2.12194440e-4f;
    float p = 1.9875691500e-4f;
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * r * r + r + 1.0f;
    int32_t bits = ((int32_t)n + 127) << 23;
    float power;
    memcpy(&power, &bits, sizeof power);
    return p * power;
}

static inline float dot(const float *restrict a, const float *restrict b, int64_t width) {
    float sum = 0.0f;
    for (int64_t i = 0; i < width; i++) sum += a[i] * b[i];
    return sum;
}

static inline void attend(const float *restrict q, const float *restrict keys, const float *restrict values,
                          float *restrict out, float *restrict scores, int64_t count, int64_t width, float scale,
                          float softcap, const float *next_keys, const float *next_values) {
    float largest = -3.4028234e38f;
    for (int64_t t = 0; t < count; t++) {
        for (int64_t line = 0; line < width; line += 16) {
            __builtin_prefetch(next_keys + t * width + line);
            __builtin_prefetch(next_values + t * width + line);
        }
        scores[t] = dot(q, keys + t * width, width) * scale;
    }
    if (softcap > 0.0f)
        for (int64_t t = 0; t < count; t++) scores[t] = softcap * __builtin_tanhf(scores[t] / softcap);
    for (int64_t t = 0; t < count; t++) largest = scores[t] > largest ? scores[t] : largest;
    float total = 0.0f;
    for (int64_t t = 0; t < count; t++) {
        scores[t] = exponential(scores[t] - largest);
        total += scores[t];
    }
    float share = 1.0f / total;
    for (int64_t i = 0; i < width; i++) out[i] = 0.0f;
    for (int64_t t = 0; t < count; t++) {
        float weight = scores[t] * share;
        for (int64_t i = 0; i < width; i++) out[i] += weight * values[t * width + i];
    }
}

void decode_attention(const float *q, int64_t q_row, int64_t q_head, const float *k, int64_t k_row, int64_t k_head,
                      const float *v, int64_t v_row, int64_t v_head, float *keys, float *values, const int64_t *slots,
                      const int64_t *positions, float *out, float *scratch, int64_t rows, int64_t heads,
                      int64_t repeats, int64_t tokens, int64_t width, int64_t window, float scale, float softcap) {
    int64_t block = tokens * width;
    for (int64_t row = 0; row < rows; row++) {
        int64_t end = positions[row];
        int64_t first = window > 0 && end + 1 > window ? end + 1 - window : 0;
        for (int64_t head = 0; head < heads; head++) {
            int64_t at = (slots[row] * heads + head) * block;
            int64_t next = head + 1 < heads ? at + block : slots[row + 1 < rows ? row + 1 : row] * heads * block;
            float *own_keys = keys + at, *own_values = values + at;
            memcpy(own_keys + end * width, k + row * k_row + head * k_head, width * sizeof(float));
            memcpy(own_values + end * width, v + row * v_row + head * v_head, width * sizeof(float));
            for (int64_t r = 0; r < repeats; r++) {
                int64_t query = head * repeats + r;
                attend(q + row * q_row + query * q_head, own_keys + first * width, own_values + first * width,
                       out + (row * heads * repeats + query) * width, scratch, end + 1 - first, width, scale, softcap,
                       keys + next, values + next);
            }
        }
    }
}
