// SPDX-License-Identifier: Apache-2.0
// A communicator that writes down what goes through it, and whether it knew the memory, and forwards.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "fsdp/concepts.hpp"
#include "fsdp/detail/step/program.hpp"

namespace toy {

/// One rank's record, shared by every communicator split from the first.
struct Tally {
  struct Entry {
    std::string operation, unit, pass;
    std::size_t count;  ///< elements, as the operation counts them
    int ranks;          ///< of its communicator
    std::size_t element_bytes;
  };
  std::vector<Entry> entries;
  std::size_t meetings = 0;                    ///< collectives of 0 elements before updates, which are no entries
  std::size_t allocated = 0, deallocated = 0;  ///< bytes through Communicator::allocate

  /// Memory that a communicator has allocated, or was told of.
  struct Known {
    int communicator;
    std::byte const* begin;
    std::size_t bytes;
  };
  int communicators = 0;
  std::vector<Known> known;
  std::vector<std::string> strange;  ///< collectives that moved memory which their communicator did not know

  bool knows(int communicator, void const* data, std::size_t bytes) const {
    auto const* const begin = static_cast<std::byte const*>(data);
    for (auto const& memory : known)
      if (memory.communicator == communicator && memory.begin <= begin && begin + bytes <= memory.begin + memory.bytes)
        return true;
    return false;
  }

  std::size_t count(std::string const& operation, std::string const& pass = {}) const {
    std::size_t found = 0;
    for (auto const& entry : entries)
      found += entry.operation == operation && entry.unit != "gradient norm" && (pass.empty() || entry.pass == pass);
    return found;
  }
  /// "operation unit" of every entry, in order.
  std::vector<std::string> order(std::string const& pass) const {
    std::vector<std::string> list;
    for (auto const& entry : entries)
      if (entry.pass == pass) list.push_back(entry.operation + " " + entry.unit);
    return list;
  }
};

/// Collectives of the communicator from entry `first` on, counted as a program counts them.
/// @param pass  "forward" or "backward"; empty: both
inline fsdp::Counts counts_of(Tally const& tally, std::size_t first = 0, std::string const& pass = {}) {
  fsdp::Counts counts;
  for (; first < tally.entries.size(); ++first) {
    auto const& entry = tally.entries[first];
    if (!pass.empty() && entry.pass != pass) continue;
    auto const elements = static_cast<std::int64_t>(entry.count);
    auto const size = entry.element_bytes;
    if (entry.operation == "all_gather") counts.all_gather.add(elements * entry.ranks, size);
    if (entry.operation == "reduce_scatter") counts.reduce_scatter.add(elements, size);
    if (entry.operation == "all_reduce") counts.all_reduce.add(elements, size);
  }
  return counts;
}

template <class C>
class Counting {
 public:
  using Device = typename C::Device;
  using Stream = typename Device::Stream;

  Counting(C inner, std::shared_ptr<Tally> tally)
      : inner_(std::move(inner)), tally_(std::move(tally)), number_(tally_->communicators++) {}

  int rank() const { return inner_.rank(); }
  int size() const { return inner_.size(); }
  Device const& device() const { return inner_.device(); }
  Counting split(int color, int key, std::string_view name) { return {inner_.split(color, key, name), tally_}; }
  void* allocate(std::size_t bytes) {
    tally_->allocated += bytes;
    auto* const memory = inner_.allocate(bytes);
    if (memory != nullptr) register_memory(memory, bytes);
    return memory;
  }
  void register_memory(void* memory, std::size_t bytes) {
    tally_->known.push_back({number_, static_cast<std::byte const*>(memory), bytes});
  }
  void deallocate(void* memory, std::size_t bytes) noexcept {
    tally_->deallocated += bytes;
    std::erase_if(tally_->known, [&](auto const& known) { return known.begin == memory; });
    inner_.deallocate(memory, bytes);
  }
  template <class T>
  fsdp::Ticket all_gather(Stream& stream, T const* send, T* recv, std::size_t count, fsdp::Label label) {
    note("all_gather", label, count, sizeof(T), send, count * sizeof(T), recv, count * group() * sizeof(T));
    return inner_.all_gather(stream, send, recv, count, label);
  }
  template <class T>
  fsdp::Ticket reduce_scatter(Stream& stream, T const* send, T* recv, std::size_t count, fsdp::Label label) {
    note("reduce_scatter", label, count, sizeof(T), send, count * group() * sizeof(T), recv, count * sizeof(T));
    return inner_.reduce_scatter(stream, send, recv, count, label);
  }
  template <class T>
  fsdp::Ticket all_reduce(Stream& stream, T const* send, T* recv, std::size_t count, fsdp::Label label) {
    note("all_reduce", label, count, sizeof(T), send, count * sizeof(T), recv, count * sizeof(T));
    return inner_.all_reduce(stream, send, recv, count, label);
  }
  fsdp::Ticket all_reduce_mean(Stream& stream, float const* send, float* recv, std::size_t count,
                               fsdp::Label label) requires fsdp::TakesMeans<C> {
    note("all_reduce", label, count, sizeof(float), send, count * sizeof(float), recv, count * sizeof(float));
    return inner_.all_reduce_mean(stream, send, recv, count, label);
  }
  template <class T>
  fsdp::Ticket broadcast(Stream& stream, T* buffer, std::size_t count, int root, fsdp::Label label) {
    note("broadcast", label, count, sizeof(T), buffer, count * sizeof(T), buffer, count * sizeof(T));
    return inner_.broadcast(stream, buffer, count, root, label);
  }
  void wait_for_peers(Stream& stream, fsdp::Ticket ticket, fsdp::WaitSite site) {
    inner_.wait_for_peers(stream, ticket, site);
  }
  std::vector<std::string> exchange(std::string const& mine, std::string_view what) {
    return inner_.exchange(mine, what);
  }

 private:
  std::size_t group() const { return static_cast<std::size_t>(size()); }
  void note(char const* operation, fsdp::Label label, std::size_t count, std::size_t element_bytes, void const* send,
            std::size_t send_bytes, void const* recv, std::size_t recv_bytes) {
    if (count == 0 && label.unit == "all units") {  // see [Note: All ranks step, or none]
      ++tally_->meetings;
      return;
    }
    if (size() > 1 && !(tally_->knows(number_, send, send_bytes) && tally_->knows(number_, recv, recv_bytes)))
      tally_->strange.push_back(std::string(operation) + " of " + std::string(label.unit));
    tally_->entries.push_back(
        {operation, std::string(label.unit), std::string(label.pass), count, size(), element_bytes});
  }
  C inner_;
  std::shared_ptr<Tally> tally_;
  int number_;  // among the rank's communicators
};

}  // namespace toy
