// From a step's product for q, k and v to attention's output: adds the bias, norms each head of q and k, rotates q and k by their positions,
// appends k and v to the committed rows of the cache, and attends to the cache and to the step's own rows (paper section 2.1.2), with the
// keys split over blocks.
//
// Row n has position p = CONTEXT + depths[n]. With a head's vector x, and i < D/2:
//   x = x + bias, if there is one
//   x = x·rsqrt(mean(x²) + eps)·weight, for q and k, if there are norms (Zhang and Sennrich 2019)
//   y[i] = x[i]·cos[p, i] - x[i + D/2]·sin[p, i]        y[i + D/2] = x[i + D/2]·cos[p, i] + x[i]·sin[p, i]
// The last is for q and k (Su et al. 2021; pairs are halves, not neighbours). Each of the three is computed in float32 and rounded. A block
// computes the new keys and values of its own tiles itself, so that it waits for no other; of the blocks that share a tile, the first
// writes them to the cache.
//
// A row at position p = CONTEXT + depths[n] attends to the committed tokens, and to those rows of the step whose bit is set in
// sees[n] ([N, 2] 64-bit words, bit j % 64 of word j / 64). With window > 0, it attends only to positions above p - window. The
// rows' own keys and values go into the cache at CONTEXT + n. The length is read from the state, so the grid is the same at every
// length.
//
// The R query heads that share a key/value head are handled as more rows of the same attention: row r·N + n is query head g·R + r
// of node n, and a tile of 64 keys is read once for 64 such rows. Softmax is online (Milakov and Gimelshein 2018; tiles as in Dao
// et al. 2022), sums are float32; probabilities are rounded to `element` for the product with the values. Each part of the keys
// yields its unnormalised sum, its maximum (in log2 units) and its denominator in float32; the last block of the same rows combines the
// parts, in their order.
//
// Layouts: qkv [N, Q + 2G, D], bias [Q + 2G, D] or null, query_norm and key_norm [D] or null, cos and sin [S, D/2] float32, o [N, Q, D],
// cache [2, G, S, D] (keys, then values), sums [parts, Q·N, D] and marks [parts, Q·N, 2] (maximum, denominator), where
// the rows of key/value head g start at g·R·N; arrived [R·N/64 rounded up, G] is 0. Compile time: HEAD_SIZE, KEYS (keys
// per tile).

#define ROW_CHUNKS (HEAD_SIZE / 8)   // 16-byte pieces of a key or value

struct Heads {
    int q, g, n, room;
};

// Where blocks of the same rows pass their parts to the last of them.
struct Parts {
    float *sums, *marks;
    int* arrived;
};

// Pieces of a row are swizzled so that the eight rows that ldmatrix reads at once lie in different banks.
INLINE int key_at(int row, int chunk) { return row * ROW_CHUNKS + (chunk ^ (row % 8)); }

// Copies the committed ones of keys [first, first + KEYS) of one plane; zeros from `end` on.
INLINE void fetch_keys(uint4* tile, const element* plane, int first, int context, int end) {
#pragma unroll
    for (int i = 0; i < KEYS * ROW_CHUNKS / 128; i++) {
        const int piece = threadIdx.x + i * 128, row = piece / ROW_CHUNKS, chunk = piece % ROW_CHUNKS;
        const bool real = first + row < context;
        if (!real && first + row < end) continue;  // the step's own
        copy16_async(&tile[key_at(row, chunk)], plane + (real ? (size_t)(first + row) * HEAD_SIZE + chunk * 8 : 0), real);
    }
}

// The product for q, k and v, and what heads get from it.
struct Inputs {
    const element *qkv, *bias, *query_norm, *key_norm;
    float eps;
    const float *cos_table, *sin_table;
};

// Eight numbers of a vector, from a chunk on, as they were loaded: with the eight that they are rotated with, and the angles.
struct Loaded {
    uint4 own, other, cos[2], sin[2];
};

INLINE const element* product_at(const Inputs& in, const Heads& heads, int node, int head) {
    return in.qkv + ((size_t)node * (heads.q + 2 * heads.g) + head) * HEAD_SIZE;
}

// Loads do not wait for each other, so callers issue several before they finish the first.
INLINE Loaded load_piece(const Inputs& in, const Heads& heads, int node, int head, int chunk, int position) {
    constexpr int HALF = ROW_CHUNKS / 2;
    const element* x = product_at(in, heads, node, head);
    const size_t angle = (size_t)position * (HEAD_SIZE / 2) + chunk % HALF * 8;
    const float *cosines = in.cos_table + angle, *sines = in.sin_table + angle;
    return Loaded{load16(x + chunk * 8), load16(x + (chunk ^ HALF) * 8),
                  {load16(cosines), load16(cosines + 4)}, {load16(sines), load16(sines + 4)}};
}

INLINE void add_bias(float (&x)[8], const Inputs& in, int head, int chunk) {
    if (!in.bias) return;
    float bias[8];
    unpack8(bias, load16(in.bias + (size_t)head * HEAD_SIZE + chunk * 8));
#pragma unroll
    for (int j = 0; j < 8; j++) x[j] = rounded(x[j] + bias[j]);
}

INLINE void scale_by(float (&x)[8], float scale, const element* norm, int chunk) {
    float weights[8];
    unpack8(weights, load16(norm + chunk * 8));
#pragma unroll
    for (int j = 0; j < 8; j++) x[j] = rounded(x[j] * scale * weights[j]);
}

INLINE float number(const uint4 (&four)[2], int j) {
    const uint4 of = four[j / 4];
    return __uint_as_float(j % 4 == 0 ? of.x : j % 4 == 1 ? of.y : j % 4 == 2 ? of.z : of.w);
}

// A piece of a query or key: with its bias, normed and rotated. ROW_CHUNKS neighbouring lanes call this for the chunks of the same vector.
INLINE uint4 rotated_piece(const Inputs& in, const Heads& heads, int head, int chunk, const Loaded& from) {
    constexpr int HALF = ROW_CHUNKS / 2;
    const element* norm = head < heads.q ? in.query_norm : in.key_norm;
    float x[8], other[8];
    unpack8(x, from.own);
    unpack8(other, from.other);
    add_bias(x, in, head, chunk);
    add_bias(other, in, head, chunk ^ HALF);
    if (norm) {
        float squares = 0.0f;
#pragma unroll
        for (int j = 0; j < 8; j++) squares += x[j] * x[j];
#pragma unroll
        for (int step = 1; step < ROW_CHUNKS; step *= 2) squares += __shfl_xor_sync(ALL_LANES, squares, step);
        const float scale = rsqrtf(squares / HEAD_SIZE + in.eps);
        scale_by(x, scale, norm, chunk);
        scale_by(other, scale, norm, chunk ^ HALF);
    }
    float y[8];
#pragma unroll
    for (int j = 0; j < 8; j++) {
        const float sine = chunk < HALF ? -number(from.sin, j) : number(from.sin, j);
        y[j] = x[j] * number(from.cos, j) + other[j] * sine;
    }
    return pack8(y);
}

// A piece of a value, as it was loaded, with its bias.
INLINE uint4 value_piece(const Inputs& in, int head, int chunk, uint4 from) {
    float x[8];
    unpack8(x, from);
    add_bias(x, in, head, chunk);
    return pack8(x);
}

// What one row attends to.
struct Seen {
    u64 low, high;
    int depth;
    bool real;  // false for rows that pad a tile
};

INLINE bool sees(const Seen& row, int key, int context, int n, int window, const int* depths) {
    const int node = key - context;
    if (node >= n) return false;
    if (node < 0) return window == 0 || context + row.depth - key < window;
    const u64 word = node < 64 ? row.low : row.high;
    return (word >> (node % 64) & 1) && (window == 0 || row.depth - depths[node] < window);
}

// o = sum of sums·2^(maximum - greatest maximum) / the same sum of denominators, over all parts, for the rows of this block. Every row
// attends to itself, so at least one part is not empty. weights holds 16·ROW_WARPS·(parts + 1) numbers of shared memory.
template <int ROW_WARPS>
INLINE void merge(const Parts& from, element* o, float* weights, Heads heads, int parts) {
    constexpr int ROWS = 16 * ROW_WARPS, EACH = 128 / ROWS, PIECES = HEAD_SIZE / 4;  // EACH threads share the marks of a row
    const int n = heads.n, share = heads.q / heads.g, first = blockIdx.y * ROWS, count = min(ROWS, share * n - first);
    const size_t base = (size_t)blockIdx.x * share * n + first, stride = (size_t)heads.q * n;
    const int row = threadIdx.x / EACH, lane = threadIdx.x % EACH;
    const float* marks = from.marks + 2 * (base + min(row, count - 1));
    float* totals = weights + ROWS * parts;
    float most = -INFINITY, total = 0.0f;
#pragma unroll 8
    for (int part = lane; part < parts; part += EACH) most = fmaxf(most, marks[2 * part * stride]);
#pragma unroll
    for (int step = 1; step < EACH; step *= 2) most = fmaxf(most, __shfl_xor_sync(ALL_LANES, most, step));
#pragma unroll 8
    for (int part = lane; part < parts; part += EACH) {
        const float weight = exp2f(marks[2 * part * stride] - most);
        weights[row * parts + part] = weight;
        total += weight * marks[2 * part * stride + 1];
    }
#pragma unroll
    for (int step = 1; step < EACH; step *= 2) total += __shfl_xor_sync(ALL_LANES, total, step);
    if (lane == 0) totals[row] = total;
    __syncthreads();
    constexpr int AT_ONCE = 4;
    for (int from_piece = threadIdx.x; from_piece < count * PIECES; from_piece += 128 * AT_ONCE) {
        float x[AT_ONCE][4] = {};
#pragma unroll 4
        for (int part = 0; part < parts; part++) {
#pragma unroll
            for (int i = 0; i < AT_ONCE; i++) {
                const int at = min(from_piece + i * 128, count * PIECES - 1), of = at / PIECES;
                const float weight = weights[of * parts + part];
                uint4 words = make_uint4(0, 0, 0, 0);
                if (weight != 0.0f)  // else nothing seen, and perhaps nothing written
                    words = load16(from.sums + (base + of + part * stride) * HEAD_SIZE + at % PIECES * 4);
                x[i][0] += weight * __uint_as_float(words.x);
                x[i][1] += weight * __uint_as_float(words.y);
                x[i][2] += weight * __uint_as_float(words.z);
                x[i][3] += weight * __uint_as_float(words.w);
            }
        }
#pragma unroll
        for (int i = 0; i < AT_ONCE; i++) {
            const int at = from_piece + i * 128, of = at / PIECES;
            if (at >= count * PIECES) continue;
            const int node = (first + of) % n, head = blockIdx.x * share + (first + of) / n;
            u32* out = (u32*)(o + ((size_t)node * heads.q + head) * HEAD_SIZE + at % PIECES * 4);
            out[0] = pack(x[i][0] / totals[of], x[i][1] / totals[of]);
            out[1] = pack(x[i][2] / totals[of], x[i][3] / totals[of]);
        }
    }
}

// ROW_WARPS of the four warps share the rows of a block (16 each), the others share the keys of a tile. With few rows, all four
// warps read different keys for the same 16 rows, and each yields a part of its own.
template <int ROW_WARPS>
INLINE void attend(const Inputs& in, element* cache, const u64* sees_words, const int* depths, const int* state, Parts parts,
                   element* out, Heads heads, float scale_log2, int window) {
    constexpr int KEY_WARPS = 4 / ROW_WARPS, TILES = KEYS / KEY_WARPS / 8;  // TILES of 8 keys per warp
    begin();
    LAUNCHED_SHARED(shared);  // two stages of keys, then two of values
    const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP, g = blockIdx.x, n = heads.n, share = heads.q / heads.g;
    const int rows = share * n, context = state[CONTEXT], end = context + n;
    const int first_row = (blockIdx.y * ROW_WARPS + warp % ROW_WARPS) * 16, first_key = warp / ROW_WARPS * TILES * 8;
    // No row of the step is before CONTEXT, so what is outside of CONTEXT's window is outside of every row's.
    const int begin = window == 0 ? 0 : max(0, context - window + 1) / KEYS;
    const int tiles = (end + KEYS - 1) / KEYS - begin, each = (tiles + gridDim.z - 1) / gridDim.z;
    const int from = begin + min(tiles, (int)blockIdx.z * each), to = begin + min(tiles, ((int)blockIdx.z + 1) * each);
    element* const keys = cache + (size_t)g * heads.room * HEAD_SIZE;
    element* const values = keys + (size_t)heads.g * heads.room * HEAD_SIZE;
    constexpr int STAGE = KEYS * ROW_CHUNKS;

    // Queries pass through the second stage of values, which is not in use yet.
    uint4* queries = shared + 3 * STAGE;
    constexpr int ROWS_AT_ONCE = 128 / ROW_CHUNKS, TIMES = ROW_WARPS * 16 / ROWS_AT_ONCE, LOADS = TIMES < 4 ? TIMES : 4;
    const int place = threadIdx.x / ROW_CHUNKS, chunk = threadIdx.x % ROW_CHUNKS;
#pragma unroll
    for (int i = 0; i < TIMES; i += LOADS) {
        Loaded loaded[LOADS];
#pragma unroll
        for (int j = 0; j < LOADS; j++) {
            const int at = blockIdx.y * ROW_WARPS * 16 + place + (i + j) * ROWS_AT_ONCE, real = min(at, rows - 1), node = real % n;
            loaded[j] = load_piece(in, heads, node, g * share + real / n, chunk, context + depths[node]);
        }
#pragma unroll
        for (int j = 0; j < LOADS; j++) {
            const int of_block = place + (i + j) * ROWS_AT_ONCE, at = blockIdx.y * ROW_WARPS * 16 + of_block;
            const uint4 query = rotated_piece(in, heads, g * share + min(at, rows - 1) / n, chunk, loaded[j]);
            queries[key_at(of_block, chunk)] = at < rows ? query : make_uint4(0, 0, 0, 0);
        }
    }
    __syncthreads();
    u32 q[HEAD_SIZE / 16][4];
#pragma unroll
    for (int k = 0; k < HEAD_SIZE / 16; k++)
        load_matrices(q[k], &queries[key_at(warp % ROW_WARPS * 16 + lane % 16, k * 2 + lane / 16)]);
    __syncthreads();  // the second stage may be overwritten

    // Lane l holds rows l / 4 and l / 4 + 8 of the warp's sixteen.
    Seen row[2];
#pragma unroll
    for (int half = 0; half < 2; half++) {
        const int at = first_row + lane / 4 + half * 8, node = at % n;
        row[half].real = at < rows;
        row[half].depth = depths[node];
        row[half].low = row[half].real ? sees_words[2 * node] : 0;
        row[half].high = row[half].real ? sees_words[2 * node + 1] : 0;
    }
    float o[HEAD_SIZE / 8][4], most[2] = {-INFINITY, -INFINITY}, total[2] = {0.0f, 0.0f};
#pragma unroll
    for (int i = 0; i < HEAD_SIZE / 8; i++) o[i][0] = o[i][1] = o[i][2] = o[i][3] = 0.0f;

    // The step's own keys and values in a tile.
    auto make_keys = [&](uint4* stage, int tile) {
        constexpr int AT_ONCE = 2;
        for (int i = 0; i < KEYS / ROWS_AT_ONCE; i += AT_ONCE) {
            const int first = tile * KEYS + i * ROWS_AT_ONCE;
            if (first >= end || first + AT_ONCE * ROWS_AT_ONCE <= context) continue;  // none of these
            Loaded k[AT_ONCE];
            uint4 v[AT_ONCE];
#pragma unroll
            for (int j = 0; j < AT_ONCE; j++) {
                const int node = max(0, min(first + j * ROWS_AT_ONCE + place - context, n - 1));
                k[j] = load_piece(in, heads, node, heads.q + g, chunk, context + depths[node]);
                v[j] = load16(product_at(in, heads, node, heads.q + heads.g + g) + chunk * 8);
            }
#pragma unroll
            for (int j = 0; j < AT_ONCE; j++) {
                const int of_tile = (i + j) * ROWS_AT_ONCE + place, key = tile * KEYS + of_tile;
                const uint4 made_k = rotated_piece(in, heads, heads.q + g, chunk, k[j]);
                const uint4 made_v = value_piece(in, heads.q + heads.g + g, chunk, v[j]);
                if (key < context || key >= end) continue;
                stage[key_at(of_tile, chunk)] = made_k;
                stage[2 * STAGE + key_at(of_tile, chunk)] = made_v;
                if (blockIdx.y > 0) continue;
                store16(keys + (size_t)key * HEAD_SIZE + chunk * 8, made_k);
                store16(values + (size_t)key * HEAD_SIZE + chunk * 8, made_v);
            }
        }
    };
    auto fetch = [&](int tile) {
        if (tile < to) {
            uint4* stage = shared + (tile - from) % 2 * STAGE;
            fetch_keys(stage, keys, tile * KEYS, context, end);
            fetch_keys(stage + 2 * STAGE, values, tile * KEYS, context, end);
            if ((tile + 1) * KEYS > context) make_keys(stage, tile);
        }
        end_copies();
    };
    fetch(from);
    for (int tile = from; tile < to; tile++) {
        fetch(tile + 1);
        wait_copies<1>();
        __syncthreads();
        const uint4* stage = shared + (tile - from) % 2 * KEYS * ROW_CHUNKS;
        float s[TILES][4];
#pragma unroll
        for (int t = 0; t < TILES; t++) {
            s[t][0] = s[t][1] = s[t][2] = s[t][3] = 0.0f;
#pragma unroll
            for (int k = 0; k < HEAD_SIZE / 16; k += 2) {
                u32 b[4];
                load_matrices(b, &stage[key_at(first_key + t * 8 + lane % 8, k * 2 + lane / 8)]);
                multiply_add(s[t], q[k], b[0], b[1]);
                multiply_add(s[t], q[k + 1], b[2], b[3]);
            }
        }
        float now[2] = {most[0], most[1]};
        const bool all_seen = (tile + 1) * KEYS <= context && window == 0;
#pragma unroll
        for (int t = 0; t < TILES; t++) {
#pragma unroll
            for (int i = 0; i < 4; i++) {
                const int key = tile * KEYS + first_key + t * 8 + lane % 4 * 2 + i % 2;
                const bool seen = all_seen || sees(row[i / 2], key, context, n, window, depths);
                s[t][i] = seen ? s[t][i] * scale_log2 : -INFINITY;
                now[i / 2] = fmaxf(now[i / 2], s[t][i]);
            }
        }
        float base[2];
#pragma unroll
        for (int half = 0; half < 2; half++) {  // over the four lanes of a row
            now[half] = fmaxf(now[half], __shfl_xor_sync(ALL_LANES, now[half], 1));
            now[half] = fmaxf(now[half], __shfl_xor_sync(ALL_LANES, now[half], 2));
            base[half] = now[half] == -INFINITY ? 0.0f : now[half];  // nothing seen yet: 2^(-inf - 0) is 0, not NaN
            const float shrink = exp2f(most[half] - base[half]);
            total[half] *= shrink;
            most[half] = now[half];
#pragma unroll
            for (int i = 0; i < HEAD_SIZE / 8; i++) {
                o[i][2 * half] *= shrink;
                o[i][2 * half + 1] *= shrink;
            }
        }
#pragma unroll
        for (int t = 0; t < TILES; t++) {
#pragma unroll
            for (int i = 0; i < 4; i++) {
                s[t][i] = exp2f(s[t][i] - base[i / 2]);
                total[i / 2] += s[t][i];
            }
        }
        const uint4* stage_values = stage + 2 * KEYS * ROW_CHUNKS;
#pragma unroll
        for (int t = 0; t < TILES; t += 2) {  // 16 keys: scores are already in the layout of the left factor's fragment
            const u32 p[4] = {pack(s[t][0], s[t][1]), pack(s[t][2], s[t][3]), pack(s[t + 1][0], s[t + 1][1]),
                              pack(s[t + 1][2], s[t + 1][3])};
#pragma unroll
            for (int i = 0; i < HEAD_SIZE / 16; i++) {
                u32 b[4];
                load_matrices_transposed(b, &stage_values[key_at(first_key + t * 8 + lane % 16, i * 2 + lane / 16)]);
                multiply_add(o[2 * i], p, b[0], b[1]);
                multiply_add(o[2 * i + 1], p, b[2], b[3]);
            }
        }
        __syncthreads();  // the next copies overwrite this stage
    }
    wait_copies<0>();
    const size_t part = (size_t)blockIdx.z * KEY_WARPS + warp / ROW_WARPS;
#pragma unroll
    for (int half = 0; half < 2; half++) {
        total[half] += __shfl_xor_sync(ALL_LANES, total[half], 1);
        total[half] += __shfl_xor_sync(ALL_LANES, total[half], 2);
        if (!row[half].real) continue;
        const size_t at = part * heads.q * n + (size_t)g * rows + first_row + lane / 4 + half * 8;
        if (lane % 4 == 0) {
            parts.marks[2 * at] = most[half];
            parts.marks[2 * at + 1] = total[half];
        }
        if (most[half] == -INFINITY) continue;  // nothing seen: merge does not read the sum
#pragma unroll
        for (int i = 0; i < HEAD_SIZE / 8; i++) {
            parts.sums[at * HEAD_SIZE + i * 8 + lane % 4 * 2] = o[i][2 * half];
            parts.sums[at * HEAD_SIZE + i * 8 + lane % 4 * 2 + 1] = o[i][2 * half + 1];
        }
    }
    if (!is_last_block(&parts.arrived[blockIdx.y * gridDim.x + g], gridDim.z)) return;
    merge<ROW_WARPS>(parts, out, (float*)shared, heads, gridDim.z * KEY_WARPS);
}

// R·N up to 16: each warp yields a part, parts = 4·splits. Grid (G, 1, splits), 128 threads, shared memory 4·KEYS·D elements.
KERNEL(128) tree_attention_few(const element* qkv, const element* bias, const element* query_norm, const element* key_norm, float eps,
                               const float* cos_table, const float* sin_table, element* cache, const u64* sees_words, const int* depths,
                               const int* state, float* sums, float* marks, int* arrived, element* o, int q, int g, int n, int room,
                               float scale_log2, int window) {
    const Inputs in = {qkv, bias, query_norm, key_norm, eps, cos_table, sin_table};
    attend<1>(in, cache, sees_words, depths, state, Parts{sums, marks, arrived}, o, Heads{q, g, n, room}, scale_log2, window);
}
// More rows: parts = splits. Grid (G, R·N/64 rounded up, splits), 128 threads, shared memory 4·KEYS·D elements.
KERNEL(128) tree_attention_many(const element* qkv, const element* bias, const element* query_norm, const element* key_norm, float eps,
                                const float* cos_table, const float* sin_table, element* cache, const u64* sees_words, const int* depths,
                                const int* state, float* sums, float* marks, int* arrived, element* o, int q, int g, int n, int room,
                                float scale_log2, int window) {
    const Inputs in = {qkv, bias, query_norm, key_norm, eps, cos_table, sin_table};
    attend<4>(in, cache, sees_words, depths, state, Parts{sums, marks, arrived}, o, Heads{q, g, n, room}, scale_log2, window);
}
