// Matrix products with weights, y[n, m] = sum over k of x[n, k]·w[m, k], for few rows and for a whole tree.
//
// A step reads every weight once, whatever the number of rows. Speed therefore needs wide reads, many reads in flight, and no
// byte read twice. K is a multiple of 8. y has dtype `element`, or float32 with `as_float`; sums are float32.

INLINE void store_number(void* y, size_t at, float number, int as_float) {
    if (as_float) ((float*)y)[at] = number;
    else ((element*)y)[at] = to_element(number);
}

#define COLUMNS 4  // columns of y per warp

// sums[c][r] = x[r]·w[first + c] for one warp, complete in every lane. Rows past the last one count as zero; columns past the
// last one repeat it and must not be used.
template <int ROWS>
INLINE void few_rows(float (&sums)[COLUMNS][ROWS], const element* x, const element* w, int first, int n, int m, int k) {
    const int lane = threadIdx.x % WARP;
    const element* columns[COLUMNS];
#pragma unroll
    for (int c = 0; c < COLUMNS; c++) {
        columns[c] = w + (size_t)min(first + c, m - 1) * k;
#pragma unroll
        for (int r = 0; r < ROWS; r++) sums[c][r] = 0.0f;
    }
#pragma unroll 2
    for (int i = lane * 8; i < k; i += WARP * 8) {
        uint4 weights[COLUMNS];
#pragma unroll
        for (int c = 0; c < COLUMNS; c++) weights[c] = stream16(columns[c] + i);
#pragma unroll
        for (int r = 0; r < ROWS; r++) {
            if (r >= n) continue;
            float numbers[8];
            unpack8(numbers, load16(x + (size_t)r * k + i));
#pragma unroll
            for (int c = 0; c < COLUMNS; c++) {
                float factors[8];
                unpack8(factors, weights[c]);
#pragma unroll
                for (int j = 0; j < 8; j++) sums[c][r] += numbers[j] * factors[j];
            }
        }
    }
#pragma unroll
    for (int c = 0; c < COLUMNS; c++) {
#pragma unroll
        for (int r = 0; r < ROWS; r++) sums[c][r] = warp_sum(sums[c][r]);
    }
}

// Up to ROWS rows: x [n, K], w [M, K], y [n, M]. A warp computes four columns of y and reads their weights side by side.
template <int ROWS>
INLINE void linear_few(const element* x, const element* w, void* y, int n, int m, int k, int as_float) {
    const int first = (blockIdx.x * (blockDim.x / WARP) + threadIdx.x / WARP) * COLUMNS, lane = threadIdx.x % WARP;
    if (first >= m) return;
    float sums[COLUMNS][ROWS];
    few_rows<ROWS>(sums, x, w, first, n, m, k);
    // Lane c·ROWS + r writes sums[c][r].
    const int row = lane % ROWS, column = first + lane / ROWS;
    float sum = 0.0f;
#pragma unroll
    for (int c = 0; c < COLUMNS; c++) {
#pragma unroll
        for (int r = 0; r < ROWS; r++) sum = lane == c * ROWS + r ? sums[c][r] : sum;
    }
    if (lane < COLUMNS * ROWS && row < n && column < m) store_number(y, (size_t)row * m + column, sum, as_float);
}

// Grid M/32 rounded up, 256 threads.
KERNEL(256) linear_1(const element* x, const element* w, void* y, int n, int m, int k, int as_float) {
    linear_few<1>(x, w, y, n, m, k, as_float);
}
KERNEL(256) linear_2(const element* x, const element* w, void* y, int n, int m, int k, int as_float) {
    linear_few<2>(x, w, y, n, m, k, as_float);
}
KERNEL(256) linear_4(const element* x, const element* w, void* y, int n, int m, int k, int as_float) {
    linear_few<4>(x, w, y, n, m, k, as_float);
}
KERNEL(256) linear_8(const element* x, const element* w, void* y, int n, int m, int k, int as_float) {
    linear_few<8>(x, w, y, n, m, k, as_float);
}

// A ResBlock of every head (paper section 2.1.1): y[k] = x[k] + SiLU(w[k]·x[k] + b[k]). x is [K, H]; with `state`, all heads read
// row LAST of x [N, H] instead. w [K, H, H], b and y [K, H]. Grid (H/32 rounded up, K), 256 threads.
KERNEL(256) res_block(const element* x, const int* state, const element* w, const element* b, element* y, int h) {
    const int first = (blockIdx.x * (blockDim.x / WARP) + threadIdx.x / WARP) * COLUMNS, lane = threadIdx.x % WARP;
    if (first >= h) return;
    const size_t head = blockIdx.y;
    x += (state ? (size_t)state[LAST] : head) * h;
    float sums[COLUMNS][1];
    few_rows<1>(sums, x, w + head * h * h, first, 1, h, h);
#pragma unroll
    for (int c = 0; c < COLUMNS; c++) {
        if (lane == c && first + c < h) {
            const float inner = sums[c][0] + to_float(b[head * h + first + c]);
            y[head * h + first + c] = to_element(to_float(x[first + c]) + silu(inner));
        }
    }
}

// Many rows: tiles of weights and of rows pass through shared memory, STAGES of them in flight, and tensor cores multiply them.
// Weights are the 16 rows of an mma and rows of x its 8 columns, since there are fewer rows of x.

#define STAGES 4
#define DEPTH 64               // depth of a tile along k
#define CHUNKS (DEPTH / 8)     // 16-byte pieces of a tile's row

// Position of a piece of a tile's row. Pieces are swizzled so that the eight rows that ldmatrix reads at once lie in different
// banks.
INLINE int tile_at(int row, int chunk) { return row * CHUNKS + (chunk ^ (row % CHUNKS)); }

// Copies rows [first, first + ROWS) and columns [from, from + DEPTH) of a matrix [rows, k]; zeros outside of the matrix.
template <int ROWS> INLINE void fetch_tile(uint4* tile, const element* matrix, int first, int rows, int from, int k) {
#pragma unroll
    for (int i = 0; i < ROWS * CHUNKS / 128; i++) {
        const int piece = threadIdx.x + i * 128, row = piece / CHUNKS, chunk = piece % CHUNKS;
        const int at = from + chunk * 8;
        const bool real = first + row < rows && at < k;
        copy16_async(&tile[tile_at(row, chunk)], matrix + (real ? (size_t)(first + row) * k + at : 0), real);
    }
    static_assert(ROWS * CHUNKS % 128 == 0, "every thread copies as much");
}

// HEIGHT rows of the weight by WIDTH rows of x. The four warps form a grid, HEIGHT / 16 along the weight, the others along x.
template <int HEIGHT, int WIDTH>
INLINE void linear_tile(const element* x, const element* w, void* y, int n, int m, int k, int as_float) {
    constexpr int HIGH = HEIGHT / 16, ACROSS = 4 / HIGH, TILES = WIDTH / 8 / ACROSS, STAGE = (HEIGHT + WIDTH) * CHUNKS;
    static_assert(HIGH * ACROSS == 4 && TILES * ACROSS * 8 == WIDTH, "four warps share a block");
    LAUNCHED_SHARED(stages);
    const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP, first = blockIdx.x * HEIGHT;
    const int high = warp % HIGH * 16, across = warp / HIGH * TILES * 8, steps = (k + DEPTH - 1) / DEPTH;
    auto fetch = [&](int step) {
        if (step < steps) {
            uint4* stage = stages + step % STAGES * STAGE;
            fetch_tile<HEIGHT>(stage, w, first, m, step * DEPTH, k);
            fetch_tile<WIDTH>(stage + HEIGHT * CHUNKS, x, 0, n, step * DEPTH, k);
        }
        end_copies();  // even if empty: one group per step
    };
    float sums[TILES][4];
#pragma unroll
    for (int tile = 0; tile < TILES; tile++) sums[tile][0] = sums[tile][1] = sums[tile][2] = sums[tile][3] = 0.0f;
    for (int step = 0; step < STAGES - 1; step++) fetch(step);
    for (int step = 0; step < steps; step++) {
        wait_copies<STAGES - 2>();
        __syncthreads();  // all copies have arrived, and the stage of the step before is free
        fetch(step + STAGES - 1);
        const uint4* weights = stages + step % STAGES * STAGE;
        const uint4* rows = weights + HEIGHT * CHUNKS;
#pragma unroll
        for (int chunk = 0; chunk < CHUNKS; chunk += 4) {  // 32 columns of k
            u32 a[2][4];
#pragma unroll
            for (int half = 0; half < 2; half++)
                load_matrices(a[half], &weights[tile_at(high + lane % 16, chunk + 2 * half + lane / 16)]);
#pragma unroll
            for (int tile = 0; tile < TILES; tile++) {
                u32 b[4];
                load_matrices(b, &rows[tile_at(across + tile * 8 + lane % 8, chunk + lane / 8)]);
                multiply_add(sums[tile], a[0], b[0], b[1]);
                multiply_add(sums[tile], a[1], b[2], b[3]);
            }
        }
    }
#pragma unroll
    for (int tile = 0; tile < TILES; tile++) {
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const int column = first + high + lane / 4 + i / 2 * 8, row = across + tile * 8 + lane % 4 * 2 + i % 2;
            if (column < m && row < n) {
                store_number(y, (size_t)row * m + column, sums[tile][i], as_float);
            }
        }
    }
}

// linear_HxW: x [N, K] with N up to W, w [M, K], y [N, M]. Grid (M / H rounded up), 128 threads, STAGES·(H + W)·DEPTH elements of
// shared memory.
#define LINEAR_TILE(height, width)                                                                                              \
    KERNEL(128) linear_##height##x##width(const element* x, const element* w, void* y, int n, int m, int k, int as_float) { \
        linear_tile<height, width>(x, w, y, n, m, k, as_float);                                                             \
    }
LINEAR_TILE(32, 16)
LINEAR_TILE(32, 32)
LINEAR_TILE(32, 64)
LINEAR_TILE(32, 128)
LINEAR_TILE(64, 16)
LINEAR_TILE(64, 32)
LINEAR_TILE(64, 64)
LINEAR_TILE(64, 128)
