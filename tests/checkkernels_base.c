/* Guarded memory, element types, random numbers and the report of the kernel checks. checkkernels.h says what each function does. */
#define _DEFAULT_SOURCE /* MAP_ANONYMOUS */
#include "checkkernels.h"

#include <math.h>
#include <setjmp.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "kernels/tile_traps.h"

/* ---- Guarded memory ----------------------------------------------------------------------------------------------- */

enum { BESIDE = 64 }; /* bytes on either side of a buffer that neighbours_untouched() compares */

typedef struct place_t {
    unsigned char *pages; /* the pages between the two guard pages */
    int64_t bytes;        /* size of `pages` */
    unsigned char *data;  /* the buffer. NULL: nothing is placed */
    int64_t used;
} place_t;

static place_t places[BUFFERS], row_places[ROW_POOLS][BA_MAX_CHUNK];
static bool at_front;

static int64_t page_bytes(void) {
    static int64_t bytes;
    if (!bytes) bytes = sysconf(_SC_PAGESIZE);
    return bytes;
}

static void map_between_guards(place_t *p, int64_t bytes) {
    const int64_t page = page_bytes();
    if (p->pages) munmap(p->pages - page, (size_t)(p->bytes + 2 * page));
    p->bytes = ba_round_up(bytes, page);
    unsigned char *mapped = mmap(NULL, (size_t)(p->bytes + 2 * page), PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (mapped == MAP_FAILED || mprotect(mapped + page, (size_t)p->bytes, PROT_READ | PROT_WRITE) != 0) {
        perror("mmap");
        exit(2);
    }
    p->pages = mapped + page;
}

static void *place_at(place_t *p, int64_t bytes, int64_t align, bool front) {
    if (bytes > p->bytes || !p->pages) map_between_guards(p, ba_max(bytes, 1));
    p->data = front ? p->pages : p->pages + (p->bytes - bytes) / align * align;
    p->used = bytes;
    const unsigned char *end = p->pages + p->bytes;
    unsigned char *from = p->data - ba_min(BESIDE, p->data - p->pages);
    memset(from, 0xff, (size_t)(ba_min(end - (p->data + bytes), BESIDE) + p->data + bytes - from));
    return p->data;
}

void *place(buffer which, int64_t bytes) { return place_at(&places[which], bytes, BA_ALIGN, at_front); }
void *place_tight(buffer which, int64_t bytes, int64_t align) { return place_at(&places[which], bytes, align, at_front); }
void *place_row(row_pool pool, int64_t index, int64_t bytes) {
    place_t *p = &row_places[pool][index];
    if (!p->pages) map_between_guards(p, BA_MAX_HEAD_DIM * (int64_t)sizeof(double));
    return place_at(p, bytes, 1, at_front ^ (index & 1));
}

void flip_side(void) { at_front = !at_front; }

static bool room_untouched(const place_t *p) {
    if (!p->data) return true;
    const unsigned char *end = p->data + p->used;
    for (int i = 1; i <= BESIDE && p->data - i >= p->pages; i++)
        if (p->data[-i] != 0xff) return false;
    for (int i = 0; i < BESIDE && end + i < p->pages + p->bytes; i++)
        if (end[i] != 0xff) return false;
    return true;
}

bool neighbours_untouched(void) {
    for (int i = 0; i < BUFFERS; i++)
        if (!room_untouched(&places[i])) return false;
    for (int i = 0; i < BA_MAX_CHUNK; i++)
        if (!room_untouched(&row_places[OUT_ROWS][i])) return false;
    return true;
}

void forget_places(void) {
    for (int i = 0; i < BUFFERS; i++) places[i].data = NULL;
    for (int i = 0; i < BA_MAX_CHUNK; i++) row_places[OUT_ROWS][i].data = NULL;
}

/* ---- Elements ----------------------------------------------------------------------------------------------------- */

typedef struct small_format {
    int bits, mantissa_bits, least_exponent, greatest_exponent;
} small_format;

static small_format format_of(ba_dtype dtype) {
    switch (dtype) {
    case BA_FLOAT16: return (small_format){16, 10, -14, 15};
    case BA_BFLOAT16: return (small_format){16, 7, -126, 127};
    default: return (small_format){8, 3, -6, 8}; /* e4m3: the largest exponent, too, stands for numbers, except in one pattern */
    }
}

double decode(ba_dtype dtype, int bits) {
    const small_format f = format_of(dtype);
    const int one = 1 << f.mantissa_bits, sign = 1 << (f.bits - 1), rest = bits & (sign - 1), mantissa = rest % one, exponent = rest / one;
    double value;
    if (exponent == 0) value = ldexp(mantissa, f.least_exponent - f.mantissa_bits);
    else if (dtype == BA_FLOAT8_E4M3 && rest == sign - 1) value = NAN;
    else if (dtype != BA_FLOAT8_E4M3 && exponent == (sign - 1) / one) value = mantissa ? NAN : INFINITY;
    else value = ldexp(one + mantissa, exponent - 1 + f.least_exponent - f.mantissa_bits);
    return bits & sign ? -value : value;
}

int encode(ba_dtype dtype, double value) {
    const small_format f = format_of(dtype);
    const int one = 1 << f.mantissa_bits, sign = signbit(value) ? 1 << (f.bits - 1) : 0, top = (1 << (f.bits - 1)) - 1;
    const int infinity = dtype == BA_FLOAT8_E4M3 ? top - 1 : top / one * one; /* e4m3 has no infinity, and saturates at its largest number */
    if (isnan(value)) return sign | top;
    const double size = fabs(value);
    if (size == 0) return sign;
    if (size >= ldexp(1, f.greatest_exponent + 1)) return sign | infinity;
    const int exponent = ilogb(size) < f.least_exponent ? f.least_exponent : ilogb(size);
    const double steps = rint(ldexp(size, f.mantissa_bits - exponent)); /* rint: ties to even */
    /* Where rounding carries out of the mantissa, the carry raises the exponent field by one, which gives the next power of two, or infinity. */
    const int pattern = (exponent - f.least_exponent) * one + (int)steps;
    return sign | (pattern < infinity ? pattern : infinity);
}

int patterns_of(ba_dtype dtype) { return ba_dtype_size(dtype) > 2 ? 0 : 1 << (8 * ba_dtype_size(dtype)); }

double get_element(ba_dtype dtype, const void *data, int64_t index) {
    switch (dtype) {
    case BA_FLOAT32: return (double)((const float *)data)[index];
    case BA_FLOAT64: return ((const double *)data)[index];
    case BA_INT8: return ((const int8_t *)data)[index];
    case BA_FLOAT8_E4M3: return decode(dtype, ((const uint8_t *)data)[index]);
    default: return decode(dtype, ((const uint16_t *)data)[index]);
    }
}

double set_element(ba_dtype dtype, void *data, int64_t index, double value) {
    switch (dtype) {
    case BA_FLOAT32: ((float *)data)[index] = (float)value; break;
    case BA_FLOAT64: ((double *)data)[index] = value; break;
    case BA_INT8: ((int8_t *)data)[index] = (int8_t)(isnan(value) ? -128 : rint(fmin(127, fmax(-128, value)))); break;
    case BA_FLOAT8_E4M3: ((uint8_t *)data)[index] = (uint8_t)encode(dtype, value); break;
    default: ((uint16_t *)data)[index] = (uint16_t)encode(dtype, value);
    }
    return get_element(dtype, data, index);
}

ba_dtype real_of(const ba_attend_family *family) { return family->real_size == 8 ? BA_FLOAT64 : BA_FLOAT32; }
bool is_vector(const ba_attend_family *family) { return family->gradient && family->gradient->gradient[0]; }

/* The tile kernel for few queries also multiplies a second piece of each weight, the part that rounding has cut off. What remains is the square of
 * the rounding error. */
const rounding *rounding_of(const ba_attend_family *family) {
    static const struct {
        const char *in_name;
        rounding rounding;
    } table[] = {{"_tiles2x2_pieces2", {.weight_unit = 0x1p-17, .flushes = true}},
                 {"_tiles2x2_pieces3", {.weight_unit = 0x1p-25, .flushes = true}},
                 {"_tiles2x2", {.weight_unit = 0x1p-8, .few_weight_unit = 0x1p-16, .exp_unit = 2.7e-6, .flushes = true}},
                 {"_pairs", {.weight_unit = 0x1p-8, .few_weight_unit = 0x1p-8, .flushes = true}},
                 {"_neon_bf16_", {.flushes = true}},
                 {"", {.flushes = false}}};
    static const ba_attend_family *last; /* remembered, because plain arithmetic calls this function for every element */
    static int i;
    if (family != last) {
        last = family;
        i = 0;
        while (!strstr(family->name, table[i].in_name)) i++;
    }
    return &table[i].rounding;
}

double unit_of(ba_dtype dtype) {
    switch (dtype) {
    case BA_FLOAT32: return 0x1p-24;
    case BA_FLOAT64: return 0x1p-53;
    default: return ldexp(1, -1 - format_of(dtype).mantissa_bits);
    }
}

double smallest_of(ba_dtype dtype) {
    switch (dtype) {
    case BA_FLOAT32: return 0x1p-149;
    case BA_FLOAT64: return 0x1p-1074;
    case BA_INT8: return 1;
    default: return decode(dtype, 1);
    }
}

double largest_of(ba_dtype dtype) {
    switch (dtype) {
    case BA_FLOAT32: return 0x1.fffffep127;
    case BA_FLOAT64: return 0x1.fffffffffffffp1023;
    default: return decode(dtype, encode(dtype, INFINITY) - 1);
    }
}

/* ---- Random numbers ----------------------------------------------------------------------------------------------- */

static uint64_t state = 0x9e3779b97f4a7c15u;
static const char *sample_seed = "";
static int64_t sample_one_in = 1, place_in_group; /* one case in each group of sample_one_in cases is checked */

void sample_cases(int64_t one_in, const char *seed) {
    sample_one_in = one_in;
    sample_seed = seed;
}

static uint64_t hash(uint64_t h, const char *text) { /* FNV-1a */
    for (; *text; text++) h = (h ^ (unsigned char)*text) * 0x100000001b3u;
    return h;
}

/* Seeds the random numbers with the subject's name, so that a subject draws the same cases whether it is checked alone or after others. */
void seed_by_name(const char *name) {
    state = hash(hash(0xcbf29ce484222325u, name), sample_seed);
    place_in_group = 0;
}

uint64_t random_bits(void) { /* xorshift64* */
    state ^= state >> 12;
    state ^= state << 25;
    state ^= state >> 27;
    return state * 0x2545f4914f6cdd1du;
}

int64_t pick(int64_t n) { return (int64_t)((random_bits() >> 33) % (uint64_t)n); }

ba_prefetch_rows pick_prefetch(const void *const *rows, int64_t keys, int64_t bytes) {
    const int64_t count = pick(keys + 1);
    return (ba_prefetch_rows){.rows = rows,
                              .count = count,
                              .bytes = bytes,
                              .skip = {0, pick(8) - 1, pick(16) - 1},
                              .others = pick(count + 1),
                              .other_bytes = 1 + pick(2 * bytes)};
}

bool is_drawn(void) {
    static int64_t drawn;
    if (sample_one_in == 1) return true;
    if (place_in_group == 0) drawn = pick(sample_one_in);
    const bool here = place_in_group == drawn;
    place_in_group = (place_in_group + 1) % sample_one_in;
    return here;
}

double uniform(void) { return (double)(random_bits() >> 11) * 0x1p-52 - 1; }

/* ---- The report --------------------------------------------------------------------------------------------------- */

enum { SHOWN = 3 }; /* how many failures of a record are printed */

char case_text[256];
static int passed, failed;

void compare(record *r, double got, double want, double tolerance, const char *what, int64_t row, int64_t lane) {
    r->compared++;
    double error = fabs(got - want) / tolerance;
    if (isnan(want) || isinf(want) || got == want) error = got == want || (isnan(want) && isnan(got)) ? 0 : INFINITY;
    else if (isnan(error)) error = INFINITY;
    r->worst = fmax(r->worst, error);
    if (error <= 1) return;
    if (r->failures++ < SHOWN)
        printf("  %s: %s [%d][%d]: got %.9g, expected %.9g +- %.3g (%s)\n", r->name, what, (int)row, (int)lane, got, want, tolerance, case_text);
}

void require(record *r, bool holds, const char *what, int64_t row, int64_t lane) {
    r->compared++;
    if (holds || r->failures++ >= SHOWN) return;
    printf("  %s: %s [%d][%d] (%s)\n", r->name, what, (int)row, (int)lane, case_text);
}

void report(const char *family, const char *variant, record *records, int count) {
    for (int i = 0; i < count; i++) {
        const record *r = &records[i];
        if (!r->compared && !r->failures) continue;
        *(r->failures ? &failed : &passed) += 1;
        char name[96];
        snprintf(name, sizeof name, "%s %s %s", family, variant, r->name);
        printf("%-64s %s  %8.3g of the tolerance, %lld compared\n", name, r->failures ? "FAILED" : "ok    ", r->worst, (long long)r->compared);
    }
    fflush(stdout);
}

int report_total(void) {
    printf("%d passed, %d failed\n", passed, failed);
    return failed != 0;
}

static sigjmp_buf after_fault;
static void on_fault(int signal_number) { siglongjmp(after_fault, signal_number); }

void guarded_run(void (*run)(void *context), void *context, record *r) {
    const int faults[] = {SIGSEGV, SIGBUS, SIGILL};
    struct sigaction action = {.sa_handler = on_fault}, before[3];
    for (int i = 0; i < 3; i++) sigaction(faults[i], &action, &before[i]);
#ifdef BA_TILE_TRAPS
    ba_trap_tiles(); /* on_fault still gets the faults of all instructions except tile instructions */
#endif
    const int fault = sigsetjmp(after_fault, 1);
    if (fault == 0) run(context);
    else require(r, false, fault == SIGILL ? "illegal instruction" : "touched memory outside its buffers", -1, -1);
    for (int i = 0; i < 3; i++) sigaction(faults[i], &before[i], NULL);
}
