// Shared by all kernel files: type names, conversions, and the few instructions that C++ cannot express.
//
// No header is included: NVRTC compiles this file followed by one kernel file. Compile-time choices: ELEMENT_BF16 or ELEMENT_F16
// (the dtype of weights and activations), and HEAD_SIZE (D, 64 or 128) where a file mentions it. With ON_CPU, a C++ compiler
// compiles the same kernels after an emulator, which provides the functions between `#ifndef ON_CPU` and `#endif`.
//
// Letters: N rows of a step (1 to 128), H hidden, Q query heads, G key/value heads, R = Q/G, D head size, I width of the MLP,
// V vocabulary, K heads, P guesses per head, S room for tokens in the cache.

typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef u16 element;  // bfloat16 or float16, as bits

// Indices into the state: see src/engine/cuda/state.rs.
enum { CONTEXT = 0, ACCEPTED = 1, LAST = 2, NEXT = 3, STEP = 4 };

#define WARP 32
#define ALL_LANES 0xffffffffu

#ifndef ON_CPU

#define KERNEL(threads) extern "C" __global__ void __launch_bounds__(threads)
#define INLINE __device__ __forceinline__
#define SHARED __shared__
// Shared memory whose size is given at launch.
#define LAUNCHED_SHARED(name) extern __shared__ __align__(128) uint4 name[]
#define INFINITY __int_as_float(0x7f800000)

#ifdef ELEMENT_BF16
INLINE u32 pack(float low, float high) {
    u32 both;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(high), "f"(low));
    return both;
}
INLINE float low(u32 both) { return __uint_as_float(both << 16); }
INLINE float high(u32 both) { return __uint_as_float(both & 0xffff0000u); }
#define MMA_TYPES "f32.bf16.bf16.f32"
#else
INLINE u32 pack(float low, float high) {
    u32 both;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(high), "f"(low));
    return both;
}
INLINE float low(u32 both) {
    float number;
    asm("{.reg .b16 l, h; mov.b32 {l, h}, %1; cvt.f32.f16 %0, l;}" : "=f"(number) : "r"(both));
    return number;
}
INLINE float high(u32 both) {
    float number;
    asm("{.reg .b16 l, h; mov.b32 {l, h}, %1; cvt.f32.f16 %0, h;}" : "=f"(number) : "r"(both));
    return number;
}
#define MMA_TYPES "f32.f16.f16.f32"
#endif

// Loads and stores 16 bytes of device memory; the address is a multiple of 16.
INLINE uint4 load16(const void* from) { return *(const uint4*)from; }
INLINE void store16(void* to, uint4 bytes) { *(uint4*)to = bytes; }
// Loads bytes that the kernel reads only once: they do not evict others from the L1 cache.
INLINE uint4 stream16(const void* from) {
    uint4 b;
    asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0,%1,%2,%3}, [%4];"
                 : "=r"(b.x), "=r"(b.y), "=r"(b.z), "=r"(b.w) : "l"(from));
    return b;
}

INLINE u32 shared_address(const void* pointer) { return (u32)__cvta_generic_to_shared(pointer); }
// Loads 16 bytes of shared memory that an asynchronous copy has written.
INLINE uint4 load16_shared(const uint4* from) {
    uint4 b;
    asm volatile("ld.shared.v4.u32 {%0,%1,%2,%3}, [%4];"
                 : "=r"(b.x), "=r"(b.y), "=r"(b.z), "=r"(b.w) : "r"(shared_address(from)));
    return b;
}

// Kernels of a step overlap on GPUs that can do so (programmatic dependent launch, compute capability 9.0): a kernel may start as soon
// as every block of the kernel before it has started. Then await_inputs must come before every access to memory that a step writes; only
// weights may be read earlier. It waits until the kernels before this one have ended and their writes are visible. Every thread calls
// it, since the kernel after this one relies on it, too.
INLINE void start_next() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;");
#endif
}
INLINE void await_inputs() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// Copies 16 bytes from device to shared memory asynchronously; writes zeros unless `real`.
INLINE void copy16_async(void* shared, const void* from, bool real) {
    const int bytes = real ? 16 : 0;
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared_address(shared)), "l"(from), "r"(bytes));
}
// Ends a group of copies.
INLINE void end_copies() { asm volatile("cp.async.commit_group;"); }
// Waits until all but the last PENDING groups of this thread have arrived.
template <int PENDING> INLINE void wait_copies() { asm volatile("cp.async.wait_group %0;" ::"n"(PENDING)); }

// Four 8x8 matrices of elements. Lane l passes the address of row l % 8 of matrix l / 8. From each matrix it receives columns
// 2(l % 4) and 2(l % 4) + 1 of row l / 4; transposed, rows 2(l % 4) and 2(l % 4) + 1 of column l / 4.
INLINE void load_matrices(u32 (&m)[4], const void* row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(m[0]), "=r"(m[1]), "=r"(m[2]), "=r"(m[3]) : "r"(shared_address(row)));
}
INLINE void load_matrices_transposed(u32 (&m)[4], const void* row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(m[0]), "=r"(m[1]), "=r"(m[2]), "=r"(m[3]) : "r"(shared_address(row)));
}
// c[16, 8] += a[16, 16]·b[16, 8] in a warp. With g = lane / 4 and t = lane % 4: a0 holds row g, columns 2t and 2t + 1; a1 row
// g + 8; a2 and a3 the same, 8 columns further; b0 rows 2t and 2t + 1 of column g, b1 8 rows further; c0 and c1 row g, columns 2t
// and 2t + 1; c2 and c3 row g + 8.
INLINE void multiply_add(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) {
    asm volatile("mma.sync.aligned.m16n8k16.row.col." MMA_TYPES " {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
                 : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

#endif

// The beginning of a kernel that reads nothing but what a step writes.
INLINE void begin() {
    start_next();
    await_inputs();
}

INLINE float to_float(element x) { return low(x); }
INLINE element to_element(float x) { return (element)pack(x, 0.0f); }
INLINE float rounded(float x) { return to_float(to_element(x)); }

// Eight elements packed into 16 bytes.
INLINE void unpack8(float (&x)[8], uint4 bytes) {
    const u32 words[4] = {bytes.x, bytes.y, bytes.z, bytes.w};
#pragma unroll
    for (int i = 0; i < 4; i++) {
        x[2 * i] = low(words[i]);
        x[2 * i + 1] = high(words[i]);
    }
}
INLINE uint4 pack8(const float (&x)[8]) {
    return make_uint4(pack(x[0], x[1]), pack(x[2], x[3]), pack(x[4], x[5]), pack(x[6], x[7]));
}

template <typename T> INLINE T warp_sum(T x) {
#pragma unroll
    for (int step = WARP / 2; step > 0; step /= 2) x += __shfl_xor_sync(ALL_LANES, x, step);
    return x;
}
INLINE float warp_max(float x) {
#pragma unroll
    for (int step = WARP / 2; step > 0; step /= 2) x = fmaxf(x, __shfl_xor_sync(ALL_LANES, x, step));
    return x;
}

// Sum and maximum over a block; `scratch` holds one number per warp, and every thread gets the result.
template <typename T> INLINE T block_sum(T x, T* scratch) {
    x = warp_sum(x);
    __syncthreads();  // scratch may still be read for an earlier sum
    if (threadIdx.x % WARP == 0) scratch[threadIdx.x / WARP] = x;
    __syncthreads();
    T total = 0;
    for (int warp = 0; warp < (int)blockDim.x / WARP; warp++) total += scratch[warp];
    return total;
}
INLINE float block_max(float x, float* scratch) {
    x = warp_max(x);
    __syncthreads();
    if (threadIdx.x % WARP == 0) scratch[threadIdx.x / WARP] = x;
    __syncthreads();
    float most = scratch[0];
    for (int warp = 1; warp < (int)blockDim.x / WARP; warp++) most = fmaxf(most, scratch[warp]);
    return most;
}

// Whether this block is the last of `count` blocks that come here with the same counter; it then sees what the others wrote before. The
// counter is 0 before and after.
INLINE bool is_last_block(int* arrived, int count) {
    SHARED int before;
    __threadfence();
    __syncthreads();
    if (threadIdx.x == 0) {
        before = atomicAdd(arrived, 1);
        if (before == count - 1) *arrived = 0;
    }
    __syncthreads();
    __threadfence();
    return before == count - 1;
}

// x·sigmoid(x)
INLINE float silu(float x) { return x / (1.0f + expf(-x)); }
