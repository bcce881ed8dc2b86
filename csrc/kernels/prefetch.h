/* Asking for rows ahead of their use. They lie where pages put them, which no hardware prefetcher can tell; and what is asked for in a
 * burst holds up the loads behind it, while a pause leaves memory idle. So the kernels for few ask a line or a few at every step of
 * their work, in the order in which the rows lie.
 *
 * A request may be dropped: Zen 5 has places for some 64 to 100 lines that are under way, and while memory is what binds they are taken. The load
 * that then has to wait keeps sums waiting behind it, until there is no room for more and the reading of what lies ahead stops too. So a second and
 * a third request follow nearer to the use; where an earlier one was heard they cost an instruction. That core also does nothing for a request into
 * L2 (PREFETCHT1, T2) of a line that no cache has: a level says where its requests go to (BA_PREFETCH_LEVEL). */
#ifndef BA_PREFETCH_H
#define BA_PREFETCH_H

#include "kernels/kernels.h"

/* As __builtin_prefetch counts: 2 is L2, 3 L1. */
#ifndef BA_PREFETCH_LEVEL
#define BA_PREFETCH_LEVEL 2
#endif

enum { BA_LINE_BYTES = 64, BA_PREFETCH_RUN = 16 /* rows: a page has as many, or more */ };

typedef struct ba_prefetch_request {
    const char *at, *stop;  /* of the run at hand: rows without a gap between them */
    const void *const *row; /* its first */
    int64_t rows;
} ba_prefetch_request;

typedef struct ba_prefetcher {
    ba_prefetch_request request[BA_MOST_REQUESTS];
    const void *const *end;
    int64_t offset, bytes;
    int64_t share; /* lines: a sixteenth of all */
    int64_t run;   /* rows that a run may have: 1 where the first ones have a gap between them */
    int farthest;  /* request */
} ba_prefetcher;

static inline ba_prefetch_request ba_prefetch_request_from(const ba_prefetcher *a, const void *const *row) {
    if (row >= a->end) return (ba_prefetch_request){.row = a->end};
    int64_t rows = a->run;
    while (rows > 1 && (a->end - row < rows || (const char *)row[rows - 1] - (const char *)*row != (rows - 1) * a->bytes)) rows /= 2;
    const char *at = (const char *)*row + a->offset;
    return (ba_prefetch_request){at, at + rows * a->bytes, row, rows};
}

static inline ba_prefetcher ba_prefetcher_for(ba_prefetch_rows ahead) {
    ba_prefetcher a = {.end = ahead.rows, .offset = ahead.offset, .bytes = ahead.bytes};
    for (int i = 0; i < BA_MOST_REQUESTS; i++) a.request[i].row = a.end;
    if (ahead.count <= 0) return a;
    a.end += ahead.count;
    a.run = ahead.count > 1 && (const char *)ahead.rows[1] - (const char *)ahead.rows[0] == ahead.bytes ? BA_PREFETCH_RUN : 1;
    for (int i = 0; i < BA_MOST_REQUESTS; i++) {
        const int64_t skip = ahead.skip[i] < 0 ? ahead.count : ba_min(ahead.skip[i], ahead.count);
        a.request[i] = ba_prefetch_request_from(&a, ahead.rows + skip);
        if (ahead.skip[i] >= 0) a.farthest = i;
    }
    a.share = ba_ceil_div(ahead.count * ba_ceil_div(a.bytes, BA_LINE_BYTES), 16);
    return a;
}

static inline bool ba_prefetcher_is_done(const ba_prefetcher *a) { return a->request[0].row == a->end; }

/* So many bytes of the run at hand have been asked for: on to the next if they were its last. */
static inline void ba_prefetch_advance(const ba_prefetcher *a, ba_prefetch_request *which, int64_t bytes) {
    which->at += bytes;
    if (which->at >= which->stop) *which = ba_prefetch_request_from(a, which->row + which->rows);
}

/* The next line of the farthest request; false: there is none. */
static inline bool ba_prefetch_line(ba_prefetcher *a) {
    ba_prefetch_request *farthest = &a->request[a->farthest];
    if (farthest->row == a->end) return false;
    __builtin_prefetch(farthest->at, 0, BA_PREFETCH_LEVEL);
    ba_prefetch_advance(a, farthest, BA_LINE_BYTES);
    return true;
}

/* Asks for `bytes` that no run has in one piece; what comes after them is left for the next call. */
static __attribute__((noinline, unused)) void ba_prefetch_bytes(const ba_prefetcher *a, ba_prefetch_request *which, int64_t bytes) {
    while (bytes > 0 && which->row != a->end) {
        const int64_t some = ba_min(bytes, which->stop - which->at);
        for (int64_t at = 0; at < some; at += BA_LINE_BYTES) __builtin_prefetch(which->at + at, 0, BA_PREFETCH_LEVEL);
        bytes -= some;
        ba_prefetch_advance(a, which, some);
    }
}

/* The next `bytes` of the rows, for the caller to ask for line by line; where no run has so many in one piece, they are asked for here, and the
 * caller is given `otherwise`: its scratch, for what lies behind a run may be another head's, which nobody wants. */
static inline const char *ba_prefetch_take(const ba_prefetcher *a, ba_prefetch_request *which, int64_t bytes, const void *otherwise) {
    const char *slice = which->at;
    if (which->stop - slice < bytes) {
        if (which->row != a->end) ba_prefetch_bytes(a, which, bytes);
        return otherwise;
    }
    ba_prefetch_advance(a, which, bytes);
    return slice;
}

/* Request `which`, or the farthest, goes on by `part` shares for every eight queries of one of the heads that are met meanwhile: what takes longer
 * asks for more. */
static inline void ba_prefetch_share(ba_prefetcher *a, int which, int64_t part, int64_t heads) {
    ba_prefetch_bytes(a, &a->request[which < a->farthest ? which : a->farthest], ba_ceil_div(a->share * part, 8 * heads) * BA_LINE_BYTES);
}

#endif
