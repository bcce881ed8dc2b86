#include "ops/plan/walk.h"

/* Goes to the first key of the next listed column, or to BA_WALK_END. */
static void next_column(ba_walk *w) {
    int64_t column = w->column + 1;
    if (!w->bitmap) { /* all keys form one column */
        w->key = column == 0 ? 0 : BA_WALK_END;
        w->end = w->keys;
    } else {
        int64_t word = column / 64;
        uint64_t bits = word < w->words ? w->bitmap[word] >> (column % 64) << (column % 64) : 0;
        while (!bits && ++word < w->words) bits = w->bitmap[word];
        column = bits ? word * 64 + __builtin_ctzll(bits) : w->words * 64;
        w->key = bits ? column * w->block_kv : BA_WALK_END;
        w->end = ba_min(w->keys, (column + 1) * w->block_kv);
    }
    w->column = column;
}

/* Goes on to the next column where the current one is finished, and ends the walk at its `stop` or where no later key is seen. */
static void settle(ba_walk *w) {
    while (w->key != BA_WALK_END && w->key >= w->end && w->key < w->keys) next_column(w);
    if (w->key >= w->keys || w->key >= w->range.hi || w->position >= w->stop) w->key = BA_WALK_END;
}

static void advance(ba_walk *w, int64_t keys) {
    w->key += keys;
    w->position += keys;
}

void ba_walk_begin(ba_walk *w, int64_t start) {
    w->column = -1;
    w->position = 0;
    next_column(w);
    settle(w);
    while (w->key != BA_WALK_END && w->position < start) {
        advance(w, ba_min(w->end - w->key, start - w->position));
        settle(w);
    }
    /* Go on to the first key that is seen, remember the beginning of its chunk on the way, and return to this beginning. */
    ba_walk chunk = *w;
    while (w->key < w->range.lo) {
        const int64_t unseen = ba_min(w->end, w->range.lo) - w->key;
        const int64_t boundary = (w->position + unseen) / w->chunk_keys * w->chunk_keys;
        if (boundary > chunk.position) {
            chunk = *w;
            advance(&chunk, boundary - w->position);
        }
        advance(w, unseen);
        settle(w);
    }
    if (w->key == BA_WALK_END) return;
    *w = chunk;
    settle(w);
}

int64_t ba_walk_take(ba_walk *w, int32_t *key_index) {
    const int64_t room = ba_min(w->chunk_keys, w->stop - w->position);
    int64_t n = 0;
    while (n < room && w->key != BA_WALK_END) {
        const int64_t some = ba_min(room - n, ba_min(w->end, w->range.hi) - w->key);
        for (int64_t i = 0; i < some; i++) key_index[n + i] = (int32_t)(w->key + i);
        n += some;
        advance(w, some);
        settle(w);
    }
    return n;
}

int64_t ba_first_at_least(const int32_t *rising, int64_t n, int64_t value) {
    int64_t low = 0;
    while (low < n) {
        const int64_t middle = (low + n) / 2;
        if (rising[middle] < value) low = middle + 1;
        else n = middle;
    }
    return low;
}
