/* Runs the tile instructions of a release build on a CPU that has none, for tests: in a build with BA_TILE_TRAPS (make check-tiles, make asan). Each
 * raises SIGILL, and a signal handler does its work. Internal. */
#ifndef BA_CORE_TILE_TRAPS_H
#define BA_CORE_TILE_TRAPS_H

#ifdef BA_TILE_TRAPS
/* Installs the handler of SIGILL for the process, unless it is installed. Every call of the library does so again, because
 * faulthandler.enable(), which pytest calls, replaces it. */
void ba_trap_tiles(void);
#endif

#endif
