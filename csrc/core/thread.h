/* What the library keeps of each thread. Internal.
 *
 * It is memory that a thread asks for when it first needs it, so that a call is refused where the system has none. Variables of storage class
 * _Thread_local would be the system's business: glibc allocates those of a library that was loaded by dlopen(), as Python loads one, when a thread
 * first uses them, and ends the process where it cannot. */
#ifndef BA_CORE_THREAD_H
#define BA_CORE_THREAD_H

#include <stdbool.h>

#include "blitz_attn.h"
#include "core/arena.h"
#include "core/float_mode.h"

typedef struct ba_thread {
    char error[512];  /* the text of ba_last_error(); "": there was no failure */
    char marked[544]; /* the same with the marks of BA_ARG(): room for 16 of them around 511 bytes */
    char note[384];   /* the text of ba_isa_note() */
    ba_arena arena;
    struct {
        ba_poll_fn fn; /* NULL: nothing can stop this thread's jobs */
        void *context;
        struct ba_stopper *job; /* the job that this thread polls for; NULL: none */
        int checks;             /* calls of ba_stopped() until the clock is read */
        int64_t read, next;     /* nanoseconds: when the clock was last read, and when fn is called next. They outlive jobs and calls: many may follow
                                 * one another, none of which takes as long as the time between two polls */
    } poll;
    ba_float_mode program_mode; /* the program's. The poll function runs in it, while the library computes in the usual mode */
    struct ba_stopper *joined;  /* of the job that this thread takes part in; NULL: no job, or one that nothing can stop */
} ba_thread;

/* The sentence of a failure for which a thread has no memory of its own. */
#define BA_NO_THREAD "thread: expected memory for what the library keeps of this thread, got none"

/* What the library keeps of the calling thread. It begins as zeros and the usual mode, and is freed when the thread ends. NULL where the system has
 * no memory for it. */
ba_thread *ba_thread_make(void);
/* The same, but NULL where this thread has not needed any so far. */
ba_thread *ba_thread_find(void);
/* Makes `own`, of zeros, what is kept of the calling thread. If malloc did not make it, the thread must never end, and never polls. Returns false
 * where the system has no memory to note it down. */
bool ba_thread_adopt(ba_thread *own);
/* Whether the end of a thread frees what is kept of it. It does not where the program has taken all keys of pthreads. */
bool ba_thread_is_freed(void);

#endif
