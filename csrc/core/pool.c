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
#include "core/float_mode.h"
#include "core/status.h"
#include "core/thread.h"

/* ---- The pool ------------------------------------------------------------------------------------------------
 *
 * A caller publishes a job by raising `generation` under the lock. A worker joins a job at most once, and only while places are left; the
 * first to join becomes worker 1, the next worker 2, and so on (the caller is worker 0). When the caller finds no more items, it sets the
 * places to 0 and waits until every worker that has joined has left. A worker that wakes up late finds no place and goes back to sleep. */
static struct {
    pthread_mutex_t owner; /* held by the caller whose job the pool runs */
    pthread_mutex_t lock;  /* guards all members below */
    pthread_cond_t wake, done;
    int workers;                 /* threads that have been started and serve as workers */
    _Atomic uint64_t generation; /* counts jobs; also read without the lock */
    int places;                  /* workers that may still join the job */
    int next_worker;             /* the number of the next worker that joins */
    _Atomic int running;         /* workers that have joined and have not left; also read without the lock */
    ba_item_fn fn;
    void *context;
    int64_t items;
    struct ba_stopper *stopper; /* NULL: nothing can stop the job */
} pool = {.owner = PTHREAD_MUTEX_INITIALIZER, .lock = PTHREAD_MUTEX_INITIALIZER, .wake = PTHREAD_COND_INITIALIZER, .done = PTHREAD_COND_INITIALIZER};

static _Atomic int64_t next_item;

/* ---- Stopping a job ------------------------------------------------------------------------------------------- */

#define POLL_NANOSECONDS 50000000
/* A check is a call of ba_stopped() in a job that can be stopped. Every check reads the job's flag `raised`. In the thread of the job's caller some
 * checks also read the clock, to find out whether a poll is due. If the last two readings of the clock lie more than RARE_NANOSECONDS apart, checks
 * are rare, and the very next check reads the clock. Otherwise only the 16th check from then on reads it, because reading the clock costs more than
 * reading the flag. */
#define RARE_NANOSECONDS 1000000
enum {
    CHECKS_PER_READ = 16,
    CHECKS_IN_JOB = 2 /* a job reads the clock in its second check at the latest; the first check comes before any item */
};

/* The state of one job that can be stopped. It lies in the stack frame of the job's caller. All threads of the job read the flag; only the
 * caller polls. */
typedef struct ba_stopper {
    _Atomic bool raised; /* the job must stop */
    bool forked;         /* the poll function forked the process, and this is the child, where the job's workers do not exist */
} ba_stopper;

/* The number of forks that led to this process since the fork handler was registered, in the first job of several threads. Earlier forks are not
 * counted: before that job, there were no workers that a child could lack. */
static int forks;

/* The clock that says when to poll: accurate to a few milliseconds, and read in a quarter of the time that the exact clock takes. */
#if defined(CLOCK_MONOTONIC_COARSE)
#define POLL_CLOCK CLOCK_MONOTONIC_COARSE
#else
#define POLL_CLOCK CLOCK_MONOTONIC
#endif

static int64_t now(clockid_t clock) {
    struct timespec t;
    clock_gettime(clock, &t);
    return (int64_t)t.tv_sec * 1000000000 + t.tv_nsec;
}

ba_status ba_set_poll(ba_poll_fn fn, void *context) {
    ba_thread *const thread = fn ? ba_thread_make() : ba_thread_find();
    if (!thread) return fn ? ba_fail(BA_ERROR_MEMORY, BA_NO_THREAD) : BA_OK;
    thread->poll.fn = fn;
    thread->poll.context = context;
    thread->poll.checks = CHECKS_IN_JOB;
    return BA_OK;
}

/* Calls the poll function of this thread, which is the job's caller, if a poll is due. The function runs in the program's float mode. It may run a
 * handler of the program, which may call this library again or fork, so the thread's poll state and its arena are put aside meanwhile. */
static void poll_if_due(ba_thread *thread, ba_stopper *job) {
    const int64_t time = now(POLL_CLOCK);
    thread->poll.checks = time - thread->poll.read > RARE_NANOSECONDS ? 1 : CHECKS_PER_READ;
    thread->poll.read = time;
    if (time < thread->poll.next) return;
    const ba_poll_fn fn = thread->poll.fn;
    void *const context = thread->poll.context;
    const int forks_before = forks;
    const ba_arena arena = ba_arena_put_aside(thread);
    thread->poll.fn = NULL;
    thread->poll.job = thread->joined = NULL;
    ba_set_float_mode(thread->program_mode);
    const int stop = fn(context);
    ba_set_float_mode(BA_USUAL_FLOAT_MODE);
    thread->poll.fn = fn;
    thread->poll.context = context;
    thread->poll.job = thread->joined = job;
    ba_arena_put_back(thread, arena);
    job->forked |= forks != forks_before;
    if (stop || job->forked) atomic_store_explicit(&job->raised, true, memory_order_relaxed);
    thread->poll.next = now(POLL_CLOCK) + POLL_NANOSECONDS;
}

bool ba_stopped(void) {
    ba_thread *const thread = ba_thread_find();
    ba_stopper *const job = thread ? thread->joined : NULL;
    if (!job) return false;
    if (job == thread->poll.job && --thread->poll.checks <= 0) poll_if_due(thread, job);
    return atomic_load_explicit(&job->raised, memory_order_relaxed);
}

static void open_job(ba_thread *thread, ba_stopper *job) {
    if (!thread->poll.fn) return;
    thread->poll.job = thread->joined = job;
    thread->poll.checks = (int)ba_min(thread->poll.checks, CHECKS_IN_JOB); /* items of this job may take longer than items of the last one */
}

static ba_status close_job(ba_thread *thread, const ba_stopper *job) {
    thread->poll.job = thread->joined = NULL;
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

/* Waking a sleeping thread takes as long as a small job. Jobs often follow one another at once (the layers of a decode step, the two rounds
 * of a selection), so a thread that waits spins for a moment before it sleeps. */
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
    ba_set_float_mode(BA_USUAL_FLOAT_MODE);
    uint64_t seen = 0;
    ba_thread own = {0};
    const bool adopted = ba_thread_adopt(&own);
    pthread_mutex_lock(&pool.lock);
    if (!adopted) { /* this thread takes part in no job */
        pool.workers--;
        pthread_mutex_unlock(&pool.lock);
        return NULL;
    }
    ba_thread *const thread = ba_thread_find();
    for (;;) {
        if (pool.generation == seen || pool.places == 0) {
            seen = pool.generation;
            pthread_mutex_unlock(&pool.lock);
            for (const int64_t until = now(CLOCK_MONOTONIC) + SPIN_NANOSECONDS; pool.generation == seen && now(CLOCK_MONOTONIC) < until;) relax();
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
        thread->joined = pool.stopper;
        pthread_mutex_unlock(&pool.lock);
        take_items(fn, context, items, worker);
        thread->joined = NULL;
        pthread_mutex_lock(&pool.lock);
        if (--pool.running == 0) pthread_cond_signal(&pool.done);
    }
    return NULL;
}

/* Only the thread that forks exists in the child, so the child's pool starts with no workers and with new locks. */
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
/* False where the system had no memory for the handler. No workers are then started, since a forked child would wait for them. */
static bool children_are_reset;
static void register_fork_handler(void) { children_are_reset = pthread_atfork(NULL, NULL, reset_in_child) == 0; }

static const size_t LEAST_STACK = 1 << 20; /* bytes, of a worker: kernels over tiles take some 130 KiB, and musl gives new threads 128 KiB */

/* Starts threads until there are `workers` workers, or until the system refuses one. Called with the lock held. */
static void grow(int workers) {
    if (pool.workers >= workers) return;
    /* Workers inherit this mask, so that signals go to the program's own threads. Signals that a worker's own instructions cause stay unblocked: if
     * they were blocked, the system would end the program at once, without calling a handler, such as Python's faulthandler, which prints where the
     * program crashed. */
    static const int own[] = {SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGTRAP};
    sigset_t others, before;
    sigfillset(&others);
    for (size_t i = 0; i < sizeof own / sizeof *own; i++) sigdelset(&others, own[i]);
    pthread_sigmask(SIG_SETMASK, &others, &before);
    pthread_attr_t attributes;
    pthread_attr_init(&attributes);
    pthread_attr_setdetachstate(&attributes, PTHREAD_CREATE_DETACHED);
    size_t stack = 0;
    if (pthread_attr_getstacksize(&attributes, &stack) == 0 && stack < LEAST_STACK) pthread_attr_setstacksize(&attributes, LEAST_STACK);
    while (pool.workers < workers) {
        pthread_t thread;
        if (ba_fault(BA_FAULT_THREAD) || pthread_create(&thread, &attributes, worker_main, NULL) != 0) break;
        pool.workers++;
    }
    pthread_attr_destroy(&attributes);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
}

/* Waits until all workers have left the job. Called with the lock held; returns with the lock released. Where the job can be stopped, the caller
 * polls while it waits. */
static void wait_for_workers(ba_thread *thread) {
    while (pool.running > 0) {
        if (!thread->joined) {
            pthread_cond_wait(&pool.done, &pool.lock);
            continue;
        }
        struct timespec until;
        clock_gettime(CLOCK_REALTIME, &until);
        until.tv_nsec += POLL_NANOSECONDS / 4; /* each wait is a quarter of the polling interval, so that a wait ends soon after a poll is due */
        until.tv_sec += until.tv_nsec / 1000000000;
        until.tv_nsec %= 1000000000;
        if (pthread_cond_timedwait(&pool.done, &pool.lock, &until) == 0) continue;
        pthread_mutex_unlock(&pool.lock); /* the poll function may take long, and workers need this lock to leave the job */
        poll_if_due(thread, thread->joined);
        if (thread->joined->forked) return;
        pthread_mutex_lock(&pool.lock);
    }
    pthread_mutex_unlock(&pool.lock);
}

ba_status ba_parallel(int threads, int64_t items, ba_item_fn fn, void *context) {
    BA_IN_USUAL_MODE;
    ba_thread *const thread = ba_thread_make();
    if (!thread) return ba_fail(BA_ERROR_MEMORY, BA_NO_THREAD);
    ba_stopper job = {0};
    open_job(thread, &job);
    threads = (int)ba_min(threads, items);
    if (threads > 1) pthread_once(&fork_handler, register_fork_handler); /* before any lock is taken: a child could otherwise find the lock taken */
    if (threads <= 1 || !children_are_reset || pthread_mutex_trylock(&pool.owner) != 0) {
        for (int64_t item = 0; item < items && !ba_stopped(); item++) fn(context, item, 0);
        return close_job(thread, &job);
    }
    pthread_mutex_lock(&pool.lock);
    grow(threads - 1);
    atomic_store(&next_item, 0);
    pool.fn = fn;
    pool.context = context;
    pool.items = items;
    pool.stopper = thread->joined;
    pool.places = threads - 1;
    pool.next_worker = 1;
    pool.generation++;
    pthread_cond_broadcast(&pool.wake);
    pthread_mutex_unlock(&pool.lock);

    take_items(fn, context, items, 0);

    for (const int64_t until = now(CLOCK_MONOTONIC) + SPIN_NANOSECONDS; pool.running > 0 && now(CLOCK_MONOTONIC) < until;) relax();
    if (!job.forked) {
        pthread_mutex_lock(&pool.lock);
        pool.places = 0;
        wait_for_workers(thread);
    }
    if (!job.forked) pthread_mutex_unlock(&pool.owner); /* in a forked child, this lock is new and free */
    return close_job(thread, &job);
}

ba_status ba_look_for_stop(void) {
    ba_thread *const thread = ba_thread_find();
    if (!thread || !thread->poll.fn) return BA_OK;
    BA_IN_USUAL_MODE;
    ba_stopper job = {0};
    open_job(thread, &job);
    poll_if_due(thread, &job);
    return close_job(thread, &job);
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

static pthread_once_t threads_default_found = PTHREAD_ONCE_INIT;
static _Atomic int threads_set; /* 0: not set */
static int threads_default = 1;
static char threads_source[128] = ""; /* where threads_default comes from */

/* The cgroup's CPU quota in CPUs, rounded and at least 1; 0 for no quota. Reads cgroup v2 or, where its file is missing, v1. */
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

static bool threads_from_environment(const char *name, const char **ignored) {
    const char *text = getenv(name);
    if (!text || !*text) return false;
    char *end;
    const long n = strtol(text, &end, 10); /* OMP_NUM_THREADS may be a list: the first number counts */
    if (end == text || n < 1 || n > BA_MAX_THREADS) {
        *ignored = *ignored ? *ignored : name;
        return false;
    }
    threads_default = (int)n;
    snprintf(threads_source, sizeof threads_source, "%s=%ld", name, n);
    return true;
}

static void threads_from_system(void) {
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

static void find_threads_default(void) {
    const char *ignored = NULL;
    if (!threads_from_environment("BLITZ_ATTN_NUM_THREADS", &ignored) && !threads_from_environment("OMP_NUM_THREADS", &ignored))
        threads_from_system();
    const size_t used = strlen(threads_source);
    if (ignored)
        snprintf(threads_source + used, sizeof threads_source - used, "; %s is not a number from 1 to %d and is ignored", ignored, BA_MAX_THREADS);
}

int ba_get_num_threads(void) {
    pthread_once(&threads_default_found, find_threads_default);
    const int set = atomic_load(&threads_set);
    return set > 0 ? set : threads_default;
}

const char *ba_num_threads_source(void) {
    pthread_once(&threads_default_found, find_threads_default);
    return atomic_load(&threads_set) > 0 ? "set_num_threads()" : threads_source;
}

ba_status ba_set_num_threads(int num_threads) {
    if (num_threads < 0)
        return ba_fail(BA_ERROR_VALUE, BA_ARG("num_threads") ": expected at least 0, where 0 means the default, got %d", num_threads);
    if (num_threads > BA_MAX_THREADS)
        return ba_fail(BA_ERROR_VALUE, BA_ARG("num_threads") ": expected at most %d, got %d", BA_MAX_THREADS, num_threads);
    atomic_store(&threads_set, num_threads);
    return BA_OK;
}

int ba_threads_for(int num_threads) { return num_threads > 0 ? num_threads : ba_get_num_threads(); }
