/* Calls of the functions about threads, instruction sets and names, which must accept any number. */
#include <string.h>

#include "fuzz.h"

typedef struct setting {
    int which;
    int64_t number;
} setting;

static void expect_text(const char *text) {
    if (!text || !*text || strlen(text) > 1000) fz_fail("expected a text, got none");
}

static ba_status set(const void *args) {
    const setting *s = args;
    const int n = (int)s->number;
    const char *name = "none";
    char word[16] = "";
    ba_isa level;
    switch (s->which) {
    case 0: return ba_set_num_threads(n);
    case 1: return ba_isa_set_cap((ba_isa)n);
    case 2:
        for (int64_t i = 0; i < 20; i++)
            if (ba_kernel_info((ba_isa)n, i, &name, &level)) expect_text(name);
        break;
    case 3: ba_kernel_info((ba_isa)fz_range(0, BA_ISA_COUNT - 1), s->number, &name, &level); break;
    case 4:
        expect_text(ba_dtype_name((ba_dtype)n));
        expect_text(ba_layout_name((ba_layout)n));
        expect_text(ba_isa_name((ba_isa)n));
        if ((ba_dtype_size((ba_dtype)n) > 0) != (n >= 0 && n < BA_DTYPE_COUNT)) fz_fail("expected a size of every dtype and of no other number");
        break;
    case 5:
        for (int i = 0; i < 15; i++) word[i] = (char)fz_range(0, 255);
        if (ba_isa_parse(word) >= BA_ISA_COUNT) fz_fail("expected a level, got another number");
        if (ba_isa_parse(ba_isa_name((ba_isa)fz_range(0, BA_ISA_COUNT - 1))) < 0) fz_fail("expected a level for its own name, got none");
        break;
    default:
        if (!(ba_default_scale(s->number) > 0)) fz_fail("expected a positive scale, got none");
        break;
    }
    return BA_OK;
}

void fz_settings(void) {
    const setting s = {.which = (int)fz_range(0, 6), .number = fz_unusual_number()};
    const int before = ba_get_num_threads();
    fz_run(FZ_SETTINGS, set, &s, NULL);
    if (ba_get_num_threads() < 1) fz_fail("expected at least one thread, got %d", ba_get_num_threads());
    if (ba_isa_active() > ba_isa_detected()) fz_fail("expected no level above the CPU's, got one");
    expect_text(ba_num_threads_source());
    expect_text(ba_isa_note());
    expect_text(ba_cpu_model());
    expect_text(ba_last_error());
    ba_set_num_threads(before);
}
