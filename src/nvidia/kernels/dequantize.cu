// Weights from their codes. Products and sums are rounded to float32 one by one, as by libtorch's calls, and the result to its dtype:
// `element`, or float32 with `as_float`.

typedef unsigned char u8;

// Eight numbers of a tensor, of which `n` exist.
INLINE void store_numbers(void* y, u64 at, const float (&x)[8], int n, int as_float) {
    if (as_float) {
        float* const to = (float*)y + at;
        if (n == 8 && (u64)to % 16 == 0) {
            store16(to, make_uint4(__float_as_uint(x[0]), __float_as_uint(x[1]), __float_as_uint(x[2]), __float_as_uint(x[3])));
            store16(to + 4, make_uint4(__float_as_uint(x[4]), __float_as_uint(x[5]), __float_as_uint(x[6]), __float_as_uint(x[7])));
        } else {
#pragma unroll
            for (int j = 0; j < 8; j++)
                if (j < n) to[j] = x[j];
        }
    } else {
        element* const to = (element*)y + at;
        if (n == 8 && (u64)to % 16 == 0) store16(to, pack8(x));
        else {
#pragma unroll
            for (int j = 0; j < 8; j++)
                if (j < n) to[j] = to_element(x[j]);
        }
    }
}

// NF4 (Dettmers et al. 2023): y[i] = table[code i]·absmax[i / 64] for the first `count` of them. A byte holds two codes, the first in its
// high half; table[b] has the two numbers of byte b. With `absmax_codes`, absmax is quantised once more, in blocks of 256: map[code]·scale
// + mean. Otherwise `scales` has it. Each thread makes 8 numbers twice. Grid count/4096 rounded up, 256 threads.
KERNEL(256) nf4_weight(const u8* pairs, const float* table, const u8* absmax_codes, const float* map, const float* scales,
                       const float* mean, void* y, long long count, int as_float) {
    SHARED float numbers[16];
    if (threadIdx.x < 16) numbers[threadIdx.x] = table[2 * threadIdx.x + 1];  // byte b < 16: its low half is b
    __syncthreads();
#pragma unroll
    for (int turn = 0; turn < 2; turn++) {
        const long long i = (long long)blockIdx.x * 4096 + turn * 2048 + threadIdx.x * 8, block = i / 64;
        if (i >= count) return;
        float absmax = scales[absmax_codes ? block / 256 : block];
        if (absmax_codes) absmax = __fadd_rn(__fmul_rn(map[absmax_codes[block]], absmax), mean[0]);
        const u32 codes = *(const u32*)(pairs + i / 2);
        float x[8];
#pragma unroll
        for (int j = 0; j < 4; j++) {
            const u32 pair = codes >> 8 * j & 0xff;
            x[2 * j] = __fmul_rn(numbers[pair >> 4], absmax);
            x[2 * j + 1] = __fmul_rn(numbers[pair & 15], absmax);
        }
        store_numbers(y, i, x, count - i < 8 ? (int)(count - i) : 8, as_float);
    }
}

// int8: y[o, i] = codes[o, i]·(absmax[o] / 127). Grid (O, I/2048 rounded up), 256 threads.
KERNEL(256) int8_weight(const signed char* codes, const float* absmax, void* y, int width, int as_float) {
    const int i = (blockIdx.y * blockDim.x + threadIdx.x) * 8;
    if (i >= width) return;
    const int n = min(width - i, 8);
    const float scale = __fdiv_rn(absmax[blockIdx.x], 127.0f);
    const u64 at = (u64)blockIdx.x * width + i;
    float x[8];
    if (n == 8 && (u64)(codes + at) % 8 == 0) {
        const u64 eight = *(const u64*)(codes + at);
#pragma unroll
        for (int j = 0; j < 8; j++) x[j] = __fmul_rn((float)(signed char)(eight >> 8 * j), scale);
    } else {
#pragma unroll
        for (int j = 0; j < 8; j++) x[j] = j < n ? __fmul_rn((float)codes[at + j], scale) : 0.0f;
    }
    store_numbers(y, at, x, n, as_float);
}
