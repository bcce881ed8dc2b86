/* Numbers that tune how work is cut and shared out among threads. They are the same at every level; tuning.c has their values. */
#ifndef BA_WORK_TUNING_H
#define BA_WORK_TUNING_H

#include <stdint.h>

typedef struct ba_work_tuning {
    int64_t parts;          /* decode: parts that a long sequence's keys are split into, where the limits of ba_few_tuning allow it */
    int64_t many_tiles;     /* tiles per thread: with so many, threads have even shares, whatever the size of a tile */
    double smaller_share;   /* tiles become smaller only if the share of the busiest thread falls below this part of what it was */
    int64_t items;          /* items per thread that a forward call aims at, where several threads share its tiles */
    int64_t few_items;      /* the same for few queries, where an item may have several heads */
    int64_t by_block_items; /* the same where queries are attended block by block */
    int64_t by_block_keys;  /* the fewest keys of a block for attention by block to pay: smaller blocks cost a kernel call for a few keys */
    int64_t by_block_young; /* list rows that have attended fewer chunks than this are taken last for each chunk: attend_by_block.c says why */
    int64_t alike_keys;     /* keys per query: with at least so many, all tiles of a call of one sequence without lists take the same time */
    int64_t few_keys;     /* keys per query: with at least so many, queries count as few even if the kernel for few queries cannot take all at once */
    int64_t most_entries; /* the most entries of an item's lists, where the lists are inverted: it bounds the item's scratch memory */
    double survey_entries;  /* lists with more entries than this are checked by several threads */
    double small_work;      /* elements: operations that only stream over memory use one thread below this */
    double small_quantised; /* numbers: quantisation uses one thread below this */
    double small_products;  /* multiply-adds: choosing blocks or tokens, and selection in native sparse attention, use one thread below this */
    int64_t small_padding;  /* bytes: less padding than this is cleared by one thread */
    int64_t merge_rows;     /* rows per item of a merge */
    int64_t round_queries;  /* attention with kv_split: queries that are attended together, as far as there are so many */
    int64_t round_bytes;    /* the same in bytes of the queries' states, where this allows more queries */
    int64_t stored_numbers; /* numbers per item where rows are stored in a cache; an item has whole tokens */
    double gradient_packs;  /* K and V are packed once for all items where the items would pack a key at least so often, on average */
    int64_t gradient_keys;  /* keys per item of the jobs that clear dK and dV, and that round them */

    /* Quest */
    struct {
        int64_t pages;             /* summaries: pages per item */
        int64_t run_rows;          /* selection: the fewest rows (summaries or keys) per item of the scores */
        int64_t thread_runs;       /* such items per thread, where there are rows enough */
        int64_t chunk_rows;        /* where heads read a row together: rows that are scored for every head before the next rows */
        int64_t single_chunk_rows; /* the same where the kernel for few queries scores one head after the other */
        int64_t ahead_bytes;       /* bytes that are prefetched ahead of the row that is scored, where heads read a row together */
        int64_t ahead_rows;        /* the most rows that are prefetched ahead */
        int64_t insertion_keys;    /* up to so many keys are sorted by insertion */
        double small_products;     /* multiply-adds: selection uses one thread below this */
    } quest;

    /* Choosing blocks for prefill */
    struct {
        int64_t pooled_keys;  /* pooled keys per item of the job that makes them */
        int64_t ahead_tokens; /* tokens are prefetched at least so many tokens before they are pooled */
        int64_t bands;        /* bands per thread: where there are fewer, fewer panels make a band */
        int64_t pooled_bytes; /* the most bytes of pooled keys that are in memory at a time, unless one KV head has more */
        int64_t bucket_keys;  /* a block row with more blocks than this is sorted with buckets */
        int64_t moves;        /* moves per block of a block row: where sorting by insertion would take more, the row is sorted by bytes */
    } choose;

    /* Choosing tokens */
    struct {
        int64_t rows;      /* the most query rows (queries times heads) scored together, but at least one query's; without scratch: tile_rows */
        int64_t tile_rows; /* the most query rows of an item, but at least those that are scored together: a panel of keys is packed once per item */
        int64_t tiles;     /* tiles per thread: where there are fewer, the keys of each tile are cut into parts */
        int64_t part_keys; /* the fewest keys of a part */
    } tokens;

    /* Native sparse attention */
    struct {
        int64_t mean_tokens;     /* tokens per item of the means of blocks and of their gradients */
        int64_t gate_tokens;     /* tokens per item of the gates */
        int64_t gradient_tokens; /* tokens per item of the gates' gradients. Each item sums its share of dweight, so this number decides the bits */
    } nsa;
} ba_work_tuning;

extern const ba_work_tuning ba_work;

#endif
