/* Runs a call and checks what the header promises of every call. */
#include <inttypes.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "memory.h"

#define NAME(op, name) name,
static const char *const names[FZ_OPS] = {FZ_EACH_OP(NAME)};
static struct {
    int64_t accepted, refused, skipped, compared;
} counts[FZ_OPS];
static fz_op running;
static bool any_order;

enum { FIRST = 0xa5, SECOND = 0x5a }; /* the bytes that fill the outputs before the first and the second run */

/* ---- Reports ---------------------------------------------------------------------------------------------------------------- */

static void print_block(const fz_block *b) {
    static const char *const roles[] = {"input", "output", "output in part"};
    if (!b->is_tensor) {
        fprintf(stderr, "  array of %zu bytes:", b->bytes);
        for (size_t i = 0; i < b->bytes / 8 && i < 12; i++) fprintf(stderr, " %" PRId64, ((const int64_t *)b->memory)[i]);
        fprintf(stderr, "\n");
        return;
    }
    const ba_tensor *t = &b->tensor;
    fprintf(stderr, "  %s: %s(%d), %d axes", roles[b->role], ba_dtype_name(t->dtype), (int)t->dtype, t->ndim);
    for (int i = 0; i < BA_MAX_DIMS; i++) fprintf(stderr, i ? ", %" PRId64 ":%" PRId64 : " (%" PRId64 ":%" PRId64, t->dims[i], t->strides[i]);
    fprintf(stderr, ")%s%s, %zu bytes\n", t->data ? "" : " without data", b->refused ? " to be refused" : "", b->bytes);
}

static void print_call(void) {
    fprintf(stderr, "call: %s at %s\n", names[running], ba_isa_name(ba_isa_active()));
    for (int i = 0; i < fz_block_count; i++) print_block(&fz_blocks[i]);
}

void fz_fail(const char *format, ...) {
    va_list args;
    va_start(args, format);
    fprintf(stderr, "broken promise: ");
    vfprintf(stderr, format, args);
    fprintf(stderr, "\nlast error: %s\n", ba_last_error());
    va_end(args);
    print_call();
    abort();
}

void fz_count_skipped(fz_op op) { counts[op].skipped++; }
void fz_count_compared(fz_op op) { counts[op].compared++; }
void fz_expect_any_order(void) { any_order = true; }

void fz_print_counts(void) {
    for (int op = 0; op < FZ_OPS; op++)
        fprintf(stderr, "count %s: %" PRId64 " accepted, %" PRId64 " refused, %" PRId64 " compared, %" PRId64 " skipped\n", names[op],
                counts[op].accepted, counts[op].refused, counts[op].compared, counts[op].skipped);
}

/* ---- Promises ---------------------------------------------------------------------------------------------------------------- */

static bool all_bytes(const char *memory, size_t bytes, int value) {
    for (size_t i = 0; i < bytes; i++)
        if ((unsigned char)memory[i] != value) return false;
    return true;
}

static void check_inputs(void) {
    for (int i = 0; i < fz_block_count; i++) {
        const fz_block *b = &fz_blocks[i];
        if (b->role == FZ_INPUT && memcmp(b->memory, b->copy, b->bytes) != 0) fz_fail("block %d: expected an input as it was, got another", i);
    }
}

static void check_untouched(int value) {
    for (int i = 0; i < fz_block_count; i++)
        if (fz_blocks[i].role != FZ_INPUT && !all_bytes(fz_blocks[i].memory, fz_blocks[i].bytes, value))
            fz_fail("block %d: expected an output as it was, since the call was refused, got another", i);
}

static void check_sentence(ba_status status, const int *num_threads) {
    const char *text = ba_last_error();
    const size_t length = strlen(text);
    const bool many = num_threads && *num_threads > 64;
    if (status == BA_ERROR_MEMORY && !many) fz_fail("expected memory for a small problem, got none");
    if (status != BA_ERROR_TYPE && status != BA_ERROR_VALUE && status != BA_ERROR_MEMORY) fz_fail("expected a refusal, got status %d", (int)status);
    if (status != BA_ERROR_MEMORY && !strstr(text, ": expected ")) fz_fail("expected a sentence `name: expected ..., got ...`, got \"%s\"", text);
    for (size_t i = 0; i < length; i++)
        if (text[i] < ' ' || text[i] > '~') fz_fail("expected printable text, got \"%s\"", text);
}

static bool is_nan(const char *element, ba_dtype dtype) {
    static const uint64_t infinity[] = {0x7f800000u, 0x7c00u, 0x7f80u, 0x7ff0000000000000u};
    static const uint64_t magnitude[] = {0x7fffffffu, 0x7fffu, 0x7fffu, 0x7fffffffffffffffu};
    uint64_t bits = 0;
    if ((unsigned)dtype > BA_FLOAT64) return false;
    memcpy(&bits, element, (size_t)ba_dtype_size(dtype));
    return (bits & magnitude[dtype]) > infinity[dtype];
}

static int64_t offset_of(const fz_block *b, const int64_t *at, int64_t size) {
    int64_t offset = (char *)b->tensor.data - b->memory;
    for (int i = 0; i < b->tensor.ndim; i++) offset += at[i] * b->tensor.strides[i] * size;
    return offset;
}

/* Marks the bytes of all elements. */
static void mark_elements(int index, char *own) {
    const fz_block *b = &fz_blocks[index];
    const size_t size = (size_t)ba_dtype_size(b->tensor.dtype);
    int64_t at[BA_MAX_DIMS] = {0};
    do {
        const int64_t offset = offset_of(b, at, (int64_t)size);
        for (size_t i = 0; i < size; i++)
            if (own[offset + (int64_t)i]++) fz_fail("block %d: expected a refusal of an output whose elements share memory", index);
    } while (fz_next(at, b->tensor.dims, b->tensor.ndim));
}

/* Compares the result of the second run with that of the first: elements must be the same, and all other bytes as they were before each run. */
static void compare_output(int index) {
    const fz_block *b = &fz_blocks[index];
    const ba_tensor *t = &b->tensor;
    const size_t size = (size_t)ba_dtype_size(t->dtype);
    if (b->bytes == 0) return;
    char *own = calloc(b->bytes, 1);
    int64_t at[BA_MAX_DIMS] = {0};
    mark_elements(index, own);
    if (!any_order) {
        do {
            const int64_t offset = offset_of(b, at, (int64_t)size);
            const char *first = b->copy + offset, *second = b->memory + offset;
            const bool unwritten = b->role == FZ_PARTIAL && all_bytes(first, size, FIRST) && all_bytes(second, size, SECOND);
            if (memcmp(first, second, size) == 0 || unwritten || (is_nan(first, t->dtype) && is_nan(second, t->dtype))) continue;
            uint64_t bits[2] = {0};
            memcpy(&bits[0], first, size);
            memcpy(&bits[1], second, size);
            fz_fail("block %d: expected every element written, and the same for any number of threads, got %" PRIx64 " and %" PRIx64 " at (%" PRId64
                    ", %" PRId64 ", %" PRId64 ", %" PRId64 ")",
                    index, bits[0], bits[1], at[0], at[1], at[2], at[3]);
        } while (fz_next(at, t->dims, t->ndim));
        for (size_t i = 0; i < b->bytes; i++)
            if (!own[i] && ((unsigned char)b->copy[i] != FIRST || (unsigned char)b->memory[i] != SECOND))
                fz_fail("block %d: expected nothing written between elements, got byte %zu", index, i);
    }
    free(own);
}

static void prepare(int value) {
    for (int i = 0; i < fz_block_count; i++)
        if (fz_blocks[i].role != FZ_INPUT) memset(fz_blocks[i].memory, value, fz_blocks[i].bytes);
}

bool fz_run(fz_op op, fz_fn fn, const void *args, int *num_threads) {
    static int verbose = -1;
    if (verbose < 0) verbose = getenv("FUZZ_VERBOSE") != NULL;
    running = op;
    if (verbose) print_call();
    for (int i = 0; i < fz_block_count; i++) memcpy(fz_blocks[i].copy, fz_blocks[i].memory, fz_blocks[i].bytes);
    prepare(FIRST);
    const ba_status status = fn(args);
    if (verbose) fprintf(stderr, "  status %d: %s\n", (int)status, status ? ba_last_error() : "accepted");
    check_inputs();
    if (status != BA_OK) {
        counts[op].refused++;
        check_untouched(FIRST);
        check_sentence(status, num_threads);
        any_order = false;
        return false;
    }
    counts[op].accepted++;
    for (int i = 0; i < fz_block_count; i++) {
        if (fz_blocks[i].refused && !fz_blocks[i].unseen) fz_fail("block %d: expected a refusal, got a call that was accepted", i);
        if (fz_blocks[i].role != FZ_INPUT) memcpy(fz_blocks[i].copy, fz_blocks[i].memory, fz_blocks[i].bytes);
    }
    prepare(SECOND);
    const int before = num_threads ? *num_threads : ba_get_num_threads(), other = before == 1 ? 3 : 1;
    if (num_threads) *num_threads = other;
    else ba_set_num_threads(other);
    if (fn(args) != BA_OK) fz_fail("expected that %d threads are as good as %d, got a refusal", other, before);
    if (num_threads) *num_threads = before;
    else ba_set_num_threads(before);
    check_inputs();
    for (int i = 0; i < fz_block_count; i++)
        if (fz_blocks[i].role != FZ_INPUT && fz_blocks[i].is_tensor) compare_output(i);
    any_order = false;
    return true;
}

int fz_threads(void) {
    static const int64_t usual[] = {1, 2, 1, 3, 4, 1, 2, 0}, rare[] = {5, 8, 16, 64};
    if (fz_unusual()) return (int)fz_unusual_number();
    return (int)(fz_once_in(32) ? fz_pick(rare, 4) : fz_pick(usual, 8));
}
