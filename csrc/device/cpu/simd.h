// Arithmetic on blocks of N machine vectors. The vector extensions of GCC and clang serve every
// instruction set from one source. A formula that is a template over its number type takes a Block
// as it takes a number. Operations are behind #if here if the extensions cannot express them, or if
// compilers make long code of them. Kernels that are compiled once per instruction set include this
// file.
//
// Each vector of a block has a chain of dependent instructions. The source interleaves the chains
// of a block. With one vector at a time the processor would have to interleave them, and its window
// is too short for that.

#pragma once

#include <cstdint>
#include <cstring>

#include "device/cpu/intrinsics.h"
#include "math/exp_series.h"
#include "tensors/convert.h"

namespace klfast::cpu {
namespace {

#if defined(__AVX512F__)
constexpr int kVectorBytes = 64;
#define KLFAST_X86(name) _mm512_##name
#elif defined(__AVX2__)
constexpr int kVectorBytes = 32;
#define KLFAST_X86(name) _mm256_##name
#else
constexpr int kVectorBytes = 16;
#if defined(__SSE2__)
#define KLFAST_X86(name) _mm_##name
#endif
#endif

template <typename T, int bytes = kVectorBytes>
struct VectorOf {
  typedef T type __attribute__((vector_size(bytes)));
};
template <typename T>
using Vector = typename VectorOf<T>::type;

template <typename T>
using SignedOf = std::conditional_t<sizeof(T) == 8, int64_t, int32_t>;

template <typename T>
using UnsignedOf = std::conditional_t<sizeof(T) == 8, uint64_t, uint32_t>;

template <typename To>
KLFAST_HOST_DEVICE To load_raw(const void* from) {
  To to;
  std::memcpy(&to, from, sizeof(to));
  return to;
}

// The least and the greatest of a and b. Both are b if a or b is NaN. On x86 each is one
// instruction. GCC makes two of `a < b ? a : b` over vectors.
template <typename T>
KLFAST_HOST_DEVICE Vector<T> least(Vector<T> a, Vector<T> b) {
#ifdef KLFAST_X86
  if constexpr (std::is_same_v<T, float>) return KLFAST_X86(min_ps)(a, b);
  if constexpr (std::is_same_v<T, double>) return KLFAST_X86(min_pd)(a, b);
#endif
  return a < b ? a : b;
}
template <typename T>
KLFAST_HOST_DEVICE Vector<T> greatest(Vector<T> a, Vector<T> b) {
#ifdef KLFAST_X86
  if constexpr (std::is_same_v<T, float>) return KLFAST_X86(max_ps)(a, b);
  if constexpr (std::is_same_v<T, double>) return KLFAST_X86(max_pd)(a, b);
#endif
#ifdef __AVX2__
  using Longs = Vector<long long>;
  if constexpr (std::is_same_v<T, uint32_t>) {
    return (Vector<T>)(Longs)KLFAST_X86(max_epu32)((Longs)a, (Longs)b);
  }
#endif
  return a > b ? a : b;
}

#define KLFAST_EACH for (int i = 0; i < N; ++i)

template <typename T, int N>
struct Block;

// One boolean per element, in an integer T of the element's size. All bits of T are set, or none.
template <typename T, int N>
struct Mask {
  Vector<T> v[N];

  friend KLFAST_HOST_DEVICE Mask operator&(Mask a, const Mask& b) {
    KLFAST_EACH a.v[i] &= b.v[i];
    return a;
  }
  friend KLFAST_HOST_DEVICE Mask operator|(Mask a, const Mask& b) {
    KLFAST_EACH a.v[i] |= b.v[i];
    return a;
  }
  // The elements of a where the mask is true, and of b elsewhere.
  template <typename U>
  KLFAST_HOST_DEVICE Block<U, N> select(Block<U, N> a, const Block<U, N>& b) const {
    KLFAST_EACH a.v[i] = v[i] ? a.v[i] : b.v[i];
    return a;
  }
  KLFAST_HOST_DEVICE bool any() const {
    Vector<T> all = v[0];
    for (int i = 1; i < N; ++i) all |= v[i];
    const auto longs = (Vector<long long>)all;
#if defined(__AVX512F__)
    return _mm512_test_epi64_mask(longs, longs) != 0;
#elif defined(__AVX2__)
    return _mm256_testz_si256(longs, longs) == 0;
#else
    return (longs[0] | longs[1]) != 0;
#endif
  }
};

template <typename T, int N>
struct Block {
  using Element = T;
  static constexpr int kVectors = N;
  static constexpr int kWidth = kVectorBytes / sizeof(T);  // elements of a vector
  static constexpr int kSize = N * kWidth;
  using Truth = Mask<SignedOf<T>, N>;

  Vector<T> v[N];

  Block() = default;
  // GCC's own copy of a block goes through memory, one machine word at a time.
  KLFAST_HOST_DEVICE Block(const Block& x) { KLFAST_EACH v[i] = x.v[i]; }
  KLFAST_HOST_DEVICE Block& operator=(const Block& x) {
    KLFAST_EACH v[i] = x.v[i];
    return *this;
  }
  // The scalar less a vector of zeros is a vector. Adding zeros would lose the sign of -0.
  KLFAST_HOST_DEVICE Block(T x) { KLFAST_EACH v[i] = x - Vector<T>{}; }
  // Converts each element as static_cast does.
  template <typename U>
  explicit KLFAST_HOST_DEVICE Block(const Block<U, N>& x) {
    KLFAST_EACH v[i] = __builtin_convertvector(x.v[i], Vector<T>);
  }
  // True becomes -1, and false 0.
  KLFAST_HOST_DEVICE Block(const Mask<T, N>& x) { KLFAST_EACH v[i] = x.v[i]; }

  // The same bits, as elements of another type.
  template <typename To>
  KLFAST_HOST_DEVICE To cast() const {
    To to;
    KLFAST_EACH to.v[i] = (Vector<typename To::Element>)v[i];
    return to;
  }
  KLFAST_HOST_DEVICE Block<T, 1> vector(int i) const {
    Block<T, 1> one;
    one.v[0] = v[i];
    return one;
  }

#define KLFAST_BINARY(op)                                                \
  friend KLFAST_HOST_DEVICE Block operator op(Block a, const Block& b) { \
    KLFAST_EACH a.v[i] = a.v[i] op b.v[i];                               \
    return a;                                                            \
  }                                                                      \
  KLFAST_HOST_DEVICE Block& operator op## = (const Block& b) { return *this = *this op b; }
  KLFAST_BINARY(+)
  KLFAST_BINARY(-)
  KLFAST_BINARY(*)
  KLFAST_BINARY(/)
  KLFAST_BINARY(&)
#undef KLFAST_BINARY

#define KLFAST_COMPARISON(op)                                                   \
  friend KLFAST_HOST_DEVICE Truth operator op(const Block& a, const Block& b) { \
    Truth truth;                                                                \
    KLFAST_EACH truth.v[i] = a.v[i] op b.v[i];                                  \
    return truth;                                                               \
  }
  KLFAST_COMPARISON(<)
  KLFAST_COMPARISON(<=)
  KLFAST_COMPARISON(>)
  KLFAST_COMPARISON(>=)
  KLFAST_COMPARISON(==)
  KLFAST_COMPARISON(!=)
#undef KLFAST_COMPARISON

  friend KLFAST_HOST_DEVICE Block operator-(Block x) {
    KLFAST_EACH x.v[i] = -x.v[i];
    return x;
  }
  friend KLFAST_HOST_DEVICE Block operator<<(Block x, int bits) {
    KLFAST_EACH x.v[i] = x.v[i] << bits;
    return x;
  }
  friend KLFAST_HOST_DEVICE Block operator>>(Block x, int bits) {
    KLFAST_EACH x.v[i] = x.v[i] >> bits;
    return x;
  }

  // Limits elements to at most hi, and to at least lo. NaN stays NaN. A bound of NaN has no effect.
  KLFAST_HOST_DEVICE Block at_most(const Block& hi) const {
    Block x;
    KLFAST_EACH x.v[i] = least<T>(hi.v[i], v[i]);
    return x;
  }
  KLFAST_HOST_DEVICE Block at_least(const Block& lo) const {
    Block x;
    KLFAST_EACH x.v[i] = greatest<T>(lo.v[i], v[i]);
    return x;
  }
#if defined(__AVX512F__)
  // x - floor(x) of floats. It is 0 if x is infinite.
  KLFAST_HOST_DEVICE Block fraction() const {
    Block x;
    KLFAST_EACH x.v[i] = _mm512_reduce_ps(v[i], _MM_FROUND_TO_NEG_INF);
    return x;
  }
  // this * 2^floor(x) of floats. It is 0 where x < -126, and infinite where x is too large.
  KLFAST_HOST_DEVICE Block times_power_of_two(const Block& x) const {
    Block product;
    for (int i = 0; i < N; ++i) {
      const auto is_normal = _mm512_cmp_ps_mask(x.v[i], _mm512_set1_ps(-126), _CMP_NLT_UQ);
      product.v[i] = _mm512_maskz_scalef_ps(is_normal, v[i], x.v[i]);
    }
    return product;
  }
#endif
  // this * b + c of floats, computed in double. It is for machines without a fused instruction.
  KLFAST_HOST_DEVICE Block fma_in_double(double b, double c) const {
    Block result;
    for (int i = 0; i < N; ++i) {
#if defined(__SSE2__) && !defined(__FMA__)
      const __m128d b2 = _mm_set1_pd(b), c2 = _mm_set1_pd(c);
      const __m128 x = v[i];
      const __m128d low = _mm_cvtps_pd(x) * b2 + c2;
      const __m128d high = _mm_cvtps_pd(_mm_movehl_ps(x, x)) * b2 + c2;
      result.v[i] = _mm_movelh_ps(_mm_cvtpd_ps(low), _mm_cvtpd_ps(high));
#else
      for (int j = 0; j < kWidth; ++j) result.v[i][j] = static_cast<T>(v[i][j] * b + c);
#endif
    }
    return result;
  }
};

// True if an element is greater than `limit`, or is a NaN of either sign. No number in the block
// may be negative, so that floats have the order of their bits.
template <typename T, int N>
KLFAST_HOST_DEVICE bool any_beyond(const Block<T, N>& x, T limit) {
#ifdef __AVX2__
  using Bits = UnsignedOf<T>;
  Block<Bits, 1> most;
  most.v[0] = (Vector<Bits>)x.v[0];
  for (int i = 1; i < N; ++i) most.v[0] = greatest<Bits>((Vector<Bits>)x.v[i], most.v[0]);
  return (most > Block<Bits, 1>(math::bit_cast<Bits>(limit))).any();
#else
  auto within = x.v[0] <= limit;
  for (int i = 1; i < N; ++i) within &= x.v[i] <= limit;
  return Mask<SignedOf<T>, 1>{~within}.any();
#endif
}

// Loads a block in the arithmetic's type. For bf16, each 32 bits of memory hold an even and an odd
// element. Even vectors of a block take the even elements, and odd vectors take the odd elements.
// No element then moves to another lane.
template <typename B>
KLFAST_HOST_DEVICE B load(const typename B::Element* from) {
  B to;
  for (int i = 0; i < B::kVectors; ++i) {
    to.v[i] = load_raw<Vector<typename B::Element>>(from + i * B::kWidth);
  }
  return to;
}
template <typename B>
KLFAST_HOST_DEVICE B load(const BFloat16* from) {
  static_assert(B::kVectors % 2 == 0);
  B to;
  for (int i = 0; i < B::kVectors; i += 2) {
    const auto pairs = load_raw<Vector<uint32_t>>(from + i * B::kWidth);
    to.v[i] = (Vector<float>)(pairs << 16);
    to.v[i + 1] = (Vector<float>)(pairs & 0xffff0000u);
  }
  return to;
}

// Stores a block. A bf16 is rounded to nearest, with ties to even, and NaN stays NaN.
template <typename T, int N>
KLFAST_HOST_DEVICE void store(const Block<T, N>& x, T* to) {
  KLFAST_EACH {
    const Vector<T> vector = x.v[i];  // GCC copies a block's own memory in smaller pieces
    std::memcpy(to + i * Block<T, N>::kWidth, &vector, kVectorBytes);
  }
}
KLFAST_HOST_DEVICE Vector<uint32_t> rounded(Vector<float> x) {
  const auto bits = (Vector<uint32_t>)x;
  return x != x ? Vector<uint32_t>{} + 0x7fc00000u : bits + 0x7fffu + ((bits >> 16) & 1u);
}
template <int N>
KLFAST_HOST_DEVICE void store(const Block<float, N>& x, BFloat16* to) {
  for (int i = 0; i < N; i += 2) {
    const Vector<uint32_t> pairs = (rounded(x.v[i]) >> 16) | (rounded(x.v[i + 1]) & 0xffff0000u);
    std::memcpy(to + i * Block<float, N>::kWidth, &pairs, kVectorBytes);
  }
}

// The same with each element in its place. It takes an instruction or two more per vector.
template <typename B>
KLFAST_HOST_DEVICE B load_in_order(const typename B::Element* from) {
  return load<B>(from);
}
template <typename B>
KLFAST_HOST_DEVICE B load_in_order(const BFloat16* from) {
  B to;
  for (int i = 0; i < B::kVectors; ++i) {
    const BFloat16* const at = from + i * B::kWidth;
#if defined(__AVX512F__)
    const auto words = _mm512_cvtepu16_epi32(load_raw<__m256i>(at));
#elif defined(__AVX2__)
    const auto words = _mm256_cvtepu16_epi32(load_raw<__m128i>(at));
#else
    using Words = typename VectorOf<uint16_t, kVectorBytes / 2>::type;
    const auto words = __builtin_convertvector(load_raw<Words>(at), Vector<uint32_t>);
#endif
    to.v[i] = (Vector<float>)((Vector<uint32_t>)words << 16);
  }
  return to;
}

// Stores one float, or a block with each element in its place.
template <typename To>
KLFAST_HOST_DEVICE void store_in_order(float x, To* to) {
  *to = convert<To>(x);
}
template <int N>
KLFAST_HOST_DEVICE void store_in_order(const Block<float, N>& x, float* to) {
  store(x, to);
}
template <int N>
KLFAST_HOST_DEVICE void store_in_order(const Block<float, N>& x, BFloat16* to) {
  KLFAST_EACH {
    using Words = typename VectorOf<uint16_t, kVectorBytes / 2>::type;
    const auto bits = (Vector<long long>)((Vector<int32_t>)rounded(x.v[i]) >> 16);
#if defined(__AVX512F__)
    const auto words = (Words)_mm512_cvtepi32_epi16(bits);
#elif defined(__AVX2__)
    const auto twice = _mm256_permute4x64_epi64(_mm256_packs_epi32(bits, bits), 8);
    const auto words = (Words)_mm256_castsi256_si128(twice);
#elif defined(__SSE2__)
    const auto words = (Words)_mm_cvtsi128_si64(_mm_packs_epi32(bits, bits));
#else
    const auto words = __builtin_convertvector((Vector<uint32_t>)bits, Words);
#endif
    std::memcpy(to + i * Block<float, N>::kWidth, &words, sizeof(words));
  }
}

// The floats of a block that a mask keeps. GCC 12 widens bytes one at a time without the
// instructions below.
template <int N>
struct Kept {
  using B = Block<float, N>;
#if defined(__AVX512F__)
  __mmask16 v[N];
#else
  Vector<int32_t> v[N];
#endif

  explicit KLFAST_HOST_DEVICE Kept(const Bool* mask) {
    for (int i = 0; i < N; ++i) {
      const Bool* const at = mask + i * B::kWidth;
#if defined(__AVX512F__)
      const auto bytes = load_raw<__m128i>(at);
      v[i] = _mm_test_epi8_mask(bytes, bytes);
#elif defined(__AVX2__)
      const auto bytes = _mm_loadl_epi64((const __m128i*)at);
      v[i] = (Vector<int32_t>)_mm256_cvtepi8_epi32(bytes) != 0;
#else
      using Bytes = typename VectorOf<int8_t, kVectorBytes / 4>::type;
      v[i] = __builtin_convertvector(load_raw<Bytes>(at), Vector<int32_t>) != 0;
#endif
    }
  }
  // x where kept, and 0 elsewhere.
  KLFAST_HOST_DEVICE B of(B x) const {
#if defined(__AVX512F__)
    KLFAST_EACH x.v[i] = _mm512_maskz_mov_ps(v[i], x.v[i]);
#else
    KLFAST_EACH x.v[i] = (Vector<float>)((Vector<int32_t>)x.v[i] & v[i]);
#endif
    return x;
  }
};

// Prefetches `bytes` bytes of memory.
template <int bytes>
KLFAST_HOST_DEVICE void fetch(const void* from) {
  for (int i = 0; i < bytes; i += 64) __builtin_prefetch(static_cast<const char*>(from) + i);
}

// A sum by lane. A row's element t is added to lane t % kSize, or to another lane that t alone
// decides. A tile is summed in the arithmetic's type. The sums of tiles are added in double.
template <typename B>
struct LaneSum {
  alignas(64) double lanes[B::kSize];
  bool is_empty = true;

  // Adds a tile's sums to the lanes, and sets the tile's sums to 0.
  KLFAST_HOST_DEVICE void flush(B& tile) {
    alignas(64) typename B::Element of_tile[B::kSize];
    store(tile, of_tile);
    for (int i = 0; i < B::kSize; ++i) {
      const double sum = static_cast<double>(of_tile[i]);
      lanes[i] = is_empty ? sum : lanes[i] + sum;
    }
    is_empty = false;
    tile = B(0);
  }
  double total() {
    if (is_empty) return 0;
    for (int half = B::kSize / 2; half > 0; half /= 2) {
      for (int i = 0; i < half; ++i) lanes[i] += lanes[i + half];
    }
    return lanes[0];
  }
};

// The greatest element.
template <typename T, int N>
T greatest_of(const Block<T, N>& x) {
  constexpr int kWidth = Block<T, N>::kWidth;
  Block<T, 1> most = x.vector(0);
  for (int i = 1; i < N; ++i) most = most.at_least(x.vector(i));
  T lanes[kWidth];
  store(most, lanes);
  for (int half = kWidth / 2; half > 0; half /= 2) {
    for (int i = 0; i < half; ++i)
      lanes[i] = lanes[i + half] > lanes[i] ? lanes[i + half] : lanes[i];
  }
  return lanes[0];
}

#undef KLFAST_EACH
#undef KLFAST_X86
}  // namespace
}  // namespace klfast::cpu

namespace klfast::math {

template <typename T, int N>
struct Constants<cpu::Block<T, N>> : Constants<T> {
  using Bits = cpu::Block<cpu::SignedOf<T>, N>;
  using Unsigned = cpu::Block<cpu::UnsignedOf<T>, N>;
};

template <typename T, int N>
struct ScalarOf<cpu::Block<T, N>> {
  using type = T;
};

#if defined(__AVX512F__)
template <int N>
inline constexpr bool splits_exponents<cpu::Block<float, N>> = true;
#endif

}  // namespace klfast::math
