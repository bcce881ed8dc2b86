/* The state that the library keeps for each thread. Internal.
 *
 * A thread allocates its state when it first needs this state, so that a call is refused where the system has no memory. Variables of storage class
 * _Thread_local would not do. In a library that was loaded by dlopen(), as extensions of Python are, glibc allocates such variables when a thread
 * first uses them, and ends the process where there is no memory. */
#ifndef BA_CORE_THREAD_H
#define BA_CORE_THREAD_H

#include <stdbool.h>

#include "blitz_attn.h"
#include "core/arena.h"
#include "core/float_mode.h"

typedef struct ba_thread {
    char error[512];  /* the text of ba_last_error(); "": there was no failure */
    char marked[544]; /* the same text with the marks of BA_ARG(): room for 511 bytes and the marks of 16 names */
    char note[384];   /* the text of ba_isa_note() */
    ba_arena arena;
    struct {
        ba_poll_fn fn; /* NULL: nothing can stop this thread's jobs */
        void *context;
        struct ba_stopper *job; /* the job that this thread polls for; NULL: none */
        int checks;             /* calls of ba_stopped() until the clock is read */
        int64_t read, next;     /* nanoseconds: when the clock was last read, and when fn is called next. Both outlive jobs and calls, because many
                                 * short jobs may run between two polls */
    } poll;
    ba_float_mode program_mode; /* the program's float mode. The poll function runs in it, while the library computes in the usual mode */
    struct ba_stopper *joined;  /* the job that this thread takes part in; NULL: no job, or a job that nothing can stop */
} ba_thread;

/* The sentence of a failure where even the ba_thread that would hold the sentence cannot be allocated. */
#define BA_NO_THREAD "thread: expected memory for what the library keeps for this thread, got none"

/* The ba_thread of the calling thread, which is freed when the thread ends. If there is none yet, a new one is made, of zeros and the usual float
 * mode. NULL where the system has no memory for a new one. */
ba_thread *ba_thread_make(void);
/* The ba_thread of the calling thread, or NULL where it has none yet. */
ba_thread *ba_thread_find(void);
/* Makes `own` the ba_thread of the calling thread. (Where there is no pthread key, each thread has a static variable instead, and `own` is not used.)
 * `own` is freed when the thread ends. If it does not come from malloc, the thread must never end after this function has returned true. All members
 * of `own` are zeros, except that program_mode must be set if the thread polls. Returns false where the system has no memory to store the pointer. */
bool ba_thread_adopt(ba_thread *own);
/* Whether a ba_thread is freed when its thread ends: false where the program has taken all pthread keys. */
bool ba_thread_is_freed(void);

#endif
