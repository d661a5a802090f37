// Kernels on whole rows: embedding, norms, the gate of the MLP. Each thread reads and writes 16 bytes at a time, so H and I are
// multiples of 8.

// x[n] = table[tokens[n]]. Grid N, 256 threads.
KERNEL(256) embed(const int* tokens, const element* table, element* x, int h) {
    begin();
    const element* from = table + (size_t)tokens[blockIdx.x] * h;
    element* to = x + (size_t)blockIdx.x * h;
    for (int i = threadIdx.x * 8; i < h; i += blockDim.x * 8) store16(to + i, load16(from + i));
}

// y = x·rsqrt(sum_of_squares/h + eps)·weight of one row.
INLINE void scaled_row(const element* x, const element* weight, element* y, float squares, int h, float eps) {
    SHARED float scratch[256 / WARP];
    const float scale = rsqrtf(block_sum(squares, scratch) / h + eps);
    for (int i = threadIdx.x * 8; i < h; i += blockDim.x * 8) {
        float numbers[8], weights[8];
        unpack8(numbers, load16(x + i));
        unpack8(weights, load16(weight + i));
        for (int j = 0; j < 8; j++) numbers[j] *= scale * weights[j];
        store16(y + i, pack8(numbers));
    }
}

INLINE float squares8(const float (&x)[8]) {
    float sum = 0.0f;
    for (int j = 0; j < 8; j++) sum += x[j] * x[j];
    return sum;
}

// y = x / rms(x)·weight (Zhang and Sennrich 2019), statistics in float32. Grid N, 256 threads.
KERNEL(256) rms_norm(const element* x, const element* weight, element* y, int h, float eps) {
    begin();
    x += (size_t)blockIdx.x * h;
    float squares = 0.0f;
    for (int i = threadIdx.x * 8; i < h; i += blockDim.x * 8) {
        float numbers[8];
        unpack8(numbers, load16(x + i));
        squares += squares8(numbers);
    }
    scaled_row(x, weight, y + (size_t)blockIdx.x * h, squares, h, eps);
}

// y[n, i] = SiLU(gate)·up with gate = gate_up[n, i], up = gate_up[n, I + i] (Shazeer 2020). Grid (I/8/256, N), 256 threads.
KERNEL(256) silu_mul(const element* gate_up, element* y, int width) {
    begin();
    const int i = (blockIdx.x * blockDim.x + threadIdx.x) * 8;
    if (i >= width) return;
    const element* row = gate_up + (size_t)blockIdx.y * 2 * width;
    float gate[8], up[8];
    unpack8(gate, load16(row + i));
    unpack8(up, load16(row + width + i));
    for (int j = 0; j < 8; j++) gate[j] = silu(gate[j]) * up[j];
    store16(y + (size_t)blockIdx.y * width + i, pack8(gate));
}
