// From a step's product for q, k and v to attention: adds the bias, norms each head of q and k, rotates q and k by their positions, and
// appends k and v to the committed rows of the cache.
//
// Row n has position p = CONTEXT + depths[n]. With a head's vector x, and i < D/2:
//   x = x + bias, if there is one
//   x = x·rsqrt(mean(x²) + eps)·weight, for q and k, if there are norms (Zhang and Sennrich 2019)
//   y[i] = x[i]·cos[p, i] - x[i + D/2]·sin[p, i]        y[i + D/2] = x[i + D/2]·cos[p, i] + x[i]·sin[p, i]
// The last is for q and k (Su et al. 2021; pairs are halves, not neighbours). Each of the three is computed in float32 and rounded.
// Layouts: qkv [N, Q + 2G, D], bias [Q + 2G, D] or null, query_norm and key_norm [D] or null, q [N, Q, D], cache [2, G, S, D] (keys, then
// values), cos and sin [S, D/2] float32.
// Compile time: HEAD_SIZE. Grid (N, (Q + 2G)/4 rounded up), 128 threads: one head per warp.

// Numbers of a head per lane: x[j] is number j·32 + lane, so the other half of x[j] is x[j + EACH / 2] of the same lane.
enum { EACH = HEAD_SIZE / WARP };

KERNEL(128) rope_append(const element* qkv, const element* bias, const element* query_norm, const element* key_norm, float eps,
                        const int* depths, const int* state, const float* cos_table, const float* sin_table, element* q_out,
                        element* cache, int q, int g, int room) {
    begin();
    const int n = blockIdx.x, heads = q + 2 * g, lane = threadIdx.x % WARP;
    const int head = blockIdx.y * (blockDim.x / WARP) + threadIdx.x / WARP;
    if (head >= heads) return;  // the whole warp
    const element* from = qkv + ((size_t)n * heads + head) * HEAD_SIZE;
    float x[EACH];
#pragma unroll
    for (int j = 0; j < EACH; j++) x[j] = to_float(from[j * WARP + lane]);
    if (bias) {
        bias += (size_t)head * HEAD_SIZE;
#pragma unroll
        for (int j = 0; j < EACH; j++) x[j] = rounded(x[j] + to_float(bias[j * WARP + lane]));
    }
    const int context = state[CONTEXT];
    if (head < q + g) {
        const element* weight = head < q ? query_norm : key_norm;
        if (weight) {
            float squares = 0.0f;
#pragma unroll
            for (int j = 0; j < EACH; j++) squares += x[j] * x[j];
            const float scale = rsqrtf(warp_sum(squares) / HEAD_SIZE + eps);
#pragma unroll
            for (int j = 0; j < EACH; j++) x[j] = rounded(x[j] * scale * to_float(weight[j * WARP + lane]));
        }
        const size_t angles = (size_t)(context + depths[n]) * (HEAD_SIZE / 2);
#pragma unroll
        for (int j = 0; j < EACH / 2; j++) {
            const float c = cos_table[angles + j * WARP + lane], s = sin_table[angles + j * WARP + lane];
            const float first = x[j], second = x[j + EACH / 2];
            x[j] = first * c - second * s;
            x[j + EACH / 2] = second * c + first * s;
        }
    }
    element* out = head < q ? q_out + ((size_t)n * q + head) * HEAD_SIZE
                            : cache + ((size_t)(head - q) * room + context + n) * HEAD_SIZE;
#pragma unroll
    for (int j = 0; j < EACH; j++) out[j * WARP + lane] = to_element(x[j]);
}
