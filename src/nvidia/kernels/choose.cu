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

#define LOADS 8  // logits of a thread that are on their way at once

// Passes every id of a row and its logit to `use`, in ascending order for each thread.
template <typename Use> INLINE void each_logit(const float* row, int v, Use use) {
    for (int from = threadIdx.x; from < v; from += LOADS * blockDim.x) {
        float logits[LOADS];
#pragma unroll
        for (int i = 0; i < LOADS; i++) logits[i] = from + i * blockDim.x < v ? row[from + i * blockDim.x] : -INFINITY;
#pragma unroll
        for (int i = 0; i < LOADS; i++) {
            if (from + i * (int)blockDim.x < v) use(from + i * blockDim.x, logits[i]);
        }
    }
}

// best[n] = id of the largest of logits[n, V]; -1 if that is infinite or any is NaN. Grid N, 1024 threads.
KERNEL(THREADS) best(const float* logits, int* best_out, int v) {
    begin();
    SHARED Ranked scratch[WARPS];
    Ranked first = none();
    each_logit(logits + (size_t)blockIdx.x * v, v, [&](int id, float logit) {
        const Ranked here = {isnan(logit) ? INFINITY : logit, id};
        if (before(here, first)) first = here;
    });
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
    each_logit(row, v, [&](int, float logit) { most = fmaxf(most, logit); });
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
    each_logit(row, v, [&](int, float logit) {
        const float x = (logit - most) / temperature, e = expf(x);
        z += e;
        if (e > 0.0f) weighted += (double)e * x;
    });
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
    float most, per_temperature, per_z;
};
INLINE float probability(const Softmax& of, float logit) { return expf((logit - of.most) * of.per_temperature) * of.per_z; }

// The lowest probability in the nucleus, and how many tokens of exactly that probability are in it: those with the lowest ids.
struct Border {
    float p;
    int equals;
};

// Tokens whose probabilities, as bits, begin with the same digits. Floats from 0 to 1 are ordered like their bits, which are three digits
// of ten bits. Of the bits behind the digits, `high` and `low` are the sums of the upper and the lower ten. Sums of integers do not
// depend on the order, and a bin's mass is exact in float64.
struct Bins {
    u32 count[1024], high[1024], low[1024];
};

INLINE double bin_mass(const Bins& bins, int bin, u32 first_bits, int exponent) {
    const double unit = ldexp(1.0, max(exponent, 1) - 150);  // of a float's last bit
    const double rest = (double)bins.high[bin] * 1024 + bins.low[bin];
    return (double)bins.count[bin] * __uint_as_float(first_bits) + rest * unit;
}

// Sum of `mine` over this thread and all before it. scratch holds one number per warp.
INLINE double block_prefix(double mine, double* scratch) {
    const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;
#pragma unroll
    for (int step = 1; step < WARP; step *= 2) {
        const double other = __shfl_up_sync(ALL_LANES, mine, step);
        if (lane >= step) mine += other;
    }
    __syncthreads();
    if (lane == WARP - 1) scratch[warp] = mine;
    __syncthreads();
    double before = 0.0;
#pragma unroll 4
    for (int i = 0; i < warp; i++) before += scratch[i];
    return before + mine;
}

// The nucleus: the smallest set of most probable tokens that together reach `top_p`. Its border is the largest p such that the tokens
// with p' >= p reach it. Each pass finds ten bits of p: in the bin that takes the mass of the bins above it to top_p. One thread per bin.
INLINE Border nucleus(const float* row, const Softmax& softmax, int v, double top_p, double* scratch) {
    SHARED Bins bins;
    SHARED int found;
    SHARED double above_found;
    const int bin = THREADS - 1 - (int)threadIdx.x;  // in the order of falling probabilities
    u32 bits = 0;
    double above = 0.0;  // mass of the tokens whose digits so far are greater
    for (int shift = 20; shift >= 0; shift -= 10) {
        __syncthreads();  // the bins of the pass before may still be read
        bins.count[bin] = bins.high[bin] = bins.low[bin] = 0;
        if (threadIdx.x == 0) found = THREADS;
        __syncthreads();
        each_logit(row, v, [&](int, float logit) {
            const u32 p = __float_as_uint(probability(softmax, logit));
            if (shift < 20 && p >> (shift + 10) != bits >> (shift + 10)) return;
            const u32 digit = p >> shift & 1023, rest = p & ((1u << shift) - 1);
            atomicAdd(&bins.count[digit], 1u);
            if (rest >> 10) atomicAdd(&bins.high[digit], rest >> 10);
            if (rest & 1023) atomicAdd(&bins.low[digit], rest & 1023);
        });
        __syncthreads();
        const u32 first_bits = bits | (u32)bin << shift;
        const double own = bin_mass(bins, bin, first_bits, first_bits >> 23), reached = above + block_prefix(own, scratch);
        if (bins.count[bin] > 0 && reached >= top_p) atomicMin(&found, (int)threadIdx.x);
        __syncthreads();
        if (found == THREADS) return Border{0.0f, v};  // even all tokens do not reach it, because of rounding
        if ((int)threadIdx.x == found) above_found = reached - own;
        __syncthreads();
        above = above_found;
        bits |= (u32)(THREADS - 1 - found) << shift;
    }
    const float p = __uint_as_float(bits);
    return Border{p, p > 0.0f ? max(1, (int)ceil((top_p - above) / p)) : v};
}

// Draws a token after each node: the one whose share of the nucleus, in id order, contains
// uniforms[(CONTEXT + depth + 1) % count]. Each warp adds up one range of ids, and the warp in whose range the number falls searches
// it. Sums are float64. Grid N, 1024 threads.
KERNEL(THREADS) draw(const float* logits, const int* depths, const int* state, const double* uniforms, int* drawn, int v, int count,
                     float temperature, double top_p) {
    begin();
    SHARED float scratch[WARPS];
    SHARED double sums[WARPS], mass[WARPS];
    SHARED int equals[WARPS];
    const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP, node = blockIdx.x;
    const float* row = logits + (size_t)node * v;
    Softmax softmax = {row_max(row, v, scratch), 1.0f / temperature, 1.0f};
    double z = 0.0;
    each_logit(row, v, [&](int, float logit) { z += probability(softmax, logit); });
    z = block_sum(z, sums);
    if (!isfinite(z)) {  // the same in all threads
        if (threadIdx.x == 0) drawn[node] = -1;
        return;
    }
    softmax.per_z = (float)(1.0 / z);
    const Border border = top_p < 1.0 ? nucleus(row, softmax, v, top_p, sums) : Border{0.0f, v};

    const int stretch = ((v + WARPS - 1) / WARPS + WARP - 1) / WARP * WARP;  // a multiple of 32, so that all lanes iterate together
    const int begin = min(v, warp * stretch), end = min(v, begin + stretch);
    double own = 0.0;
    int equal = 0;
#pragma unroll 8
    for (int id = begin + lane; id < end; id += WARP) {
        const float p = probability(softmax, row[id]);
        own += p > border.p ? p : 0.0f;
        equal += p == border.p;
    }
    own = warp_sum(own);
    equal = warp_sum(equal);
    if (lane == 0) equals[warp] = equal;
    __syncthreads();
    int before_warp = 0;
#pragma unroll 4
    for (int i = 0; i < warp; i++) before_warp += equals[i];
    if (lane == 0) mass[warp] = own + (double)max(0, min(equal, border.equals - before_warp)) * border.p;
    __syncthreads();
    double total = 0.0;
#pragma unroll 4
    for (int i = 0; i < WARPS; i++) total += mass[i];
    const double wanted = uniforms[(state[CONTEXT] + depths[node] + 1) % count] * total;
    // The warp that reaches `wanted`; the last one with any mass if none does, because of rounding.
    int chosen_warp = 0;
    double below = 0.0, before_it = 0.0;
    bool reaches = false;
#pragma unroll 4
    for (int i = 0; i < WARPS; i++) {
        if (mass[i] > 0.0 && !reaches) {
            chosen_warp = i;
            below = before_it;
            reaches = before_it + mass[i] > wanted;
        }
        before_it += mass[i];
    }
    if (warp != chosen_warp) return;
    int seen = before_warp, last = 0;
    for (int from = begin; from < end; from += WARP) {
        const int id = from + lane;
        const float p = id < end ? probability(softmax, row[id]) : 0.0f;
        const u32 same = __ballot_sync(ALL_LANES, id < end && p == border.p);
        const int rank = seen + __popc(same & ((1u << lane) - 1));
        seen += __popc(same);
        const float kept = p > border.p || (p == border.p && rank < border.equals) ? p : 0.0f;
        double sum = kept;
#pragma unroll
        for (int step = 1; step < WARP; step *= 2) {
            const double other = __shfl_up_sync(ALL_LANES, sum, step);
            if (lane >= step) sum += other;
        }
        const u32 crossed = __ballot_sync(ALL_LANES, kept > 0.0f && below + sum > wanted);
        const u32 any = __ballot_sync(ALL_LANES, kept > 0.0f);
        if (any) last = from + 31 - __clz(any);
        if (crossed) {
            last = from + __ffs(crossed) - 1;
            break;
        }
        below += __shfl_sync(ALL_LANES, sum, WARP - 1);
    }
    if (lane == 0) drawn[node] = last;  // rounding may put `wanted` at the total: then the last token of the nucleus
}
