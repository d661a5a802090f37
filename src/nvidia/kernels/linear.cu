// Matrix products with weights, y[n, m] = sum over k of x[n, k]·w[m, k], for few rows and for a whole tree.
//
// A step reads every weight once, whatever the number of rows. Speed therefore needs wide reads, many reads in flight, and no
// byte read twice. K is a multiple of 8; sums are float32. Sizes that launches need, too (COLUMNS, FEW_WARPS, FEW_STAGES, BLOCK_SPLIT, STAGES,
// DEPTH), are defined in front of this file: see `Program::sizes` in src/nvidia/kernels.rs.

// What is written of the sums; see `WrittenSums` in src/nvidia/gemm.rs. GATED: y [N, M/2] is SiLU(gate)·up, with gate from the first M/2 rows
// of w and up from the others.
enum { ROUNDED = 0, FLOAT32 = 1, ADDED = 2, GATED = 3 };

INLINE void store_sum(void* y, size_t at, float sum, int written) {
    element* to = (element*)y + at;
    if (written == FLOAT32) ((float*)y)[at] = sum;
    else *to = to_element(written == ADDED ? to_float(*to) + sum : sum);
}

// Gate and up are rounded first, as if they had been stored.
INLINE float gated(float gate, float up) { return silu(rounded(gate)) * rounded(up); }

// The group of SPLIT warps that a warp belongs to, counted over all blocks.
template <int SPLIT> INLINE int few_group() { return blockIdx.x * (FEW_WARPS / SPLIT) + threadIdx.x / WARP / SPLIT; }

// sums[c][r] += row r times weights of column c; with NORMED, rows are multiplied by `norm` first, and squares[r] gets those of row r.
template <int ROWS, bool NORMED>
INLINE void multiply_few(float (&sums)[COLUMNS][ROWS], float (&squares)[ROWS], const uint4 (&rows)[ROWS],
                         const uint4 (&weights)[COLUMNS], uint4 norm) {
#pragma unroll
    for (int r = 0; r < ROWS; r++) {
        float numbers[8];
        unpack8(numbers, rows[r]);
        if (NORMED) {
            float scales[8];
            unpack8(scales, norm);
#pragma unroll
            for (int j = 0; j < 8; j++) {
                squares[r] += numbers[j] * numbers[j];
                numbers[j] *= scales[j];
            }
        }
#pragma unroll
        for (int c = 0; c < COLUMNS; c++) {
            float factors[8];
            unpack8(factors, weights[c]);
#pragma unroll
            for (int j = 0; j < 8; j++) sums[c][r] += numbers[j] * factors[j];
        }
    }
}

#define FEW_SLOTS (FEW_STAGES * COLUMNS * FEW_WARPS * WARP)  // 16-byte pieces of weights in shared memory

// Products of four columns with ROWS rows of x = input(), the last of which repeat row n - 1 if n is smaller. The columns belong to a group
// of SPLIT warps: of K, each warp reads every SPLIT-th run of 256 numbers, and their sums are added in the order of the warps. Weights pass
// through shared memory, where each thread reads only what it has copied itself, so that nothing waits for other threads. Copies of two
// runs are under way while a third is multiplied, and those of the first two begin before the kernels that make x have ended. Lane
// c·ROWS + r of a group's first warp returns row r times column c. With NORMED, x is x / rms(x)·norm (Zhang and Sennrich 2019), which is
// not rounded. All threads of the block call this.
template <int ROWS, int SPLIT, bool NORMED, typename Input>
INLINE float few_rows(Input input, const element* const (&columns)[COLUMNS], int n, int k, const element* norm = nullptr,
                      float eps = 0.0f) {
    LAUNCHED_SHARED(slots);  // FEW_SLOTS pieces, then 2·FEW_WARPS·WARP numbers
    constexpr int STRIDE = SPLIT * WARP * 8, THREADS = FEW_WARPS * WARP;
    const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP, begin = (warp % SPLIT * WARP + lane) * 8;
    const int steps = (k + STRIDE - 1) / STRIDE;
    float* parts = (float*)(slots + FEW_SLOTS);
    auto slot = [&](int step, int c) { return &slots[(step % FEW_STAGES * COLUMNS + c) * THREADS + threadIdx.x]; };
    auto fetch = [&](int step) {
        const int at = step * STRIDE + begin;
#pragma unroll
        for (int c = 0; c < COLUMNS; c++) copy16_async(slot(step, c), columns[c] + (at < k ? at : 0), at < k);
        end_copies();
    };
    start_next();
    for (int step = 0; step < FEW_STAGES - 1; step++) fetch(step);
    await_inputs();
    const element* x = input();
    float sums[COLUMNS][ROWS] = {}, squares[ROWS] = {};
    for (int step = 0; step < steps; step++) {
        const int at = step * STRIDE + begin;
        const uint4 zeros = make_uint4(0, 0, 0, 0), scales = NORMED && at < k ? load16(norm + at) : zeros;
        uint4 rows[ROWS], weights[COLUMNS];
#pragma unroll
        for (int r = 0; r < ROWS; r++) rows[r] = at < k ? load16(x + (size_t)min(r, n - 1) * k + at) : zeros;
        fetch(step + FEW_STAGES - 1);
        wait_copies<FEW_STAGES - 1>();
#pragma unroll
        for (int c = 0; c < COLUMNS; c++) weights[c] = load16_shared(slot(step, c));
        multiply_few<ROWS, NORMED>(sums, squares, rows, weights, scales);
    }
    float sum = 0.0f, square = 0.0f;
#pragma unroll
    for (int c = 0; c < COLUMNS; c++) {
#pragma unroll
        for (int r = 0; r < ROWS; r++) {
            const float whole = warp_sum(sums[c][r]);
            sum = lane == c * ROWS + r ? whole : sum;
        }
    }
#pragma unroll
    for (int r = 0; r < ROWS && NORMED; r++) {
        const float whole = warp_sum(squares[r]);
        square = lane % ROWS == r ? whole : square;
    }
    if (SPLIT > 1) {
        parts[threadIdx.x] = sum;
        if (NORMED) parts[THREADS + threadIdx.x] = square;
        __syncthreads();
#pragma unroll
        for (int other = 1; other < SPLIT; other++) {
            const int at = (threadIdx.x + other * WARP) % THREADS;  // of the next warp, for the groups' first warps
            sum += parts[at];
            if (NORMED) square += parts[THREADS + at];
        }
    }
    return NORMED ? sum * rsqrtf(square / k + eps) : sum;
}

// Up to ROWS rows: x [n, K], w [M, K], y [n, M], or [n, M/2] if it is gated.
template <int ROWS, int SPLIT, bool NORMED>
INLINE void linear_few(const element* x, const element* w, void* y, int n, int m, int k, int written,
                       const element* norm = nullptr, float eps = 0.0f) {
    const int share = written == GATED ? 2 : 1, width = m / share, own = COLUMNS / share;  // columns of y, and the group's
    const int first = few_group<SPLIT>() * own, lane = threadIdx.x % WARP;
    const element* columns[COLUMNS];
#pragma unroll
    for (int c = 0; c < COLUMNS; c++) columns[c] = w + (size_t)(c / own * width + min(first + c % own, width - 1)) * k;
    float sum = few_rows<ROWS, SPLIT, NORMED>([&] { return x; }, columns, n, k, norm, eps);
    const float up = __shfl_xor_sync(ALL_LANES, sum, COLUMNS / 2 * ROWS);
    if (written == GATED) sum = gated(sum, up);
    const int row = lane % ROWS, column = first + lane / ROWS;
    const bool is_first_warp = threadIdx.x / WARP % SPLIT == 0;
    if (is_first_warp && lane < own * ROWS && row < n && column < width) store_sum(y, (size_t)row * width + column, sum, written);
}

// linear_R_S: up to R rows, with the columns shared by S warps. normed_linear_R_S: x is normed. Grid (M / (32/S) rounded up), 256 threads,
// shared memory for few_rows.
#define LINEAR_FEW(rows, split)                                                                                                    \
    KERNEL(256) linear_##rows##_##split(const element* x, const element* w, void* y, int n, int m, int k, int written) {      \
        linear_few<rows, split, false>(x, w, y, n, m, k, written);                                                            \
    }                                                                                                                         \
    KERNEL(256) normed_linear_##rows##_##split(const element* x, const element* w, void* y, int n, int m, int k, int written, \
                                               const element* norm, float eps) {                                             \
        linear_few<rows, split, true>(x, w, y, n, m, k, written, norm, eps);                                                  \
    }
LINEAR_FEW(1, 1)
LINEAR_FEW(1, 4)
LINEAR_FEW(1, 8)
LINEAR_FEW(4, 1)
LINEAR_FEW(4, 4)
LINEAR_FEW(8, 1)
LINEAR_FEW(8, 4)

// A ResBlock of every head (paper section 2.1.1): y[k] = x[k] + SiLU(w[k]·x[k] + b[k]). x is [K, H]; with `state`, all heads read
// row LAST of x [N, H] instead. w [K, H, H], b and y [K, H]. Grid (H/8 rounded up, K), 256 threads,
// shared memory for few_rows.
KERNEL(256) res_block(const element* x, const int* state, const element* w, const element* b, element* y, int h) {
    const int first = few_group<BLOCK_SPLIT>() * COLUMNS, lane = threadIdx.x % WARP;
    const size_t head = blockIdx.y;
    const element* columns[COLUMNS];
#pragma unroll
    for (int c = 0; c < COLUMNS; c++) columns[c] = w + (head * h + min(first + c, h - 1)) * h;
    auto input = [&] { return x + (state ? (size_t)state[LAST] : head) * h; };
    const float sum = few_rows<1, BLOCK_SPLIT, false>(input, columns, 1, h);
    const int column = first + lane;
    if (threadIdx.x / WARP % BLOCK_SPLIT == 0 && lane < COLUMNS && column < h) {
        y[head * h + column] = to_element(to_float(input()[column]) + silu(sum + to_float(b[head * h + column])));
    }
}

// Many rows: tiles of weights and of rows pass through shared memory, STAGES of them in flight, and tensor cores multiply them.
// Weights are the 16 rows of an mma and rows of x its 8 columns, since there are fewer rows of x.

#define CHUNKS (DEPTH / 8)  // 16-byte pieces of a tile's row

// Position of a piece of a tile's row. Pieces are swizzled so that the eight rows that ldmatrix reads at once lie in different
// banks.
INLINE int tile_at(int row, int chunk) { return row * CHUNKS + (chunk ^ (row % CHUNKS)); }

// Copies columns [from, from + DEPTH) of ROWS rows of a matrix; zeros for rows below 0, and behind the end of the rows.
template <int ROWS, int THREADS, typename Row>
INLINE void fetch_tile(uint4* tile, const element* matrix, Row row_of, int from, int k) {
#pragma unroll
    for (int first = 0; first < ROWS * CHUNKS; first += THREADS) {
        const int piece = first + threadIdx.x, place = piece / CHUNKS, chunk = piece % CHUNKS;
        if (ROWS * CHUNKS % THREADS != 0 && piece >= ROWS * CHUNKS) break;  // fewer pieces than threads
        const int row = row_of(place), at = from + chunk * 8;
        const bool real = row >= 0 && at < k;
        copy16_async(&tile[tile_at(place, chunk)], matrix + (real ? (size_t)row * k + at : 0), real);
    }
}

// Adds up the sums of the blocks that share a tile, in the order of these blocks, whichever is last. False for all but the last one.
template <int TILES> INLINE bool add_splits(float (&sums)[TILES][4], float* room, int* arrived) {
    const int splits = gridDim.y;
    if (splits == 1) return true;
    auto at = [&](int split, int i) -> float& {
        return room[(((size_t)blockIdx.x * splits + split) * TILES * 4 + i) * blockDim.x + threadIdx.x];
    };
#pragma unroll
    for (int i = 0; i < TILES * 4; i++) at(blockIdx.y, i) = sums[i / 4][i % 4];
    if (!is_last_block(&arrived[blockIdx.x], splits)) return false;
#pragma unroll
    for (int i = 0; i < TILES * 4; i++) sums[i / 4][i % 4] = 0.0f;
    for (int split = 0; split < splits; split++) {
#pragma unroll
        for (int i = 0; i < TILES * 4; i++) sums[i / 4][i % 4] += at(split, i);
    }
    return true;
}

// HEIGHT rows of the weight by WIDTH rows of x. The warps of a block form a grid, HEIGHT / 16 along the weight, the others along x. If y is
// gated, a warp's sixteen rows of the weight are eight of gate and the eight of up that belong to them, so that a lane holds both. K may
// be split over several blocks.
template <int HEIGHT, int WIDTH, int THREADS>
INLINE void linear_tile(const element* x, const element* w, void* y, int n, int m, int k, int written, float* room, int* arrived) {
    constexpr int WARPS = THREADS / WARP, HIGH = HEIGHT / 16, ACROSS = WARPS / HIGH, TILES = WIDTH / 8 / ACROSS;
    constexpr int STAGE = (HEIGHT + WIDTH) * CHUNKS;
    static_assert(HIGH * ACROSS == WARPS && TILES * ACROSS * 8 == WIDTH, "the warps share a block");
    LAUNCHED_SHARED(stages);
    const bool gates = written == GATED;
    const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP, width = gates ? m / 2 : m;
    const int first = blockIdx.x * (gates ? HEIGHT / 2 : HEIGHT);
    const int all = (k + DEPTH - 1) / DEPTH, each = (all + gridDim.y - 1) / gridDim.y;
    const int begin = min(all, (int)blockIdx.y * each), steps = min(all - begin, each);
    const int high = warp % HIGH * 16, across = warp / HIGH * TILES * 8;
    // The column of y that a row of the tile belongs to.
    auto column_of = [&](int place) { return first + (gates ? place / 16 * 8 + place % 8 : place); };
    auto weight_row = [&](int place) {
        const int column = column_of(place);
        return column < width ? (gates && place % 16 >= 8 ? width : 0) + column : -1;
    };
    auto stage = [&](int step) { return stages + step % STAGES * STAGE; };
    auto fetch_weights = [&](int step) {
        if (step < steps) fetch_tile<HEIGHT, THREADS>(stage(step), w, weight_row, (begin + step) * DEPTH, k);
    };
    auto fetch_rows = [&](int step) {
        auto row_of = [&](int place) { return place < n ? place : -1; };
        if (step < steps) fetch_tile<WIDTH, THREADS>(stage(step) + HEIGHT * CHUNKS, x, row_of, (begin + step) * DEPTH, k);
        end_copies();  // even if empty: one group per step
    };
    start_next();
    for (int step = 0; step < STAGES - 1; step++) fetch_weights(step);
    await_inputs();
    for (int step = 0; step < STAGES - 1; step++) fetch_rows(step);
    float sums[TILES][4];
#pragma unroll
    for (int tile = 0; tile < TILES; tile++) sums[tile][0] = sums[tile][1] = sums[tile][2] = sums[tile][3] = 0.0f;
    for (int step = 0; step < steps; step++) {
        wait_copies<STAGES - 2>();
        __syncthreads();  // all copies have arrived, and the stage of the step before is free
        fetch_weights(step + STAGES - 1);
        fetch_rows(step + STAGES - 1);
        const uint4* weights = stage(step);
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
    if (!add_splits(sums, room, arrived)) return;
#pragma unroll
    for (int tile = 0; tile < TILES; tile++) {
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const int column = column_of(high + lane / 4 + i / 2 * 8), row = across + tile * 8 + lane % 4 * 2 + i % 2;
            if (gates && i >= 2) continue;  // up, which is in y with its gate
            const float sum = gates ? gated(sums[tile][i], sums[tile][i % 2 + 2]) : sums[tile][i];
            if (column < width && row < n) store_sum(y, (size_t)row * width + column, sum, written);
        }
    }
}

// linear_HxW: x [N, K] with N up to W, w [M, K], y [N, M], or [N, M/2] if it is gated. Grid (M / H rounded up, splits of K), 128 threads,
// or 256 for H = 128, STAGES·(H + W)·DEPTH elements of shared memory. With several splits, room holds splits·M·W numbers with M rounded
// up to H, and arrived [M / H] is 0.
#define LINEAR_TILE(height, width)                                                                                              \
    KERNEL(2 * height > 128 ? 2 * height : 128) linear_##height##x##width(                                                     \
        const element* x, const element* w, void* y, int n, int m, int k, int written, float* room, int* arrived) {           \
        linear_tile<height, width, (2 * height > 128 ? 2 * height : 128)>(x, w, y, n, m, k, written, room, arrived);          \
    }
LINEAR_TILE(32, 16)
LINEAR_TILE(32, 32)
LINEAR_TILE(32, 64)
LINEAR_TILE(64, 16)
LINEAR_TILE(64, 32)
LINEAR_TILE(64, 64)
LINEAR_TILE(64, 128)
LINEAR_TILE(128, 64)
