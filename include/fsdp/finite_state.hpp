// SPDX-License-Identifier: Apache-2.0
// Finds infinities and NaN in a run's state: training cannot continue from such a state.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>
#include <string>
#include <vector>

#include "fsdp/communicator.hpp"
#include "fsdp/detail/checkpoint/manifest.hpp"
#include "fsdp/detail/checkpoint/training_state.hpp"
#include "fsdp/error.hpp"
#include "fsdp/tensor.hpp"

namespace fsdp::inline FSDP_VERSION_NAMESPACE::checkpoint {

namespace detail {

/// Whether a value's exponent is all ones in one of the elements: an infinity or NaN. It looks at bits, which no
/// compiler's option lets it leave out.
template <class Word>
bool has_exponent(std::span<std::byte const> elements, Word exponent) {
  bool found = false;
  for (std::size_t at = 0; at < elements.size(); at += sizeof(Word)) {
    Word word;
    std::memcpy(&word, elements.data() + at, sizeof word);
    found |= (word & exponent) == exponent;
  }
  return found;
}

}  // namespace detail

/// Whether all of these elements are finite. Whole numbers are.
inline bool are_finite(std::span<std::byte const> elements, DType type) {
  switch (type) {
    case DType::f32: return !detail::has_exponent<std::uint32_t>(elements, 0x7f800000u);
    case DType::bf16: return !detail::has_exponent<std::uint16_t>(elements, 0x7f80u);
    case DType::f16: return !detail::has_exponent<std::uint16_t>(elements, 0x7c00u);
    case DType::f64: return !detail::has_exponent<std::uint64_t>(elements, 0x7ff0000000000000u);
    case DType::i64: return true;
  }
  return true;
}

/// The name of a slice in messages: "exp_avg of 'h.0.attn.weight'".
inline std::string described(Slice const& slice) { return formatted("{} of '{}'", slice.array, slice.tensor); }

/// The first array of a tensor with an infinity or NaN, among what save() would write: parameters of tensors that are
/// not frozen, and the optimizer's state. Each rank looks at its own slices.
/// @return "exp_avg of 'h.0.attn.weight'", say; empty if all is finite. Equal on all ranks
/// @throws UsageError inside a use, an evaluation, or an optimizer step that has ended half-way
/// @note Collective: yes; blocks. One block of a MiB of host memory.
template <class E, Checkpointable O>
std::string find_not_finite(E& engine, O& optimizer) {
  auto const entry = engine.shards().enter("find_not_finite");
  engine.shards().passes().expect_at_rest("a run's state is to be checked for infinities and NaN");
  engine.seal();
  engine.synchronize();
  RunState<E> const state(engine, optimizer);
  auto const own = own_slices(engine, state, true);
  std::string found;
  std::vector<std::byte> staging(block_bytes);
  for (std::size_t i = 0; i < own.slices.size() && found.empty(); ++i) {
    auto const& slice = own.slices[i];
    auto const& place = own.places[i];
    auto const* const from = state.at(place.array, place.unit, place.part);
    for (std::int64_t begin = 0; begin < slice.bytes() && found.empty(); begin += block_bytes) {
      auto const bytes = static_cast<std::size_t>(std::min(block_bytes, slice.bytes() - begin));
      engine.device().copy_async(engine.compute(), staging.data(), from + begin, bytes);
      engine.device().synchronize(engine.compute());
      if (!are_finite(std::span<std::byte const>(staging).first(bytes), slice.dtype)) found = described(slice);
    }
  }
  return comm::ask_first_rank(engine.world(), found, "state that is not finite", comm::first_text);
}

}  // namespace fsdp::inline FSDP_VERSION_NAMESPACE::checkpoint
