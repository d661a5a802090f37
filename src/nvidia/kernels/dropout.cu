// Masks of dropout from ChaCha with 8 rounds (Bernstein 2008), whose blocks are numbered: a mask depends on key and stream only, and is the
// one that src/torch/dropout.rs draws on the CPU.

#define QUARTER(a, b, c, d)                                      \
    a += b, d ^= a, d = d << 16 | d >> 16;                       \
    c += d, b ^= c, b = b << 12 | b >> 20;                       \
    a += b, d ^= a, d = d << 8 | d >> 24;                        \
    c += d, b ^= c, b = b << 7 | b >> 25

// Words of block `number`.
INLINE void chacha8(u32 (&x)[16], const u32 (&key)[8], u64 stream, u64 number) {
    const u32 start[16] = {0x61707865u, 0x3320646eu, 0x79622d32u, 0x6b206574u, key[0], key[1], key[2], key[3], key[4], key[5], key[6], key[7],
                           (u32)number, (u32)(number >> 32), (u32)stream, (u32)(stream >> 32)};
#pragma unroll
    for (int i = 0; i < 16; i++) x[i] = start[i];
#pragma unroll
    for (int round = 0; round < 4; round++) {
        QUARTER(x[0], x[4], x[8], x[12]);
        QUARTER(x[1], x[5], x[9], x[13]);
        QUARTER(x[2], x[6], x[10], x[14]);
        QUARTER(x[3], x[7], x[11], x[15]);
        QUARTER(x[0], x[5], x[10], x[15]);
        QUARTER(x[1], x[6], x[11], x[12]);
        QUARTER(x[2], x[7], x[8], x[13]);
        QUARTER(x[3], x[4], x[9], x[14]);
    }
#pragma unroll
    for (int i = 0; i < 16; i++) x[i] += start[i];
}

// mask[i] = 0 where the i-th 16 bits of the stream are below `threshold`, else `kept`. A thread draws one block: 32 numbers. `mask` has
// dtype `element`, or float32 with `as_float`. Grid count/8192 rounded up, 256 threads.
KERNEL(256) dropout_mask(void* mask, long long count, u64 stream, u32 key0, u32 key1, u32 key2, u32 key3, u32 key4, u32 key5, u32 key6,
                         u32 key7, int threshold, float kept, int as_float) {
    const long long number = (long long)blockIdx.x * blockDim.x + threadIdx.x, first = number * 32;
    if (first >= count) return;
    const u32 key[8] = {key0, key1, key2, key3, key4, key5, key6, key7};
    u32 words[16];
    chacha8(words, key, stream, (u64)number);
    const u32 whole = to_element(kept), bits = __float_as_uint(kept);
    const bool is_full = count - first >= 32 && (u64)mask % 16 == 0;
#pragma unroll
    for (int i = 0; i < 16; i += 4) {
        u32 halves[4], low[4], high[4];  // two elements in a word, or one float32 each
#pragma unroll
        for (int j = 0; j < 4; j++) {
            const bool drops_low = (int)(words[i + j] & 0xffff) < threshold, drops_high = (int)(words[i + j] >> 16) < threshold;
            halves[j] = (drops_low ? 0 : whole) | (drops_high ? 0 : whole << 16);
            low[j] = drops_low ? 0 : bits;
            high[j] = drops_high ? 0 : bits;
        }
        const long long at = first + 2 * i;
        if (is_full && as_float) {
            store16((float*)mask + at, make_uint4(low[0], high[0], low[1], high[1]));
            store16((float*)mask + at + 4, make_uint4(low[2], high[2], low[3], high[3]));
        } else if (is_full) {
            store16((element*)mask + at, make_uint4(halves[0], halves[1], halves[2], halves[3]));
        } else {
#pragma unroll
            for (int j = 0; j < 8; j++) {
                if (at + j >= count) continue;
                if (as_float) ((float*)mask)[at + j] = __uint_as_float(j % 2 ? high[j / 2] : low[j / 2]);
                else ((element*)mask)[at + j] = (element)(halves[j / 2] >> 16 * (j % 2));
            }
        }
    }
}
