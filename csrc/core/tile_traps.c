#include "core/tile_traps.h"
#ifdef BA_TILE_TRAPS

#if !defined(__x86_64__) || !defined(__linux__)
#error "BA_TILE_TRAPS: expected Linux on x86-64"
#endif
#define _GNU_SOURCE /* names of registers in ucontext_t */
#define BA_TILE_EMULATED
#include <signal.h>
#include <stdbool.h>
#include <stdlib.h>
#include <ucontext.h>
#include <unistd.h>

#include "kernels/tiles/tile.h"

/* Encodings: Intel 64 and IA-32 Architectures Software Developer's Manual, volume 2, sections 2.3 (VEX) and 2.1.5 (ModRM and SIB). The
 * instructions of tiles have the VEX prefix of three bytes, and stand in its opcode map 2. */
enum { VEX3 = 0xc4, MAP_0F38 = 2, CONFIGURE = 0x49, MOVE = 0x4b, DOT = 0x5c };
enum { NO_PREFIX, PREFIX_66, PREFIX_F3, PREFIX_F2 };

/* Whether this thread has tiles: between ldtilecfg and tilerelease. Elsewhere a CPU with tiles refuses the instructions, too. */
static _Thread_local bool configured;

static struct sigaction before; /* what Python's faulthandler, or a caller, installed */

static greg_t register_of(const ucontext_t *context, int number) {
    static const int names[16] = {REG_RAX, REG_RCX, REG_RDX, REG_RBX, REG_RSP, REG_RBP, REG_RSI, REG_RDI,
                                  REG_R8,  REG_R9,  REG_R10, REG_R11, REG_R12, REG_R13, REG_R14, REG_R15};
    return context->uc_mcontext.gregs[names[number]];
}

/* Writes why the program ends, and ends it. */
static void refuse(const char *sentence) {
    if (write(STDERR_FILENO, sentence, strlen(sentence)) < 0) _exit(1);
    abort();
}

/* An operand in memory. For tiles, `index` is the distance between rows, and no part of the address. */
typedef struct operand {
    char *address;
    int64_t index;
    int length; /* of ModRM, SIB and displacement, in bytes */
} operand;

static operand memory_operand(const ucontext_t *context, const unsigned char *modrm, const unsigned char *vex, const unsigned char *end_of_prefixes) {
    const int mod = modrm[0] >> 6, rm = modrm[0] & 7, base_high = vex[1] & 0x20 ? 0 : 8, index_high = vex[1] & 0x40 ? 0 : 8;
    operand m = {NULL, 0, 1};
    int base = rm;
    if (rm == 4) {
        const unsigned char sib = modrm[m.length++];
        const int index = (sib >> 3 & 7) + index_high;
        base = sib & 7;
        if (index != 4) m.index = register_of(context, index) << (sib >> 6);
    }
    const bool no_base = mod == 0 && base == 5; /* without SIB: relative to the next instruction */
    int32_t displacement = 0;
    if (mod == 1) displacement = (int8_t)modrm[m.length++];
    if (mod == 2 || no_base) {
        memcpy(&displacement, modrm + m.length, sizeof displacement);
        m.length += (int)sizeof displacement;
    }
    int64_t address = displacement;
    if (!no_base) address += register_of(context, base + base_high);
    else if (rm == 5) address += (int64_t)(uintptr_t)(end_of_prefixes + m.length);
    m.address = (char *)(uintptr_t)address; /* NOLINT: made from registers, as the CPU does */
    return m;
}

/* Carries out the instruction at `code`. Returns its length; 0: it is none of tiles. */
static int carry_out(const ucontext_t *context, const unsigned char *code) {
    if (code[0] != VEX3 || (code[1] & 0x1f) != MAP_0F38) return 0;
    const int prefix = code[2] & 3, opcode = code[3];
    const unsigned char *modrm = code + 4;
    const bool in_register = modrm[0] >> 6 == 3;
    const int tile = modrm[0] >> 3 & 7;
    if (opcode == CONFIGURE && prefix == NO_PREFIX && !in_register) {
        const operand m = memory_operand(context, modrm, code, modrm);
        for (int t = 0; t < 8; t++)
            if (m.address[0] != 1 || m.address[1] != 0 || m.address[16 + 2 * t] != BA_TILE_ROW_BYTES || m.address[48 + t] != BA_TILE_ROWS)
                refuse("tiles: expected palette 1, and eight tiles of 16 rows of 64 bytes\n");
        configured = true;
        ba_tile_configure();
        return 4 + m.length;
    }
    if (opcode != CONFIGURE && opcode != MOVE && opcode != DOT) return 0;
    if (!configured) refuse("tiles: an instruction outside of ldtilecfg and tilerelease\n");
    if (opcode == CONFIGURE && prefix == NO_PREFIX) {
        ba_tile_release();
        configured = false;
        return 5;
    }
    if (opcode == CONFIGURE && prefix == PREFIX_F2) {
        BA_TILE_ZERO(tile);
        return 5;
    }
    if (opcode == DOT && prefix == PREFIX_F3) { /* bfloat16: the destination, the left operand, and the right one */
        ba_tile_dot(tile, modrm[0] & 7, ~code[2] >> 3 & 7);
        return 5;
    }
    if (opcode != MOVE || prefix == NO_PREFIX) return 0;
    const operand m = memory_operand(context, modrm, code, modrm);
    if (prefix == PREFIX_F3) ba_tile_store(tile, m.address, m.index);
    else ba_tile_load(tile, m.address, m.index);
    return 4 + m.length;
}

static void handle(int number, siginfo_t *info, void *memory) {
    (void)number;
    (void)info;
    ucontext_t *context = memory;
    greg_t *next = &context->uc_mcontext.gregs[REG_RIP];
    const int length = carry_out(context, (const unsigned char *)*next);
    *next += length;
    if (length == 0) sigaction(SIGILL, &before, NULL); /* the instruction runs again, and ends the program as it would have */
}

void ba_trap_tiles(void) {
    struct sigaction action = {.sa_sigaction = handle, .sa_flags = SA_SIGINFO | SA_NODEFER}, present;
    sigaction(SIGILL, NULL, &present);
    if (present.sa_sigaction == handle) return;
    before = present;
    sigaction(SIGILL, &action, NULL);
}

#else
typedef int ba_no_tile_traps; /* ISO C forbids an empty file */
#endif
