// Operators for the CPU, each one pass over memory where the mathematics allows it. Plain C interface: raw pointers,
// sizes in elements, the number of threads last. `kind`: 0 = float32, 1 = bfloat16. Statistics are float32.
#include <algorithm>
#include <array>
#include <vector>

#include "vec.h"

using namespace sennit;

#define EXPORT extern "C" __attribute__((visibility("default")))

namespace {

// Pieces into which sums over rows are cut, so that the order of addition does not depend on the number of threads.
constexpr int64_t kPieces = 32;

template <class T>
void norm_forward(const T* x, const T* delta, const T* w, T* total, T* y, float* rstd, int64_t rows, int64_t h, float eps,
                  int threads) {
#pragma omp parallel for num_threads(threads) schedule(static)
  for (int64_t row = 0; row < rows; ++row) {
    const T* in = x + row * h;
    if (delta) {
      const T* d = delta + row * h;
      T* out = total + row * h;
      for_vectors(h, [&](int64_t i, int64_t n) { store_n(out + i, load_n(in + i, n) + load_n(d + i, n), n); });
      in = out;
    }
    vf squares{};
    for_vectors(h, [&](int64_t i, int64_t n) {
      const vf v = load_n(in + i, n);
      squares += v * v;
    });
    const float scale = 1.0f / std::sqrt(sum(squares) / float(h) + eps);
    rstd[row] = scale;
    T* out = y + row * h;
    for_vectors(h, [&](int64_t i, int64_t n) { store_n(out + i, load_n(in + i, n) * scale * load_n(w + i, n), n); });
  }
}

template <class T>
void norm_backward(const T* dy, const T* dtotal, const T* x, const T* w, const float* rstd, T* dx, float* dw, int64_t rows,
                   int64_t h, int threads) {
  const int64_t pieces = std::min(kPieces, rows);
  std::vector<float> partial(pieces * h, 0.0f);
#pragma omp parallel for num_threads(threads) schedule(static)
  for (int64_t piece = 0; piece < pieces; ++piece) {
    float* sums = partial.data() + piece * h;
    for (int64_t row = rows * piece / pieces; row < rows * (piece + 1) / pieces; ++row) {
      const T *g = dy + row * h, *in = x + row * h;
      const float scale = rstd[row];
      vf dots{};
      for_vectors(h, [&](int64_t i, int64_t n) {
        const vf gi = load_n(g + i, n), xi = load_n(in + i, n);
        dots += gi * load_n(w + i, n) * xi;
        store_n(sums + i, load_n(sums + i, n) + gi * xi * scale, n);
      });
      const float mean = sum(dots) * scale * scale * scale / float(h);
      T* out = dx + row * h;
      for_vectors(h, [&](int64_t i, int64_t n) {
        vf value = load_n(g + i, n) * load_n(w + i, n) * scale - load_n(in + i, n) * mean;
        if (dtotal) value += load_n(dtotal + row * h + i, n);
        store_n(out + i, value, n);
      });
    }
  }
  for_vectors(h, [&](int64_t i, int64_t n) {
    vf total{};
    for (int64_t piece = 0; piece < pieces; ++piece) total += load_n(partial.data() + piece * h + i, n);
    store_n(dw + i, total, n);
  });
}

template <class T>
void swiglu_forward(const T* gate, const T* up, T* out, int64_t size, int threads) {
#pragma omp parallel for num_threads(threads) schedule(static)
  for (int64_t start = 0; start < size; start += 4096) {
    for_vectors(std::min<int64_t>(4096, size - start), [&](int64_t i, int64_t n) {
      const vf g = load_n(gate + start + i, n);
      store_n(out + start + i, g / (exp_of<T>(-g) + 1.0f) * load_n(up + start + i, n), n);
    });
  }
}

template <class T>
void swiglu_backward(const T* dy, const T* gate, const T* up, T* dgate, T* dup, int64_t size, int threads) {
#pragma omp parallel for num_threads(threads) schedule(static)
  for (int64_t start = 0; start < size; start += 4096) {
    for_vectors(std::min<int64_t>(4096, size - start), [&](int64_t i, int64_t n) {
      const int64_t at = start + i;
      const vf g = load_n(gate + at, n), d = load_n(dy + at, n);
      const vf s = 1.0f / (exp_of<T>(-g) + 1.0f);
      store_n(dgate + at, d * load_n(up + at, n) * s * (g * (1.0f - s) + 1.0f), n);
      store_n(dup + at, d * g * s, n);
    });
  }
}

// One head of one token: rotate by (cos, sin * sign), or copy if cos is null.
template <class T>
inline void rotate(const T* in, T* out, const float* cos, const float* sin, float sign, int64_t d) {
  if (!cos) {
    std::memcpy(out, in, d * sizeof(T));
    return;
  }
  const int64_t half = d / 2;
  for_vectors(half, [&](int64_t i, int64_t n) {
    const vf a = load_n(in + i, n), b = load_n(in + half + i, n);
    const vf c = load_n(cos + i, n), s = load_n(sin + i, n) * sign;
    store_n(out + i, a * c - b * s, n);
    store_n(out + half + i, b * c + a * s, n);
  });
}

struct RopeSizes {
  int64_t b, s, g, r, d;
  int64_t stride_b, stride_s, stride_n;  // of the tensor [b, s, n = g * r, d]
  int64_t table_stride_b;                // of cos and sin [b, s, d / 2]; 0 if they are shared
};

// heads [b, s, n, d] <-> rows [b * g, s * r, d]
template <class T>
void rope(const T* in, T* out, const float* cos, const float* sin, float sign, const RopeSizes z, bool to_rows, int threads) {
#pragma omp parallel for num_threads(threads) schedule(static) collapse(2)
  for (int64_t b = 0; b < z.b; ++b) {
    for (int64_t s = 0; s < z.s; ++s) {
      const float* c = cos ? cos + b * z.table_stride_b + s * (z.d / 2) : nullptr;
      const float* n = cos ? sin + b * z.table_stride_b + s * (z.d / 2) : nullptr;
      for (int64_t g = 0; g < z.g; ++g) {
        for (int64_t r = 0; r < z.r; ++r) {
          const int64_t heads = b * z.stride_b + s * z.stride_s + (g * z.r + r) * z.stride_n;
          const int64_t rows = (((b * z.g + g) * z.s + s) * z.r + r) * z.d;
          rotate(in + (to_rows ? heads : rows), out + (to_rows ? rows : heads), c, n, sign, z.d);
        }
      }
    }
  }
}

struct Scores {
  int64_t batch, rows, cols, stride_batch, stride_row;
  int64_t lse_stride;           // between batches of lse and delta
  int64_t bounds, per_bound;    // batches of first/last, scores batches that share one
};

template <class T, class F>
void for_score_rows(T* scores, const Scores z, const int32_t* first, const int32_t* last, int threads, F f) {
#pragma omp parallel for num_threads(threads) schedule(static) collapse(2)
  for (int64_t b = 0; b < z.batch; ++b) {
    for (int64_t row = 0; row < z.rows; ++row) {
      int64_t low = 0, high = z.cols;
      if (first) {
        const int64_t at = (z.bounds == 1 ? 0 : b / z.per_bound) * z.rows + row;
        low = std::clamp<int64_t>(first[at], 0, z.cols);
        high = std::clamp<int64_t>(last[at], low, z.cols);
      }
      f(scores + b * z.stride_batch + row * z.stride_row, b * z.lse_stride + row, b, row, low, high);
    }
  }
}

template <class T>
inline void clear_outside(T* p, int64_t low, int64_t high, int64_t cols) {
  if (low > 0) std::memset(static_cast<void*>(p), 0, low * sizeof(T));
  if (high < cols) std::memset(static_cast<void*>(p + high), 0, (cols - high) * sizeof(T));
}

template <class T>
void softmax(T* scores, float* lse, const Scores z, const int32_t* first, const int32_t* last, float scale, int threads) {
  for_score_rows(scores, z, first, last, threads, [&](T* p, int64_t at, int64_t, int64_t, int64_t low, int64_t high) {
    thread_local std::vector<float> buffer;
    buffer.resize(high - low + kLanes);
    float* e = buffer.data();
    vf top = splat(-INFINITY), nan{};
    for_vectors(high - low, [&](int64_t i, int64_t n) {
      const vf v = load_n(p + low + i, n, -INFINITY);
      top = max(v, top);
      nan += v != v ? v : splat(0.0f);
    });
    const float shift = max_of(top + nan) * scale;
    vf sums{};
    for_vectors(high - low, [&](int64_t i, int64_t n) {
      const vf v = exp_of<T>(load_n(p + low + i, n, -INFINITY) * scale - shift);
      sums += v;
      store(e + i, v);
    });
    const float total = sum(sums);
    lse[at] = std::log(total) + shift;
    const float inverse = 1.0f / total;
    clear_outside(p, low, high, z.cols);
    for_vectors(high - low, [&](int64_t i, int64_t n) { store_n(p + low + i, load(e + i) * inverse, n); });
  });
}

template <class T>
void exponentials(T* scores, const float* lse, const Scores z, const int32_t* first, const int32_t* last, float scale,
                  int threads) {
  for_score_rows(scores, z, first, last, threads, [&](T* p, int64_t at, int64_t, int64_t, int64_t low, int64_t high) {
    const float shift = lse[at];
    clear_outside(p, low, high, z.cols);
    for_vectors(high - low, [&](int64_t i, int64_t n) {
      store_n(p + low + i, exp_of<T>(load_n(p + low + i, n) * scale - shift), n);
    });
  });
}

template <class T>
void softmax_backward(T* ds, const T* prob, const float* delta, const Scores z, const int32_t* first, const int32_t* last,
                      float scale, int threads) {
  for_score_rows(ds, z, first, last, threads, [&](T* p, int64_t at, int64_t b, int64_t row, int64_t low, int64_t high) {
    const T* q = prob + (b * z.rows + row) * z.cols;
    const float d = delta[at];
    clear_outside(p, low, high, z.cols);
    for_vectors(high - low, [&](int64_t i, int64_t n) {
      store_n(p + low + i, load_n(q + low + i, n) * (load_n(p + low + i, n) - d) * scale, n);
    });
  });
}

template <class T>
void row_dots(const T* a, const T* b, float* out, int64_t rows, int64_t d, int threads) {
#pragma omp parallel for num_threads(threads) schedule(static)
  for (int64_t row = 0; row < rows; ++row) {
    vf dots{};
    for_vectors(d, [&](int64_t i, int64_t n) { dots += load_n(a + row * d + i, n) * load_n(b + row * d + i, n); });
    out[row] = sum(dots);
  }
}

// Per row of logits [t, v]: maximum, sum of exp(logit - maximum), logit of the label (0 if not here), sum of logits.
template <class T>
void logit_statistics(const T* logits, const int64_t* labels, float* top, float* exponentials, float* target, float* every,
                      int64_t t, int64_t v, int64_t first, int64_t real, int threads) {
#pragma omp parallel for num_threads(threads) schedule(static)
  for (int64_t row = 0; row < t; ++row) {
    const T* p = logits + row * v;
    vf highest = splat(-INFINITY), all{};
    for_vectors(real, [&](int64_t i, int64_t n) {
      highest = max(load_n(p + i, n, -INFINITY), highest);
      all += load_n(p + i, n);
    });
    const float total = sum(all);
    const float shift = total != total ? total : max_of(highest);
    vf sums{};
    for_vectors(real, [&](int64_t i, int64_t n) { sums += exp_of<T>(load_n(p + i, n, -INFINITY) - shift); });
    const int64_t index = labels[row] - first;
    top[row] = shift;
    exponentials[row] = sum(sums);
    target[row] = index >= 0 && index < real ? get(p + index) : 0.0f;
    every[row] = total;
  }
}

// logits <- weight * (on_softmax * softmax - on_label * onehot - on_all); 0 in padded columns.
template <class T>
void logit_gradient(T* logits, const int64_t* labels, const float* lse, const float* weight, const float* on_softmax,
                    float on_label, float on_all, int64_t t, int64_t v, int64_t first, int64_t real, int threads) {
#pragma omp parallel for num_threads(threads) schedule(static)
  for (int64_t row = 0; row < t; ++row) {
    T* p = logits + row * v;
    const float factor = weight[row] * on_softmax[row], shift = lse[row], constant = weight[row] * on_all;
    if (weight[row] == 0.0f) {
      std::memset(static_cast<void*>(p), 0, v * sizeof(T));
      continue;
    }
    const int64_t index = labels[row] - first;
    const bool mine = index >= 0 && index < real;
    const float own = mine ? std::exp(get(p + index) - shift) * factor - constant - weight[row] * on_label : 0.0f;
    for_vectors(real, [&](int64_t i, int64_t n) { store_n(p + i, exp_of<T>(load_n(p + i, n) - shift) * factor - constant, n); });
    if (mine) put(p + index, own);
    if (real < v) std::memset(static_cast<void*>(p + real), 0, (v - real) * sizeof(T));
  }
}

template <class G>
void adamw_part(float* p, const G* g, float* m, float* v, bf16* shadow, int64_t size, float lr, float beta1, float beta2,
                float eps, float decay, float correct1, float correct2, float scale) {
  const float keep = 1.0f - lr * decay, step = lr / correct1, root = 1.0f / std::sqrt(correct2);
  for_vectors(size, [&](int64_t i, int64_t n) {
    const vf gi = load_n(g + i, n) * scale;
    vf mi = load_n(m + i, n), vi_ = load_n(v + i, n), pi = load_n(p + i, n);
    mi = mi + (gi - mi) * (1.0f - beta1);
    vi_ = vi_ * beta2 + gi * gi * (1.0f - beta2);
    pi = pi * keep - mi * step / (sqrt(vi_) * root + eps);
    store_n(m + i, mi, n);
    store_n(v + i, vi_, n);
    store_n(p + i, pi, n);
    if (shadow) store_n(shadow + i, pi, n);
  });
}

struct Span {
  int64_t tensor, start, size;
};

std::vector<Span> spans(const int64_t* sizes, int64_t count, int64_t length) {
  std::vector<Span> out;
  for (int64_t i = 0; i < count; ++i)
    for (int64_t start = 0; start < sizes[i]; start += length) out.push_back({i, start, std::min(length, sizes[i] - start)});
  return out;
}

template <class T>
double squares(const T* p, int64_t size) {
  vd sums{};
  for_vectors(size, [&](int64_t i, int64_t n) {
    const vd v = __builtin_convertvector(load_n(p + i, n), vd);
    sums += v * v;
  });
  double total = 0.0;
  for (int lane = 0; lane < kLanes; ++lane) total += sums[lane];
  return total;
}

constexpr int64_t kBlock = 32;

#ifdef __AVX512BW__
// Exchange of blocks of `Width` elements between two rows of a 32 x 32 block: one butterfly of the transposition.
template <int Width>
inline void butterfly(__m512i& a, __m512i& b) {
  alignas(64) static constexpr auto low = [] {
    std::array<uint16_t, 32> index{};
    for (int i = 0; i < 32; ++i) index[i] = uint16_t((i & Width) ? 32 + (i ^ Width) : i);
    return index;
  }();
  alignas(64) static constexpr auto high = [] {
    std::array<uint16_t, 32> index{};
    for (int i = 0; i < 32; ++i) index[i] = uint16_t((i & Width) ? 32 + i : (i ^ Width));
    return index;
  }();
  const __m512i x = _mm512_permutex2var_epi16(a, _mm512_load_si512(low.data()), b);
  b = _mm512_permutex2var_epi16(a, _mm512_load_si512(high.data()), b);
  a = x;
}

template <int Width>
inline void stage(__m512i (&rows)[32]) {
#pragma GCC unroll 32
  for (int i = 0; i < 32; ++i)
    if (!(i & Width)) butterfly<Width>(rows[i], rows[i | Width]);
}

inline void transpose_block(const uint16_t* in, int64_t stride_in, uint16_t* out, int64_t stride_out) {
  __m512i rows[32];
#pragma GCC unroll 32
  for (int i = 0; i < 32; ++i) rows[i] = _mm512_loadu_si512(in + i * stride_in);
  stage<16>(rows);
  stage<8>(rows);
  stage<4>(rows);
  stage<2>(rows);
  stage<1>(rows);
#pragma GCC unroll 32
  for (int i = 0; i < 32; ++i) _mm512_storeu_si512(out + i * stride_out, rows[i]);
}
#else
inline void transpose_block(const uint16_t* in, int64_t stride_in, uint16_t* out, int64_t stride_out) {
  uint16_t block[kBlock][kBlock];
  for (int64_t r = 0; r < kBlock; ++r)
    for (int64_t c = 0; c < kBlock; ++c) block[c][r] = in[r * stride_in + c];
  for (int64_t c = 0; c < kBlock; ++c) std::memcpy(out + c * stride_out, block[c], kBlock * 2);
}
#endif

// Blocks of 32 x 32 16-bit elements, so that both sides touch whole cache lines; a strip of blocks at a time, so that
// reading is long enough for the prefetchers.
void transpose16(const uint16_t* in, uint16_t* out, int64_t rows, int64_t cols, int threads) {
  constexpr int64_t kStrip = 16 * kBlock;
#pragma omp parallel for num_threads(threads) schedule(static) collapse(2)
  for (int64_t strip = 0; strip < cols; strip += kStrip) {
    for (int64_t r0 = 0; r0 < rows; r0 += kBlock) {
      const int64_t r1 = std::min(rows, r0 + kBlock);
      for (int64_t c0 = strip; c0 < std::min(cols, strip + kStrip); c0 += kBlock) {
        const int64_t c1 = std::min(cols, c0 + kBlock);
        if (r1 - r0 == kBlock && c1 - c0 == kBlock) {
          transpose_block(in + r0 * cols + c0, cols, out + c0 * rows + r0, rows);
        } else {
          for (int64_t c = c0; c < c1; ++c)
            for (int64_t r = r0; r < r1; ++r) out[c * rows + r] = in[r * cols + c];
        }
      }
    }
  }
}

template <class T>
void column_sums(const T* x, T* out, int64_t rows, int64_t cols, int threads) {
#pragma omp parallel for num_threads(threads) schedule(static)
  for (int64_t c0 = 0; c0 < cols; c0 += kLanes) {
    const int64_t n = std::min<int64_t>(kLanes, cols - c0);
    vf total{};
    for (int64_t row = 0; row < rows; ++row) total += load_n(x + row * cols + c0, n);
    store_n(out + c0, total, n);
  }
}

}  // namespace

EXPORT int sennit_version() { return 1; }

#define AS(T, p) static_cast<T*>(p)
#define CAS(T, p) static_cast<const T*>(p)

EXPORT void sennit_norm_forward(int kind, const void* x, const void* delta, const void* w, void* total, void* y, float* rstd,
                                int64_t rows, int64_t h, float eps, int threads) {
  auto call = [&]<class T>() {
    norm_forward<T>(CAS(T, x), CAS(T, delta), CAS(T, w), AS(T, total), AS(T, y), rstd, rows, h, eps, threads);
  };
  kind ? call.operator()<bf16>() : call.operator()<float>();
}

EXPORT void sennit_norm_backward(int kind, const void* dy, const void* dtotal, const void* x, const void* w, const float* rstd,
                                 void* dx, float* dw, int64_t rows, int64_t h, int threads) {
  auto call = [&]<class T>() {
    norm_backward<T>(CAS(T, dy), CAS(T, dtotal), CAS(T, x), CAS(T, w), rstd, AS(T, dx), dw, rows, h, threads);
  };
  kind ? call.operator()<bf16>() : call.operator()<float>();
}

EXPORT void sennit_swiglu_forward(int kind, const void* gate, const void* up, void* out, int64_t size, int threads) {
  auto call = [&]<class T>() { swiglu_forward<T>(CAS(T, gate), CAS(T, up), AS(T, out), size, threads); };
  kind ? call.operator()<bf16>() : call.operator()<float>();
}

EXPORT void sennit_swiglu_backward(int kind, const void* dy, const void* gate, const void* up, void* dgate, void* dup,
                                   int64_t size, int threads) {
  auto call = [&]<class T>() {
    swiglu_backward<T>(CAS(T, dy), CAS(T, gate), CAS(T, up), AS(T, dgate), AS(T, dup), size, threads);
  };
  kind ? call.operator()<bf16>() : call.operator()<float>();
}

EXPORT void sennit_rope(int kind, const void* in, void* out, const float* cos, const float* sin, float sign, int64_t b,
                        int64_t s, int64_t g, int64_t r, int64_t d, int64_t stride_b, int64_t stride_s, int64_t stride_n,
                        int64_t table_stride_b, int to_rows, int threads) {
  const RopeSizes z{b, s, g, r, d, stride_b, stride_s, stride_n, table_stride_b};
  auto call = [&]<class T>() { rope<T>(CAS(T, in), AS(T, out), cos, sin, sign, z, to_rows != 0, threads); };
  kind ? call.operator()<bf16>() : call.operator()<float>();
}

EXPORT void sennit_softmax(int kind, void* scores, float* lse, const int32_t* first, const int32_t* last, float scale,
                           const int64_t* sizes, int threads) {
  const Scores z{sizes[0], sizes[1], sizes[2], sizes[3], sizes[4], sizes[5], sizes[6], sizes[7]};
  auto call = [&]<class T>() { softmax<T>(AS(T, scores), lse, z, first, last, scale, threads); };
  kind ? call.operator()<bf16>() : call.operator()<float>();
}

EXPORT void sennit_exponentials(int kind, void* scores, const float* lse, const int32_t* first, const int32_t* last,
                                float scale, const int64_t* sizes, int threads) {
  const Scores z{sizes[0], sizes[1], sizes[2], sizes[3], sizes[4], sizes[5], sizes[6], sizes[7]};
  auto call = [&]<class T>() { exponentials<T>(AS(T, scores), lse, z, first, last, scale, threads); };
  kind ? call.operator()<bf16>() : call.operator()<float>();
}

EXPORT void sennit_softmax_backward(int kind, void* ds, const void* prob, const float* delta, const int32_t* first,
                                    const int32_t* last, float scale, const int64_t* sizes, int threads) {
  const Scores z{sizes[0], sizes[1], sizes[2], sizes[3], sizes[4], sizes[5], sizes[6], sizes[7]};
  auto call = [&]<class T>() { softmax_backward<T>(AS(T, ds), CAS(T, prob), delta, z, first, last, scale, threads); };
  kind ? call.operator()<bf16>() : call.operator()<float>();
}

EXPORT void sennit_row_dots(int kind, const void* a, const void* b, float* out, int64_t rows, int64_t d, int threads) {
  auto call = [&]<class T>() { row_dots<T>(CAS(T, a), CAS(T, b), out, rows, d, threads); };
  kind ? call.operator()<bf16>() : call.operator()<float>();
}

EXPORT void sennit_logit_statistics(int kind, const void* logits, const int64_t* labels, float* top, float* exponentials,
                                    float* target, float* every, int64_t t, int64_t v, int64_t first, int64_t real,
                                    int threads) {
  auto call = [&]<class T>() {
    logit_statistics<T>(CAS(T, logits), labels, top, exponentials, target, every, t, v, first, real, threads);
  };
  kind ? call.operator()<bf16>() : call.operator()<float>();
}

EXPORT void sennit_logit_gradient(int kind, void* logits, const int64_t* labels, const float* lse, const float* weight,
                                  const float* on_softmax, float on_label, float on_all, int64_t t, int64_t v, int64_t first,
                                  int64_t real, int threads) {
  auto call = [&]<class T>() {
    logit_gradient<T>(AS(T, logits), labels, lse, weight, on_softmax, on_label, on_all, t, v, first, real, threads);
  };
  kind ? call.operator()<bf16>() : call.operator()<float>();
}

// `shadows[i]` may be null. `kinds[i]`: type of gradient i.
EXPORT void sennit_adamw(int64_t count, const int64_t* sizes, const int32_t* kinds, void** params, void** grads, void** exp_avgs,
                         void** exp_avg_sqs, void** shadows, const float* decays, float lr, float beta1, float beta2, float eps,
                         float correct1, float correct2, float scale, int threads) {
  const auto parts = spans(sizes, count, 16384);
#pragma omp parallel for num_threads(threads) schedule(static)
  for (size_t index = 0; index < parts.size(); ++index) {
    const Span s = parts[index];
    float *p = AS(float, params[s.tensor]) + s.start, *m = AS(float, exp_avgs[s.tensor]) + s.start;
    float* v = AS(float, exp_avg_sqs[s.tensor]) + s.start;
    bf16* shadow = shadows[s.tensor] ? AS(bf16, shadows[s.tensor]) + s.start : nullptr;
    const float decay = decays[s.tensor];
    if (kinds[s.tensor])
      adamw_part(p, AS(bf16, grads[s.tensor]) + s.start, m, v, shadow, s.size, lr, beta1, beta2, eps, decay, correct1, correct2, scale);
    else
      adamw_part(p, AS(float, grads[s.tensor]) + s.start, m, v, shadow, s.size, lr, beta1, beta2, eps, decay, correct1, correct2, scale);
  }
}

EXPORT double sennit_sum_of_squares(int64_t count, const int64_t* sizes, const int32_t* kinds, void** tensors, int threads) {
  const auto parts = spans(sizes, count, 65536);
  std::vector<double> sums(parts.size());
#pragma omp parallel for num_threads(threads) schedule(static)
  for (size_t index = 0; index < parts.size(); ++index) {
    const Span s = parts[index];
    sums[index] = kinds[s.tensor] ? squares(AS(bf16, tensors[s.tensor]) + s.start, s.size)
                                  : squares(AS(float, tensors[s.tensor]) + s.start, s.size);
  }
  double total = 0.0;
  for (double part : sums) total += part;
  return total;
}

EXPORT void sennit_transpose16(const void* in, void* out, int64_t rows, int64_t cols, int threads) {
  transpose16(CAS(uint16_t, in), AS(uint16_t, out), rows, cols, threads);
}

EXPORT void sennit_column_sums(int kind, const void* x, void* out, int64_t rows, int64_t cols, int threads) {
  auto call = [&]<class T>() { column_sums<T>(CAS(T, x), AS(T, out), rows, cols, threads); };
  kind ? call.operator()<bf16>() : call.operator()<float>();
}
