// SPDX-License-Identifier: Apache-2.0
// Initial values of a tensor: named by `describe`, and filled in by `kernels::initialize`.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

#include "fsdp/error.hpp"

namespace fsdp::inline FSDP_VERSION_NAMESPACE {

/// Distribution of a tensor's first values.
struct Init {
  enum class Kind : unsigned char { zeros, constant, normal, uniform, given };

  Kind kind = Kind::zeros;
  float first = 0.0f;      ///< constant: the value; normal: the mean; uniform: the lower bound
  float second = 0.0f;     ///< normal: the standard deviation; uniform: the upper bound, not reached
  std::uint64_t hash = 0;  ///< given: of the values, which ranks compare

  friend constexpr bool operator==(Init const&, Init const&) = default;
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

inline constexpr Init zeros{};
inline constexpr Init ones{Init::Kind::constant, 1.0f, 0.0f};

constexpr Init constant(float value) { return {Init::Kind::constant, value, 0.0f}; }
/// Values of the caller: see Shards::set_initial_values. @param hash  of the values; sealing refuses ranks that differ
constexpr Init given(std::uint64_t hash) { return {Init::Kind::given, 0.0f, 0.0f, hash}; }
constexpr Init normal(float deviation) { return {Init::Kind::normal, 0.0f, deviation}; }
constexpr Init normal(float mean, float deviation) { return {Init::Kind::normal, mean, deviation}; }
constexpr Init uniform(float low, float high) { return {Init::Kind::uniform, low, high}; }

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
