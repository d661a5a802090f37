// Choices from logits: the most probable token, the best guesses, a token's probability, a drawn token. Logits are float32; ties
// go to the lower id. If any logit is NaN or the largest is infinite, no token is chosen: -1. Blocks read a row in slices of SLICE logits, of which
// it has at most MOST_SLICES (defined by `Program::sizes` in src/nvidia/kernels.rs); the last block of a row adds them up.

#define THREADS 1024
#define WARPS (THREADS / WARP)
#define SLICE_THREADS 256  // threads that read a slice
#define OWN (SLICE / SLICE_THREADS)

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

// What a slice of a row adds up to, with x = (logit - most)/temperature: z is the sum of e^x, and weighted that of e^x·x. `most` is the largest
// logit, infinite if one is NaN, and `id` its token.
struct Part {
    double z, weighted;
    float most;
    int id;
};

INLINE int slices_of(int v) { return (v + SLICE - 1) / SLICE; }

// Loads this block's slice of a row, OWN logits a thread, all at once. Returns the largest with its id.
INLINE Ranked load_slice(float (&logits)[OWN], const float* row, int v) {
    SHARED Ranked scratch[SLICE_THREADS / WARP];
    const int from = blockIdx.x * SLICE + threadIdx.x;
#pragma unroll
    for (int i = 0; i < OWN; i++) logits[i] = from + i * SLICE_THREADS < v ? row[from + i * SLICE_THREADS] : -INFINITY;
    Ranked first = none();
#pragma unroll
    for (int i = 0; i < OWN; i++) {
        const Ranked here = {isnan(logits[i]) ? INFINITY : logits[i], from + i * SLICE_THREADS};
        if (before(here, first)) first = here;
    }
    return block_first(first, scratch);
}

// Adds up this block's slice. A thread sums its own logits in float32, a quarter of them at a time, and the block in float64.
INLINE Part slice_part(const float* row, int v, float temperature) {
    SHARED double sums[SLICE_THREADS / WARP];
    float logits[OWN], z[4] = {}, weighted[4] = {};
    const Ranked first = load_slice(logits, row, v);
    const bool is_empty = first.logit == -INFINITY;  // the difference of two infinities would be NaN
#pragma unroll
    for (int i = 0; i < OWN; i++) {
        const float x = (logits[i] - first.logit) / temperature, e = is_empty ? 0.0f : expf(x);
        z[i % 4] += e;
        weighted[i % 4] += e > 0.0f ? e * x : 0.0f;
    }
    auto together = [&](const float (&four)[4]) { return block_sum((double)((four[0] + four[1]) + (four[2] + four[3])), sums); };
    const double of_block = together(z);
    return Part{of_block, together(weighted), first.logit, first.id};
}

// Of all slices of a row, added in their order in each lane: a warp calls this. If a logit is NaN or infinite, so is `most`.
INLINE Part row_part(const Part* parts, int slices, float temperature) {
    Ranked first = none();
    for (int slice = threadIdx.x % WARP; slice < slices; slice += WARP) {
        const Ranked here = {parts[slice].most, parts[slice].id};
        if (before(here, first)) first = here;
    }
    first = warp_first(first);
    double z = 0.0, weighted = 0.0;
    for (int slice = threadIdx.x % WARP; slice < slices; slice += WARP) {
        const Part part = parts[slice];
        const float x = (part.most - first.logit) / temperature, e = expf(x);
        if (part.z > 0.0 && e > 0.0f) {
            z += part.z * e;
            weighted += e * (part.weighted + part.z * x);
        }
    }
    return Part{warp_sum(z), warp_sum(weighted), first.logit, first.id};
}

// best[n] = id of the largest of logits[n, V]; -1 if that is infinite or any is NaN. parts [N, slices]; arrived [N], 0 before and after. Grid
// (V/SLICE rounded up, N), 256 threads.
KERNEL(SLICE_THREADS) best(const float* logits, Part* parts, int* arrived, int* best_out, int v) {
    begin();
    const int node = blockIdx.y;
    float own[OWN];
    const Ranked first = load_slice(own, logits + (size_t)node * v, v);
    Part* of_row = parts + (size_t)node * gridDim.x;
    if (threadIdx.x == 0) of_row[blockIdx.x] = Part{0.0, 0.0, first.logit, first.id};
    if (!is_last_block(&arrived[node], gridDim.x)) return;
    if (threadIdx.x < WARP) {
        const Part all = row_part(of_row, gridDim.x, 1.0f);
        if (threadIdx.x == 0) best_out[node] = isfinite(all.most) ? all.id : -1;
    }
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

// With x = (logit - largest)/temperature and Z = sum of e^x over the row: log p = x - ln Z, entropy = ln Z - sum of e^x·x / Z.
// entropy[n] is that of row n. log_p[c] of each child c of node n is that of c's token in row n; the root's is taken from its own
// row and not used. parts [N, slices]; arrived [N], 0 before and after. Grid (V/SLICE rounded up, N), 256 threads.
KERNEL(SLICE_THREADS) posterior(const float* logits, Part* parts, int* arrived, const int* tokens, const int* children, float* log_p,
                                float* entropy, int v, float temperature) {
    begin();
    const int node = blockIdx.y, lane = threadIdx.x;
    const float* row = logits + (size_t)node * v;
    Part* of_row = parts + (size_t)node * gridDim.x;
    const Part part = slice_part(row, v, temperature);
    if (threadIdx.x == 0) of_row[blockIdx.x] = part;
    if (!is_last_block(&arrived[node], gridDim.x) || lane >= WARP) return;
    const Part all = row_part(of_row, gridDim.x, temperature);
    const double log_z = log(all.z);
    if (lane == 0) entropy[node] = (float)(log_z - all.weighted / all.z);
    auto of_token = [&](int token) { return (float)((double)((row[token] - all.most) / temperature) - log_z); };
    const int first = children[2 * node], end = children[2 * node + 1];
    for (int child = first + lane; child < end; child += WARP) log_p[child] = of_token(tokens[child]);
    if (node == 0 && lane == 0) log_p[0] = of_token(tokens[0]);
}

// parts[n, s] of every slice of every row, for draw. Grid (V/SLICE rounded up, N), 256 threads.
KERNEL(SLICE_THREADS) add_slices(const float* logits, Part* parts, int v, float temperature) {
    begin();
    const Part part = slice_part(logits + (size_t)blockIdx.y * v, v, temperature);
    if (threadIdx.x == 0) parts[(size_t)blockIdx.y * gridDim.x + blockIdx.x] = part;
}

// A token's probability, float32. It depends on the token's logit alone, so that every pass computes the same number.
struct Softmax {
    float most, temperature, per_z;  // with per_z = 1, its multiple
};
INLINE float probability(const Softmax& of, float logit) { return expf((logit - of.most) / of.temperature) * of.per_z; }

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
template <typename T> INLINE T block_prefix(T mine, T* scratch) {
    const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;
#pragma unroll
    for (int step = 1; step < WARP; step *= 2) {
        const T other = __shfl_up_sync(ALL_LANES, mine, step);
        if (lane >= step) mine += other;
    }
    __syncthreads();
    if (lane == WARP - 1) scratch[warp] = mine;
    __syncthreads();
    T before = 0;
#pragma unroll 4
    for (int i = 0; i < warp; i++) before += scratch[i];
    return before + mine;
}

// The tokens of a row that may be in its nucleus, by slices: counts[s] of them, with their places in the slice in ascending order.
struct Candidates {
    const float* row;
    const u16* places;  // [slices, SLICE]
    const int* counts;
    int slices;
};

// The logit of candidate i of a slice.
INLINE float candidate(const Candidates& of, int slice, int i) {
    return of.row[slice * SLICE + of.places[(size_t)slice * SLICE + i]];
}

#define LOADS 8  // logits of a thread that are on their way at once

// Passes the logits of candidates part, part + parts, part + 2·parts, … of a slice to `use`.
template <typename Use> INLINE void each_candidate(const Candidates& of, int slice, int part, int parts, Use use) {
    const int count = of.counts[slice];
    for (int from = part; from < count; from += LOADS * parts) {
        float logits[LOADS];
#pragma unroll
        for (int i = 0; i < LOADS; i++) logits[i] = from + i * parts < count ? candidate(of, slice, from + i * parts) : -INFINITY;
#pragma unroll
        for (int i = 0; i < LOADS; i++) {
            if (from + i * parts < count) use(logits[i]);
        }
    }
}

// Passes the logits of all candidates to `use`, in no order. Warps share a slice if there are fewer slices.
template <typename Use> INLINE void each_candidate(const Candidates& of, Use use) {
    const int share = max(1, WARPS / of.slices), warp = threadIdx.x / WARP, part = warp % share * WARP + threadIdx.x % WARP;
    for (int slice = warp / share; slice < of.slices; slice += WARPS / share) each_candidate(of, slice, part, share * WARP, use);
}

// Keeps those tokens of this block's slice that may be in the nucleus: writes their places in the slice, in ascending order, and their number.
// These have a probability above `least`. 1024 threads.
INLINE void keep_candidates(u16* places, int* count, const float* row, int v, const Softmax& softmax, float least) {
    constexpr int EACH = SLICE / THREADS;
    SHARED int scratch[WARPS];
    const int first = blockIdx.x * SLICE + threadIdx.x * EACH;
    float logits[EACH];
#pragma unroll
    for (int i = 0; i < EACH; i++) logits[i] = first + i < v ? row[first + i] : -INFINITY;
    u32 kept = 0;
#pragma unroll
    for (int i = 0; i < EACH; i++) kept |= (u32)(probability(softmax, logits[i]) > least) << i;
    const int own = __popc(kept), end = block_prefix(own, scratch);
    int at = end - own;
#pragma unroll
    for (int i = 0; i < EACH; i++) {
        if (kept >> i & 1) places[at++] = (u16)(threadIdx.x * EACH + i);
    }
    if (threadIdx.x == THREADS - 1) *count = end;
}

// The nucleus: the smallest set of most probable tokens that together reach `top_p`. Its border is the largest p such that the tokens
// with p' >= p reach it. Each pass finds ten bits of p: in the bin that takes the mass of the bins above it to top_p. One thread per bin.
INLINE Border nucleus(const Candidates& candidates, const Softmax& softmax, double top_p, double* scratch) {
    SHARED Bins bins;
    SHARED int found;
    SHARED double above_found;
    const Border all = {0.0f, candidates.slices * SLICE};
    const int bin = THREADS - 1 - (int)threadIdx.x;  // in the order of falling probabilities
    u32 bits = 0;
    double above = 0.0;  // mass of the tokens whose digits so far are greater
    for (int shift = 20; shift >= 0; shift -= 10) {
        __syncthreads();  // the bins of the pass before may still be read
        bins.count[bin] = bins.high[bin] = bins.low[bin] = 0;
        if (threadIdx.x == 0) found = THREADS;
        __syncthreads();
        each_candidate(candidates, [&](float logit) {
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
        if (found == THREADS) return all;  // even all tokens do not reach it, because of rounding
        if ((int)threadIdx.x == found) above_found = reached - own;
        __syncthreads();
        above = above_found;
        bits |= (u32)(THREADS - 1 - found) << shift;
    }
    const float p = __uint_as_float(bits);
    return p > 0.0f ? Border{p, max(1, (int)ceil((top_p - above) / p))} : all;
}

// The slice in which a random number falls. `wanted` is that number less the mass of the slices before, and `equals` counts the tokens before
// whose probability is the border's.
struct Fallen {
    int slice, equals;
    double wanted;
};

// Finds it: the slice whose mass reaches `uniform` of the whole, or the last one with any mass if none does, because of rounding. `above[s]`
// is the mass of a slice's tokens above the border, and `equal[s]` counts those at it. One thread calls this.
INLINE Fallen fall(const double* above, const int* equal, const Border& border, int slices, double uniform) {
    auto mass_of = [&](int slice, int before) { return above[slice] + (double)max(0, min(equal[slice], border.equals - before)) * border.p; };
    double total = 0.0;
    for (int slice = 0, seen = 0; slice < slices; seen += equal[slice++]) total += mass_of(slice, seen);
    const double drawn = uniform * total;
    Fallen fallen = {0, 0, drawn};
    double below = 0.0;
    for (int slice = 0, seen = 0; slice < slices; seen += equal[slice++]) {
        const double mass = mass_of(slice, seen);
        if (mass > 0.0) fallen = Fallen{slice, seen, drawn - below};
        below += mass;
        if (mass > 0.0 && below > drawn) break;
    }
    return fallen;
}

// The place in a slice, of `count` in ascending order, at which the sum of probabilities within the nucleus exceeds what is wanted; the last
// one in the nucleus if none does, because of rounding. 1024 threads; p_of(i) is the probability of number i.
template <typename P>
INLINE int place_of(P p_of, int count, const Border& border, const Fallen& fallen, double* sums, int* counts, int* ends) {
    constexpr int EACH = SLICE / THREADS;
    int &reached = ends[0], &last = ends[1];
    float p[EACH];
    int equal = 0;
#pragma unroll
    for (int i = 0; i < EACH; i++) {
        const int at = threadIdx.x * EACH + i;
        p[i] = at < count ? p_of(at) : -1.0f;
        equal += p[i] == border.p;
    }
    if (threadIdx.x == 0) reached = count, last = 0;
    int rank = fallen.equals + block_prefix(equal, counts) - equal;
    double own = 0.0;
#pragma unroll
    for (int i = 0; i < EACH; i++) {
        const bool is_kept = p[i] > border.p || (p[i] == border.p && rank++ < border.equals);
        p[i] = is_kept ? p[i] : 0.0f;
        own += p[i];
    }
    double sum = block_prefix(own, sums) - own;
#pragma unroll
    for (int i = 0; i < EACH; i++) {
        sum += p[i];
        if (p[i] <= 0.0f) continue;
        atomicMax(&last, (int)threadIdx.x * EACH + i);
        if (sum > fallen.wanted) atomicMin(&reached, (int)threadIdx.x * EACH + i);
    }
    __syncthreads();
    return reached < count ? reached : last;
}

// Draws a token after each node: the one whose share of the nucleus, in id order, contains uniforms[(CONTEXT + depth + 1) % count]. parts come
// from add_slices. With top_p below 1, every block keeps the candidates of a slice, and the row's last block draws among them: grid
// (V/SLICE rounded up, N); places [N, slices, SLICE], counts [N, slices], arrived [N], 0 before and after. Tokens of at most `least` weigh
// less than 1 - top_p together, so the others reach top_p without them, and the nucleus has none of them. Without top_p, a block draws from
// the slices' masses and reads one slice: grid (1, N). 1024 threads; sums are float64.
KERNEL(THREADS) draw(const float* logits, const Part* parts, u16* places, int* counts, int* arrived, const int* depths, const int* state,
                     const double* uniforms, int* drawn, int v, int count, float temperature, double top_p, float least) {
    begin();
    SHARED Softmax softmax;
    SHARED Fallen fallen;
    SHARED double sums[WARPS], above[MOST_SLICES];
    SHARED int warp_counts[WARPS], ends[2], equal[MOST_SLICES];
    const bool is_whole = top_p >= 1.0;
    const int node = blockIdx.y, slices = slices_of(v), warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;
    const float* row = logits + (size_t)node * v;
    const Part* of_row = parts + (size_t)node * slices;
    if (warp == 0) {
        const Part all = row_part(of_row, slices, temperature);
        if (lane == 0) softmax = Softmax{all.most, temperature, is_whole ? 1.0f : (float)(1.0 / all.z)};
    }
    __syncthreads();
    if (!isfinite(softmax.most)) {  // the same in all blocks of the row
        if (blockIdx.x == 0 && threadIdx.x == 0) drawn[node] = -1;
        return;
    }
    Border border = {0.0f, v};
    u16* places_of_row = places + (size_t)node * slices * SLICE;
    int* counts_of_row = counts + (size_t)node * slices;
    const Candidates candidates = {row, places_of_row, counts_of_row, slices};
    if (is_whole) {
        for (int slice = threadIdx.x; slice < slices; slice += THREADS) {
            const Part part = of_row[slice];
            above[slice] = part.z > 0.0 ? part.z * probability(softmax, part.most) : 0.0;
            equal[slice] = 0;
        }
    } else {
        const int slice = blockIdx.x;
        keep_candidates(places_of_row + (size_t)slice * SLICE, counts_of_row + slice, row, v, softmax, least);
        if (!is_last_block(&arrived[node], slices)) return;
        border = nucleus(candidates, softmax, top_p, sums);
        for (int slice = warp; slice < slices; slice += WARPS) {
            double mass = 0.0;
            int equals = 0;
            each_candidate(candidates, slice, lane, WARP, [&](float logit) {
                const float p = probability(softmax, logit);
                mass += p > border.p ? p : 0.0f;
                equals += p == border.p;
            });
            mass = warp_sum(mass);
            equals = warp_sum(equals);
            if (lane == 0) above[slice] = mass, equal[slice] = equals;
        }
    }
    __syncthreads();
    if (threadIdx.x == 0) fallen = fall(above, equal, border, slices, uniforms[(state[CONTEXT] + depths[node] + 1) % count]);
    __syncthreads();
    const int first = fallen.slice * SLICE;
    int id;
    if (is_whole) {
        auto p_of = [&](int i) { return probability(softmax, row[first + i]); };
        id = first + place_of(p_of, min(SLICE, v - first), border, fallen, sums, warp_counts, ends);
    } else {
        const int kept = counts_of_row[fallen.slice];
        auto p_of = [&](int i) { return probability(softmax, candidate(candidates, fallen.slice, i)); };
        id = first + places_of_row[(size_t)fallen.slice * SLICE + place_of(p_of, kept, border, fallen, sums, warp_counts, ends)];
    }
    if (threadIdx.x == 0) drawn[node] = id;
}
