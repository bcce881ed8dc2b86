/* What calls.c may know of the blocks of memory.c. */
#ifndef BA_FUZZ_MEMORY_H
#define BA_FUZZ_MEMORY_H

#include "fuzz.h"

enum { FZ_MOST_BLOCKS = 96 };

typedef struct fz_block {
    fz_role role;
    char *base, *memory; /* what malloc gave; behind `slack` poisoned bytes, what the tensor has */
    size_t slack, bytes;
    char *copy; /* of an input, or an output's first result */
    bool is_tensor;
    ba_tensor tensor;
    bool refused; /* a call that looks at it must refuse it */
    bool unseen;
} fz_block;

extern fz_block fz_blocks[FZ_MOST_BLOCKS];
extern int fz_block_count;

#endif
