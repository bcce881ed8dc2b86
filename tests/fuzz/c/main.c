/* The function that libFuzzer calls. With -DBA_FUZZ_REPLAY, any compiler can build this file into a program that runs input files. */
#include <stdio.h>
#include <stdlib.h>

#include "fuzz.h"

int LLVMFuzzerInitialize(int *argc, char ***argv);
int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);
const char *__asan_default_options(void);

/* Sanitizer options: an allocation that is too large returns NULL, as without a sanitizer, and leaks are not searched for, because the arena keeps
 * its memory. */
const char *__asan_default_options(void) { return "allocator_may_return_null=1:max_allocation_size_mb=1024:detect_leaks=0"; }

int LLVMFuzzerInitialize(int *argc, char ***argv) {
    (void)argc, (void)argv;
    atexit(fz_print_counts);
    return 0;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    static void (*const operations[])(void) = {
        fz_attention,      fz_select_tokens, fz_attention, fz_paged,      fz_paged,       fz_merge,
        fz_select,         fz_quantise,      fz_gate,      fz_nsa_select, fz_block_means, fz_block_means_backward,
        fz_quest_metadata, fz_gate_backward, fz_settings,  fz_choose,     fz_choose,      fz_append};
    fz_open(data, size);
    ba_isa_set_cap((ba_isa)fz_range(0, ba_isa_detected()));
    ba_set_num_threads((int)fz_range(0, 4));
    const int64_t operation = fz_range(0, sizeof operations / sizeof *operations - 1);
    fz_draw_contents();
    operations[operation]();
    fz_release_all();
    return 0;
}

#ifdef BA_FUZZ_REPLAY
int main(int argc, char **argv) {
    static uint8_t data[4096];
    for (int i = 1; i < argc; i++) {
        FILE *file = fopen(argv[i], "rb");
        if (!file) return 2;
        const size_t size = fread(data, 1, sizeof data, file);
        fclose(file);
        fprintf(stderr, "%s\n", argv[i]);
        LLVMFuzzerTestOneInput(data, size);
    }
    fz_print_counts();
    return 0;
}
#endif
