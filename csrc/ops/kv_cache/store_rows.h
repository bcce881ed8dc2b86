/* Stores rows of K and V in the dtype of a cache. Where that dtype has 8 bits or fewer, all numbers are checked first, so that nothing is written
 * where a number cannot be quantised. Internal. */
#ifndef BA_OPS_STORE_ROWS_H
#define BA_OPS_STORE_ROWS_H

#include <stdatomic.h>

#include "kernels/kernels.h"
#include "ops/problem.h"

/* The rows of one array, (tokens, heads, dim), and where they go. Strides of `from`, `to` and `scale` count elements. */
typedef struct ba_stored_rows {
    const char *name; /* of the array, for a sentence */
    ba_dtype from_dtype, to_dtype;
    int64_t dim;
    const char *from;
    int64_t token_stride, head_stride;
    ba_view to, scale;   /* the batch strides are those from one page to the next. Only 8-bit dtypes have scales */
    bool scale_is_fixed; /* scales are read, and not written; of no meaning where there are none */
    /* The rest is set by ba_store_rows(). */
    ba_pack_rows_fn pack;    /* converts from_dtype to float; NULL where it is float32 or float64 */
    ba_store_row_fn convert; /* converts reals to to_dtype; NULL for dtypes of 8 bits and fewer */
    ba_magnitude_fn magnitude;
    ba_quantise_fn quantise; /* NULL for float dtypes */
    _Atomic bool unfit;      /* some row cannot be quantised */
} ba_stored_rows;

typedef struct ba_store_call {
    ba_stored_rows rows[2]; /* of K and V: both go to one dtype, or both to dtypes with cells */
    int arrays;             /* 1 or 2 */
    int64_t tokens, heads, page_size;
    const int64_t *slots; /* NULL: token t goes to slot t. Else -1 leaves a token out. Slot s is row s % page_size of page s / page_size */
    /* The rest is set by ba_store_rows(). */
    int64_t item_tokens;
    char *scratch;
    int64_t scratch_bytes; /* per worker */
} ba_store_call;

/* Stores the rows. Fails where a number cannot be quantised, for want of memory, or where it is interrupted. */
ba_status ba_store_rows(ba_store_call *c, int num_threads);

#endif
