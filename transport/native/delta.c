/* Finds where two buffers differ: a bit per block of 64 bytes, and the 16-bit words, page by page. */

#include <stdint.h>
#include <string.h>

#define BLOCK_WORDS 32
#define PAGE_WORDS 65536

static inline uint64_t four(const uint16_t *words, int i) {
    uint64_t found;
    memcpy(&found, words + 4 * i, sizeof found);
    return found;
}

/* The words from `at` to `end` that differ, appended to lows and values. How many there are then. */
static inline int64_t append(
    const uint16_t *old, const uint16_t *new, int64_t low, int64_t at, int64_t end, int64_t total,
    uint16_t *lows, uint16_t *values
) {
    for (int64_t i = at; i < end; i++) {
        lows[total] = (uint16_t)(i - low);
        values[total] = new[i];
        total += old[i] != new[i];
    }
    return total;
}

/* blocks: a bit for each whole block, zeroed by the caller; counts: words of each page that differ; lows and values:
   their places in their pages and what `new` has there, as long as there are no more than `most` (room for
   BLOCK_WORDS more is there). The number of words that differ. */
int64_t dataflow_differences(
    const uint16_t *old, const uint16_t *new, int64_t words, int64_t most,
    uint8_t *blocks, int32_t *counts, uint16_t *lows, uint16_t *values
) {
    int64_t total = 0, whole = words / BLOCK_WORDS * BLOCK_WORDS;
    for (int64_t page = 0; page * PAGE_WORDS < words; page++) {
        int64_t low = page * PAGE_WORDS, high = words - low < PAGE_WORDS ? words : low + PAGE_WORDS, before = total;
        for (int64_t at = low; at < high; at += BLOCK_WORDS) {
            uint64_t changed[BLOCK_WORDS / 4], any = 0;
            if (at < whole) {
                for (int i = 0; i < BLOCK_WORDS / 4; i++) any |= changed[i] = four(old + at, i) ^ four(new + at, i);
                if (!any) continue;
                blocks[at / BLOCK_WORDS / 8] |= (uint8_t)(1 << at / BLOCK_WORDS % 8);
            }
            if (total > most) { /* from here on they are only counted */
                int64_t end = at < whole ? at + BLOCK_WORDS : high;
                for (int64_t i = at; i < end; i++) total += old[i] != new[i];
            } else if (at >= whole) {
                total = append(old, new, low, at, high, total, lows, values);
            } else {
                for (int i = 0; i < BLOCK_WORDS / 4; i++)
                    if (changed[i])
                        total = append(old, new, low, at + 4 * i, at + 4 * i + 4, total, lows, values);
            }
        }
        counts[page] = (int32_t)(total - before);
    }
    return total;
}
