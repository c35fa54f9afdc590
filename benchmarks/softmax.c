// The exponentials of a chunk's logits by rows, in one pass after the largest: what a compiled kernel could do.
// See benchmarks/compiled.py.
#include <math.h>
#include <stdint.h>
#include <string.h>

void exponentials(const float *x, long stride, float *out, float *total, long n, long m) {
  for (long i = 0; i < n; i++) {
    const float *row = x + i * stride;
    float *here = out + i * m, largest = -INFINITY, sum = 0;
    for (long j = 0; j < m; j++) largest = row[j] > largest ? row[j] : largest;
    for (long j = 0; j < m; j++) {
      float y = row[j] - largest, kept = y >= -70.f ? 1.f : 0.f;
      y = y > -70.f ? y : -70.f;
      // 2^k · e^r with |r| <= ln 2 / 2, and a polynomial (Cephes) for e^r.
      int32_t k = (int32_t)(y * 1.44269504f - 0.5f), bits = (k + 127) << 23;
      float r = y - k * 0.693359375f + k * 2.12194440e-4f, power, p = 1.9875691500e-4f;
      p = p * r + 1.3981999507e-3f;
      p = p * r + 8.3334519073e-3f;
      p = p * r + 4.1665795894e-2f;
      p = p * r + 1.6666665459e-1f;
      p = p * r + 5.0000001201e-1f;
      memcpy(&power, &bits, 4);
      here[j] = (p * r * r + r + 1.f) * power * kept;
      sum += here[j];
    }
    total[i] = sum;
  }
}
