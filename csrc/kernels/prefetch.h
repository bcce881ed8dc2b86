/* Prefetching of rows that are used later. Rows lie where pages put them, which no hardware prefetcher can predict. A burst of prefetches would delay
 * the loads behind it, and a pause would leave memory idle. So a few kernel prefetches one or a few lines at every step of its work, in the order in
 * which the rows lie.
 *
 * A core drops a prefetch when all its buffers for outstanding misses are taken, as they are where memory is the bottleneck. The load that needs this
 * line then waits for memory, and so do the sums that need the load, until the core can issue no further loads. So a second and a third pass over the
 * same lines follow, nearer to the use. For a line that an earlier pass has brought, they cost one instruction. */
#ifndef BA_PREFETCH_H
#define BA_PREFETCH_H

#include "kernels/kernels.h"

/* Where prefetches go, as __builtin_prefetch counts: 2 is L2, 3 is L1. A trait of a level (traits.h). */
#ifndef BA_PREFETCH_LEVEL
#define BA_PREFETCH_LEVEL 2
#endif

enum {
    BA_LINE_BYTES = 64,
    BA_PREFETCH_RUN = 16 /* the most rows of a run; pages of fewer tokens give shorter runs */
};

/* One pass over the rows: how far it has come. A run is several rows without a gap between them. */
typedef struct ba_prefetch_pass {
    const char *at, *stop;  /* the next byte of the current run, and its end */
    const void *const *row; /* the run's first row; the prefetcher's `end` when the pass is over */
    int64_t rows;           /* of the run */
} ba_prefetch_pass;

typedef struct ba_prefetcher {
    ba_prefetch_pass pass[BA_PREFETCH_PASSES];
    const void *const *others, *const *end;
    int64_t offset, bytes, other_bytes; /* as in ba_prefetch_rows */
    int64_t share;                      /* a sixteenth of all lines */
    int64_t run;                        /* the most rows of a run; 1 where the first two rows have a gap between them */
    int farthest;                       /* the index of the pass that is farthest from the use */
} ba_prefetcher;

/* A pass that goes on at `row`. Its run has as many rows as the prefetcher allows, halved until they follow each other without a gap. */
static inline ba_prefetch_pass ba_prefetch_pass_from(const ba_prefetcher *a, const void *const *row) {
    if (row >= a->end) return (ba_prefetch_pass){.row = a->end};
    const void *const *end = row < a->others ? a->others : a->end;
    const int64_t bytes = row < a->others ? a->bytes : a->other_bytes;
    int64_t rows = a->run;
    while (rows > 1 && (end - row < rows || (const char *)row[rows - 1] - (const char *)*row != (rows - 1) * bytes)) rows /= 2;
    const char *at = (const char *)*row + a->offset;
    return (ba_prefetch_pass){at, at + rows * bytes, row, rows};
}

/* The prefetcher of a call's rows to come. Pass i begins at row skip[i]; -1 means that there is no such pass. */
static inline ba_prefetcher ba_prefetcher_for(ba_prefetch_rows wanted) {
    ba_prefetcher a = {.end = wanted.rows, .offset = wanted.offset, .bytes = wanted.bytes, .other_bytes = wanted.other_bytes};
    for (int i = 0; i < BA_PREFETCH_PASSES; i++) a.pass[i].row = a.end;
    if (wanted.count <= 0) return a;
    a.end += wanted.count;
    a.others = a.end - wanted.others;
    a.run = wanted.count > 1 && (const char *)wanted.rows[1] - (const char *)wanted.rows[0] == wanted.bytes ? BA_PREFETCH_RUN : 1;
    for (int i = 0; i < BA_PREFETCH_PASSES; i++) {
        const int64_t skip = wanted.skip[i] < 0 ? wanted.count : ba_min(wanted.skip[i], wanted.count);
        a.pass[i] = ba_prefetch_pass_from(&a, wanted.rows + skip);
        if (wanted.skip[i] >= 0) a.farthest = i;
    }
    a.share = ba_ceil_div(wanted.count * ba_ceil_div(a.bytes, BA_LINE_BYTES), 16);
    return a;
}

static inline bool ba_prefetcher_is_done(const ba_prefetcher *a) { return a->pass[0].row == a->end; }

/* Moves a pass on by `bytes` bytes of its run, and to the next run where this one ends. */
static inline void ba_prefetch_advance(const ba_prefetcher *a, ba_prefetch_pass *pass, int64_t bytes) {
    pass->at += bytes;
    if (pass->at >= pass->stop) *pass = ba_prefetch_pass_from(a, pass->row + pass->rows);
}

/* Prefetches the next `bytes` bytes of a pass, over as many runs as it takes. */
static __attribute__((noinline, unused)) void ba_prefetch_bytes(const ba_prefetcher *a, ba_prefetch_pass *pass, int64_t bytes) {
    while (bytes > 0 && pass->row != a->end) {
        const int64_t some = ba_min(bytes, pass->stop - pass->at);
        for (int64_t at = 0; at < some; at += BA_LINE_BYTES) __builtin_prefetch(pass->at + at, 0, BA_PREFETCH_LEVEL);
        bytes -= some;
        ba_prefetch_advance(a, pass, some);
    }
}

/* Takes the next `bytes` bytes of a pass and returns where they begin, so that the caller prefetches them line by line. Where the current run has
 * fewer bytes, this function prefetches the next `bytes` bytes itself, from several runs, and the caller gets `otherwise`, memory of its own: the
 * memory behind a run may belong to another head. */
static inline const char *ba_prefetch_take(const ba_prefetcher *a, ba_prefetch_pass *pass, int64_t bytes, const void *otherwise) {
    const char *taken = pass->at;
    if (pass->stop - taken < bytes) {
        if (pass->row != a->end) ba_prefetch_bytes(a, pass, bytes);
        return otherwise;
    }
    ba_prefetch_advance(a, pass, bytes);
    return taken;
}

/* Prefetches share * queries / (8 * heads) lines of pass `index`, or of the farthest pass if that one is nearer to the use. The number of lines is
 * proportional to the time that the softmax of `queries` queries takes, for one of `heads` heads. */
static inline void ba_prefetch_share(ba_prefetcher *a, int index, int64_t queries, int64_t heads) {
    ba_prefetch_bytes(a, &a->pass[index < a->farthest ? index : a->farthest], ba_ceil_div(a->share * queries, 8 * heads) * BA_LINE_BYTES);
}

#endif
