/* AMX tiles on a CPU without them, for tests: in a build with BA_TILE_TRAPS (make check-traps), the instructions of the level amx are those of a
 * release. The CPU refuses each of them, and a signal handler carries it out. Internal. */
#ifndef BA_CORE_TILE_TRAPS_H
#define BA_CORE_TILE_TRAPS_H

#ifdef BA_TILE_TRAPS
/* Installs the handler of SIGILL, for all threads, where it is not in place: pytest installs its own whenever it likes. */
void ba_trap_tiles(void);
#endif

#endif
