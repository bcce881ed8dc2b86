#include "kernels/tile_traps.h"
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
enum { UNUSED = 15 /* VEX.vvvv of an instruction without a third operand */, WITH_SIB = 4 /* ModRM.rm where a SIB byte follows */ };

/* Whether this thread is between ldtilecfg and tilerelease. A CPU with tiles, too, refuses loads, stores, tilezero and products elsewhere. */
static _Thread_local bool configured;

/* The handler that was there before: a caller's, or that of Python's faulthandler. */
static struct sigaction before;

static int64_t register_of(const ucontext_t *context, int number) {
    static const int names[16] = {REG_RAX, REG_RCX, REG_RDX, REG_RBX, REG_RSP, REG_RBP, REG_RSI, REG_RDI,
                                  REG_R8,  REG_R9,  REG_R10, REG_R11, REG_R12, REG_R13, REG_R14, REG_R15};
    return context->uc_mcontext.gregs[names[number]];
}

/* Writes why the program ends, and ends it. */
static void refuse(const char *sentence) {
    if (write(STDERR_FILENO, sentence, strlen(sentence)) < 0) _exit(1);
    abort();
}

typedef struct operand {
    int64_t address; /* without the index */
    int64_t index;   /* the index times its scale: for a tile, the distance between its rows */
    int length;      /* of ModRM, SIB and displacement, in bytes */
} operand;

static operand memory_operand(const ucontext_t *context, const unsigned char *vex, const unsigned char *modrm) {
    const int mod = modrm[0] >> 6, rm = modrm[0] & 7, base_high = vex[1] & 0x20 ? 0 : 8, index_high = vex[1] & 0x40 ? 0 : 8;
    operand m = {0, 0, 1};
    int base = rm;
    if (rm == WITH_SIB) {
        const unsigned char sib = modrm[m.length++];
        const int index = (sib >> 3 & 7) + index_high, scale = 1 << (sib >> 6);
        base = sib & 7;
        if (index != 4) m.index = register_of(context, index) * scale; /* 4 stands for no index */
    }
    const bool no_base = mod == 0 && base == 5;
    int32_t displacement = 0;
    if (mod == 1) displacement = (int8_t)modrm[m.length++];
    if (mod == 2 || no_base) {
        memcpy(&displacement, modrm + m.length, sizeof displacement);
        m.length += (int)sizeof displacement;
    }
    m.address = displacement;
    if (!no_base) m.address += register_of(context, base + base_high);
    else if (rm != WITH_SIB) m.address += (int64_t)(uintptr_t)(modrm + m.length); /* relative to the next instruction: no immediate follows */
    return m;
}

/* Whether this is the configuration of tile.h: palette 1, with eight tiles of 16 rows of 64 bytes. */
static bool is_full_size(const unsigned char *config) {
    unsigned char expected[64] = {1};
    for (int t = 0; t < 8; t++) {
        expected[16 + 2 * t] = BA_TILE_ROW_BYTES;
        expected[48 + t] = BA_TILE_ROWS;
    }
    return memcmp(config, expected, sizeof expected) == 0;
}

/* Carries out the instruction at `code`. Returns its length; 0: tile.h does not have this instruction. */
static int carry_out(const ucontext_t *context, const unsigned char *code) {
    if (code[0] != VEX3 || (code[1] & 0x1f) != MAP_0F38 || code[2] & 0x84) return 0; /* W and L are 0 */
    const int prefix = code[2] & 3, opcode = code[3], extra = code[2] >> 3 & 15;
    const unsigned char *modrm = code + 4;
    const bool in_register = modrm[0] >> 6 == 3;
    const int reg = modrm[0] >> 3 & 7, rm = modrm[0] & 7;
    if (opcode == CONFIGURE && prefix == NO_PREFIX && !in_register && reg == 0 && extra == UNUSED) { /* ldtilecfg */
        const operand m = memory_operand(context, code, modrm);
        if (!is_full_size((const unsigned char *)(uintptr_t)(m.address + m.index)))
            refuse("tiles: expected palette 1, and eight tiles of 16 rows of 64 bytes\n");
        configured = true;
        ba_tile_configure();
        return 4 + m.length;
    }
    if (opcode == CONFIGURE && prefix == NO_PREFIX && modrm[0] == 0xc0 && extra == UNUSED) { /* tilerelease */
        configured = false;
        ba_tile_release();
        return 5;
    }
    const bool zero = opcode == CONFIGURE && prefix == PREFIX_F2 && in_register && rm == 0 && extra == UNUSED;
    const bool move = opcode == MOVE && prefix != NO_PREFIX && !in_register && rm == WITH_SIB && extra == UNUSED;
    const int right = 15 - extra; /* VEX.vvvv is inverted */
    const bool dot = opcode == DOT && prefix == PREFIX_F3 && in_register && right < 8 && reg != rm && reg != right && rm != right;
    if (!zero && !move && !dot) return 0;
    if (!configured) refuse("tiles: an instruction outside of ldtilecfg and tilerelease\n");
    if (zero) BA_TILE_ZERO(reg);
    if (dot) ba_tile_dot(reg, rm, right); /* tdpbf16ps */
    if (!move) return 5;
    const operand m = memory_operand(context, code, modrm);
    void *memory = (void *)(uintptr_t)m.address;
    if (prefix == PREFIX_F3) ba_tile_store(reg, memory, m.index);
    else ba_tile_load(reg, memory, m.index); /* PREFIX_66 is tileloaddt1, PREFIX_F2 is tileloadd */
    return 4 + m.length;
}

static void handle(int number, siginfo_t *info, void *memory) {
    (void)number;
    ucontext_t *context = memory;
    greg_t *next = &context->uc_mcontext.gregs[REG_RIP];
    const bool sent = info->si_code <= 0; /* by kill or raise: no instruction caused it */
    const int length = sent ? 0 : carry_out(context, (const unsigned char *)*next);
    *next += length;
    if (length) return;
    /* Leave the signal to the handler that was there before, but only once: if that is faulthandler, it calls the handler that it has replaced, which
     * may be this one. */
    sigaction(SIGILL, &before, NULL);
    before = (struct sigaction){.sa_handler = SIG_DFL};
    if (sent) raise(SIGILL);
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
