// The optimizer's update, the norm of the gradients, and the check that parameters are finite: one launch for all parameters.
//
// A table has an entry for each parameter. Block b treats chunk b: CHUNK numbers of one parameter (defined by `Program::sizes` in
// src/nvidia/kernels.rs), less at its end.
// Products and sums that are rounded one by one are written so (__fmul_rn, __fadd_rn), since the compiler contracts others.

typedef unsigned char u8;

#define STATE_BLOCK 256  // numbers that share an absmax in 8-bit moments

// As `TableRow::row` in src/fused/optim.rs writes it.
struct Entry {
    float* value;
    float* gradient;
    void* first;   // moments: float32, or codes of 8 bits
    void* second;
    float* first_absmax;  // with 8-bit moments
    float* second_absmax;
    u64 count;
    u64 first_chunk;
    float decay;      // 1 - learning rate · weight decay
    float step_size;  // learning rate / (1 - beta1^t)
};

// The entry that holds a chunk: the last one that starts at or before it, since an empty one starts where the next one does.
INLINE int entry_of(const Entry* table, int entries, u64 chunk) {
    int low = 0, high = entries - 1;
    while (low < high) {
        const int middle = (low + high + 1) / 2;
        if (table[middle].first_chunk <= chunk) low = middle;
        else high = middle - 1;
    }
    return low;
}

// The numbers [from, end) of a chunk.
struct Range {
    u64 from, end;
};

INLINE Range range_of(const Entry& entry, u64 chunk) {
    const u64 from = (chunk - entry.first_chunk) * CHUNK, end = from + CHUNK;
    return {from, end < entry.count ? end : entry.count};
}

// A pointer read from the table: the compiler is told that it is in device memory.
template <typename T> INLINE T* from_table(const void* pointer) {
#ifndef ON_CPU
    __builtin_assume(__isGlobal(pointer));
#endif
    return (T*)pointer;
}

INLINE bool is_aligned(const void* pointer) { return (u64)pointer % 16 == 0; }

INLINE void load4(float (&x)[4], const float* from) {
    const uint4 bits = load16(from);
    x[0] = __uint_as_float(bits.x), x[1] = __uint_as_float(bits.y), x[2] = __uint_as_float(bits.z), x[3] = __uint_as_float(bits.w);
}
INLINE void store4(float* to, const float (&x)[4]) {
    store16(to, make_uint4(__float_as_uint(x[0]), __float_as_uint(x[1]), __float_as_uint(x[2]), __float_as_uint(x[3])));
}

// The constants of an update.
struct Update {
    float scale;              // of gradients
    float first_weight;       // 1 - beta1
    float beta2;
    float second_weight;      // 1 - beta2
    float second_correction;  // 1 / √(1 - beta2^t)
    float eps;
};

// AdamW (Loshchilov and Hutter 2019) of one number, rounded as by the libtorch calls in src/torch/optim/adamw.rs.
INLINE void adamw_number(float& value, float gradient, float& m, float& v, const Update& u, float decay, float step_size) {
    const float g = __fmul_rn(gradient, u.scale), difference = __fsub_rn(g, m);
    m = u.first_weight < 0.5f ? __fmaf_rn(u.first_weight, difference, m)
                              : __fmaf_rn(__fsub_rn(u.first_weight, 1.0f), difference, g);
    v = __fmaf_rn(__fmul_rn(g, u.second_weight), g, __fmul_rn(v, u.beta2));
    const float denominator = __fadd_rn(__fmul_rn(__fsqrt_rn(v), u.second_correction), u.eps);
    value = __fadd_rn(__fmul_rn(value, decay), __fdiv_rn(__fmul_rn(m, -step_size), denominator));
}

// An update with float32 moments; gradients become 0. Grid: all chunks, 256 threads.
KERNEL(256) adamw(const Entry* table, int entries, float scale, float first_weight, float beta2, float second_weight,
                  float second_correction, float eps) {
    const Update update = {scale, first_weight, beta2, second_weight, second_correction, eps};
    const Entry entry = table[entry_of(table, entries, blockIdx.x)];
    const Range range = range_of(entry, blockIdx.x);
    float* const values = from_table<float>(entry.value);
    float* const gradients = from_table<float>(entry.gradient);
    float* const first = from_table<float>(entry.first);
    float* const second = from_table<float>(entry.second);
    u64 rest = range.from;
    if (is_aligned(values) && is_aligned(gradients) && is_aligned(first) && is_aligned(second)) {
        rest = range.from + (range.end - range.from) / 4 * 4;
        for (u64 i = range.from + threadIdx.x * 4; i < rest; i += blockDim.x * 4) {
            float value[4], gradient[4], m[4], v[4];
            load4(value, values + i);
            load4(gradient, gradients + i);
            load4(m, first + i);
            load4(v, second + i);
#pragma unroll
            for (int j = 0; j < 4; j++) {
                adamw_number(value[j], gradient[j], m[j], v[j], update, entry.decay, entry.step_size);
                gradient[j] = 0.0f;
            }
            store4(values + i, value);
            store4(gradients + i, gradient);
            store4(first + i, m);
            store4(second + i, v);
        }
    }
    for (u64 i = rest + threadIdx.x; i < range.end; i += blockDim.x) {
        adamw_number(values[i], gradients[i], first[i], second[i], update, entry.decay, entry.step_size);
        gradients[i] = 0.0f;
    }
}

// Four numbers of a lane, of which the first `n` exist (all from 4 on, none below 1); the others are 0.
INLINE void load_some(float (&x)[4], const float* from, int n) {
    if (n >= 4 && is_aligned(from)) load4(x, from);
    else {
#pragma unroll
        for (int j = 0; j < 4; j++) x[j] = j < n ? from[j] : 0.0f;
    }
}
INLINE void store_some(float* to, const float (&x)[4], int n) {
    if (n >= 4 && is_aligned(to)) store4(to, x);
    else {
#pragma unroll
        for (int j = 0; j < 4; j++)
            if (j < n) to[j] = x[j];
    }
}
// Eight codes of a lane, of which `n` exist.
INLINE u64 load_codes(const u8* from, int n) {
    if (n == 8 && (u64)from % 8 == 0) return *(const u64*)from;
    u64 codes = 0;
    for (int j = 0; j < n; j++) codes |= (u64)from[j] << 8 * j;
    return codes;
}
INLINE void store_codes(u8* to, u64 codes, int n) {
    if (n == 8 && (u64)to % 8 == 0) *(u64*)to = codes;
    else
        for (int j = 0; j < n; j++) to[j] = (u8)(codes >> 8 * j);
}

INLINE void dequantize8(float (&x)[8], u64 codes, const float* map, float absmax) {
#pragma unroll
    for (int j = 0; j < 8; j++) x[j] = __fmul_rn(map[codes >> 8 * j & 0xff], absmax);
}

// Codes of eight numbers, of which `n` exist, of a warp's block; sets its absmax. `nearest` has a code for each of 65,536 points from -1 to 1.
INLINE u64 quantize8(const float (&x)[8], const u8* nearest, int n, float& absmax) {
    absmax = 0.0f;
#pragma unroll
    for (int j = 0; j < 8; j++) absmax = fmaxf(absmax, j < n ? fabsf(x[j]) : 0.0f);
    absmax = warp_max(absmax);
    const float inverse = __fdiv_rn(1.0f, fmaxf(absmax, 1.17549435e-38f));
    u64 codes = 0;
#pragma unroll
    for (int j = 0; j < 8; j++) {
        const float point = __fadd_rn(__fmul_rn(__fadd_rn(__fmul_rn(x[j], inverse), 1.0f), 32767.5f), 0.5f);
        codes |= (u64)nearest[(int)fminf(fmaxf(point, 0.0f), 65535.0f)] << 8 * j;  // 0 for NaN
    }
    return codes;
}

// An update with 8-bit moments (Dettmers et al. 2021), each warp a block of 256 numbers at a time; gradients become 0. Maps: signed for
// the first moments, unsigned for the second ones. Grid: all chunks, 256 threads.
KERNEL(256) adamw_8bit(const Entry* table, int entries, const float* signed_map, const u8* signed_nearest, const float* unsigned_map,
                       const u8* unsigned_nearest, float scale, float first_weight, float beta2, float second_weight,
                       float second_correction, float eps) {
    SHARED float maps[2][256];
    maps[0][threadIdx.x] = signed_map[threadIdx.x];
    maps[1][threadIdx.x] = unsigned_map[threadIdx.x];
    __syncthreads();
    const Update update = {scale, first_weight, beta2, second_weight, second_correction, eps};
    // A reference: with a copy of the entry or its pointers in registers, others are spilled.
    const Entry& entry = table[entry_of(table, entries, blockIdx.x)];
    const Range range = range_of(entry, blockIdx.x);
    const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP, warps = blockDim.x / WARP;
    for (u64 from = range.from + (u64)warp * STATE_BLOCK; from < range.end; from += (u64)warps * STATE_BLOCK) {
        const u64 i = from + lane * 8, block = from / STATE_BLOCK;
        const int n = i >= range.end ? 0 : range.end - i < 8 ? (int)(range.end - i) : 8;
        float m[8], v[8], absmax;
        dequantize8(m, load_codes((u8*)entry.first + i, n), maps[0], entry.first_absmax[block]);
        dequantize8(v, load_codes((u8*)entry.second + i, n), maps[1], entry.second_absmax[block]);
#pragma unroll
        for (int part = 0; part < 8; part += 4) {
            float value[4], gradient[4];
            load_some(value, entry.value + i + part, n - part);
            load_some(gradient, entry.gradient + i + part, n - part);
#pragma unroll
            for (int j = 0; j < 4; j++) {
                adamw_number(value[j], gradient[j], m[part + j], v[part + j], update, entry.decay, entry.step_size);
                gradient[j] = 0.0f;
            }
            store_some(entry.value + i + part, value, n - part);
            store_some(entry.gradient + i + part, gradient, n - part);
        }
        // All lanes have read the block's absmax before they meet in quantize8.
        store_codes((u8*)entry.first + i, quantize8(m, signed_nearest, n, absmax), n);
        if (lane == 0) entry.first_absmax[block] = absmax;
        store_codes((u8*)entry.second + i, quantize8(v, unsigned_nearest, n, absmax), n);
        if (lane == 0) entry.second_absmax[block] = absmax;
    }
}

// partial[b] = the sum of squares of the gradients of chunk b. Grid: all chunks, 256 threads.
KERNEL(256) squares(const Entry* table, int entries, double* partial) {
    SHARED double scratch[256 / WARP];
    const Entry entry = table[entry_of(table, entries, blockIdx.x)];
    const Range range = range_of(entry, blockIdx.x);
    const float* const gradients = from_table<const float>(entry.gradient);
    float sum = 0.0f;  // of up to 64 squares
    u64 rest = range.from;
    if (is_aligned(gradients)) {
        rest = range.from + (range.end - range.from) / 4 * 4;
        for (u64 i = range.from + threadIdx.x * 4; i < rest; i += blockDim.x * 4) {
            float gradient[4];
            load4(gradient, gradients + i);
#pragma unroll
            for (int j = 0; j < 4; j++) sum += gradient[j] * gradient[j];
        }
    }
    for (u64 i = rest + threadIdx.x; i < range.end; i += blockDim.x) sum += gradients[i] * gradients[i];
    const double total = block_sum((double)sum, scratch);
    if (threadIdx.x == 0) partial[blockIdx.x] = total;
}

// norm[0] = √(the sum of all partial sums), always in the same order. One block of 256 threads.
KERNEL(256) norm_of_squares(const double* partial, int chunks, double* norm) {
    SHARED double scratch[256 / WARP];
    double sum = 0.0;
    for (int i = threadIdx.x; i < chunks; i += blockDim.x) sum += partial[i];
    const double total = block_sum(sum, scratch);
    if (threadIdx.x == 0) norm[0] = sqrt(total);
}

INLINE bool is_finite(float x) { return (__float_as_uint(x) & 0x7f800000u) != 0x7f800000u; }

// first_broken[0] = the least of itself and of the entries whose values are not all finite. Grid: all chunks, 256 threads.
KERNEL(256) first_not_finite(const Entry* table, int entries, int* first_broken) {
    const int at = entry_of(table, entries, blockIdx.x);
    const Entry entry = table[at];
    const Range range = range_of(entry, blockIdx.x);
    const float* const values = from_table<const float>(entry.value);
    bool broken = false;
    u64 rest = range.from;
    if (is_aligned(values)) {
        rest = range.from + (range.end - range.from) / 4 * 4;
        for (u64 i = range.from + threadIdx.x * 4; i < rest; i += blockDim.x * 4) {
            float value[4];
            load4(value, values + i);
#pragma unroll
            for (int j = 0; j < 4; j++) broken = broken || !is_finite(value[j]);
        }
    }
    for (u64 i = rest + threadIdx.x; i < range.end; i += blockDim.x) broken = broken || !is_finite(values[i]);
    if (broken) atomicMin(first_broken, at);
}
