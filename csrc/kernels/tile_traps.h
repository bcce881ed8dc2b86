/* Runs the tile instructions of a release build on a CPU that lacks them, for tests: in a build with BA_TILE_TRAPS (make check-tiles, make asan).
 * Each of these instructions raises SIGILL, and a signal handler carries it out. Internal. */
#ifndef BA_TILE_TRAPS_H
#define BA_TILE_TRAPS_H

#ifdef BA_TILE_TRAPS
/* Installs the handler of SIGILL for the process, unless it is installed. ba_kernels_at calls this function each time that it hands out kernels,
 * because faulthandler.enable(), which pytest calls, replaces the handler. */
void ba_trap_tiles(void);
#endif

#endif
