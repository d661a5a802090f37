// What sequential heads (Hydra, arXiv 2402.05109) compute beside matrix products, level after level of the tree. Rows are the level's
// nodes that have children. A number is read and written by one thread only, so that no kernel needs a barrier.

// x[n] = table[tokens[nodes[n]]]; the root's token may be -1, which is read as 0: there will be no step with it. Grid N, 256 threads.
KERNEL(256) embed_nodes(const int* tokens, const int* nodes, const element* table, element* x, int h) {
    begin();
    const element* from = table + (size_t)max(tokens[nodes[blockIdx.x]], 0) * h;
    element* to = x + (size_t)blockIdx.x * h;
    for (int i = threadIdx.x * 8; i < h; i += blockDim.x * 8) store16(to + i, load16(from + i));
}

// The first block of a head at N nodes, and what later heads inherit. sums [N, W] holds what the nodes' tokens add to this head and
// the later ones; of each head, H outputs of its linear layer, then H of its residual connection: W = 2·pairs. before [.., W + used] are the
// sums of the level above, of which the first `used` belong to the head above. sums[n] += before[parents[n], used..] + bias; bias [W] is
// null below the root's level. y[n] = residual + SiLU(linear) of the first head. Grid (pairs/256 rounded up, N), 256 threads.
KERNEL(256) first_block(float* sums, const float* before, const int* parents, const element* bias, element* y, int pairs, int used,
                        int h) {
    begin();
    const int pair = blockIdx.x * blockDim.x + threadIdx.x, node = blockIdx.y;
    if (pair >= pairs) return;
    const int linear = pair / h * 2 * h + pair % h, width = 2 * pairs;
    float both[2];
    for (int i = 0; i < 2; i++) {
        const int at = linear + i * h;
        float* sum = sums + (size_t)node * width + at;
        both[i] = *sum + before[(size_t)parents[node] * (width + used) + used + at];
        if (bias) both[i] += to_float(bias[at]);
        *sum = both[i];
    }
    if (pair < h) y[(size_t)node * h + pair] = to_element(both[1] + silu(both[0]));
}

// A later ResBlock behind its product: x[n] += SiLU(product[n] + bias). Grid (H/256 rounded up, N), 256 threads.
KERNEL(256) residual(element* x, const float* product, const element* bias, int h) {
    begin();
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= h) return;
    const size_t at = (size_t)blockIdx.y * h + i;
    x[at] = to_element(to_float(x[at]) + silu(product[at] + to_float(bias[i])));
}

// Tokens of the level below: node c holds guess guesses[c] of row rows[c], from ids [N, P]. One block, 128 threads.
KERNEL(128) fill_level(const int* ids, const int* rows, const int* guesses, int* tokens, int count, int p) {
    begin();
    const int node = threadIdx.x;
    if (node < count) tokens[node] = ids[rows[node] * p + guesses[node]];
}
