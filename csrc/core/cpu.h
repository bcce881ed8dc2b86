/* What this CPU can do, and the cap on it. Internal; the public part is in blitz_attn.h. */
#ifndef BA_CORE_CPU_H
#define BA_CORE_CPU_H

#include "blitz_attn.h"

#endif
