/* Numbers that tune how work is cut and shared out among threads, the same at every level: tuning.c has them beside those of the levels. */
#ifndef BA_WORK_TUNING_H
#define BA_WORK_TUNING_H

#include <stdint.h>

typedef struct ba_work_tuning {
    int64_t parts;         /* decode: parts that a long sequence's keys are split into, where the limits of ba_few_tuning allow it */
    int64_t many_tiles;    /* per thread: with so many tiles, shares are even whatever the size of a tile */
    double smaller_share;  /* tiles become smaller only where the largest share of a thread falls below this times what it was */
    int64_t items;         /* per thread: items of a forward call at least, where there are tiles enough */
    int64_t few_items;     /* the same of few queries, where an item may have several heads */
    int64_t row_items;     /* the same where queries are attended block by block */
    double survey_entries; /* lists with more entries than this are checked by several threads */
    double small_work;     /* elements: operations that only stream over memory use one thread below this */
} ba_work_tuning;

extern const ba_work_tuning ba_work;

#endif
