// Choices from logits: the most probable token, the best guesses, a token's probability, a drawn token. Logits are float32; ties
// go to the lower id. If any logit is NaN or the largest is infinite, no token is chosen: -1.

#define THREADS 1024
#define WARPS (THREADS / WARP)

struct Ranked {
    float logit;
    int id;
};

INLINE bool before(Ranked a, Ranked b) { return a.logit > b.logit || (a.logit == b.logit && a.id < b.id); }

INLINE Ranked none() { return Ranked{-INFINITY, 0x7fffffff}; }

INLINE Ranked warp_first(Ranked x) {
#pragma unroll
    for (int step = WARP / 2; step > 0; step /= 2) {
        const Ranked other = {__shfl_xor_sync(ALL_LANES, x.logit, step), __shfl_xor_sync(ALL_LANES, x.id, step)};
        if (before(other, x)) x = other;
    }
    return x;
}

INLINE Ranked block_first(Ranked x, Ranked* scratch) {
    x = warp_first(x);
    __syncthreads();
    if (threadIdx.x % WARP == 0) scratch[threadIdx.x / WARP] = x;
    __syncthreads();
    x = scratch[0];
    for (int warp = 1; warp < (int)blockDim.x / WARP; warp++) {
        if (before(scratch[warp], x)) x = scratch[warp];
    }
    return x;
}

// best[n] = id of the largest of logits[n, V]; -1 if that is infinite or any is NaN. Grid N, 1024 threads.
KERNEL(THREADS) best(const float* logits, int* best_out, int v) {
    begin();
    SHARED Ranked scratch[WARPS];
    const float* row = logits + (size_t)blockIdx.x * v;
    Ranked first = none();
    for (int id = threadIdx.x; id < v; id += blockDim.x) {
        const Ranked here = {isnan(row[id]) ? INFINITY : row[id], id};
        if (before(here, first)) first = here;
    }
    first = block_first(first, scratch);
    if (threadIdx.x == 0) best_out[blockIdx.x] = isfinite(first.logit) ? first.id : -1;
}

// Passes the first p of `count` numbers in shared memory to `take`, in order; then none(). A thread searches its own numbers
// again only after one of them was taken.
template <typename Take> INLINE void in_order(const Ranked* kept, int count, int p, Ranked* scratch, Take take) {
    Ranked taken = {INFINITY, -1};
    auto mine_after = [&](Ranked last) {
        Ranked first = none();
        for (int i = threadIdx.x; i < count; i += blockDim.x) {
            if (before(last, kept[i]) && before(kept[i], first)) first = kept[i];
        }
        return first;
    };
    Ranked mine = mine_after(taken);
    for (int place = 0; place < p; place++) {
        taken = block_first(mine, scratch);
        if (taken.id == mine.id) mine = mine_after(taken);
        if (threadIdx.x == 0) take(place, taken);
    }
}

#define SLICE 4096  // logits per block of top_guesses_part

// The first p of each slice of a row: logits [K, V] to parts [K, slices, p]. bias [V], which may be null, is added to every row. Grid
// (V/SLICE rounded up, K), 256 threads.
KERNEL(256) top_guesses_part(const float* logits, const element* bias, Ranked* parts, int v, int p) {
    begin();
    SHARED Ranked kept[SLICE];
    SHARED Ranked scratch[WARPS];
    const int begin = blockIdx.x * SLICE, count = min(SLICE, v - begin);
    const float* row = logits + (size_t)blockIdx.y * v + begin;
    for (int i = threadIdx.x; i < count; i += blockDim.x) {
        kept[i] = Ranked{bias ? row[i] + to_float(bias[begin + i]) : row[i], begin + i};
    }
    __syncthreads();
    Ranked* out = parts + ((size_t)blockIdx.y * gridDim.x + blockIdx.x) * p;
    in_order(kept, count, p, scratch, [&](int place, Ranked taken) { out[place] = taken; });
}
// The first p of all slices: ids [K, p]. Grid K, 256 threads, slices·p at most SLICE.
KERNEL(256) top_guesses_merge(const Ranked* parts, int* ids, int v, int slices, int p) {
    begin();
    SHARED Ranked kept[SLICE];
    SHARED Ranked scratch[WARPS];
    for (int i = threadIdx.x; i < slices * p; i += blockDim.x) kept[i] = parts[(size_t)blockIdx.x * slices * p + i];
    __syncthreads();
    in_order(kept, slices * p, p, scratch, [&](int place, Ranked taken) { ids[blockIdx.x * p + place] = min(taken.id, v - 1); });
}

// The largest logit of a row.
INLINE float row_max(const float* row, int v, float* scratch) {
    float most = -INFINITY;
    for (int id = threadIdx.x; id < v; id += blockDim.x) most = fmaxf(most, row[id]);
    return block_max(most, scratch);
}

// With x = (logit - largest)/temperature and Z = sum of e^x over the row: log p = x - ln Z, entropy = ln Z - sum of e^x·x / Z.
// entropy[n] is that of row n. log_p[c] of each child c of node n is that of c's token in row n; the root's is taken from its own
// row and not used. Sums are float64. Grid N, 1024 threads.
KERNEL(THREADS) posterior(const float* logits, const int* tokens, const int* children, float* log_p, float* entropy, int v,
                          float temperature) {
    begin();
    SHARED float scratch[WARPS];
    SHARED double sums[WARPS];
    const int node = blockIdx.x;
    const float* row = logits + (size_t)node * v;
    const float most = row_max(row, v, scratch);
    double z = 0.0, weighted = 0.0;
    for (int id = threadIdx.x; id < v; id += blockDim.x) {
        const float x = (row[id] - most) / temperature, e = expf(x);
        z += e;
        if (e > 0.0f) weighted += (double)e * x;
    }
    z = block_sum(z, sums);
    weighted = block_sum(weighted, sums);
    const double log_z = log(z);
    if (threadIdx.x == 0) entropy[node] = (float)(log_z - weighted / z);
    const int first = children[2 * node], end = children[2 * node + 1];
    for (int child = first + (int)threadIdx.x; child < end; child += blockDim.x) {
        log_p[child] = (float)((double)((row[tokens[child]] - most) / temperature) - log_z);
    }
    if (node == 0 && threadIdx.x == 0) log_p[0] = (float)((double)((row[tokens[0]] - most) / temperature) - log_z);
}

// A token's probability, float32. It depends on the token's logit alone, so that every pass computes the same number.
struct Softmax {
    const float* row;
    float most, temperature, z;
};
INLINE float probability(const Softmax& of, int id) { return expf((of.row[id] - of.most) / of.temperature) / of.z; }

// The lowest probability in the nucleus, and how many tokens of exactly that probability are in it: those with the lowest ids.
struct Border {
    float p;
    int equals;
};

// The nucleus: the smallest set of most probable tokens that together reach `top_p`. Its border is the largest p such that the
// tokens with p' >= p reach it. Floats from 0 to 1 are ordered like their bits, so each pass finds three bits of p by testing
// seven candidates.
INLINE Border nucleus(const Softmax& softmax, int v, double top_p, double* sums) {
    SHARED double parts[7][WARPS];
    const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;
    u32 bits = 0;
    for (int shift = 27; shift >= 0; shift -= 3) {
        double mass[7] = {};
        for (int id = threadIdx.x; id < v; id += blockDim.x) {
            const float p = probability(softmax, id);
            const u32 here = __float_as_uint(p);
#pragma unroll
            for (int i = 0; i < 7; i++) mass[i] += here >= bits + ((u32)(i + 1) << shift) ? p : 0.0f;
        }
#pragma unroll
        for (int i = 0; i < 7; i++) mass[i] = warp_sum(mass[i]);
        if (lane == 0) {
#pragma unroll
            for (int i = 0; i < 7; i++) parts[i][warp] = mass[i];
        }
        __syncthreads();
        if (warp < 7) {  // one candidate per warp
            const double whole = warp_sum(parts[warp][lane]);
            if (lane == 0) sums[warp] = whole;
        }
        __syncthreads();
        u32 digit = 0;
        for (int i = 0; i < 7; i++) digit += sums[i] >= top_p;
        bits += digit << shift;
    }
    const float p = __uint_as_float(bits);
    double above = 0.0;
    for (int id = threadIdx.x; id < v; id += blockDim.x) {
        const float here = probability(softmax, id);
        above += here > p ? here : 0.0f;
    }
    above = block_sum(above, sums);
    const double missing = p > 0.0f ? (top_p - above) / p : 0.0;
    return Border{p, p > 0.0f ? max(1, (int)ceil(missing)) : v};
}

// Draws a token after each node: the one whose share of the nucleus, in id order, contains
// uniforms[(CONTEXT + depth + 1) % count]. Each warp handles one range of ids. Sums are float64. Grid N, 1024 threads.
KERNEL(THREADS) draw(const float* logits, const int* depths, const int* state, const double* uniforms, int* drawn, int v, int count,
                     float temperature, double top_p) {
    begin();
    SHARED float scratch[WARPS];
    SHARED double sums[WARPS], mass[WARPS];
    SHARED int equals[WARPS], chosen, last;
    const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP, node = blockIdx.x;
    const float* row = logits + (size_t)node * v;
    Softmax softmax = {row, row_max(row, v, scratch), temperature, 1.0f};
    double z = 0.0;
    for (int id = threadIdx.x; id < v; id += blockDim.x) z += probability(softmax, id);
    z = block_sum(z, sums);
    if (!isfinite(z)) {  // the same in all threads
        if (threadIdx.x == 0) drawn[node] = -1;
        return;
    }
    softmax.z = (float)z;
    const Border border = top_p < 1.0 ? nucleus(softmax, v, top_p, sums) : Border{0.0f, v};

    const int stretch = ((v + WARPS - 1) / WARPS + WARP - 1) / WARP * WARP;  // a multiple of 32, so that all lanes iterate together
    const int begin = min(v, warp * stretch), end = min(v, begin + stretch);
    int equal = 0;
    for (int id = begin + lane; id < end; id += WARP) equal += probability(softmax, id) == border.p;
    equal = warp_sum(equal);
    if (threadIdx.x == 0) chosen = last = -1;
    if (lane == 0) equals[warp] = equal;
    __syncthreads();
    // A token's probability, or 0 outside of the nucleus. `seen`: tokens of the border's probability before these 32.
    auto kept = [&](int from, int& seen) {
        const int id = from + lane;
        const float p = id < end ? probability(softmax, id) : 0.0f;
        const u32 same = __ballot_sync(ALL_LANES, id < end && p == border.p);
        const int rank = seen + __popc(same & ((1u << lane) - 1));
        seen += __popc(same);
        return p > border.p || (p == border.p && rank < border.equals) ? p : 0.0f;
    };
    int before_warp = 0;
    for (int i = 0; i < warp; i++) before_warp += equals[i];
    double own = 0.0;
    int seen = before_warp;
    for (int from = begin; from < end; from += WARP) own += kept(from, seen);
    own = warp_sum(own);
    if (lane == 0) mass[warp] = own;
    __syncthreads();
    double below = 0.0, total = 0.0;
    for (int i = 0; i < WARPS; i++) {
        if (i < warp) below += mass[i];
        total += mass[i];
    }
    const double wanted = uniforms[(state[CONTEXT] + depths[node] + 1) % count] * total;
    seen = before_warp;
    for (int from = begin; from < end; from += WARP) {
        const float p = kept(from, seen);
        double sum = p;
#pragma unroll
        for (int step = 1; step < WARP; step *= 2) {
            const double other = __shfl_up_sync(ALL_LANES, sum, step);
            if (lane >= step) sum += other;
        }
        const u32 crossed = __ballot_sync(ALL_LANES, p > 0.0f && below + sum > wanted);
        const u32 any = __ballot_sync(ALL_LANES, p > 0.0f);
        if (lane == 0 && any) atomicMax(&last, from + 31 - __clz(any));
        if (crossed) {
            if (lane == 0) atomicMin((u32*)&chosen, (u32)(from + __ffs(crossed) - 1));  // -1 is the largest u32
            break;
        }
        below += __shfl_sync(ALL_LANES, sum, WARP - 1);
    }
    __syncthreads();
    // Rounding may put `wanted` at the total.
    if (threadIdx.x == 0) drawn[node] = chosen >= 0 ? chosen : max(last, 0);
}
