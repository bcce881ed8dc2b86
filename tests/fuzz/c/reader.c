#include <math.h>

#include "fuzz.h"

static struct {
    const uint8_t *data;
    size_t size, at;
    int odds; /* one in `odds` arguments is unusual; 0: none is */
    uint32_t random;
} input;

static uint64_t next_bytes(int count) {
    uint64_t value = 0;
    for (int i = 0; i < count; i++) value = value << 8 | (input.at < input.size ? input.data[input.at++] : 0);
    return value;
}

void fz_open(const uint8_t *data, size_t size) {
    static const int odds[] = {0, 60, 0, 15};
    input.data = data;
    input.size = size;
    input.at = 0;
    input.odds = odds[next_bytes(1) % 4];
    fz_seed();
}

int64_t fz_range(int64_t lo, int64_t hi) {
    const uint64_t count = (uint64_t)hi - (uint64_t)lo + 1;
    if (count == 0) return (int64_t)next_bytes(8);
    return (int64_t)((uint64_t)lo + next_bytes(count <= 256 ? 1 : count <= 65536 ? 2 : 8) % count);
}

int64_t fz_pick(const int64_t *values, int64_t count) { return values[fz_range(0, count - 1)]; }
bool fz_once_in(int n) { return fz_range(1, n) == n; }
bool fz_unusual(void) { return input.odds && fz_once_in(input.odds); }

int64_t fz_unusual_number(void) {
    static const int64_t table[] = {
        0,         -1,        1,         2,         3,         -2,           INT64_MAX,     INT64_MIN, INT64_MAX - 1,      INT64_MIN + 1,
        576,       577,       1023,      1024,      1025,      65535,        65536,         INT32_MAX, INT32_MIN,          (int64_t)INT32_MAX + 1,
        1ll << 32, 1ll << 48, 1ll << 60, 1ll << 61, 1ll << 62, -(1ll << 62), INT32_MAX / 2, 3ll << 61, 0x5555555555555555, -(1ll << 31) - 1,
    };
    enum { COUNT = sizeof table / sizeof *table };
    const int64_t which = fz_range(0, COUNT + 2);
    if (which < COUNT) return table[which];
    return which == COUNT ? fz_range(INT64_MIN, INT64_MAX) : which == COUNT + 1 ? fz_range(-100, 100) : (int64_t)1 << fz_range(0, 62);
}

double fz_unusual_real(void) {
    static const double table[] = {0, -0.0, 1, -1, NAN, INFINITY, -INFINITY, 1e300, -1e300, 1e38, 1e-300, 5e-324, 1e-38, 1000, 88.5};
    return table[fz_range(0, sizeof table / sizeof *table - 1)];
}

void fz_seed(void) { input.random = (uint32_t)next_bytes(1) * 2654435761u + 0x9e3779b9u; }

uint32_t fz_random(void) {
    input.random ^= input.random << 13;
    input.random ^= input.random >> 17;
    input.random ^= input.random << 5;
    return input.random;
}

int64_t fz_below(int64_t n) { return n < 1 ? 0 : (int64_t)(fz_random() % (uint64_t)n); }
