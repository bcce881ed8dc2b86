/* The blocks of memory.c, as calls.c sees them. */
#ifndef BA_FUZZ_MEMORY_H
#define BA_FUZZ_MEMORY_H

#include "fuzz.h"

enum { FZ_MOST_BLOCKS = 96 };

typedef struct fz_block {
    fz_role role;
    char *base, *memory; /* the result of malloc; the tensor's memory, behind `slack` poisoned bytes */
    size_t slack, bytes;
    char *copy; /* a copy of an input, or of the first result of an output */
    bool is_tensor;
    ba_tensor tensor;
    bool refused; /* a call that reads the tensor must refuse it */
    bool unseen;  /* the call does not read the tensor */
} fz_block;

extern fz_block fz_blocks[FZ_MOST_BLOCKS];
extern int fz_block_count;

#endif
