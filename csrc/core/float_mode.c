#include "core/float_mode.h"

_Thread_local ba_float_mode ba_program_float_mode = BA_USUAL_FLOAT_MODE;
