// Splits a step's q, k and v, rotates q and k by their positions, and appends k and v to the committed rows of the cache.
//
// Row n has position p = CONTEXT + depths[n]. For i < D/2 and a head's vector x (Su et al. 2021; pairs are halves, not
// neighbours):
//   y[i] = x[i]·cos[p, i] - x[i + D/2]·sin[p, i]        y[i + D/2] = x[i + D/2]·cos[p, i] + x[i]·sin[p, i]
// Layouts: qkv [N, Q + 2G, D], q [N, Q, D], cache [2, G, S, D] (keys, then values), cos and sin [S, D/2] float32.
// Compile time: HEAD_SIZE. Grid (N, (Q + 2G)·D/2 / 128 rounded up), 128 threads: one pair per thread.

KERNEL(128) rope_append(const element* qkv, const int* depths, const int* state, const float* cos_table,
                        const float* sin_table, element* q_out, element* cache, int q, int g, int room) {
    const int half = HEAD_SIZE / 2, n = blockIdx.x, heads = q + 2 * g;
    const int pair = blockIdx.y * blockDim.x + threadIdx.x, head = pair / half, i = pair % half;
    if (head >= heads) return;
    const size_t at = (size_t)head * HEAD_SIZE + i;
    const element* row = qkv + (size_t)n * heads * HEAD_SIZE;
    float first = to_float(row[at]), second = to_float(row[at + half]);
    const int context = state[CONTEXT];
    if (head < q + g) {
        const size_t angle = (size_t)(context + depths[n]) * half + i;
        const float c = cos_table[angle], s = sin_table[angle];
        const float rotated = first * c - second * s;
        second = second * c + first * s;
        first = rotated;
    }
    element* out = head < q ? q_out + ((size_t)n * q + head) * HEAD_SIZE
                            : cache + ((size_t)(head - q) * room + context + n) * HEAD_SIZE;
    out[i] = to_element(first);
    out[i + half] = to_element(second);
}
