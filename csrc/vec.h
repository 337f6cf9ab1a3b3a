// Short vectors of float that the compiler lowers to whatever the target has, and bfloat16 conversion.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstring>

#ifdef __AVX512F__
#include <immintrin.h>
#endif

namespace sennit {

constexpr int kLanes = 16;
typedef float vf __attribute__((vector_size(kLanes * 4), aligned(4)));
typedef int32_t vi __attribute__((vector_size(kLanes * 4), aligned(4)));
typedef uint32_t vu __attribute__((vector_size(kLanes * 4), aligned(4)));
typedef double vd __attribute__((vector_size(kLanes * 8), aligned(8)));
typedef uint16_t vh __attribute__((vector_size(kLanes * 2), aligned(2)));

struct bf16 {
  uint16_t bits;
};

inline vf splat(float x) { return vf{} + x; }

template <class To, class From>
inline To bits_as(From x) {
  static_assert(sizeof(To) == sizeof(From));
  To out;
  std::memcpy(&out, &x, sizeof(To));
  return out;
}

inline vf load(const float* p) {
  vf out;
  std::memcpy(&out, p, sizeof(out));
  return out;
}

inline vf load(const bf16* p) {
  vh half;
  std::memcpy(&half, p, sizeof(half));
  return bits_as<vf>(__builtin_convertvector(half, vu) << 16);
}

inline void store(float* p, vf x) { std::memcpy(p, &x, sizeof(x)); }

// Round to nearest, ties to even; a NaN stays one.
inline void store(bf16* p, vf x) {
#ifdef __AVX512BF16__
  const __m256bh half = _mm512_cvtneps_pbh(bits_as<__m512>(x));
  std::memcpy(p, &half, sizeof(half));
#else
  const vu u = bits_as<vu>(x);
  vu rounded = (u + 0x7fffu + ((u >> 16) & 1u)) >> 16;
  const vi nan = x != x;
  rounded = nan ? vu{} + 0x7fc0u : rounded;
  const vh half = __builtin_convertvector(rounded, vh);
  std::memcpy(p, &half, sizeof(half));
#endif
}

inline float get(const float* p) { return *p; }
inline float get(const bf16* p) { return bits_as<float>(uint32_t(p->bits) << 16); }
inline void put(float* p, float x) { *p = x; }
inline void put(bf16* p, float x) {
  const uint32_t u = bits_as<uint32_t>(x);
  p->bits = x != x ? 0x7fc0 : uint16_t((u + 0x7fffu + ((u >> 16) & 1u)) >> 16);
}

// The first `count` < kLanes elements; the other lanes hold `fill`.
template <class T>
inline vf load_part(const T* p, int64_t count, float fill = 0.0f) {
  vf out = splat(fill);
  for (int64_t i = 0; i < count; ++i) out[i] = get(p + i);
  return out;
}

template <class T>
inline void store_part(T* p, vf x, int64_t count) {
  for (int64_t i = 0; i < count; ++i) put(p + i, x[i]);
}

inline float sum(vf x) {
  float out = 0.0f;
  for (int i = 0; i < kLanes; ++i) out += x[i];
  return out;
}

inline vf sqrt(vf x) {
#ifdef __AVX512F__
  return bits_as<vf>(_mm512_sqrt_ps(bits_as<__m512>(x)));
#else
  for (int i = 0; i < kLanes; ++i) x[i] = std::sqrt(x[i]);
  return x;
#endif
}

inline vf max(vf a, vf b) { return a > b ? a : b; }

// The maximum; NaN if any lane is one.
inline float max_of(vf x) {
  float out = x[0];
  for (int i = 1; i < kLanes; ++i) out = (x[i] > out || x[i] != x[i]) ? x[i] : out;
  return out;
}

// e^x; 0 for very small, infinity for very large x, NaN for NaN. `Precise`: relative error below 2e-7, else below 1e-5,
// which is far less than the rounding of bfloat16.
template <bool Precise>
inline vf exp(vf x) {
#ifdef __AVX512F__
  __m512 v = _mm512_max_ps(_mm512_set1_ps(-110.0f), bits_as<__m512>(x));  // NaN passes as the second operand
  v = _mm512_min_ps(_mm512_set1_ps(110.0f), v);
  const __m512 whole = _mm512_roundscale_ps(_mm512_mul_ps(v, _mm512_set1_ps(1.44269504088896341f)), 0);
  __m512 r = _mm512_fnmadd_ps(whole, _mm512_set1_ps(0.693359375f), v);
  r = _mm512_fnmadd_ps(whole, _mm512_set1_ps(-2.12194440e-4f), r);
#else
  const vf clamped = x < splat(-87.3f) ? splat(-87.3f) : (x > splat(88.7f) ? splat(88.7f) : x);
  const vf magic = splat(12582912.0f);  // 1.5 * 2^23: adding it rounds to a whole number
  const vf shifted = clamped * 1.44269504088896341f + magic;
  const vf whole = shifted - magic;
  vf r = clamped - whole * 0.693359375f;
  r = r + whole * 2.12194440e-4f;
#endif
  const vf t = bits_as<vf>(r);
  vf p;
  if (Precise) {
    p = t * 1.9875691500e-4f + 1.3981999507e-3f;
    p = p * t + 8.3334519073e-3f;
    p = p * t + 4.1665795894e-2f;
    p = p * t + 1.6666665459e-1f;
    p = p * t + 5.0000001201e-1f;
    p = p * t * t + t + 1.0f;
  } else {
    p = t * 4.1917537e-2f + 1.6664828e-1f;
    p = p * t + 4.9999446e-1f;
    p = p * t + 1.0f;
    p = p * t + 1.0f;
  }
#ifdef __AVX512F__
  return bits_as<vf>(_mm512_scalef_ps(bits_as<__m512>(p), whole));
#else
  vf y = bits_as<vf>(bits_as<vi>(p) + (bits_as<vi>(shifted) << 23));  // the low bits of `shifted` are the whole number
  y = x < splat(-87.3f) ? splat(0.0f) : y;
  y = x > splat(88.7f) ? splat(INFINITY) : y;
  return x != x ? x : y;
#endif
}

// The exponential for values of type T.
template <class T>
inline vf exp_of(vf x) {
  return exp<sizeof(T) == 4>(x);
}

// Calls f(offset, count) for each vector of n elements; count == kLanes except possibly the last time.
template <class F>
inline void for_vectors(int64_t n, F f) {
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) f(i, int64_t(kLanes));
  if (i < n) f(i, n - i);
}

template <class T>
inline vf load_n(const T* p, int64_t count, float fill = 0.0f) {
  return count == kLanes ? load(p) : load_part(p, count, fill);
}

template <class T>
inline void store_n(T* p, vf x, int64_t count) {
  if (count == kLanes)
    store(p, x);
  else
    store_part(p, x, count);
}

}  // namespace sennit
