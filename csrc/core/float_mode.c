#include "core/float_mode.h"

#include "core/thread.h"

ba_mode_change ba_change_float_mode(ba_float_mode before) {
    ba_thread *const thread = ba_thread_find(); /* a thread that polls has a ba_thread */
    ba_mode_change change = {.before = before, .known = thread != NULL};
    if (thread) {
        change.program = thread->program_mode;
        thread->program_mode = before;
    }
    ba_set_float_mode(BA_USUAL_FLOAT_MODE);
    return change;
}

void ba_restore_float_mode(const ba_mode_change *change) {
    if (change->known) ba_thread_find()->program_mode = change->program;
    ba_set_float_mode(change->before);
}
