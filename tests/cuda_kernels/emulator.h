// Runs the kernels of src/nvidia/kernels on the CPU. Emulates the part of CUDA that they use, with its strictest interpretation.
//
// Blocks run one after another. The threads of a block are fibers, of which one runs at a time. Every warp collective checks that all of
// its lanes reach the same one, and __syncthreads that all threads do; otherwise the launch ends with an error. To expose a missing
// barrier or wait, shared memory is poisoned before each block, an asynchronous copy poisons its destination and takes place as late as
// allowed (at the wait), and the order of blocks and threads can be reversed. Until a thread has waited for the kernels before its own,
// memory that is hidden (everything except weights) is inaccessible to it, and a thread of a step's kernel that ends without waiting is an
// error. That wait is no barrier: the first thread of a block goes on at once, before the others have run at all. Buffers end at an
// inaccessible page, so that an access past their end is reported with the kernel's name, the block and the thread. 16-byte accesses must
// be aligned.
#pragma once

#include <setjmp.h>
#include <signal.h>
#include <sys/mman.h>
#include <ucontext.h>
#include <unistd.h>

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <tuple>
#include <utility>
#include <vector>

using std::isfinite, std::isnan;

#define INLINE static inline
#define SHARED static __attribute__((section("shared_memory")))
#define LAUNCHED_SHARED(name) uint4* const name = (uint4*)emulator::launched_shared
// Hidden visibility: libc exports a function `advance`, which would replace a public symbol of that name.
#define KERNEL(threads) extern "C" __attribute__((visibility("hidden"))) void

struct alignas(16) uint4 {
    unsigned x, y, z, w;
};
static inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return uint4{x, y, z, w}; }

// The section with all SHARED variables of this library.
extern "C" __attribute__((weak, visibility("hidden"))) char __start_shared_memory[], __stop_shared_memory[];

namespace emulator {

struct Index {
    unsigned x, y, z;
};

struct Copy {
    void* to;
    const void* from;
    bool real;
    int group;
};

// A thread of the block.
struct Fiber {
    ucontext_t start;
    jmp_buf at;
    bool started, done;
    Index thread;
    std::vector<Copy> copies;
    int group;
    bool awaited;
};

// Memory that is inaccessible until await_inputs.
struct Hidden {
    char* begin;
    size_t bytes;
};

// A synchronization point of a warp or of the block.
struct Meeting {
    int expected, arrived;
    unsigned turn;
    const char* what;
};

struct Warp {
    Meeting meeting;
    unsigned words[2][32][12];  // what each lane brings, for this turn and the previous one
    float sums[2][16][8];
};

static constexpr size_t STACK = 256 << 10, SHARED_ROOM = 256 << 10;
static char* stacks;
static char* shared_room;
static char* launched_shared;
static size_t launched_bytes;
static std::vector<Fiber> fibers;
static std::vector<Warp> warps;
static Meeting everyone;
static Fiber* now;
static Index block_index, grid_dim, block_dim;
static bool backwards;
static unsigned long progress;  // grows with every arrival: a round without progress is a deadlock
static jmp_buf outside;
static char error[512];
static const char* kernel_name;
static void (*body)(void*);
static void* body_data;
static const Hidden* hidden;
static unsigned hidden_count;
static bool must_await;
static int came;  // threads of the block that have come to await_inputs
static bool shown;

static void show(bool accessible) {
    if (shown == accessible) return;
    shown = accessible;
    for (unsigned i = 0; i < hidden_count; i++)
        mprotect(hidden[i].begin, hidden[i].bytes, accessible ? PROT_READ | PROT_WRITE : PROT_NONE);
}

static int thread_number() { return (int)(now - fibers.data()); }

[[noreturn]] static void fail(const char* what, const char* detail) {
    snprintf(error, sizeof error, "%s: block (%u, %u, %u), thread %d: %s%s", kernel_name, block_index.x, block_index.y, block_index.z,
             now ? thread_number() : -1, what, detail);
    _longjmp(outside, 1);
}

static void next_fiber();

static void run_fiber() {
    for (;;) {  // one turn per block
        body(body_data);
        for (const Copy& copy : now->copies) {
            if (copy.real) fail("ends with a copy that it never waited for", "");
        }
        if (!now->awaited) fail("ends without waiting for the kernels before it", "");
        now->done = true;
        progress++;
        next_fiber();
    }
}

// The callers must not use what the compiler knows about these two functions: other fibers use the registers that setjmp does not save,
// including those that GCC sees these functions leave alone.
#ifdef __clang__
#define OPAQUE __attribute__((noinline))
#else
#define OPAQUE __attribute__((noipa))
#endif

OPAQUE static void resume(Fiber* fiber) {
    now = fiber;
    show(fiber->awaited);
    if (fiber->started) _longjmp(fiber->at, 1);
    fiber->started = true;
    setcontext(&fiber->start);
}

OPAQUE static void next_fiber() {
    const int count = (int)fibers.size(), at = thread_number(), step = backwards ? count - 1 : 1;
    for (int i = 1, other = (at + step) % count; i <= count; i++, other = (other + step) % count) {
        if (fibers[other].done) continue;
        if (&fibers[other] == now) return;
        if (_setjmp(now->at) == 0) resume(&fibers[other]);
        return;
    }
    if (_setjmp(now->at) == 0) _longjmp(outside, 2);  // all threads are done; the next block continues here
}

static unsigned meet(Meeting& meeting, const char* what) {
    if (meeting.arrived == 0) meeting.what = what;
    else if (strcmp(meeting.what, what) != 0) {
        char detail[160];
        snprintf(detail, sizeof detail, "%s, where others of its warp or block are at %s", what, meeting.what);
        fail("comes to ", detail);
    }
    const unsigned turn = meeting.turn;
    progress++;
    if (++meeting.arrived == meeting.expected) {
        meeting.arrived = 0;
        meeting.turn++;
        return turn;
    }
    unsigned long seen = progress;
    for (int rounds = 0; meeting.turn == turn;) {
        next_fiber();
        rounds = progress == seen ? rounds + 1 : 0;
        seen = progress;
        if (rounds > 3) fail("waits for ever at ", what);
    }
    return turn;
}

// The first thread that comes here goes on at once; the others when all are here.
static void await() {
    const int count = (int)fibers.size();
    progress++;
    if (++came > 1) {
        unsigned long seen = progress;
        for (int rounds = 0; came < count;) {
            next_fiber();
            rounds = progress == seen ? rounds + 1 : 0;
            seen = progress;
            if (rounds > 3) fail("waits for ever at ", "await_inputs");
        }
    }
    now->awaited = true;
    if (came == count) {
        for (Fiber& fiber : fibers) fiber.awaited = true;
    }
    show(true);
}

static int lane() { return thread_number() % 32; }

// Passes words to the warp's meeting; returns all lanes' words, which remain valid until the meeting after the next.
template <typename T> static unsigned (*exchange(const char* what, unsigned lanes, const T& mine))[12] {
    static_assert(sizeof(T) <= 48, "twelve words a lane");
    if (lanes != 0xffffffffu) fail(what, " with a mask that is not the whole warp");
    Warp& warp = warps[thread_number() / 32];
    auto* words = warp.words[warp.meeting.turn % 2];
    memcpy(words[lane()], &mine, sizeof mine);
    meet(warp.meeting, what);
    return words;
}

template <typename T> static T shuffle(const char* what, unsigned lanes, T mine, int from) {
    auto* words = exchange(what, lanes, mine);
    T theirs;
    memcpy(&theirs, words[from < 0 || from > 31 ? lane() : from], sizeof theirs);
    return theirs;
}

static void check_aligned(const void* pointer) {
    if ((uintptr_t)pointer % 16 != 0) fail("16 bytes at an address that is no multiple of 16", "");
}

static bool is_shared(const void* pointer) {
    return (const char*)pointer >= launched_shared && (const char*)pointer + 16 <= launched_shared + launched_bytes;
}

// The signal interrupts a fiber; its launch ends.
static void on_fault(int, siginfo_t* info, void*) {
    char detail[64];
    snprintf(detail, sizeof detail, "%p", info->si_addr);
    const char* at = (const char*)info->si_addr;
    for (unsigned i = 0; i < hidden_count; i++) {
        if (now && !now->awaited && at >= hidden[i].begin && at < hidden[i].begin + hidden[i].bytes)
            fail("touches memory of a step before it has waited for the kernels before it, at ", detail);
    }
    fail("touches memory that is not its own, at ", detail);
}

struct FaultsAreErrors {
    struct sigaction before[2];
    FaultsAreErrors() {
        struct sigaction ours = {};
        ours.sa_sigaction = on_fault;
        ours.sa_flags = SA_SIGINFO | SA_NODEFER;
        sigaction(SIGSEGV, &ours, &before[0]);
        sigaction(SIGBUS, &ours, &before[1]);
    }
    ~FaultsAreErrors() {
        sigaction(SIGSEGV, &before[0], nullptr);
        sigaction(SIGBUS, &before[1], nullptr);
    }
};

static void prepare(unsigned threads) {
    if (!stacks) {
        const int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
        stacks = (char*)mmap(nullptr, 1024 * STACK, PROT_READ | PROT_WRITE, flags, -1, 0);
        shared_room = (char*)mmap(nullptr, SHARED_ROOM + 4096, PROT_READ | PROT_WRITE, flags, -1, 0);
        mprotect(shared_room + SHARED_ROOM, 4096, PROT_NONE);
    }
    fibers.clear();
    fibers.resize(threads);
    warps.assign(threads / 32, Warp{});
    for (unsigned i = 0; i < threads; i++) {
        Fiber& fiber = fibers[i];
        fiber.thread = Index{i, 0, 0};
        getcontext(&fiber.start);
        fiber.start.uc_stack.ss_sp = stacks + i * STACK;
        fiber.start.uc_stack.ss_size = STACK;
        makecontext(&fiber.start, run_fiber, 0);
    }
}

static void begin_block(unsigned threads) {
    if (__start_shared_memory) memset(__start_shared_memory, 0xff, __stop_shared_memory - __start_shared_memory);
    memset(launched_shared, 0xff, launched_bytes);
    everyone = Meeting{(int)threads, 0, 0, ""};
    came = 0;
    for (Warp& warp : warps) warp.meeting = Meeting{32, 0, 0, ""};
    for (Fiber& fiber : fibers) {
        fiber.done = false;
        fiber.awaited = !must_await;
        fiber.copies.clear();
        fiber.group = 0;
    }
}

// Runs all blocks; returns null or the error.
static const char* run(const char* name, const unsigned* grid, unsigned threads, unsigned shared, bool from_the_last) {
    kernel_name = name;
    now = nullptr;
    error[0] = 0;
    if (threads % 32 != 0 || threads > 1024 || shared > SHARED_ROOM || shared % 16 != 0) {
        snprintf(error, sizeof error, "%s: %u threads, %u bytes of shared memory: no such block here", name, threads, shared);
        return error;
    }
    prepare(threads);
    launched_shared = shared_room + SHARED_ROOM - shared;
    launched_bytes = shared;
    grid_dim = Index{grid[0], grid[1], grid[2]};
    block_dim = Index{threads, 1, 1};
    backwards = from_the_last;
    FaultsAreErrors faults;
    shown = true;
    const unsigned blocks = grid[0] * grid[1] * grid[2];
    static unsigned block;  // static: keeps its value over longjmp
    for (block = 0; block < blocks; block++) {
        const unsigned at = backwards ? blocks - 1 - block : block;
        block_index = Index{at % grid[0], at / grid[0] % grid[1], at / grid[0] / grid[1]};
        begin_block(threads);
        show(false);
        const int came_back = _setjmp(outside);
        if (came_back == 0) resume(&fibers[backwards ? threads - 1 : 0]);
        show(true);
        if (came_back == 1) return error;
    }
    return nullptr;
}

// A kernel with its arguments in the driver's form: a pointer to each.
template <typename... A> struct Call {
    void (*kernel)(A...);
    void** arguments;
    template <size_t... I> void unpack(std::index_sequence<I...>) { kernel(*(std::remove_reference_t<A>*)arguments[I]...); }
    static void enter(void* data) { ((Call*)data)->unpack(std::index_sequence_for<A...>()); }
};

template <typename... A>
static const char* launch(const char* name, void (*kernel)(A...), const unsigned* grid, unsigned threads, unsigned shared, void** arguments,
                          unsigned count, bool from_the_last, const Hidden* until_awaited, unsigned ranges, bool awaits) {
    static Call<A...> call;
    if (count != sizeof...(A)) {
        snprintf(error, sizeof error, "%s: takes %zu arguments, got %u", name, sizeof...(A), count);
        return error;
    }
    call = {kernel, arguments};
    body = call.enter;
    body_data = &call;
    hidden = until_awaited;
    hidden_count = ranges;
    must_await = awaits;
    return run(name, grid, threads, shared, from_the_last);
}

// float16 by its definition; bfloat16 is the upper half of float32.
static float of_half(unsigned short bits) {
    const int exponent = bits >> 10 & 31, fraction = bits & 1023;
    const float sign = bits >> 15 ? -1.0f : 1.0f;
    if (exponent == 31) return fraction ? NAN : sign * INFINITY;
    return exponent == 0 ? sign * ldexpf((float)fraction, -24) : sign * ldexpf((float)(fraction + 1024), exponent - 25);
}

static unsigned short to_half(float x) {
    unsigned bits;
    memcpy(&bits, &x, 4);
    const unsigned short sign = bits >> 16 & 0x8000;
    const float size = fabsf(x);
    if (x != x) return sign | 0x7fff;
    if (size >= 65520.0f) return sign | 0x7c00;
    if (size == 0.0f) return sign;
    int exponent;
    frexpf(size, &exponent);
    const int step = (exponent < -13 ? -13 : exponent) - 11;  // of the last bit
    const int units = (int)rintf(ldexpf(size, -step));        // ties to even, the default rounding mode
    return sign | (unsigned short)((step + 24) * 1024 + units);  // a normal number's leading bit adds to the exponent
}

static unsigned short to_bfloat(float x) {
    unsigned bits;
    memcpy(&bits, &x, 4);
    if (x != x) return 0x7fff;
    return (unsigned short)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

#ifdef ELEMENT_BF16
static float decode(unsigned short bits) {
    const unsigned wide = (unsigned)bits << 16;
    float x;
    memcpy(&x, &wide, 4);
    return x;
}
static unsigned short encode(float x) { return to_bfloat(x); }
#else
static const std::vector<float>& halves() {
    static const std::vector<float> all = [] {
        std::vector<float> table(65536);
        for (unsigned bits = 0; bits < 65536; bits++) table[bits] = of_half((unsigned short)bits);
        return table;
    }();
    return all;
}
static float decode(unsigned short bits) { return halves()[bits]; }
static unsigned short encode(float x) { return to_half(x); }
#endif

static void multiply_add(float (&c)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {
    Warp& warp = warps[thread_number() / 32];
    const unsigned turn = warp.meeting.turn % 2;
    unsigned mine[10] = {a[0], a[1], a[2], a[3], b0, b1};
    memcpy(mine + 6, c, 16);
    const bool is_last = warp.meeting.arrived == 31;
    memcpy(warp.words[turn][lane()], mine, sizeof mine);
    auto& sums = warp.sums[turn];
    if (is_last) {
        static float left[16][16], right[16][8];
        for (int l = 0; l < 32; l++) {
            const unsigned* words = warp.words[turn][l];
            const int g = l / 4, t = l % 4;
            for (int i = 0; i < 2; i++) {
                const int shift = 16 * i;
                left[g][2 * t + i] = decode((unsigned short)(words[0] >> shift));
                left[g + 8][2 * t + i] = decode((unsigned short)(words[1] >> shift));
                left[g][2 * t + 8 + i] = decode((unsigned short)(words[2] >> shift));
                left[g + 8][2 * t + 8 + i] = decode((unsigned short)(words[3] >> shift));
                right[2 * t + i][g] = decode((unsigned short)(words[4] >> shift));
                right[2 * t + 8 + i][g] = decode((unsigned short)(words[5] >> shift));
                memcpy(&sums[g][2 * t + i], &words[6 + i], 4);
                memcpy(&sums[g + 8][2 * t + i], &words[8 + i], 4);
            }
        }
        for (int row = 0; row < 16; row++)
            for (int k = 0; k < 16; k++)
                for (int column = 0; column < 8; column++) sums[row][column] += left[row][k] * right[k][column];
    }
    meet(warp.meeting, "mma");
    const int g = lane() / 4, t = lane() % 4;
    for (int i = 0; i < 4; i++) c[i] = sums[g + i / 2 * 8][2 * t + i % 2];
}

static void load_matrices(unsigned (&m)[4], const void* row, bool transposed) {
    check_aligned(row);
    if (!is_shared(row)) fail("ldmatrix outside of shared memory", "");
    auto* words = exchange(transposed ? "ldmatrix.trans" : "ldmatrix", 0xffffffffu, row);
    for (int i = 0; i < 4; i++) {
        unsigned short pair[2];
        for (int j = 0; j < 2; j++) {
            const int at_row = transposed ? 2 * (lane() % 4) + j : lane() / 4, column = transposed ? lane() / 4 : 2 * (lane() % 4) + j;
            const unsigned short* theirs;
            memcpy(&theirs, words[8 * i + at_row], sizeof theirs);
            pair[j] = theirs[column];
        }
        m[i] = pair[0] | (unsigned)pair[1] << 16;
    }
}

}  // namespace emulator

#define threadIdx (emulator::now->thread)
#define blockIdx emulator::block_index
#define gridDim emulator::grid_dim
#define blockDim emulator::block_dim

static inline void __syncthreads() { emulator::meet(emulator::everyone, "__syncthreads"); }
static inline void __syncwarp() { emulator::meet(emulator::warps[emulator::thread_number() / 32].meeting, "__syncwarp"); }
static inline void __threadfence() {}
static inline void start_next() {}
static inline void await_inputs() { emulator::await(); }
template <typename T> static T __shfl_xor_sync(unsigned lanes, T x, int step) {
    return emulator::shuffle("__shfl_xor_sync", lanes, x, emulator::lane() ^ step);
}
template <typename T> static T __shfl_up_sync(unsigned lanes, T x, int step) {
    return emulator::shuffle("__shfl_up_sync", lanes, x, emulator::lane() - step);
}
template <typename T> static T __shfl_sync(unsigned lanes, T x, int from) { return emulator::shuffle("__shfl_sync", lanes, x, from); }
static inline unsigned __ballot_sync(unsigned lanes, bool mine) {
    auto* words = emulator::exchange("__ballot_sync", lanes, (unsigned)mine);
    unsigned all = 0;
    for (int lane = 0; lane < 32; lane++) all |= words[lane][0] << lane;
    return all;
}
static inline int __popc(unsigned x) { return __builtin_popcount(x); }
static inline int __ffs(unsigned x) { return __builtin_ffs((int)x); }
static inline int __clz(unsigned x) { return x ? __builtin_clz(x) : 32; }
static inline unsigned __float_as_uint(float x) {
    unsigned bits;
    memcpy(&bits, &x, 4);
    return bits;
}
static inline float __uint_as_float(unsigned bits) {
    float x;
    memcpy(&x, &bits, 4);
    return x;
}
template <typename T> static T atomicAdd(T* at, T x) { return std::exchange(*at, *at + x); }
template <typename T> static T atomicMax(T* at, T x) { return std::exchange(*at, *at < x ? x : *at); }
template <typename T> static T atomicMin(T* at, T x) { return std::exchange(*at, x < *at ? x : *at); }
static inline int min(int a, int b) { return a < b ? a : b; }
static inline int max(int a, int b) { return a > b ? a : b; }
// Rounded one by one: `volatile` keeps the compiler from contracting them.
static inline float one_by_one(volatile float x) { return x; }
static inline float __fmul_rn(float a, float b) { return one_by_one(a * b); }
static inline float __fadd_rn(float a, float b) { return one_by_one(a + b); }
static inline float __fsub_rn(float a, float b) { return one_by_one(a - b); }
static inline float __fdiv_rn(float a, float b) { return a / b; }
static inline float __fsqrt_rn(float a) { return sqrtf(a); }
static inline float __fmaf_rn(float a, float b, float c) { return fmaf(a, b, c); }
static inline float rsqrtf(float x) { return 1.0f / sqrtf(x); }

// The prelude's functions between #ifndef ON_CPU and #endif.
static inline unsigned pack(float low, float high) { return emulator::encode(low) | (unsigned)emulator::encode(high) << 16; }
static inline float low(unsigned both) { return emulator::decode((unsigned short)both); }
static inline float high(unsigned both) { return emulator::decode((unsigned short)(both >> 16)); }
static inline uint4 load16(const void* from) {
    emulator::check_aligned(from);
    return *(const uint4*)from;
}
static inline uint4 stream16(const void* from) { return load16(from); }
static inline uint4 load16_shared(const uint4* from) {
    if (!emulator::is_shared(from)) emulator::fail("loads from what is not shared memory", "");
    return load16(from);
}
static inline void store16(void* to, uint4 bytes) {
    emulator::check_aligned(to);
    *(uint4*)to = bytes;
}
static inline void copy16_async(void* shared, const void* from, bool real) {
    emulator::check_aligned(shared);
    emulator::check_aligned(from);
    if (real) (void)*(const volatile char*)from;  // must be accessible now, even though it is read later
    if (!emulator::is_shared(shared)) emulator::fail("copies to what is not shared memory", "");
    memset(shared, 0xff, 16);
    emulator::now->copies.push_back({shared, from, real, emulator::now->group});
}
static inline void end_copies() { emulator::now->group++; }
template <int PENDING> static void wait_copies() {
    auto& copies = emulator::now->copies;
    size_t kept = 0;
    for (const emulator::Copy& copy : copies) {
        if (copy.group >= emulator::now->group - PENDING) copies[kept++] = copy;
        else if (copy.real) memcpy(copy.to, copy.from, 16);
        else memset(copy.to, 0, 16);
    }
    copies.resize(kept);
}
static inline void load_matrices(unsigned (&m)[4], const void* row) { emulator::load_matrices(m, row, false); }
static inline void load_matrices_transposed(unsigned (&m)[4], const void* row) { emulator::load_matrices(m, row, true); }
static inline void multiply_add(float (&c)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) { emulator::multiply_add(c, a, b0, b1); }
