// Parts of a pass over whole rows or new tokens that libtorch computes with several kernels. Results are rounded where libtorch's are:
// after each of its calls. Rows of inputs may lie further apart than they are long; strides are in elements.

INLINE bool is_aligned(const void* pointer) { return (u64)pointer % 16 == 0; }

// Eight elements, of which `n` exist; the others are 0.
INLINE void load_elements(float (&x)[8], const element* from, int n) {
    if (n == 8 && is_aligned(from)) unpack8(x, load16(from));
    else {
#pragma unroll
        for (int j = 0; j < 8; j++) x[j] = j < n ? to_float(from[j]) : 0.0f;
    }
}
INLINE void store_elements(element* to, const float (&x)[8], int n) {
    if (n == 8 && is_aligned(to)) store16(to, pack8(x));
    else {
#pragma unroll
        for (int j = 0; j < 8; j++)
            if (j < n) to[j] = to_element(x[j]);
    }
}
INLINE float round_to_element(float x) { return to_float(to_element(x)); }

// A head's first R numbers rotated (Su et al. 2021), halves and not pairs of neighbours: y = x·cos + roll(x, R/2)·sin, where the first
// half of `sin` is negated. cos and sin are [P, R]; token t has row t % P. Without a copy, y is x, and numbers behind R are left alone.
// Grid: tokens, 256 threads: each rotates 8 numbers of both halves of a head, and copies as many behind them.
KERNEL(256) rotate(const element* x, element* y, const element* cos, const element* sin, int heads, int d, int r, long long x_stride,
                   long long y_stride, int positions) {
    const int token = blockIdx.x, half = r / 2, pieces = (half + 7) / 8;
    const long long at = (long long)(token % positions) * r;
    for (int i = threadIdx.x; i < heads * pieces; i += blockDim.x) {
        const int head = i / pieces, from = i % pieces * 8, n = min(half - from, 8);
        const element* const in = x + token * x_stride + head * d;
        element* const out = y + token * y_stride + head * d;
        float first[8], second[8], factors[8], partners[8], rotated[8];
        load_elements(first, in + from, n);
        load_elements(second, in + half + from, n);
        load_elements(factors, cos + at + from, n);
        load_elements(partners, sin + at + from, n);
#pragma unroll
        for (int j = 0; j < 8; j++) rotated[j] = __fmaf_rn(second[j], partners[j], round_to_element(first[j] * factors[j]));
        store_elements(out + from, rotated, n);
        load_elements(factors, cos + at + half + from, n);
        load_elements(partners, sin + at + half + from, n);
#pragma unroll
        for (int j = 0; j < 8; j++) rotated[j] = __fmaf_rn(first[j], partners[j], round_to_element(second[j] * factors[j]));
        store_elements(out + half + from, rotated, n);
        if (in == out) continue;
        for (int behind = r + from; behind < d; behind += pieces * 8) {
            const int count = min(d - behind, 8);
            load_elements(first, in + behind, count);
            store_elements(out + behind, first, count);
        }
    }
}

// y = SiLU(gate)·up (Shazeer 2020), [N, I]. Grid (N, I/2048 rounded up), 256 threads.
KERNEL(256) silu_up(const element* gate, const element* up, element* y, int width, long long gate_stride, long long up_stride) {
    const int i = (blockIdx.y * blockDim.x + threadIdx.x) * 8, n = min(width - i, 8);
    if (n <= 0) return;
    float gates[8], ups[8];
    load_elements(gates, gate + (long long)blockIdx.x * gate_stride + i, n);
    load_elements(ups, up + (long long)blockIdx.x * up_stride + i, n);
#pragma unroll
    for (int j = 0; j < 8; j++) gates[j] = round_to_element(silu(gates[j])) * ups[j];
    store_elements(y + (long long)blockIdx.x * width + i, gates, n);
}
