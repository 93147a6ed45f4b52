// SPDX-License-Identifier: Apache-2.0
// Element types, tensors (non-owning pointers with extents), initial values, and precision policies.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <type_traits>

#include "fsdp/error.hpp"
#include "fsdp/version.hpp"

namespace fsdp::inline FSDP_VERSION_NAMESPACE {

/// Distribution of a tensor's first values.
struct Init {
  /// Kinds of distributions; `given`: values of the caller, by Shards::set_initial_values.
  enum class Kind : unsigned char { zeros, constant, normal, uniform, given };

  Kind kind = Kind::zeros;  ///< decides the meaning of `first`, `second` and `hash`
  float first = 0.0f;       ///< constant: the value; normal: the mean; uniform: the lower bound
  float second = 0.0f;      ///< normal: the standard deviation; uniform: the upper bound, not reached
  std::uint64_t hash = 0;   ///< given: of the values, which ranks compare

  friend constexpr bool operator==(Init const&, Init const&) = default;  ///< whether all members are equal
};

/// The text of an Init, for messages and the comparison of ranks: "normal(0, 0.02)".
inline std::string to_text(Init const& init) {
  switch (init.kind) {
    case Init::Kind::zeros: return "zeros";
    case Init::Kind::constant: return formatted("constant({})", init.first);
    case Init::Kind::normal: return formatted("normal({}, {})", init.first, init.second);
    case Init::Kind::uniform: return formatted("uniform({}, {})", init.first, init.second);
    case Init::Kind::given: return formatted("given values of hash {:016x}", init.hash);
  }
  return "?";
}

/// Factories of Init.
namespace init {

inline constexpr Init zeros{};                                 ///< every element is 0
inline constexpr Init ones{Init::Kind::constant, 1.0f, 0.0f};  ///< every element is 1

constexpr Init constant(float value) { return {Init::Kind::constant, value, 0.0f}; }  ///< every element is `value`
/// Values of the caller: see Shards::set_initial_values. @param hash  of the values; sealing refuses ranks that differ
constexpr Init given(std::uint64_t hash) { return {Init::Kind::given, 0.0f, 0.0f, hash}; }
constexpr Init normal(float deviation) { return {Init::Kind::normal, 0.0f, deviation}; }  ///< normal, with mean 0
/// Normal distribution of this mean and standard deviation.
constexpr Init normal(float mean, float deviation) { return {Init::Kind::normal, mean, deviation}; }
constexpr Init uniform(float low, float high) { return {Init::Kind::uniform, low, high}; }  ///< uniform in [low, high)

}  // namespace init

/// Hash of a tensor's name: FNV-1a over its bytes (Fowler, Noll, Vo), then two xor-multiply rounds that spread every
/// bit, so that similar names give unrelated sequences. Equal on every platform.
constexpr std::uint64_t hash_name(std::string_view name) {
  std::uint64_t hash = 0xcbf29ce484222325ull;
  for (char const letter : name) {
    hash ^= static_cast<unsigned char>(letter);
    hash *= 0x100000001b3ull;
  }
  hash ^= hash >> 32;
  hash *= 0x9e3779b97f4a7c15ull;
  hash ^= hash >> 29;
  hash *= 0xbf58476d1ce4e5b9ull;
  return hash ^ (hash >> 32);
}

}  // namespace fsdp::inline FSDP_VERSION_NAMESPACE

#if defined(__CUDACC__)
#define FSDP_HD __host__ __device__
#else
#define FSDP_HD
#endif

namespace fsdp::inline FSDP_VERSION_NAMESPACE {

namespace detail {
/// std::bit_cast, callable in device code without relaxed-constexpr flags.
template <class To, class From>
FSDP_HD constexpr To bit_cast(From const& from) {
  static_assert(sizeof(To) == sizeof(From));
  return __builtin_bit_cast(To, from);
}
}  // namespace detail

/// bfloat16: the upper half of an fp32. Rounds to nearest even; NaN stays NaN.
struct alignas(2) bf16 {
  std::uint16_t bits{};  ///< sign, 8 bits of exponent, 7 of mantissa

  bf16() = default;
  FSDP_HD constexpr explicit bf16(float value) : bits(round(value)) {}  ///< rounds to nearest even; NaN stays NaN
  /// The value in fp32, without rounding.
  FSDP_HD constexpr explicit operator float() const {
    return detail::bit_cast<float>(static_cast<std::uint32_t>(bits) << 16);
  }

 private:
  FSDP_HD static constexpr std::uint16_t round(float value) {
    auto const word = detail::bit_cast<std::uint32_t>(value);
    if ((word & 0x7fffffffu) > 0x7f800000u) return static_cast<std::uint16_t>((word >> 16) | 0x40u);
    return static_cast<std::uint16_t>((word + 0x7fffu + ((word >> 16) & 1u)) >> 16);
  }
};

/// IEEE binary16. Rounds to nearest even; overflow gives infinity; NaN stays NaN.
struct alignas(2) fp16 {
  std::uint16_t bits{};  ///< sign, 5 bits of exponent, 10 of mantissa

  fp16() = default;
  FSDP_HD constexpr explicit fp16(float value) : bits(round(value)) {}  ///< rounds to nearest even; overflow: infinity
  FSDP_HD constexpr explicit operator float() const { return widen(bits); }  ///< the value in fp32, without rounding

 private:
  FSDP_HD static constexpr std::uint16_t round(float value) {
    auto const word = detail::bit_cast<std::uint32_t>(value);
    auto const sign = static_cast<std::uint16_t>((word >> 16) & 0x8000u);
    std::uint32_t const magnitude = word & 0x7fffffffu;
    if (magnitude > 0x7f800000u) return static_cast<std::uint16_t>(sign | 0x7e00u);
    if (magnitude >= 0x477ff000u) return static_cast<std::uint16_t>(sign | 0x7c00u);  // 65520 and above
    if (magnitude < 0x38800000u) {                                                    // below 2^-14: subnormal
      // Adding 0.5 aligns the mantissa so that the fp32 adder itself rounds to nearest even.
      float const shifted = detail::bit_cast<float>(magnitude) + 0.5f;
      return static_cast<std::uint16_t>(sign | (detail::bit_cast<std::uint32_t>(shifted) - 0x3f000000u));
    }
    std::uint32_t const odd = (magnitude >> 13) & 1u;
    return static_cast<std::uint16_t>(sign | ((magnitude - 0x38000000u + 0xfffu + odd) >> 13));
  }
  FSDP_HD static constexpr float widen(std::uint16_t half) {
    std::uint32_t const sign = static_cast<std::uint32_t>(half & 0x8000u) << 16;
    std::uint32_t const magnitude = half & 0x7fffu;
    if (magnitude >= 0x7c00u) return detail::bit_cast<float>(sign | 0x7f800000u | ((magnitude & 0x3ffu) << 13));
    if (magnitude >= 0x400u) return detail::bit_cast<float>(sign | ((magnitude << 13) + 0x38000000u));
    float const subnormal = static_cast<float>(magnitude) * 0x1p-24f;
    return detail::bit_cast<float>(sign | detail::bit_cast<std::uint32_t>(subnormal));
  }
};

/// Runtime name of an element type.
enum class DType : unsigned char { f32, bf16, f16, f64, i64 };

/// The DType of T, const or not; of types that fsdp does not move, a compile error.
template <class T>
inline constexpr DType dtype_of = [] {
  using U = std::remove_cv_t<T>;
  constexpr bool moved = std::is_same_v<U, float> || std::is_same_v<U, bf16> || std::is_same_v<U, fp16> ||
                         std::is_same_v<U, double> || std::is_same_v<U, std::int64_t>;
  static_assert(moved, "fsdp moves float, double, bf16, fp16 and std::int64_t");
  if constexpr (std::is_same_v<U, float>) return DType::f32;
  if constexpr (std::is_same_v<U, bf16>) return DType::bf16;
  if constexpr (std::is_same_v<U, fp16>) return DType::f16;
  if constexpr (std::is_same_v<U, double>) return DType::f64;
  return DType::i64;
}();

/// Bytes of an element.
constexpr std::size_t size_of(DType type) {
  switch (type) {
    case DType::f32: return 4;
    case DType::bf16:
    case DType::f16: return 2;
    case DType::f64:
    case DType::i64: return 8;
  }
  return 0;
}

/// Name of an element type, for messages: "fp32", "bf16", "fp16", "fp64", "int64".
constexpr std::string_view name(DType type) {
  switch (type) {
    case DType::f32: return "fp32";
    case DType::bf16: return "bf16";
    case DType::f16: return "fp16";
    case DType::f64: return "fp64";
    case DType::i64: return "int64";
  }
  return "?";
}

/// A pointer and its extents, row-major. Owns nothing; copy it freely, also into a kernel.
template <class T, std::size_t Rank>
struct Tensor {
  using value_type = T;                      ///< type of an element; const if elements are read only
  static constexpr std::size_t rank = Rank;  ///< number of dimensions
  /// For gradients: the sum has begun, and backward adds to it.
  static constexpr bool fresh = false;
  /// Whether backward writes this gradient. False for frozen tensors of modules that skip their gradients.
  constexpr bool wanted() const { return data != nullptr; }

  T* data = nullptr;                         ///< first element; nullptr: no memory
  std::array<std::int64_t, Rank> extents{};  ///< elements along each dimension

  /// Number of elements: the product of the extents.
  constexpr std::int64_t numel() const {
    std::int64_t product = 1;
    for (auto const extent : extents) product *= extent;
    return product;
  }
  constexpr std::int64_t extent(std::size_t axis) const { return extents[axis]; }  ///< elements along dimension `axis`
  /// A view of constant elements.
  template <class Constant>
  requires(std::is_same_v<Constant, T const> && !std::is_const_v<T>) constexpr operator Tensor<Constant, Rank>() const {
    return {data, extents};
  }
};

/// The extents of a tensor of rank `Rank`: as many integers of any type, no more and no fewer.
template <std::size_t Rank>
struct ExtentList : std::array<std::int64_t, Rank> {
  /// Extents from one integer for each dimension; another number of integers is a compile error.
  template <class... Integers>
  constexpr ExtentList(Integers... extents) : std::array<std::int64_t, Rank>{} {
    static_assert(sizeof...(Integers) == Rank,
                  "fsdp: describe gives a tensor another number of extents than its rank: {rows, columns} for rank 2");
    static_assert(((std::is_convertible_v<Integers, std::int64_t> && !std::is_floating_point_v<Integers>)&&...),
                  "fsdp: a tensor's extents are integers");
    if constexpr (sizeof...(Integers) == Rank) {
      std::size_t axis = 0;
      (((*this)[axis++] = static_cast<std::int64_t>(extents)), ...);
    }
  }
  /// Extents from an array of one integer for each dimension.
  constexpr ExtentList(std::array<std::int64_t, Rank> const& extents) : std::array<std::int64_t, Rank>(extents) {}
};
/// Extents as an argument of a visitor of `describe`: `{rows, columns}` or a std::array, of the rank that the tensor
/// beside it has.
template <std::size_t Rank>
using Extents = std::type_identity_t<ExtentList<Rank>>;

/// Marks the gradients of a module that begins their sums itself (see Module).
template <class T>
struct Gradient;

namespace detail {
/// Stands for T in Params<T> when a module is registered.
struct Declared {};
struct DeclaredFp32 {};

template <class T>
struct InFp32 {
  using type = float;
};
template <class T>
struct InFp32<T const> {
  using type = typename InFp32<T>::type const;
};
template <class T>
struct InFp32<Gradient<T>> {
  using type = Gradient<float>;
};
template <>
struct InFp32<Declared> {
  using type = DeclaredFp32;
};
}  // namespace detail

/// The element type of a tensor that is fp32 in every precision: `fsdp::Tensor<fsdp::in_fp32<T>, 1> norm;` in
/// Params<T>. Its parameters, gradients and masters are float.
template <class T>
using in_fp32 = typename detail::InFp32<T>::type;

/// A gradient of type T. Where it is `fresh` its elements are undefined, and backward stores all of them; else it adds.
template <class T, std::size_t Rank>
struct Tensor<Gradient<T>, Rank> : Tensor<T, Rank> {
  bool fresh = false;  ///< backward stores every element; false: it adds to them
};

/// An element type of a precision policy.
template <class T>
inline constexpr bool is_precision_type =
    std::is_same_v<T, float> || std::is_same_v<T, bf16> || std::is_same_v<T, fp16>;

/// Element types of one engine, each float, bf16 or fp16 (docs/numerics.md has the table).
/// @tparam ParamT   what forward and backward read: the type of the gather buffers
/// @tparam ReduceT  what backward writes: the type of the gradient slots; the collectives sum it, or what it is rounded
///                  to (EngineOptions::reduce_dtype)
/// @tparam MasterT  what the optimizer updates and checkpoints read: the type of the parameter shards
/// Gradient shards are fp32: micro-steps accumulate there.
template <class ParamT, class ReduceT, class MasterT = float>
struct Precision {
  static_assert(is_precision_type<ParamT> && is_precision_type<ReduceT> && is_precision_type<MasterT>,
                "fsdp::Precision takes float, fsdp::bf16 or fsdp::fp16 as parameter, reduction and master type");
  using Param = ParamT;    ///< type of the parameters that forward and backward read
  using Reduce = ReduceT;  ///< type of the gradients that backward writes
  using Master = MasterT;  ///< type of the parameter shards
};

/// A precision policy: an argument of Engine.
template <class P>
concept PrecisionPolicy = is_precision_type<typename P::Param> && is_precision_type<typename P::Reduce> &&
    is_precision_type<typename P::Master>;

/// The element types of one unit.
struct ElementTypes {
  DType parameter = DType::f32;  ///< of the parameters that forward and backward read
  DType gradient = DType::f32;   ///< of the gradients that backward writes
  DType master = DType::f32;     ///< of the parameter shard
  friend constexpr bool operator==(ElementTypes const&, ElementTypes const&) = default;  ///< whether all are equal
};

using Fp32 = Precision<float, float>;      ///< fp32 everywhere
using Bf16 = Precision<bf16, float>;       ///< bf16 compute, fp32 reduction
using Bf16Reduce = Precision<bf16, bf16>;  ///< bf16 compute, bf16 reduction
using Fp16 = Precision<fp16, fp16>;        ///< fp16 compute and reduction: train with a GradScaler

}  // namespace fsdp::inline FSDP_VERSION_NAMESPACE
