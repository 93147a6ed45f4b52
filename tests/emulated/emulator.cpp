// SPDX-License-Identifier: Apache-2.0
// The emulated thread block: what it promises to the tests that run kernels in it.
// skip-tsan
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <stdexcept>
#include <string>
#include <vector>

#include "tests/catch.hpp"
#include "tests/support/emulated_block.hpp"
#include "tests/support/emulated_tile.hpp"
#include "tests/unit/kernels_support.hpp"

using emulated::Options;
using emulated::Schedule;
using fsdp::SyncSite;
using Tile = transformer::tile::Tile<emulated::Lanes>;

namespace {

constexpr SyncSite first{"first", 1}, second{"second", 2}, unused{"unused", 3};

/// Text of the Failure that a launch ends with; "" where it does not.
template <class Kernel, class... Args>
std::string failure(Schedule schedule, Args... args) {
  try {
    emulated::launch<Kernel>(Options{.schedule = schedule}, 1, args...);
  } catch (emulated::Failure const& failed) {
    return failed.what();
  }
  return "";
}
bool contains(std::string const& text, std::string const& part) { return text.find(part) != std::string::npos; }

/// Every thread writes its number, and reads that of the thread `distance` further on, behind a barrier.
struct Rotate {
  static constexpr int threads = 128;
  static constexpr std::size_t shared_bytes = 128 * sizeof(int);
  template <class Block>
  void operator()(Block const& block, std::int64_t index, int distance, int* out) const {
    int* const shared = reinterpret_cast<int*>(block.shared());
    shared[block.thread()] = block.thread() + static_cast<int>(index) * 1000;
    block.sync(first);
    out[index * 128 + block.thread()] = shared[(block.thread() + distance) % 128];
  }
};

}  // namespace

TEST_CASE("a barrier lets threads read what others wrote, and dropping it does not", "[emulated]") {
  for (auto const schedule : emulated::schedules) {
    CAPTURE(emulated::name(schedule));
    std::vector<int> out(3 * 128), right;
    for (int i = 0; i < 3 * 128; ++i) right.push_back(i / 128 * 1000 + (i + 37) % 128);
    emulated::launch<Rotate>(Options{.schedule = schedule}, 3, 37, out.data());
    CHECK(out == right);
    std::int64_t dropped = 0;
    emulated::launch<Rotate>(Options{.schedule = schedule, .drop = first, .dropped = &dropped}, 3, 37, out.data());
    CHECK(out != right);
    CHECK(dropped == 3 * 128);
    emulated::launch<Rotate>(Options{.schedule = schedule, .drop = unused}, 3, 37, out.data());
    CHECK(out == right);
  }
}

namespace {

/// Rounds of: all warps write their slot, barrier, all read the sum of the slots, barrier. A shuffle stands between a
/// round's read and the next round's write, as products or sums do in a kernel.
struct Rounds {
  static constexpr int threads = 128;
  static constexpr std::size_t shared_bytes = 4 * sizeof(int);
  template <class Block>
  void operator()(Block const& block, std::int64_t, int* out) const {
    int* const slots = reinterpret_cast<int*>(block.shared());
    int sum = 0;
    for (int round = 0; round < 4; ++round) {
      if (block.thread() % 32 == 0) slots[block.thread() / 32] = 1 << round;
      block.sync(first);
      int seen = slots[block.thread() % 4];
      for (int mask = 1; mask < 4; mask *= 2) seen += block.shuffle_xor(seen, mask);
      sum += seen;
      block.sync(second);
    }
    out[block.thread()] = sum;
  }
};

}  // namespace

TEST_CASE("a missing trailing barrier is caught by the greedy schedules alone", "[emulated]") {
  std::vector<int> const right(128, 60);
  for (auto const schedule : emulated::schedules) {
    CAPTURE(emulated::name(schedule));
    std::vector<int> out(128);
    emulated::launch<Rounds>(Options{.schedule = schedule}, 1, out.data());
    CHECK(out == right);
    emulated::launch<Rounds>(Options{.schedule = schedule, .drop = second}, 1, out.data());
    bool const greedy = schedule == Schedule::greedy_forward || schedule == Schedule::greedy_reverse;
    if (schedule != Schedule::shuffled) CHECK((out != right) == greedy);
  }
}

namespace {

template <class Block>
void wait_for_caller(Block const& block, SyncSite site) {
  block.sync_warp(site);
}

/// Barriers at places of their own, a function that has its caller's, and two reductions.
struct Places {
  static constexpr int line = __LINE__;
  template <class Block>
  void operator()(Block const& block, std::int64_t, float const* x) const {
    for (int i = 0; i < 3; ++i) block.sync();
    block.sync_warp();
    wait_for_caller(block, SyncSite::here());
    wait_for_caller(block, SyncSite::here());
    for (int i = 0; i < 2; ++i) {
      static_cast<void>(block.sum(
          1, [](float v) { return v; }, x));
    }
    static_cast<void>(block.max(
        1, [](float v) { return v; }, x));
  }
};

}  // namespace

TEST_CASE("a barrier has the place of its call, or of its caller's", "[emulated]") {
  emulated::Sites met;
  float const x = 1.0f;
  emulated::launch<Places>(Options{.met = &met}, 2, &x);
  std::vector<int> own, of_library;
  for (auto const& site : met) {
    bool const here = contains(site.file, "emulated/emulator.cpp");
    if (!here) CHECK(contains(site.file, "fsdp/detail/cuda/block.hpp"));
    (here ? own : of_library).push_back(site.line);
  }
  int const line = Places::line;
  CHECK(own == std::vector<int>{line + 3, line + 4, line + 5, line + 6});
  CHECK(of_library.size() == 2);
}

namespace {

/// Writes the order in which threads come to the first barrier, then to the second.
struct Order {
  static constexpr int threads = 96;
  template <class Block>
  void operator()(Block const& block, std::int64_t, int* order, int* count) const {
    static_cast<void>(block.shuffle_xor(1, 1));
    order[(*count)++] = block.thread();
    block.sync(first);
    order[(*count)++] = block.thread();
  }
};

}  // namespace

TEST_CASE("schedules run threads in their order", "[emulated]") {
  auto const run = [](Schedule schedule, std::uint64_t seed) {
    std::vector<int> order(192);
    int count = 0;
    emulated::launch<Order>(Options{.schedule = schedule, .seed = seed}, 1, order.data(), &count);
    CHECK(count == 192);
    auto sorted = order;
    std::sort(sorted.begin(), sorted.end());
    for (int i = 0; i < 192; ++i) REQUIRE(sorted[static_cast<std::size_t>(i)] == i / 2);
    return order;
  };
  auto const warps = [](std::vector<int> const& order) {  // runs of one warp
    std::vector<int> list;
    for (int const thread : order)
      if (list.empty() || list.back() != thread / 32) list.push_back(thread / 32);
    return list;
  };
  auto const forward = run(Schedule::forward, 1), reverse = run(Schedule::reverse, 1);
  for (int i = 0; i < 96; ++i) {  // behind the barrier nothing holds them
    CHECK(forward[static_cast<std::size_t>(96 + i)] == i);
    CHECK(reverse[static_cast<std::size_t>(96 + i)] == 95 - i);
  }
  CHECK(warps(run(Schedule::greedy_forward, 1)) == std::vector<int>{0, 1, 2, 0, 1, 2});
  CHECK(warps(run(Schedule::greedy_reverse, 1)) == std::vector<int>{2, 1, 0, 2, 1, 0});
  CHECK(run(Schedule::shuffled, 1) == run(Schedule::shuffled, 1));
  CHECK(run(Schedule::shuffled, 1) != run(Schedule::shuffled, 2));
  CHECK(run(Schedule::shuffled, 1) != forward);
}

namespace {

struct Shuffle {
  static constexpr int threads = 64;
  template <class Block>
  void operator()(Block const& block, std::int64_t, double* wide, std::int16_t* narrow) const {
    for (int mask = 0; mask < 32; ++mask) {
      wide[mask * 64 + block.thread()] = block.shuffle_xor(0.5 + block.thread(), mask);
      narrow[mask * 64 + block.thread()] = block.shuffle_xor(static_cast<std::int16_t>(block.thread()), mask);
      block.sync_warp(first);
    }
  }
};

/// Sums by reductions of every kind, of every type.
struct Reduce {
  template <class Block>
  void operator()(Block const& block, std::int64_t, float const* x, std::int64_t n, double* out) const {
    float const sum = block.sum(
        n, [](float v) { return v; }, x);
    double const wide = block.sum(
        n, [](float v) { return static_cast<double>(v); }, x);
    auto const pair = block.sum_pair(
        n,
        [](float v) {
          return fsdp::Pair<double>{v, v * v};
        },
        x);
    float const largest = block.max(
        n, [](float v) { return v; }, x);
    auto* const own = out + block.thread() * 5;
    own[0] = sum, own[1] = wide, own[2] = pair.first, own[3] = pair.second, own[4] = largest;
  }
};

}  // namespace

TEST_CASE("shuffles give the value of the lane that the mask names", "[emulated]") {
  for (auto const schedule : emulated::schedules) {
    std::vector<double> wide(32 * 64);
    std::vector<std::int16_t> narrow(32 * 64);
    emulated::launch<Shuffle>(Options{.schedule = schedule}, 1, wide.data(), narrow.data());
    for (int mask = 0; mask < 32; ++mask) {
      for (int i = 0; i < 64; ++i) {
        auto const at = static_cast<std::size_t>(mask * 64 + i);
        REQUIRE(wide[at] == 0.5 + (i ^ mask));
        REQUIRE(narrow[at] == (i ^ mask));
      }
    }
  }
}

TEST_CASE("a block's reductions are those of its elements, in every thread alike", "[emulated]") {
  for (std::int64_t const n : {0, 1, 31, 33, 1000, 5001}) {
    auto const x = kernel_test::random_values(n + 1, 31);
    double sum = 0, square = 0, largest = -std::numeric_limits<double>::infinity();
    for (std::int64_t i = 1; i <= n; ++i) {
      double const v = x[static_cast<std::size_t>(i)];
      sum += v;
      square += static_cast<double>(static_cast<float>(v) * static_cast<float>(v));
      largest = std::fmax(largest, v);
    }
    std::vector<double> first_out;
    for (auto const schedule : emulated::schedules) {
      std::vector<double> out(256 * 5);
      emulated::launch<Reduce>(Options{.schedule = schedule}, 1, x.data() + 1, n, out.data());
      for (std::size_t i = 5; i < out.size(); ++i) REQUIRE(out[i] == out[i % 5]);
      if (first_out.empty()) first_out = out;
      REQUIRE(out == first_out);
    }
    double const bound = 32.0 * static_cast<double>(n + 1);
    CHECK(std::fabs(first_out[0] - sum) <= bound * 0x1p-24);
    CHECK(std::fabs(first_out[1] - sum) <= bound * 0x1p-53);
    CHECK(std::fabs(first_out[2] - sum) <= bound * 0x1p-53);
    CHECK(std::fabs(first_out[3] - square) <= bound * 0x1p-53);
    CHECK(first_out[4] == largest);
  }
}

namespace {

struct HalfBarrier {
  static constexpr int threads = 64;
  template <class Block>
  void operator()(Block const& block, std::int64_t) const {
    if (block.thread() < 40) block.sync(first);
  }
};
struct TwoBarriers {
  static constexpr int threads = 64;
  template <class Block>
  void operator()(Block const& block, std::int64_t) const {
    block.sync(block.thread() < 32 ? first : second);
  }
};
struct TwoWarpBarriers {
  static constexpr int threads = 32;
  template <class Block>
  void operator()(Block const& block, std::int64_t) const {
    block.sync_warp(block.thread() < 7 ? SyncSite{"first", 1} : SyncSite{"second", 1});
  }
};
struct HalfShuffle {
  static constexpr int threads = 32;
  template <class Block>
  void operator()(Block const& block, std::int64_t, int* out) const {
    if (block.thread() < 16) *out = block.shuffle_xor(1, 1);
  }
};
struct MixedShuffles {
  static constexpr int threads = 32;
  template <class Block>
  void operator()(Block const& block, std::int64_t, int* out) const {
    *out = block.shuffle_xor(1, block.thread() < 7 ? 1 : 2);
  }
};
struct ShuffleAndBarrier {
  static constexpr int threads = 32;
  template <class Block>
  void operator()(Block const& block, std::int64_t, int* out) const {
    if (block.thread() == 3) {
      block.sync(first);
    } else {
      *out = block.shuffle_xor(1, 1);
    }
  }
};
struct Throws {
  template <class Block>
  void operator()(Block const& block, std::int64_t) const {
    block.sync(first);
    if (block.thread() == 77) throw std::runtime_error("thread 77");
    block.sync(second);
  }
};

}  // namespace

TEST_CASE("what cannot go on ends with words, and leaves the emulator usable", "[emulated]") {
  for (auto const schedule : emulated::schedules) {
    CAPTURE(emulated::name(schedule));
    int out = 0;
    auto const half = failure<HalfBarrier>(schedule);
    CHECK(contains(half, "40 threads at barrier first:1"));
    CHECK(contains(half, "24 threads done"));
    auto const two = failure<TwoBarriers>(schedule);
    CHECK(contains(two, "first:1"));
    CHECK(contains(two, "second:2"));
    auto const warp = failure<TwoWarpBarriers>(schedule);
    CHECK(contains(warp, "sync_warp (first:1)"));
    CHECK(contains(warp, "sync_warp (second:1)"));
    CHECK(contains(failure<HalfShuffle>(schedule, &out), "16 threads in shuffle_xor"));
    CHECK(contains(failure<MixedShuffles>(schedule, &out), "shuffle_xor (1)"));
    CHECK(contains(failure<ShuffleAndBarrier>(schedule, &out), "1 threads at barrier first:1"));
    CHECK_THROWS_WITH(emulated::launch<Throws>(Options{.schedule = schedule}, 1), "thread 77");
    std::vector<int> good(128);
    emulated::launch<Rotate>(Options{.schedule = schedule}, 1, 1, good.data());
    CHECK(good[0] == 1);
  }
}

namespace {

struct Uninitialised {
  static constexpr int threads = 32;
  static constexpr std::size_t shared_bytes = 100;  // not a multiple of the alignment
  template <class Block>
  void operator()(Block const& block, std::int64_t index, bool* aligned, float* out) const {
    auto* const shared = reinterpret_cast<float*>(block.shared());
#if defined(EMULATED_ASAN)
    if (__asan_address_is_poisoned(shared + 25) == 0) throw std::runtime_error("nothing guards the end");
    if (__asan_address_is_poisoned(shared + 24) != 0) throw std::runtime_error("shared memory is too small");
#endif
    aligned[index * 32 + block.thread()] = reinterpret_cast<std::uintptr_t>(shared) % 128 == 0;
    if (block.thread() < 25) out[index * 32 + block.thread()] = shared[block.thread()];
    block.sync(first);
    if (block.thread() < 25) shared[block.thread()] = 1.0f;
  }
};

}  // namespace

TEST_CASE("shared memory is aligned, of its exact size, and NaN at the start of every block", "[emulated]") {
  bool aligned[64] = {};
  std::vector<float> out(64, 0.0f);
  emulated::launch<Uninitialised>(Options{}, 2, &aligned[0], out.data());
  for (std::size_t i = 0; i < 64; ++i) {
    CHECK(aligned[i]);
    if (i % 32 < 25) CHECK(std::isnan(out[i]));
  }
}

namespace {

/// Two groups of copies and one that stays open; what is there after each wait.
struct Copies {
  static constexpr int threads = 32;
  static constexpr std::size_t shared_bytes = 32 * 4 * 16;
  template <class Block>
  void operator()(Block const& block, std::int64_t, std::uint32_t* from, std::uint32_t* seen) const {
    auto* const own = reinterpret_cast<std::uint32_t*>(block.shared()) + block.thread() * 16;
    auto* const source = from + block.thread() * 16;
    auto* const out = seen + block.thread() * 16;
    Tile::copy_async(Tile::address(own), source, true);
    Tile::copy_async(Tile::address(own + 4), source + 4, false);
    Tile::commit();
    Tile::copy_async(Tile::address(own + 8), source + 8, true);
    Tile::commit();
    Tile::copy_async(Tile::address(own + 12), source + 12, true);
    Tile::wait<2>();
    out[0] = own[0];
    source[0] += 1;  // the copy may read it as late as at its wait
    Tile::wait<1>();
    out[1] = own[0], out[2] = own[3], out[3] = own[4], out[4] = own[8];
    Tile::wait<0>();
    out[5] = own[8], out[6] = own[12];
    Tile::commit();
    Tile::wait<0>();
    out[7] = own[12];
  }
};
struct OffCopy {
  static constexpr int threads = 32;
  static constexpr std::size_t shared_bytes = 512;
  template <class Block>
  void operator()(Block const& block, std::int64_t, char const* from, std::int64_t to, std::int64_t source) const {
    Tile::copy_async(Tile::address(block.shared() + to), from + source, true);
  }
};

}  // namespace

TEST_CASE("the data of a copy is there after its wait, and not before", "[emulated][tile]") {
  alignas(16) std::uint32_t from[32 * 16];
  std::vector<std::uint32_t> seen(32 * 16);
  for (std::uint32_t i = 0; i < 32 * 16; ++i) from[i] = i;
  emulated::launch<Copies>(Options{}, 1, &from[0], seen.data());
  for (std::uint32_t i = 0; i < 32; ++i) {
    auto const* const out = seen.data() + i * 16;
    CHECK(out[0] == ~0u);
    CHECK(out[1] == i * 16 + 1);
    CHECK(out[2] == i * 16 + 3);
    CHECK(out[3] == 0);  // a copy that is not valid
    CHECK(out[4] == ~0u);
    CHECK(out[5] == i * 16 + 8);
    CHECK(out[6] == ~0u);
    CHECK(out[7] == i * 16 + 12);
  }
  auto const* const bytes = reinterpret_cast<char const*>(&from[0]);
  CHECK(failure<OffCopy>(Schedule::forward, bytes, std::int64_t{496}, std::int64_t{0}) == "");
  CHECK(contains(failure<OffCopy>(Schedule::forward, bytes, std::int64_t{8}, std::int64_t{0}), "aligned"));
  CHECK(contains(failure<OffCopy>(Schedule::forward, bytes, std::int64_t{0}, std::int64_t{4}), "off 16 bytes"));
  CHECK(contains(failure<OffCopy>(Schedule::forward, bytes, std::int64_t{512}, std::int64_t{0}), "outside"));
  CHECK(contains(failure<OffCopy>(Schedule::forward, bytes, std::int64_t{-1024}, std::int64_t{0}), "outside"));
}

namespace {

/// Loads four matrices of (32, 8) elements, with a gap behind every row.
template <bool Transposed>
struct LoadMatrices {
  static constexpr int threads = 64;
  static constexpr std::size_t shared_bytes = 32 * 32;
  template <class Block>
  void operator()(Block const& block, std::int64_t, std::uint16_t const* elements, std::int64_t off,
                  std::uint16_t* out) const {
    for (int i = block.thread(); i < 32 * 8; i += block.threads()) {
      reinterpret_cast<std::uint16_t*>(block.shared())[i / 8 * 16 + i % 8] = elements[i];
    }
    block.sync(first);
    std::uint32_t r[4];
    auto const* const row = block.shared() + block.thread() % 32 * 32 + off;
    if constexpr (Transposed) {
      Tile::load_matrices_transposed(r, Tile::address(row));
    } else {
      Tile::load_matrices(r, Tile::address(row));
    }
    std::memcpy(out + block.thread() * 8, r, 16);
  }
};

/// d (16, 8) += a (16, 16) b (16, 8), each warp its own; fragments are gathered element by element.
struct Product {
  static constexpr int threads = 64;
  template <class Block>
  void operator()(Block const& block, std::int64_t, fsdp::bf16 const* a, fsdp::bf16 const* b, float* d) const {
    int const warp = block.thread() / 32, lane = block.thread() % 32;
    a += warp * 256, b += warp * 128, d += warp * 128;
    auto const pair = [](fsdp::bf16 low, fsdp::bf16 high) {
      return low.bits | static_cast<std::uint32_t>(high.bits) << 16;
    };
    // PTX ISA, fragments of mma.m16n8k16 with .bf16: element i of a lane, by its row and column.
    std::uint32_t left[4], right[2];
    for (int r = 0; r < 4; ++r) {
      int const i = 2 * r, row = (i < 2 || (i >= 4 && i < 6)) ? lane >> 2 : (lane >> 2) + 8;
      int const column = (lane % 4) * 2 + (i & 1) + (i >= 4 ? 8 : 0);
      left[r] = pair(a[row * 16 + column], a[row * 16 + column + 1]);
    }
    for (int r = 0; r < 2; ++r) {
      int const i = 2 * r, k = (lane % 4) * 2 + (i & 1) + (i >= 2 ? 8 : 0), column = lane >> 2;
      right[r] = pair(b[k * 8 + column], b[(k + 1) * 8 + column]);
    }
    float sum[4];
    auto const place = [&](int i) { return d + (i < 2 ? lane >> 2 : (lane >> 2) + 8) * 8 + (lane % 4) * 2 + (i & 1); };
    for (int i = 0; i < 4; ++i) sum[i] = *place(i);
    Tile::mma(sum, left, right);
    for (int i = 0; i < 4; ++i) *place(i) = sum[i];
  }
};

}  // namespace

TEST_CASE("ldmatrix hands out rows, or columns", "[emulated][tile]") {
  std::vector<std::uint16_t> elements(32 * 8), plain(64 * 8), transposed(64 * 8);
  for (std::size_t i = 0; i < elements.size(); ++i) elements[i] = static_cast<std::uint16_t>(i * 40503u);
  for (auto const schedule : emulated::schedules) {
    Options const options{.schedule = schedule};
    std::uint16_t const* const from = elements.data();
    emulated::launch<LoadMatrices<false>>(options, 1, from, std::int64_t{0}, plain.data());
    emulated::launch<LoadMatrices<true>>(options, 1, from, std::int64_t{0}, transposed.data());
    for (std::size_t thread = 0; thread < 64; ++thread) {
      for (std::size_t i = 0; i < 8; ++i) {
        std::size_t const matrix = i / 2, row = thread % 32 / 4, column = thread % 4 * 2 + i % 2;
        REQUIRE(plain[thread * 8 + i] == elements[matrix * 64 + row * 8 + column]);
        REQUIRE(transposed[thread * 8 + i] == elements[matrix * 64 + column * 8 + row]);
      }
    }
    CHECK(contains(failure<LoadMatrices<false>>(schedule, from, std::int64_t{2}, plain.data()), "aligned"));
    CHECK(contains(failure<LoadMatrices<true>>(schedule, from, std::int64_t{1024}, plain.data()), "outside"));
  }
}

TEST_CASE("mma multiplies fragments as the PTX ISA lays them out", "[emulated][tile]") {
  auto const a = kernel_test::random_values<fsdp::bf16>(2 * 256, 41),
             b = kernel_test::random_values<fsdp::bf16>(256, 42);
  auto const start = kernel_test::random_values(256, 43);
  for (auto const schedule : emulated::schedules) {
    auto d = start;
    emulated::launch<Product>(Options{.schedule = schedule}, 1, a.data(), b.data(), d.data());
    for (std::size_t i = 0; i < 256; ++i) {
      std::size_t const warp = i / 128, row = i % 128 / 8, column = i % 8;
      double sum = start[i], size = std::fabs(sum);
      for (std::size_t k = 0; k < 16; ++k) {
        double const term = kernel_test::as_double(a[warp * 256 + row * 16 + k]) *
                            kernel_test::as_double(b[warp * 128 + k * 8 + column]);
        sum += term;
        size += std::fabs(term);
      }
      REQUIRE(std::fabs(static_cast<double>(d[i]) - sum) <= 16.0 * 0x1p-24 * size);
    }
  }
}

namespace {

/// Lanes overwrite rows that they have read together, behind a shuffle alone or behind a barrier too.
struct Overwrites {
  static constexpr int threads = 64;
  static constexpr std::size_t shared_bytes = 2 * 32 * 16;
  template <class Block>
  void operator()(Block const& block, std::int64_t, int barriers, std::uint32_t* out) const {
    auto* const row = reinterpret_cast<std::uint32_t*>(block.shared() + block.thread() * 16);
    for (int i = 0; i < 4; ++i) row[i] = static_cast<std::uint32_t>(block.thread() * 4 + i);
    block.sync(first);
    std::uint32_t r[4];
    Tile::load_matrices(r, Tile::address(row));
    out[block.thread()] = block.shuffle_xor(r[0], 1);
    if (barriers == 1) block.sync_warp(second);
    if (barriers == 2) block.sync(second);
    row[0] = 1000;
    if (barriers == 3) block.sync_warp(second);  // too late
    if (barriers == 4) block.sync(second);
  }
};

}  // namespace

TEST_CASE("what a warp has read together may not change before a barrier", "[emulated][tile]") {
  for (auto const schedule : emulated::schedules) {
    CAPTURE(emulated::name(schedule));
    std::vector<std::uint32_t> out(64);
    for (int const barriers : {0, 3, 4})
      CHECK(contains(failure<Overwrites>(schedule, barriers, out.data()), "overwritten without a barrier"));
    for (int const barriers : {1, 2}) CHECK(failure<Overwrites>(schedule, barriers, out.data()) == "");
  }
}
