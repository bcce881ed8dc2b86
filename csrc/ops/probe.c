/* Measures the machine's limits: how fast a number of threads multiply, and how fast they read memory. */
#define _POSIX_C_SOURCE 200809L /* clock_gettime */
#include <stdatomic.h>
#include <stdlib.h>
#include <time.h>

#include "core/faults.h"
#include "core/pool.h"
#include "kernels/kernels.h"

enum { SLICES = 4, PROBE_STEP = 512 /* bytes; a multiple of the bytes that one iteration of any level's read loop reads */ };

typedef struct probe {
    const ba_probes *kernels;
    ba_probe_flops_fn flops;
    double seconds;
    int64_t bytes;       /* bytes that each thread reads; 0: products are measured, not reads */
    float *own_memory;   /* NULL: `data` is the caller's or NULL. Else `bytes` bytes of each thread, which the thread writes and then reads */
    const char *data;    /* own_memory, or the caller's memory; NULL where products are measured */
    _Atomic int arrived; /* threads that are ready to measure */
    int threads;
    double *rate; /* [thread]: FLOP/s or bytes/s */
} probe;

static double now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + (double)t.tv_nsec * 1e-9;
}

static void run_probe(void *context, int64_t item, int worker) {
    (void)worker;
    probe *p = context;
    float operands[64], sink[64];
    unsigned seed = 1u + (unsigned)item;
    for (int i = 0; i < 64; i++) { /* from 0.5 to 0.75, so that a chain of x * a + b stays finite and normal */
        seed = seed * 1664525u + 1013904223u;
        operands[i] = 0.5f + (float)(seed >> 8) * 0x1p-26f;
    }
    const int64_t floats = p->bytes / (int64_t)sizeof(float);
    for (int64_t i = 0; p->own_memory && i < floats; i++) {
        seed = seed * 1664525u + 1013904223u;
        p->own_memory[item * floats + i] = (float)(seed >> 8) * 0x1p-24f;
    }
    const char *data = p->data ? p->data + item * p->bytes : NULL;
    /* All threads must measure at the same time, because a thread that measures alone has the machine to itself. Each waits until all have arrived,
     * but no longer than a second: where the pool has fewer threads than items, they never all arrive. */
    atomic_fetch_add(&p->arrived, 1);
    const double deadline = now() + 1;
    while (atomic_load(&p->arrived) < p->threads && now() < deadline) {
    }
    volatile float keep = 0;
    double done = 0;
    const double begin = now();
    double elapsed;
    do {
        if (p->bytes) {
            const int64_t repeats = p->seconds > 0 ? 1 + (1 << 20) / p->bytes : 1;
            for (int64_t r = 0; r < repeats; r++) keep = keep + (float)p->kernels->read(data, p->bytes);
            done += (double)repeats * (double)p->bytes;
        } else {
            done += p->flops(operands, 1000, sink);
            keep = keep + sink[0];
        }
        elapsed = now() - begin;
    } while (elapsed < p->seconds);
    p->rate[item] = done / elapsed;
}

/* The number of threads that measure; 0 where num_threads is a number that calls refuse. */
static int threads_of(int num_threads) { return num_threads < 0 || num_threads > BA_MAX_THREADS ? 0 : ba_threads_for(num_threads); }

static double measure(ba_isa level, bool tiles, const void *data, int64_t bytes, double seconds, int threads) {
    int64_t own_bytes;
    if ((unsigned)level >= BA_ISA_COUNT || level > ba_isa_detected() || seconds < 0 || (seconds <= 0 && !bytes) || bytes < 0) return 0;
    if (!threads || __builtin_mul_overflow(bytes, threads, &own_bytes)) return 0;
    probe p = {.kernels = ba_kernels_at(level)->probes, .seconds = seconds, .bytes = bytes, .threads = threads};
    p.flops = tiles ? p.kernels->tile_flops : p.kernels->flops;
    if (!p.flops) return 0;
    p.rate = ba_fault(BA_FAULT_MEMORY) ? NULL : calloc((size_t)threads, sizeof *p.rate);
    if (bytes && !data && !ba_fault(BA_FAULT_MEMORY)) p.own_memory = aligned_alloc(BA_ALIGN, (size_t)own_bytes);
    p.data = data ? data : (const char *)p.own_memory;
    double best = 0, later = 0;
    /* The best of a few slices is the limit: in any one slice, two threads may have shared a core until the system moved one of them. Products of
     * tiles lower the clock within a few milliseconds, and a long call cannot keep up with their best slice. Their limit is the mean of the slices
     * after the first. */
    p.seconds = seconds / SLICES;
    for (int slice = 0; slice < (seconds > 0 ? SLICES : 1) && p.rate && (!bytes || p.data); slice++) {
        atomic_store(&p.arrived, 0);
        if (ba_parallel(threads, threads, run_probe, &p) != BA_OK) break;
        double total = 0;
        for (int i = 0; i < threads; i++) total += p.rate[i];
        best = total > best ? total : best;
        if (slice) later += (total - later) / slice; /* the mean of these slices */
    }
    free(p.rate);
    free(p.own_memory);
    return tiles ? later : best;
}

double ba_probe_flops(ba_isa level, double seconds, int num_threads) { return measure(level, false, NULL, 0, seconds, threads_of(num_threads)); }

double ba_probe_tile_flops(ba_isa level, double seconds, int num_threads) { return measure(level, true, NULL, 0, seconds, threads_of(num_threads)); }

double ba_probe_read(ba_isa level, const void *data, int64_t bytes, double seconds, int num_threads) {
    const int threads = threads_of(num_threads);
    if (!threads || bytes > INT64_MAX - PROBE_STEP) return 0;
    bytes = data ? bytes / threads - bytes / threads % PROBE_STEP : ba_round_up(bytes, PROBE_STEP);
    return bytes > 0 ? measure(level, false, data, bytes, seconds, threads) : 0;
}
