// SPDX-License-Identifier: Apache-2.0
// mpi::Communicator over memory that ranks do not share: on all ranks, and on some.
// ranks: 3
// full-ranks: 2 4
// sanitizer-ranks: 3
// timeout: 600
#include <map>
#include <string_view>

#include "fsdp/mpi.hpp"
#include "tests/conformance/communicator_suite.hpp"
#include "tests/mpi_main.hpp"

namespace {

/// Gives ranks with `rank % Period == 0` heap memory, and shared memory to the others.
template <int Period>
struct HeapCommunicator : fsdp::mpi::Communicator {
  using Base = fsdp::mpi::Communicator;
  explicit HeapCommunicator(Base base) : Base(std::move(base)) {}

  HeapCommunicator split(int color, int key, std::string_view what) {
    return HeapCommunicator(Base::split(color, key, what));
  }
  void* allocate(std::size_t bytes) {
    void* const shared = Base::allocate(bytes);  // collective, so always; mapped for as long as peers use theirs
    if (!takes_heap() || bytes == 0) return shared;
    void* const memory = device().allocate(bytes);
    shared_[memory] = shared;
    return memory;
  }
  void deallocate(void* memory, std::size_t bytes) noexcept {
    auto const entry = shared_.find(memory);
    if (entry == shared_.end()) return Base::deallocate(memory, bytes);
    Base::deallocate(entry->second, bytes);
    shared_.erase(entry);
    device().deallocate(memory, bytes);
  }
  bool takes_heap() const { return rank() % Period == 0; }

 private:
  std::map<void*, void*> shared_;
};

template <int Period>
struct Fixture {
  using Communicator = HeapCommunicator<Period>;
  static constexpr bool fixed_tree = true;
  static constexpr bool reports_order = false;
  static constexpr bool reports_peers = false;
  static std::vector<int> sizes() { return {test_environment().size()}; }
  template <class Body>
  static void run(int, Body const& body) {
    for (int const ranks_per_node : {0, 2}) {
      if (ranks_per_node >= test_environment().size()) continue;
      fsdp::mpi::Options options;
      options.ranks_per_node = ranks_per_node;
      Communicator world{fsdp::mpi::Communicator(test_environment(), {}, options)};
      body(world);
    }
  }
};

}  // namespace

FSDP_COMMUNICATOR_SUITE("mpi<host>, heap memory", Fixture<1>);

TEST_CASE("mpi<host>: heap memory on every second rank", "[communicator]") {
  using Suite = fsdp::conformance::CommunicatorSuite<Fixture<2>>;
  Suite::all_gather();
  Suite::reduce_scatter();
  Suite::all_reduce();
  Suite::broadcast();
  Suite::back_to_back();
}
