/* The memory of a call's tensors. Each has a block of its own, which ends where the tensor ends. */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "memory.h"

#if defined(__has_feature)
#if __has_feature(address_sanitizer)
#include <sanitizer/asan_interface.h>
#endif
#endif
#ifndef ASAN_POISON_MEMORY_REGION /* for builds without a sanitizer, which only run inputs again */
#define ASAN_POISON_MEMORY_REGION(memory, bytes) ((void)(memory), (void)(bytes))
#define ASAN_UNPOISON_MEMORY_REGION(memory, bytes) ((void)(memory), (void)(bytes))
#endif

enum { MOST_BYTES = 1 << 20, MOST_COUNT = 1 << 12 };

fz_block fz_blocks[FZ_MOST_BLOCKS];
int fz_block_count;
static enum { TAME, ROUGH, LARGE, ZERO } contents;

/* ---- Blocks -------------------------------------------------------------------------------------------------------------- */

static fz_block *new_block(fz_role role, size_t bytes) {
    if (fz_block_count == FZ_MOST_BLOCKS) fz_fail("the fuzzer has too few blocks");
    fz_block *b = &fz_blocks[fz_block_count++];
    *b = (fz_block){.role = role, .bytes = bytes};
    b->slack = 8 * (size_t)fz_range(0, 7);
    b->base = malloc(b->slack + bytes);
    b->memory = b->base + b->slack;
    b->copy = malloc(bytes + 1);
    ASAN_POISON_MEMORY_REGION(b->base, b->slack);
    return b;
}

void fz_release_all(void) {
    for (int i = 0; i < fz_block_count; i++) {
        ASAN_UNPOISON_MEMORY_REGION(fz_blocks[i].base, fz_blocks[i].slack);
        free(fz_blocks[i].base);
        free(fz_blocks[i].copy);
    }
    fz_block_count = 0;
}

/* Tensors without memory may be equal in every bit. A record of one such tensor then applies to all of them. */
static bool is_block_of(const fz_block *b, const ba_tensor *t) { return b->is_tensor && memcmp(&b->tensor, t, sizeof *t) == 0; }

void fz_set_role(const ba_tensor *t, fz_role role) {
    for (int i = 0; i < fz_block_count; i++)
        if (is_block_of(&fz_blocks[i], t)) fz_blocks[i].role = role;
}

void fz_unseen(const ba_tensor *t) {
    for (int i = 0; i < fz_block_count; i++)
        if (is_block_of(&fz_blocks[i], t)) fz_blocks[i].unseen = true;
}

bool fz_backed(const ba_tensor *t) {
    if (t->ndim < 0 || t->ndim > BA_MAX_DIMS) return false;
    for (int i = 0; i < fz_block_count; i++)
        if (is_block_of(&fz_blocks[i], t)) return !fz_blocks[i].refused;
    return false;
}

/* ---- Contents -------------------------------------------------------------------------------------------------------------- */

void fz_draw_contents(void) {
    static const int64_t kinds[] = {TAME, TAME, TAME, ROUGH, TAME, LARGE, TAME, ZERO};
    contents = (int)fz_pick(kinds, 8);
}

bool fz_is_tame(void) { return contents == TAME || contents == ZERO; }

static float next_value(void) {
    static const float rough[] = {NAN, INFINITY, -INFINITY, 3e38f, -3e38f, 1e-40f, -0.0f, 65504, 1e-7f};
    if (contents == ZERO) return 0;
    if (contents == ROUGH && fz_random() % 16 == 0) return rough[fz_random() % 9];
    const float value = (float)((int)(fz_random() >> 8) - (1 << 23)) * 0x1p-22f; /* -2 .. 2 */
    return contents == LARGE ? value * 100 : value;
}

static uint16_t to_float16(float value) { /* rounds towards 0; too large a number becomes infinity, too small a number 0 */
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    const uint32_t sign = bits >> 16 & 0x8000, mantissa = bits >> 13 & 0x3ff;
    const int exponent = (int)(bits >> 23 & 0xff) - 127 + 15;
    if (value != value) return (uint16_t)(sign | 0x7e00);
    if (exponent >= 31) return (uint16_t)(sign | 0x7c00);
    return (uint16_t)(exponent <= 0 ? sign : sign | (uint32_t)exponent << 10 | mantissa);
}

static double from_float16(uint16_t bits) {
    const int exponent = bits >> 10 & 31, mantissa = bits & 0x3ff;
    const double size = exponent == 31 ? (mantissa ? NAN : INFINITY) : exponent ? ldexp(1024 + mantissa, exponent - 25) : ldexp(mantissa, -24);
    return bits & 0x8000 ? -size : size;
}

static void fill(char *to, ba_dtype dtype, size_t bytes) {
    const size_t size = (size_t)ba_dtype_size(dtype);
    for (size_t at = 0; size > 0 && at + size <= bytes; at += size) {
        const float value = dtype <= BA_FLOAT64 ? next_value() : 0;
        uint32_t bits;
        memcpy(&bits, &value, sizeof bits);
        const uint16_t half = dtype == BA_FLOAT16 ? to_float16(value) : (uint16_t)(bits >> 16);
        const double wide = (double)value;
        switch (dtype) {
        case BA_FLOAT32: memcpy(to + at, &value, 4); break;
        case BA_FLOAT16:
        case BA_BFLOAT16: memcpy(to + at, &half, 2); break;
        case BA_FLOAT64: memcpy(to + at, &wide, 8); break;
        case BA_INT8: to[at] = (char)fz_random(); break;
        case BA_FLOAT8_E4M3: to[at] = (char)(fz_random() & (fz_is_tame() ? 0xbf : 0xff)); break; /* tame: below 2, so no NaN */
        default: memset(to + at, 0, size);
        }
    }
}

static int64_t place(const ba_tensor *t, const int64_t *at) {
    int64_t place = 0;
    for (int i = 0; i < t->ndim; i++) place += at[i] * t->strides[i];
    return place;
}

void fz_put(const ba_tensor *t, const int64_t *at, int64_t value) {
    const int64_t to = place(t, at);
    switch (t->dtype) {
    case BA_UINT16:
    case BA_INT16: ((int16_t *)t->data)[to] = (int16_t)value; break;
    case BA_INT32: ((int32_t *)t->data)[to] = (int32_t)value; break;
    case BA_INT64: ((int64_t *)t->data)[to] = value; break;
    case BA_BOOL: ((uint8_t *)t->data)[to] = (uint8_t)value; break;
    default: break;
    }
}

double fz_get(const ba_tensor *t, const int64_t *at) {
    const int64_t from = place(t, at);
    switch (t->dtype) {
    case BA_FLOAT32: return (double)((const float *)t->data)[from];
    case BA_FLOAT64: return ((const double *)t->data)[from];
    case BA_FLOAT16: return from_float16(((const uint16_t *)t->data)[from]);
    case BA_BFLOAT16: {
        const uint32_t bits = (uint32_t)((const uint16_t *)t->data)[from] << 16;
        float value;
        memcpy(&value, &bits, sizeof value);
        return (double)value;
    }
    case BA_BOOL: return (double)((const uint8_t *)t->data)[from];
    case BA_INT8: return (double)((const int8_t *)t->data)[from];
    case BA_FLOAT8_E4M3: {
        const int bits = ((const uint8_t *)t->data)[from], exponent = bits >> 3 & 15, mantissa = bits & 7;
        const double size = (bits & 0x7f) == 0x7f ? NAN : exponent ? ldexp(8 + mantissa, exponent - 10) : ldexp(mantissa, -9);
        return bits & 0x80 ? -size : size;
    }
    case BA_UINT16: return ((const uint16_t *)t->data)[from] == UINT16_MAX ? -1 : (double)((const uint16_t *)t->data)[from];
    case BA_INT16: return (double)((const int16_t *)t->data)[from];
    case BA_INT32: return (double)((const int32_t *)t->data)[from];
    default: return (double)((const int64_t *)t->data)[from];
    }
}

/* ---- Tensors ---------------------------------------------------------------------------------------------------------------- */

/* The numbers of elements that a tensor's axes and strides reach before and after its first element. */
typedef struct extent {
    bool empty, wrong; /* wrong: a call must refuse the tensor, even if it has enough memory */
    __int128 before, after;
} extent;

static extent extent_of(const ba_tensor *t) {
    extent e = {0};
    if (t->ndim < 0 || t->ndim > BA_MAX_DIMS) return (extent){.wrong = true};
    for (int i = 0; i < t->ndim; i++) {
        e.empty |= t->dims[i] == 0;
        e.wrong |= t->dims[i] < 0;
    }
    double elements = 1;
    for (int i = 0; i < t->ndim && !e.empty && !e.wrong; i++) {
        const __int128 reach = (__int128)(t->dims[i] - 1) * t->strides[i];
        elements *= (double)t->dims[i];
        if (reach < 0) e.before -= reach;
        else e.after += reach;
    }
    const double bytes = (double)ba_dtype_size(t->dtype);
    e.wrong |= elements * bytes >= 0x1p63 || ((double)e.before + (double)e.after + 1) * bytes >= 0x1p63;
    return e;
}

double fz_elements(const ba_tensor *t) {
    double elements = 1;
    if (t->ndim < 0 || t->ndim > BA_MAX_DIMS) return 1;
    for (int i = 0; i < t->ndim; i++) elements *= t->dims[i] < 0 ? INFINITY : (double)t->dims[i];
    return elements == elements ? elements : 0;
}

static void choose_strides(ba_tensor *t, fz_role role, int flags) {
    enum { PLAIN_KINDS = 4, PADDED = 4, PERMUTED, NEGATIVE, BROADCAST, MIXED };
    const int64_t kind = flags & FZ_PLAIN ? 0 : fz_range(0, MIXED);
    const int n = t->ndim, kept = flags & FZ_FREE_LAST ? 0 : 1; /* how many axes at the end stay contiguous */
    int order[BA_MAX_DIMS];
    for (int i = 0; i < n; i++) order[i] = n - 1 - i;
    for (int i = kept; (kind == PERMUTED || kind == MIXED) && i < n; i++) {
        const int other = i + (int)fz_below(n - i), axis = order[i];
        order[i] = order[other];
        order[other] = axis;
    }
    int64_t step = 1;
    for (int i = 0; i < n; i++) {
        const int axis = order[i];
        t->strides[axis] = step;
        if (__builtin_mul_overflow(step, t->dims[axis] > 1 ? t->dims[axis] : 1, &step)) step = INT64_MAX / 4;
        if (kind == PADDED || kind == MIXED) step += fz_below(4) * (i == 0 ? 1 : t->strides[axis] < 1000 ? t->strides[axis] : 1);
    }
    if (kind < PADDED || n <= kept) return;
    const int axis = (int)fz_below(n - kept);
    if (kind == NEGATIVE || kind == MIXED) t->strides[axis] = -t->strides[axis];
    if (kind == BROADCAST && role == FZ_INPUT) t->strides[axis] = 0;
}

/* Makes one mistake that a caller could make. */
static void make_unusual(ba_tensor *t, bool *none) {
    const int axis = (int)fz_range(0, BA_MAX_DIMS - 1) % (t->ndim > 0 ? t->ndim : 1);
    switch (fz_range(0, 9)) {
    case 0: t->dtype = (ba_dtype)fz_range(0, BA_DTYPE_COUNT); break;
    case 1: t->dtype = (ba_dtype)fz_unusual_number(); break;
    case 2: t->ndim = (int)fz_range(0, BA_MAX_DIMS); break;
    case 3: t->ndim = (int)fz_unusual_number(); break;
    case 4: t->dims[axis] = fz_unusual_number(); break;
    case 5: t->dims[axis] += fz_range(-2, 2); break;
    case 6: t->strides[axis] = fz_unusual_number(); break;
    case 7: t->strides[axis] = 0; break;
    case 8: *none = true; break;
    default: t->dims[axis] = 0; break;
    }
}

ba_tensor fz_tensor(fz_role role, ba_dtype dtype, int ndim, const int64_t *dims, int flags) {
    ba_tensor t = {.dtype = dtype, .ndim = ndim};
    bool none = false;
    for (int i = 0; i < ndim; i++) t.dims[i] = dims[i];
    if (!(flags & FZ_PLAIN) && fz_unusual()) make_unusual(&t, &none); /* strides are chosen for these axes */
    const int given = t.ndim;
    if (t.ndim < 0 || t.ndim > BA_MAX_DIMS) t.ndim = BA_MAX_DIMS;
    choose_strides(&t, role, flags);
    t.ndim = given;
    if (!(flags & FZ_PLAIN) && fz_unusual()) make_unusual(&t, &none);

    const extent e = extent_of(&t);
    const __int128 elements = e.empty || e.wrong ? 0 : e.before + e.after + 1;
    const bool too_many = elements * ba_dtype_size(t.dtype) > MOST_BYTES;
    const size_t bytes = e.empty || e.wrong || too_many || none ? 0 : (size_t)elements * (size_t)ba_dtype_size(t.dtype);
    fz_block *b = new_block(role, bytes);
    if (role == FZ_INPUT) fill(b->memory, t.dtype, bytes);
    /* A tensor that does not get the memory that it needs has no pointer. A tensor that a call must refuse because its axes are wrong has a pointer
     * that must not be read. */
    const bool no_place = none || (too_many && !e.wrong) || (e.empty && fz_random() % 2);
    t.data = no_place ? NULL : b->memory + (bytes ? (size_t)e.before * (size_t)ba_dtype_size(t.dtype) : 0);
    b->is_tensor = true;
    b->refused = e.wrong || (!e.empty && (too_many || none));
    if (none && t.ndim == 0) b->refused = false; /* this means "not given" */
    b->tensor = t;
    return t;
}

/* ---- Arrays of numbers -------------------------------------------------------------------------------------------------------- */

void *fz_array(int64_t count, size_t size) {
    if (count < 0 || count > MOST_COUNT) return NULL;
    fz_block *b = new_block(FZ_INPUT, (size_t)count * size);
    memset(b->memory, 0, b->bytes);
    return b->memory;
}

int64_t *fz_numbers(int64_t count) { return fz_array(count, sizeof(int64_t)); }

int64_t *fz_numbers_from(int64_t count, int64_t lo, int64_t hi) {
    int64_t *numbers = fz_numbers(count);
    for (int64_t b = 0; numbers && b < count; b++) numbers[b] = fz_range(lo, hi);
    if (numbers && count > 0 && fz_unusual()) numbers[fz_below(count)] = fz_unusual_number();
    return numbers;
}

int64_t *fz_cumulative(int64_t batch, int64_t total) {
    if (fz_unusual() || batch == INT64_MAX) return NULL;
    int64_t *cu = fz_numbers(batch + 1);
    fz_seed();
    for (int64_t b = 1; cu && b <= batch; b++) { /* some lengths are 0 */
        const int64_t left = total - cu[b - 1];
        cu[b] = b == batch ? total : cu[b - 1] + (fz_random() % 4 ? fz_below(left + 1) : 0);
    }
    if (cu && batch >= 0 && fz_unusual()) cu[fz_below(batch + 1)] = fz_unusual_number();
    if (cu && batch >= 0 && fz_unusual()) cu[fz_below(batch + 1)] += fz_range(-1, 1);
    return cu;
}

int64_t *fz_lengths(int64_t count, int64_t most) {
    int64_t *lengths = fz_numbers(count);
    const int64_t kind = fz_range(0, 3);
    fz_seed();
    for (int64_t b = 0; lengths && b < count; b++) lengths[b] = kind == 0 ? most : kind == 1 && fz_random() % 2 ? 0 : fz_below(most + 1);
    if (lengths && count > 0 && fz_unusual()) lengths[fz_below(count)] = fz_unusual_number();
    if (lengths && count > 0 && fz_unusual()) lengths[fz_below(count)] = most + 1;
    return lengths;
}

bool fz_next(int64_t *at, const int64_t *dims, int ndim) {
    for (int i = ndim - 1; i >= 0; i--) {
        if (++at[i] < dims[i]) return true;
        at[i] = 0;
    }
    return false;
}
