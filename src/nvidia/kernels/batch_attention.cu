// A decoding step of many texts: the new token of each attends to its text's keys and values in the cache and to itself, and its key and value
// are appended there. Each text's keys are read once, up to its own length.
//
// A block has one key/value head of one text, and its R = Q/G query heads. D/8 neighbouring lanes share a key, 16 bytes each, so that a warp
// reads KEYS of them at once, and AHEAD times as many keys and values are in flight. Softmax is online (Milakov and Gimelshein 2018), in float32,
// for each group of lanes on its own; groups and warps are merged at the end. With window > 0, only the last `window` tokens are seen.
//
// Layouts: qkv [B, Q + 2G, D] (queries, keys, values), cache [B, 2G, S, D] (keys, values), lengths [B], o [B, Q, D]. Compile time: D, and SHARE,
// which R is at most. Grid (G, B), 256 threads, shared memory for 8·SHARE·(D + 2) float32.

#define BATCH_WARPS 8

template <int D, int SHARE>
INLINE void attend_batch(const element* qkv, element* cache, const long long* lengths, element* o, int q, int g, int room, float scale_log2,
                         int window) {
    constexpr int LANES = D / 8, KEYS = WARP / LANES, AHEAD = SHARE > 4 ? 2 : 4, AT_ONCE = BATCH_WARPS * KEYS;
    LAUNCHED_SHARED(shared);
    float *sums = (float*)shared, *marks = sums + BATCH_WARPS * SHARE * D;  // [BATCH_WARPS, SHARE, D] and [BATCH_WARPS, SHARE, 2]
    const int head = blockIdx.x, text = blockIdx.y, share = q / g, warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;
    const int column = lane % LANES * 8, slot = warp * KEYS + lane / LANES;
    const int length = (int)lengths[text], begin = window > 0 ? max(0, length + 1 - window) : 0;
    const element* of_text = qkv + (size_t)text * (q + 2 * g) * D + column;
    const element *new_key = of_text + (size_t)(q + head) * D, *new_value = new_key + (size_t)g * D;
    element* keys = cache + ((size_t)text * 2 * g + head) * room * D + column;
    element* values = keys + (size_t)g * room * D;

    float query[SHARE][8], sum[SHARE][8], most[SHARE], total[SHARE];
#pragma unroll
    for (int r = 0; r < SHARE; r++) {
        unpack8(query[r], r < share ? load16(of_text + (size_t)(head * share + r) * D) : make_uint4(0, 0, 0, 0));
        most[r] = -INFINITY;
        total[r] = 0.0f;
#pragma unroll
        for (int j = 0; j < 8; j++) {
            query[r][j] *= scale_log2;
            sum[r][j] = 0.0f;
        }
    }
    for (int first = begin; first <= length; first += AT_ONCE * AHEAD) {
        uint4 key[AHEAD], value[AHEAD];
#pragma unroll
        for (int i = 0; i < AHEAD; i++) {  // behind the new token: that one again, and its score is not used
            const int at = first + i * AT_ONCE + slot;
            key[i] = stream16(at < length ? keys + (size_t)at * D : new_key);
            value[i] = stream16(at < length ? values + (size_t)at * D : new_value);
        }
        float score[AHEAD][SHARE];
#pragma unroll
        for (int i = 0; i < AHEAD; i++) {
            float x[8];
            unpack8(x, key[i]);
#pragma unroll
            for (int r = 0; r < SHARE; r++) {
                float product = 0.0f;
#pragma unroll
                for (int j = 0; j < 8; j++) product += query[r][j] * x[j];
#pragma unroll
                for (int step = LANES / 2; step > 0; step /= 2) product += __shfl_xor_sync(ALL_LANES, product, step);
                score[i][r] = first + i * AT_ONCE + slot <= length ? product : -INFINITY;
            }
        }
#pragma unroll
        for (int r = 0; r < SHARE; r++) {
            float now = most[r];
#pragma unroll
            for (int i = 0; i < AHEAD; i++) now = fmaxf(now, score[i][r]);
            const float base = now == -INFINITY ? 0.0f : now;  // nothing seen yet: 2^(-inf - 0) is 0, not NaN
            const float shrink = exp2f(most[r] - base);
            most[r] = now;
            total[r] *= shrink;
#pragma unroll
            for (int j = 0; j < 8; j++) sum[r][j] *= shrink;
#pragma unroll
            for (int i = 0; i < AHEAD; i++) {
                score[i][r] = exp2f(score[i][r] - base);
                total[r] += score[i][r];
            }
        }
#pragma unroll
        for (int i = 0; i < AHEAD; i++) {
            float x[8];
            unpack8(x, value[i]);
#pragma unroll
            for (int r = 0; r < SHARE; r++) {
#pragma unroll
                for (int j = 0; j < 8; j++) sum[r][j] += score[i][r] * x[j];
            }
        }
    }
    if (slot == 0) {
        store16(keys + (size_t)length * D, load16(new_key));
        store16(values + (size_t)length * D, load16(new_value));
    }
#pragma unroll
    for (int r = 0; r < SHARE; r++) {
#pragma unroll
        for (int step = LANES; step < WARP; step *= 2) {  // over the keys of a warp
            const float other = __shfl_xor_sync(ALL_LANES, most[r], step), now = fmaxf(most[r], other);
            const float base = now == -INFINITY ? 0.0f : now;
            const float own = exp2f(most[r] - base), theirs = exp2f(other - base);
            total[r] = total[r] * own + __shfl_xor_sync(ALL_LANES, total[r], step) * theirs;
#pragma unroll
            for (int j = 0; j < 8; j++) sum[r][j] = sum[r][j] * own + __shfl_xor_sync(ALL_LANES, sum[r][j], step) * theirs;
            most[r] = now;
        }
        if (lane < LANES) {
#pragma unroll
            for (int j = 0; j < 8; j++) sums[(warp * SHARE + r) * D + column + j] = sum[r][j];
            marks[(warp * SHARE + r) * 2] = most[r];  // the same in all lanes
            marks[(warp * SHARE + r) * 2 + 1] = total[r];
        }
    }
    __syncthreads();
    for (int at = threadIdx.x; at < share * D; at += BATCH_WARPS * WARP) {
        const int r = at / D, d = at % D;
        float greatest = -INFINITY, all = 0.0f, out = 0.0f;
        for (int w = 0; w < BATCH_WARPS; w++) greatest = fmaxf(greatest, marks[(w * SHARE + r) * 2]);
        for (int w = 0; w < BATCH_WARPS; w++) {  // the first one has seen a key
            const float weight = exp2f(marks[(w * SHARE + r) * 2] - greatest);
            all += weight * marks[(w * SHARE + r) * 2 + 1];
            out += weight * sums[(w * SHARE + r) * D + d];
        }
        o[((size_t)text * q + head * share + r) * D + d] = to_element(out / all);
    }
}

#define BATCH_PARAMETERS \
    const element *qkv, element *cache, const long long *lengths, element *o, int q, int g, int room, float scale_log2, int window
#define BATCH_ARGUMENTS qkv, cache, lengths, o, q, g, room, scale_log2, window

KERNEL(256) batch_attention_64x1(BATCH_PARAMETERS) { attend_batch<64, 1>(BATCH_ARGUMENTS); }
KERNEL(256) batch_attention_64x2(BATCH_PARAMETERS) { attend_batch<64, 2>(BATCH_ARGUMENTS); }
KERNEL(256) batch_attention_64x4(BATCH_PARAMETERS) { attend_batch<64, 4>(BATCH_ARGUMENTS); }
KERNEL(256) batch_attention_64x8(BATCH_PARAMETERS) { attend_batch<64, 8>(BATCH_ARGUMENTS); }
KERNEL(256) batch_attention_128x1(BATCH_PARAMETERS) { attend_batch<128, 1>(BATCH_ARGUMENTS); }
KERNEL(256) batch_attention_128x2(BATCH_PARAMETERS) { attend_batch<128, 2>(BATCH_ARGUMENTS); }
KERNEL(256) batch_attention_128x4(BATCH_PARAMETERS) { attend_batch<128, 4>(BATCH_ARGUMENTS); }
KERNEL(256) batch_attention_128x8(BATCH_PARAMETERS) { attend_batch<128, 8>(BATCH_ARGUMENTS); }
