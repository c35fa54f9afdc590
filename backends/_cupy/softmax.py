"""CuPy: the custom kernel, a softmax over rows with a given pitch, in place."""

from __future__ import annotations

THREADS = 256
"""Threads of a block, which shares one row."""

NAME = "skewed_softmax"

SOURCE = r"""
__device__ real reduced(real value, bool largest, real* shared) {
    shared[threadIdx.x] = value;
    __syncthreads();
    for (unsigned step = blockDim.x / 2; step > 0; step /= 2) {
        if (threadIdx.x < step) {
            real other = shared[threadIdx.x + step];
            if (!largest) shared[threadIdx.x] += other;
            else if (!(other <= shared[threadIdx.x])) shared[threadIdx.x] = other;  // NaN wins
        }
        __syncthreads();
    }
    real result = shared[0];
    __syncthreads();
    return result;
}

// A block owns row i of head p: x[p * head_pitch + spare + i * pitch ...], logits of m keys, which become weights.
// Whatever lies between the rows becomes zero, so that the same memory is the weights in relative layout.
extern "C" __global__ void skewed_softmax(
    real* x, real* lse, const void* mask, long long head_pitch, long long pitch, int spare, int n, int m,
    int heads, int position, int first_key, int before, int after, int block_size, real softcap,
    int mask_kind, long long mask_b, long long mask_h, long long mask_i, long long mask_j,
    long long lse_pitch, int lse_start) {
    __shared__ real shared[256];
    const real infinity = -log((real)0);
    const long long p = blockIdx.x / n;
    const int i = blockIdx.x % n, at = position + i;
    real* head = x + p * head_pitch;
    real* row = head + spare + i * pitch;
    int low = 0, high = m;  // the keys that the query sees
    if (before >= 0) low = max(low, at - before - first_key);
    if (block_size > 0 && at >= 0) low = max(low, (at / block_size - 1) * block_size - first_key);
    if (after != NO_END) high = min(high, at + after + 1 - first_key);
    mask_kind = low < high ? mask_kind : 0;
    const long long corner = p / heads * mask_b + p % heads * mask_h + i * mask_i;

    real largest = -infinity;
    for (int j = low + (int)threadIdx.x; j < high; j += blockDim.x) {
        real s = row[j];
        if (softcap > 0) s = softcap * tanh(s / softcap);
        if (mask_kind == 1 && !((const unsigned char*)mask)[corner + j * mask_j]) s = -infinity;
        if (mask_kind == 2) {
            const real added = ((const real*)mask)[corner + j * mask_j];
            s = added == -infinity ? added : s + added;
        }
        row[j] = s;
        if (!(s <= largest)) largest = s;
    }
    largest = reduced(largest, true, shared);
    const real shift = largest == -infinity ? 0 : largest;
    real total = 0;
    for (int j = low + (int)threadIdx.x; j < high; j += blockDim.x) {
        row[j] = exp(row[j] - shift);
        total += row[j];
    }
    total = reduced(total, false, shared);
    for (int j = (int)threadIdx.x; j < pitch; j += blockDim.x) {
        const bool seen = j >= low && j < high && total != 0;
        if (j < m || n > 1) row[j] = seen ? row[j] / total : (real)0;
    }
    if (i == 0)
        for (int c = threadIdx.x; c < spare; c += blockDim.x) head[c] = 0;
    if (threadIdx.x == 0) lse[p * lse_pitch + lse_start + i] = largest + log(total == 0 ? (real)1 : total);
}
"""
"""CUDA C++ for a dtype in the macro ``real``; ``NO_END`` represents a pattern that sees all of the future."""

NO_END = 2**31 - 1
