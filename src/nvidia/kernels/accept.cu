// Acceptance of a tree's nodes, and what a step keeps. Each kernel handles a few numbers in one block, except for compact.
//
// Tree: depths, parents [N], children [N, 2] (the first, and one past the last). path [levels + 1]: the accepted nodes, root
// first.

#define MAX_NODES 128

INLINE void set_accepted(int* path, const int* from_root, int count, int next, int* state) {
    for (int i = 0; i < count; i++) path[i] = from_root[i];
    state[ACCEPTED] = count;
    state[LAST] = from_root[count - 1];
    state[NEXT] = next;
}

// Walks from the root along the first child that holds the token chosen after its parent. Greedy if `chosen` is the most probable
// token after each node, speculative sampling if it is drawn. One block, 128 threads: each thread finds the successor of its
// node.
KERNEL(128) walk(const int* tokens, const int* chosen, const int* children, int* path, int* state, int n) {
    begin();
    SHARED int token[MAX_NODES], after[MAX_NODES], steps[MAX_NODES];
    const int node = threadIdx.x;
    if (node < n) token[node] = tokens[node];
    __syncthreads();
    if (node < n) {
        const int wanted = chosen[node], end = children[2 * node + 1];
        int child = children[2 * node];
        while (child < end && token[child] != wanted) child++;
        after[node] = child < end ? child : 0;  // 0: no successor, since the root follows no node
    }
    __syncthreads();
    if (node == 0) {
        int count = 0, at = 0;
        do {
            steps[count++] = at;
            at = after[at];
        } while (at != 0);
        set_accepted(path, steps, count, chosen[steps[count - 1]], state);
    }
}

// A node is accepted if its parent is and p > min(threshold, alpha·exp(-H)), where p = exp(log_p) and H is the entropy after the
// parent (paper section 2.3.1). The path ends at the deepest accepted node; ties go to the likeliest, then to the first. Sums are
// float64 and start at the root, as on the host. One block, 128 threads: one thread per node, level after level.
KERNEL(128) typical(const float* log_p, const float* entropy, const int* parents, const int* depths, const int* best, int* path,
                    int* state, int n, int levels, double threshold, double alpha) {
    begin();
    SHARED double sum[MAX_NODES];
    SHARED int depth[MAX_NODES], parent[MAX_NODES];  // depth -1: not accepted
    SHARED int steps[MAX_NODES];
    const int node = threadIdx.x, level = node < n ? depths[node] : -1;
    bool accepts = node == 0;
    if (node < n) {
        depth[node] = node == 0 ? 0 : -1;
        sum[node] = 0.0;
        parent[node] = parents[node];
        const double flat_enough = alpha * exp(-(double)entropy[parents[node]]);
        if (node > 0) accepts = exp((double)log_p[node]) > fmin(threshold, flat_enough);
    }
    for (int now = 1; now <= levels; now++) {
        __syncthreads();
        if (level == now && accepts && depth[parent[node]] >= 0) {
            depth[node] = level;
            sum[node] = sum[parent[node]] + (double)log_p[node];
        }
    }
    __syncthreads();
    if (node == 0) {
        int last = 0;
        for (int i = 1; i < n; i++) {
            if (depth[i] > depth[last] || (depth[i] == depth[last] && sum[i] > sum[last])) last = i;
        }
        const int count = depth[last] + 1;
        for (int i = count - 1, at = last; i >= 0; i--, at = parent[at]) steps[i] = at;
        set_accepted(path, steps, count, best[last], state);
    }
}

// Keeps only the accepted rows of the step in the cache [planes, S, D]: row CONTEXT + path[i] moves to CONTEXT + i. path ascends,
// so a row only moves down and never onto one that is still to be read: eight rows are read, then written, then the next eight. A
// thread moves the same 16 bytes of every row. Grid planes·D/8 / 128 rounded up, 128 threads.
KERNEL(128) compact(element* cache, const int* path, const int* state, int planes, int room, int d) {
    begin();
    const int chunks = d / 8, at = blockIdx.x * blockDim.x + threadIdx.x;
    if (at / chunks >= planes) return;
    const int count = state[ACCEPTED];
    element* rows = cache + ((size_t)(at / chunks) * room + state[CONTEXT]) * d + at % chunks * 8;
    for (int from = 0; from < count; from += 8) {
        uint4 held[8];
#pragma unroll
        for (int i = 0; i < 8; i++) {
            if (from + i < count) held[i] = load16(rows + (size_t)path[from + i] * d);
        }
#pragma unroll
        for (int i = 0; i < 8; i++) {
            if (from + i < count) store16(rows + (size_t)(from + i) * d, held[i]);
        }
    }
}

// Ends a step: CONTEXT += ACCEPTED, STEP += 1. Row STEP % ring of results [ring, 3 + width] gets [steps done, ACCEPTED, NEXT,
// tokens], which the host copies after the step. One block, 128 threads.
KERNEL(128) advance(const int* path, const int* tokens, int* state, int* results, int ring, int width) {
    begin();
    const int count = state[ACCEPTED], step = state[STEP];
    int* row = results + (size_t)(step % ring) * (3 + width);
    for (int i = threadIdx.x; i < count && i < width; i += blockDim.x) row[3 + i] = tokens[path[i]];
    __syncthreads();  // all threads have read the state
    if (threadIdx.x == 0) {
        row[0] = step + 1;
        row[1] = count;
        row[2] = state[NEXT];
        state[CONTEXT] += count;
        state[STEP] = step + 1;
    }
}

// Writes the tokens of the next step's nodes: the root holds NEXT, a node of depth d > 0 guess guesses[n] of head d - 1, from ids
// [K, P]. One block, 128 threads.
KERNEL(128) fill_tree(const int* ids, const int* depths, const int* guesses, const int* state, int* tokens, int n, int p) {
    begin();
    const int node = threadIdx.x;
    if (node < n) tokens[node] = node == 0 ? state[NEXT] : ids[(depths[node] - 1) * p + guesses[node]];
}
