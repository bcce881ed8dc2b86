#if defined(__linux__)
#define _GNU_SOURCE /* sched_getaffinity, CPU_COUNT */
#endif
#include "core/pool.h"

#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "core/arena.h"
#include "core/common.h"
#include "core/faults.h"
#include "core/status.h"

/* ---- The pool ------------------------------------------------------------------------------------------------
 *
 * A job is published by raising `generation` under the lock; each worker takes part in a job at most once, as worker
 * number 1, 2, ... while places are left. The caller leaves when every worker that joined has left too, so a worker
 * that wakes late finds the places gone and goes back to sleep. */
static struct {
    pthread_mutex_t owner; /* held by the caller whose job it is */
    pthread_mutex_t lock;  /* guards what follows */
    pthread_cond_t wake, done;
    int workers;                 /* threads made so far */
    _Atomic uint64_t generation; /* counts jobs; looked at without the lock too */
    int places;                  /* workers that may still join the job */
    int next_worker;             /* number that the next to join gets */
    _Atomic int running;         /* workers that joined and have not left; looked at without the lock too */
    ba_item_fn fn;
    void *context;
    int64_t items;
    struct stopper *stopper; /* NULL: nothing stops the job */
} pool = {.owner = PTHREAD_MUTEX_INITIALIZER, .lock = PTHREAD_MUTEX_INITIALIZER, .wake = PTHREAD_COND_INITIALIZER, .done = PTHREAD_COND_INITIALIZER};

static _Atomic int64_t next_item;

/* ---- Stopping a job ------------------------------------------------------------------------------------------- */

#define POLL_NANOSECONDS 100000000

/* Of one job that can be stopped, in its caller's frame. All its threads look at the flag; only the caller polls. */
typedef struct stopper {
    _Atomic bool raised;
    bool forked;       /* a poll forked: in the child, the job's workers are gone */
    int looks;         /* since the clock was last looked at */
    int64_t next_poll; /* nanoseconds; 0: not known yet */
} stopper;

static _Thread_local struct {
    ba_poll_fn fn; /* NULL: nothing stops this thread's jobs */
    void *context;
    stopper *job; /* the one that this thread polls for; NULL: none */
} poll;
static _Thread_local stopper *joined; /* of the job that this thread takes part in; NULL: none, or one that nothing stops */
static int forks;                     /* since the process that loaded the library */

static int64_t now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (int64_t)t.tv_sec * 1000000000 + t.tv_nsec;
}

void ba_set_poll(ba_poll_fn fn, void *context) {
    poll.fn = fn;
    poll.context = context;
}

/* What is polled may be a program's handler, which may call this library again, or fork. */
static void poll_if_due(stopper *job) {
    const int64_t time = now();
    if (job->next_poll == 0) job->next_poll = time + POLL_NANOSECONDS;
    if (time < job->next_poll) return;
    const ba_poll_fn fn = poll.fn;
    void *const context = poll.context;
    const int forks_before = forks;
    const ba_arena arena = ba_arena_put_aside();
    poll.fn = NULL;
    poll.job = joined = NULL;
    const int wanted = fn(context);
    poll.fn = fn;
    poll.context = context;
    poll.job = joined = job;
    ba_arena_put_back(arena);
    job->forked |= forks != forks_before;
    if (wanted || job->forked) atomic_store_explicit(&job->raised, true, memory_order_relaxed);
    job->next_poll = now() + POLL_NANOSECONDS;
}

bool ba_stopped(void) {
    enum { LOOKS = 16 }; /* the clock costs more than a look at the flag */
    stopper *const job = joined;
    if (!job) return false;
    if (job == poll.job && ++job->looks >= LOOKS) {
        job->looks = 0;
        poll_if_due(job);
    }
    return atomic_load_explicit(&job->raised, memory_order_relaxed);
}

static void open_job(stopper *job) {
    if (poll.fn) poll.job = joined = job;
}

static ba_status close_job(const stopper *job) {
    poll.job = joined = NULL;
    if (job->forked)
        return ba_fail(BA_ERROR_SYSTEM, "a signal handler forked the process while the call ran: the outputs are undefined in the child");
    return atomic_load(&job->raised) ? ba_fail(BA_INTERRUPTED, "interrupted: the outputs are undefined") : BA_OK;
}

/* ---- Taking part ---------------------------------------------------------------------------------------------- */

static void take_items(ba_item_fn fn, void *context, int64_t items, int worker) {
    while (!ba_stopped()) {
        const int64_t item = atomic_fetch_add_explicit(&next_item, 1, memory_order_relaxed);
        if (item >= items) return;
        fn(context, item, worker);
    }
}

/* To wake a thread that sleeps takes as long as a small job. Jobs come in rows (the layers of a step, the two rounds of a
 * selection), so a thread that waits looks about for a moment before it sleeps. */
#define SPIN_NANOSECONDS 50000

static void pause_once(void) {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

static void relax(void) {
    for (int i = 0; i < 16; i++) pause_once();
}

static void *worker_main(void *unused) {
    (void)unused;
    uint64_t seen = 0;
    pthread_mutex_lock(&pool.lock);
    for (;;) {
        if (pool.generation == seen || pool.places == 0) {
            seen = pool.generation;
            pthread_mutex_unlock(&pool.lock);
            for (const int64_t until = now() + SPIN_NANOSECONDS; pool.generation == seen && now() < until;) relax();
            pthread_mutex_lock(&pool.lock);
        }
        while (pool.generation == seen || pool.places == 0) {
            seen = pool.generation;
            pthread_cond_wait(&pool.wake, &pool.lock);
        }
        seen = pool.generation;
        pool.places--;
        pool.running++;
        const int worker = pool.next_worker++;
        const ba_item_fn fn = pool.fn;
        void *context = pool.context;
        const int64_t items = pool.items;
        joined = pool.stopper;
        pthread_mutex_unlock(&pool.lock);
        take_items(fn, context, items, worker);
        joined = NULL;
        pthread_mutex_lock(&pool.lock);
        if (--pool.running == 0) pthread_cond_signal(&pool.done);
    }
    return NULL;
}

/* Only the forking thread lives on in the child: the pool starts again with no workers and fresh locks. */
static void reset_in_child(void) {
    pthread_mutex_init(&pool.owner, NULL);
    pthread_mutex_init(&pool.lock, NULL);
    pthread_cond_init(&pool.wake, NULL);
    pthread_cond_init(&pool.done, NULL);
    pool.workers = pool.places = 0;
    pool.running = 0;
    forks++;
}

static pthread_once_t fork_handler = PTHREAD_ONCE_INIT;
static void register_fork_handler(void) { pthread_atfork(NULL, NULL, reset_in_child); }

/* Makes threads until there are `wanted` workers, or until the system refuses one. Called with the lock held. */
static void grow(int wanted) {
    if (pool.workers >= wanted) return;
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before); /* workers inherit the mask: signals belong to the program's own threads */
    pthread_attr_t attributes;
    pthread_attr_init(&attributes);
    pthread_attr_setdetachstate(&attributes, PTHREAD_CREATE_DETACHED);
    while (pool.workers < wanted) {
        pthread_t thread;
        if (ba_fault(BA_FAULT_THREAD) || pthread_create(&thread, &attributes, worker_main, NULL) != 0) break;
        pool.workers++;
    }
    pthread_attr_destroy(&attributes);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
}

/* Until all workers have left the job; called with the lock held, and lets it go. Where the job can be stopped, the caller goes on polling meanwhile.
 */
static void wait_for_workers(void) {
    while (pool.running > 0) {
        if (!joined) {
            pthread_cond_wait(&pool.done, &pool.lock);
            continue;
        }
        struct timespec until;
        clock_gettime(CLOCK_REALTIME, &until);
        until.tv_nsec += POLL_NANOSECONDS;
        until.tv_sec += until.tv_nsec / 1000000000;
        until.tv_nsec %= 1000000000;
        if (pthread_cond_timedwait(&pool.done, &pool.lock, &until) == 0) continue;
        pthread_mutex_unlock(&pool.lock); /* what is polled may take locks of its own */
        poll_if_due(joined);
        if (joined->forked) return;
        pthread_mutex_lock(&pool.lock);
    }
    pthread_mutex_unlock(&pool.lock);
}

ba_status ba_parallel(int threads, int64_t items, ba_item_fn fn, void *context) {
    stopper job = {0};
    open_job(&job);
    threads = (int)ba_min(threads, items);
    if (threads > 1) pthread_once(&fork_handler, register_fork_handler); /* before a lock is taken that a child would find taken */
    if (threads <= 1 || pthread_mutex_trylock(&pool.owner) != 0) {
        for (int64_t item = 0; item < items && !ba_stopped(); item++) fn(context, item, 0);
        return close_job(&job);
    }
    pthread_mutex_lock(&pool.lock);
    grow(threads - 1);
    atomic_store(&next_item, 0);
    pool.fn = fn;
    pool.context = context;
    pool.items = items;
    pool.stopper = joined;
    pool.places = threads - 1;
    pool.next_worker = 1;
    pool.generation++;
    pthread_cond_broadcast(&pool.wake);
    pthread_mutex_unlock(&pool.lock);

    take_items(fn, context, items, 0);

    for (const int64_t until = now() + SPIN_NANOSECONDS; pool.running > 0 && now() < until;) relax();
    if (!job.forked) {
        pthread_mutex_lock(&pool.lock);
        pool.places = 0;
        wait_for_workers();
    }
    if (!job.forked) pthread_mutex_unlock(&pool.owner); /* a child's lock is new, and free */
    return close_job(&job);
}

void ba_pause(int spins) {
    enum { SPINS = 256 };
    if (spins >= SPINS) {
        sched_yield();
        return;
    }
    pause_once();
}

/* ---- How many threads ---------------------------------------------------------------------------------------- */

static pthread_once_t threads_looked = PTHREAD_ONCE_INIT;
static _Atomic int threads_set;
static int threads_default = 1;
static char threads_source[96] = "";

/* CPUs that the cgroup's quota is worth, or 0 for no quota (cgroup v2, then v1). */
static int cgroup_cpus(void) {
    double quota = -1, period = -1;
    char text[32];
    FILE *file = fopen("/sys/fs/cgroup/cpu.max", "r");
    if (file) {
        if (fscanf(file, "%31s %lf", text, &period) == 2 && strcmp(text, "max") != 0) quota = atof(text);
        fclose(file);
    } else if ((file = fopen("/sys/fs/cgroup/cpu/cpu.cfs_quota_us", "r"))) {
        if (fscanf(file, "%lf", &quota) != 1) quota = -1;
        fclose(file);
        if ((file = fopen("/sys/fs/cgroup/cpu/cpu.cfs_period_us", "r"))) {
            if (fscanf(file, "%lf", &period) != 1) period = -1;
            fclose(file);
        }
    }
    if (quota <= 0 || period <= 0) return 0;
    const int cpus = (int)(quota / period + 0.5);
    return cpus < 1 ? 1 : cpus;
}

static bool threads_from_environment(const char *name) {
    const char *text = getenv(name);
    if (!text) return false;
    char *end;
    const long n = strtol(text, &end, 10); /* OMP_NUM_THREADS may be a list: the first number counts */
    if (end == text || n < 1 || n > BA_MAX_THREADS) return false;
    threads_default = (int)n;
    snprintf(threads_source, sizeof threads_source, "%s=%ld", name, n);
    return true;
}

static void threads_look(void) {
    if (threads_from_environment("BLITZ_ATTN_NUM_THREADS") || threads_from_environment("OMP_NUM_THREADS")) return;
    int cpus = (int)sysconf(_SC_NPROCESSORS_ONLN);
    const char *source = "CPUs online";
#if defined(__linux__)
    cpu_set_t set;
    if (sched_getaffinity(0, sizeof set, &set) == 0) {
        cpus = CPU_COUNT(&set);
        source = "CPU affinity";
    }
#endif
    const int quota = cgroup_cpus();
    if (quota > 0 && quota < cpus) {
        cpus = quota;
        source = "cgroup quota";
    }
    threads_default = (int)ba_max(1, ba_min(cpus, BA_MAX_THREADS));
    snprintf(threads_source, sizeof threads_source, "%s", source);
}

int ba_get_num_threads(void) {
    pthread_once(&threads_looked, threads_look);
    const int set = atomic_load(&threads_set);
    return set > 0 ? set : threads_default;
}

const char *ba_num_threads_source(void) {
    pthread_once(&threads_looked, threads_look);
    return atomic_load(&threads_set) > 0 ? "set_num_threads()" : threads_source;
}

ba_status ba_set_num_threads(int num_threads) {
    if (num_threads < 0 || num_threads > BA_MAX_THREADS)
        return ba_fail(BA_ERROR_VALUE, "num_threads: expected 1 to %d, or 0 for the default, got %d", BA_MAX_THREADS, num_threads);
    atomic_store(&threads_set, num_threads);
    return BA_OK;
}

int ba_threads_for(int asked) { return asked > 0 ? asked : ba_get_num_threads(); }
