// SPDX-License-Identifier: Apache-2.0
// Buffers of modules: ranks have different ones until they are averaged or broadcast, and the same bits afterwards; a
// checkpoint has them once, for any number of ranks.
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <functional>
#include <limits>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "fsdp/checkpoint.hpp"
#include "fsdp/fsdp.hpp"
#include "fsdp/host.hpp"
#include "fsdp/local.hpp"
#include "tests/catch.hpp"
#include "tests/support/delayed.hpp"
#include "tests/support/messages.hpp"
#include "tests/support/rank_checks.hpp"
#include "tests/support/temporary_folder.hpp"

namespace {

using Comm = toy::Delayed<fsdp::local::Communicator<fsdp::host::Device>>;
using Engine = fsdp::Engine<Comm>;
using fsdp::testing::has;

constexpr std::size_t width = 5, rows = 4;

/// y = gain * (x - mean) / sqrt(variance + 1e-5), of each column: of this rank's rows in training, of the running
/// statistics in an evaluation. Statistics are buffers: each rank has its own.
struct BatchNorm {
  struct Statistics {
    std::vector<float> mean = std::vector<float>(width, 0.0f), variance = std::vector<float>(width, 1.0f);
    std::int64_t batches = 0;
  };
  std::shared_ptr<Statistics> statistics = std::make_shared<Statistics>();

  template <class T>
  struct Params {
    fsdp::Tensor<T, 1> gain;
  };
  template <class T, class Visit>
  void describe(Params<T>& p, Visit&& tensor) const {
    tensor("gain", p.gain, {width}, fsdp::TensorOptions{.init = fsdp::init::ones});
  }
  template <class P>
  void forward(auto& stream, Params<P> const& p, float const* x, float* y, bool trains) const {
    stream.enqueue([gain = p.gain.data, x, y, trains, of = statistics] {
      of->batches += trains ? 1 : 0;
      for (std::size_t c = 0; c < width; ++c) {
        float mean = of->mean[c], variance = of->variance[c];
        if (trains) {
          mean = variance = 0.0f;
          for (std::size_t r = 0; r < rows; ++r) mean += x[r * width + c] / rows;
          for (std::size_t r = 0; r < rows; ++r) variance += std::pow(x[r * width + c] - mean, 2.0f) / rows;
          of->mean[c] = 0.9f * of->mean[c] + 0.1f * mean;
          of->variance[c] = 0.9f * of->variance[c] + 0.1f * variance;
        }
        for (std::size_t r = 0; r < rows; ++r)
          y[r * width + c] = gain[c] * (x[r * width + c] - mean) / std::sqrt(variance + 1e-5f);
      }
    });
  }
  template <class P, class G>
  void backward(auto& stream, Params<P> const&, Params<G> const& g) const {
    stream.enqueue([gain = g.gain.data] {
      for (std::size_t c = 0; c < width; ++c) gain[c] += 1.0f;
    });
  }
  std::vector<fsdp::ModuleBuffer> buffers(std::string const& name) const {
    return {{name + ".mean", statistics->mean.data(), {width}},
            {name + ".variance", statistics->variance.data(), {width}},
            {name + ".batches", &statistics->batches, {}}};
  }
};

template <class T>
std::string bits(std::vector<T> const& values) {
  return {reinterpret_cast<char const*>(values.data()), values.size() * sizeof(T)};
}

/// A rank's engine of one BatchNorm.
struct Trainer {
  explicit Trainer(Comm comm) : mesh(std::move(comm)) {}

  std::vector<float> forward(int seed, bool trains) {
    std::vector<float> x(rows * width), y(rows * width);
    for (std::size_t i = 0; i < x.size(); ++i)
      x[i] = std::sin(static_cast<float>(i) + 17.0f * static_cast<float>(seed));
    std::optional<Engine::Evaluation> evaluation;
    if (!trains) evaluation.emplace(engine.evaluation());
    norm.forward(x.data(), y.data(), trains);
    if (trains) norm.backward();
    engine.synchronize();
    return y;
  }
  std::vector<float> evaluate() { return forward(99, false); }
  std::string all_bits() const {
    return bits(of->mean) + bits(of->variance) + bits(std::vector<std::int64_t>{of->batches});
  }
  /// Bits that are the same on all ranks.
  bool same_on_all(std::string const& mine) {
    bool same = true;
    for (auto const& text : engine.world().exchange(mine, "bits")) same = same && text == mine;
    return same;
  }

  fsdp::Mesh<Comm> mesh;
  Engine engine{mesh, fsdp::FullShard{}};
  BatchNorm module{};
  std::shared_ptr<BatchNorm::Statistics> of = module.statistics;
  std::vector<fsdp::ModuleBuffer> buffers = module.buffers("norm");
  fsdp::ShardedModule<BatchNorm, Engine> norm = engine.shard(module, "norm");
};

/// @param seed  of delays of up to `at_most` microseconds, which rank 0 does not have
template <class Body>
void on_ranks(int ranks, Body const& body, std::uint64_t seed = 0, std::int64_t at_most = 0) {
  fsdp::local::run(ranks, fsdp::host::Device{}, [&](fsdp::local::Communicator<fsdp::host::Device> comm) {
    auto const delay = comm.rank() == 0 ? 0 : at_most;
    body(Comm(std::move(comm), seed, delay));
  });
}

/// The text of the error of rank 0, of a run of two ranks.
template <class Failure = fsdp::OrderError, class Act>
std::string refused(Act const& act) {
  std::string text;
  on_ranks(2, [&](Comm comm) {
    Trainer trainer(std::move(comm));
    auto const before = trainer.all_bits();
    auto const own = fsdp::testing::what<Failure>([&] { act(trainer); });
    RANK_CHECK(trainer.all_bits() == before);
    if (trainer.engine.rank() == 0) text = own;
  });
  CHECK_RANKS();
  return text;
}

}  // namespace

TEST_CASE("running statistics differ by rank until they are averaged, and evaluations are then equal on all ranks") {
  for (int const ranks : {1, 2, 3, 4})
    for (auto const how : {fsdp::BufferSync::average, fsdp::BufferSync::broadcast}) {
      std::string first;
      for (std::uint64_t const seed : {0u, 1u, 2u}) {
        on_ranks(
            ranks,
            [&](Comm comm) {
              Trainer trainer(std::move(comm));
              auto& engine = trainer.engine;
              for (int step = 0; step < 3; ++step) trainer.forward(step * ranks + engine.rank(), true);
              RANK_CHECK(trainer.same_on_all(trainer.all_bits()) == (ranks == 1));
              RANK_CHECK(trainer.same_on_all(bits(trainer.evaluate())) == (ranks == 1));
              std::vector<float> expected;  // of elements 1: mean and variance
              for (auto const* values : {&trainer.of->mean, &trainer.of->variance}) {
                double sum = 0;
                for (auto const& text : engine.world().exchange(bits(*values), "values")) {
                  float value = 0;
                  std::memcpy(&value, text.data() + sizeof value, sizeof value);
                  if (how == fsdp::BufferSync::broadcast) {
                    sum = value * static_cast<double>(ranks);
                    break;
                  }
                  sum += value;
                }
                expected.push_back(static_cast<float>(sum / ranks));
              }
              if (how == fsdp::BufferSync::average)
                fsdp::average_buffers(engine, trainer.buffers);
              else
                fsdp::broadcast_buffers(engine, trainer.buffers);
              RANK_CHECK(trainer.of->mean[1] == expected[0] && trainer.of->variance[1] == expected[1]);
              RANK_CHECK(trainer.of->batches == 3);
              RANK_CHECK(trainer.same_on_all(trainer.all_bits()));
              auto const evaluation = bits(trainer.evaluate());
              RANK_CHECK(trainer.same_on_all(evaluation));
              RANK_CHECK(engine.account().reserved(fsdp::MemoryTag::workspace) == 0);
              if (engine.rank() != 0) return;
              if (seed == 0) first = trainer.all_bits();
              RANK_CHECK(trainer.all_bits() == first);  // whoever comes late
            },
            seed, seed == 0 ? 0 : 300);
      }
    }
  CHECK_RANKS();
}

TEST_CASE("means of equal values, signed zeros and infinities keep their bits; integers are those of rank 0") {
  auto const nan = std::numeric_limits<float>::quiet_NaN(), infinity = std::numeric_limits<float>::infinity();
  for (int const ranks : {2, 3})
    on_ranks(ranks, [&](Comm comm) {
      Trainer trainer(std::move(comm));
      auto& engine = trainer.engine;
      auto const rank = engine.rank();
      std::vector<float> equal{0.1f, -0.0f, infinity, 3e38f, 1e-45f}, apart{1e30f, 0.0f, -infinity};
      std::vector<fsdp::bf16> brain{fsdp::bf16(0.1f), fsdp::bf16(rank == 0 ? 1.0f : 2.0f)};
      std::vector<fsdp::fp16> half{fsdp::fp16(0.1f), fsdp::fp16(rank == 0 ? 1.0f : 2.0f)};
      std::vector<double> wide{1.0 + 1e-15 * rank};
      std::vector<std::int32_t> whole{7 + rank};
      bool flag = rank == 0;
      if (rank == 1) apart = {-1e30f, nan, 1.0f};
      auto const before = bits(equal);
      auto const narrow = std::pair(brain[0].bits, half[0].bits);
      std::vector<fsdp::ModuleBuffer> const buffers{{"equal", equal.data(), {5}}, {"apart", apart.data(), {3, 1}},
                                                    {"brain", brain.data(), {2}}, {"half", half.data(), {2}},
                                                    {"wide", wide.data(), {1}},   {"whole", whole.data(), {1}},
                                                    {"flag", &flag, {}},          {"nothing", equal.data(), {0}}};
      fsdp::average_buffers(engine, buffers);
      RANK_CHECK(bits(equal) == before);
      RANK_CHECK(apart[0] == static_cast<float>(ranks == 2 ? 0.0 : 1e30f / 3.0));  // the third rank has 1e30
      RANK_CHECK(std::isnan(apart[1]) && apart[2] == -infinity);
      RANK_CHECK(std::pair(brain[0].bits, half[0].bits) == narrow);
      auto const mean = ranks == 2 ? 1.5f : 5.0f / 3.0f;
      RANK_CHECK(brain[1].bits == fsdp::bf16(mean).bits && half[1].bits == fsdp::fp16(mean).bits);
      RANK_CHECK(wide[0] > 1.0 && wide[0] < 1.0 + 1e-15 * ranks);
      RANK_CHECK(whole[0] == 7 && flag);
      // A broadcast moves bits, and those of a NaN too.
      std::uint32_t const payload = 0x7f812345u + static_cast<std::uint32_t>(rank);
      std::memcpy(&apart[1], &payload, sizeof payload);
      apart[0] = rank == 0 ? -0.0f : 0.0f;
      fsdp::broadcast_buffers(engine, buffers);
      std::uint32_t received = 0;
      std::memcpy(&received, &apart[1], sizeof received);
      RANK_CHECK(received == 0x7f812345u && std::signbit(apart[0]));
    });
  CHECK_RANKS();
}

TEST_CASE("buffers that are larger than the memory that moves them are moved in parts") {
  for (int const ranks : {2, 3})
    on_ranks(
        ranks,
        [&](Comm comm) {
          Trainer trainer(std::move(comm));
          auto& engine = trainer.engine;
          auto const rank = static_cast<float>(engine.rank());
          std::vector<std::vector<float>> all;
          std::vector<fsdp::ModuleBuffer> buffers;
          for (std::size_t const size : {3u, 1'100'000u, 1u, 400'001u}) {
            auto& values = all.emplace_back(size);
            for (std::size_t i = 0; i < size; ++i) values[i] = static_cast<float>(i) + rank;
            buffers.emplace_back(std::to_string(size), values.data(), std::vector{static_cast<std::int64_t>(size)});
          }
          auto const expect = [&](float added) {
            for (auto const& values : all)
              for (std::size_t i = 0; i < values.size(); ++i)
                if (values[i] != static_cast<float>(i) + added) return false;
            return true;
          };
          // The mean of i, i + 1 (and i + 2) is exact up to 2^22, and i + 0.5 needs one bit more.
          fsdp::average_buffers(engine, buffers);
          RANK_CHECK(expect(ranks == 2 ? 0.5f : 1.0f));
          for (auto& values : all)
            for (auto& value : values) value += 8.0f * rank;
          fsdp::broadcast_buffers(engine, buffers);
          RANK_CHECK(expect(ranks == 2 ? 0.5f : 1.0f));
        },
        1, 2000);
  CHECK_RANKS();
}

TEST_CASE("a checkpoint has the buffers once, and any number of ranks gets the same bits and evaluations") {
  for (auto const& [from, to] : {std::pair(2, 4), std::pair(4, 2), std::pair(2, 3), std::pair(3, 1)}) {
    fsdp::testing::TemporaryFolder const folder;
    std::string saved, evaluation;
    on_ranks(from, [&](Comm comm) {
      Trainer trainer(std::move(comm));
      auto& engine = trainer.engine;
      fsdp::AdamW adamw{engine};
      trainer.forward(engine.rank(), true);
      adamw.step();
      fsdp::average_buffers(engine, trainer.buffers);
      fsdp::save(engine, adamw, folder.path, {{"buffers", fsdp::buffers_to_json(engine, trainer.buffers)}});
      auto const y = bits(trainer.evaluate());
      if (engine.rank() == 0) saved = trainer.all_bits(), evaluation = y;
    });
    on_ranks(to, [&](Comm comm) {
      Trainer trainer(std::move(comm));
      auto& engine = trainer.engine;
      fsdp::AdamW adamw{engine};
      auto const loaded = fsdp::load_latest(engine, adamw, folder.path);
      fsdp::buffers_from_json(engine, trainer.buffers, loaded->extra.at("buffers"));
      RANK_CHECK(trainer.all_bits() == saved);
      RANK_CHECK(bits(trainer.evaluate()) == evaluation);
    });
  }
  CHECK_RANKS();
}

TEST_CASE("saved buffers that do not fit are refused by name, and none has changed") {
  on_ranks(1, [](Comm comm) {
    Trainer trainer(std::move(comm));
    auto& engine = trainer.engine;
    auto const json = fsdp::buffers_to_json(engine, trainer.buffers);
    trainer.of->mean[0] = 5.0f;
    auto const before = trainer.all_bits();
    auto const load = [&](fsdp::checkpoint::Json const& from) {
      auto text =
          fsdp::testing::what<fsdp::ConfigError>([&] { fsdp::buffers_from_json(engine, trainer.buffers, from); });
      RANK_CHECK(trainer.all_bits() == before);
      return text;
    };
    auto wrong = json;
    wrong.erase("norm.batches");
    RANK_CHECK(load(wrong) == "rank 0: the saved buffers have no buffer 'norm.batches', which the modules have");
    RANK_CHECK(has(load(nullptr), "no buffer 'norm.mean'"));
    for (auto const& [key, value] :
         std::vector<std::pair<std::string, fsdp::checkpoint::Json>>{{"type", "fp64"},
                                                                     {"shape", {4}},
                                                                     {"shape", "5"},
                                                                     {"bytes", "00"},
                                                                     {"bytes", std::string(40, 'g')},
                                                                     {"bytes", 7},
                                                                     {"type", nullptr}}) {
      wrong = json;
      wrong["norm.variance"][key] = value;
      auto const of = [&](char const* name) { return wrong["norm.variance"][name].dump(); };
      RANK_CHECK(load(wrong) ==
                 "rank 0: saved buffer 'norm.variance': expected type fp32, shape (5) and 20 bytes as hexadecimal "
                 "digits, got type " +
                     of("type") + ", shape " + of("shape"));
    }
    wrong["norm.variance"] = 3;
    RANK_CHECK(has(load(wrong),
                   "saved buffer 'norm.variance': expected type fp32, shape (5) and 20 bytes as hexadecimal "
                   "digits, got type none, shape none"));
    fsdp::buffers_from_json(engine, trainer.buffers, json);
    RANK_CHECK(trainer.of->mean[0] == 0.0f);
  });
  CHECK_RANKS();
}

TEST_CASE("lists of buffers that differ over ranks are refused on all ranks in one sentence, and no buffer changes") {
  auto const of_rank_1 = [](std::function<void(std::vector<fsdp::ModuleBuffer>&)> const& change, bool averages) {
    return refused([&](Trainer& trainer) {
      if (trainer.engine.rank() == 1) change(trainer.buffers);
      if (averages)
        fsdp::average_buffers(trainer.engine, trainer.buffers);
      else
        fsdp::broadcast_buffers(trainer.engine, trainer.buffers);
    });
  };
  for (bool const averages : {false, true}) {
    CHECK(of_rank_1([](auto& list) { list.pop_back(); }, averages) ==
          "rank 0: ranks disagree: rank 0 has \"buffer 'norm.batches' (), int64\", rank 1 has \"2 buffers in all\"; "
          "expected the same on all ranks");
    CHECK(has(of_rank_1([](auto& list) { list[0].name = "other"; }, averages),
              "rank 0 has \"buffer 'norm.mean' (5), fp32\", rank 1 has \"buffer 'other' (5), fp32\""));
    CHECK(has(of_rank_1(
                  [](auto& list) {
                    list[1].shape = {1, 5};
                  },
                  averages),
              "rank 0 has \"buffer 'norm.variance' (5), fp32\", rank 1 has \"buffer 'norm.variance' (1, 5), fp32\""));
    CHECK(has(of_rank_1([](auto& list) { list[2].type = "int32"; }, averages),
              "rank 1 has \"buffer 'norm.batches' (), int32\""));
    CHECK(has(of_rank_1([](auto& list) { std::swap(list[0], list[1]); }, averages), "ranks disagree"));
  }
  auto const one_averages = refused([](Trainer& trainer) {
    if (trainer.engine.rank() == 1)
      fsdp::average_buffers(trainer.engine, trainer.buffers);
    else
      fsdp::broadcast_buffers(trainer.engine, trainer.buffers);
  });
  INFO(one_averages);
  CHECK((has(one_averages, "buffers to average") && has(one_averages, "buffers to broadcast")));
  auto const one_discards = refused([](Trainer& trainer) {
    trainer.engine.seal();
    auto const before = *trainer.of;
    trainer.forward(3, true);
    *trainer.of = before;
    if (trainer.engine.rank() == 1) trainer.engine.discard_gradients();
    fsdp::average_buffers(trainer.engine, trainer.buffers);
  });
  INFO(one_discards);
  CHECK(has(one_discards, "3 buffers in all, after discard_gradients"));
}

TEST_CASE("a list with a name twice, or without memory, is refused") {
  on_ranks(1, [](Comm comm) {
    Trainer trainer(std::move(comm));
    auto& engine = trainer.engine;
    auto list = trainer.buffers;
    list.push_back(list[1]);
    std::string const twice = ": two buffers have the name 'norm.variance'; give each buffer its own name";
    using fsdp::testing::refusal;
    RANK_CHECK(refusal([&] { fsdp::average_buffers(engine, list); }) == "rank 0: average_buffers" + twice);
    RANK_CHECK(refusal([&] { fsdp::broadcast_buffers(engine, list); }) == "rank 0: broadcast_buffers" + twice);
    RANK_CHECK(refusal([&] { fsdp::buffers_to_json(engine, list); }) == "rank 0: buffers_to_json" + twice);
    RANK_CHECK(refusal([&] { fsdp::buffers_from_json(engine, list, {}); }) == "rank 0: buffers_from_json" + twice);
    list = {{"gone", static_cast<float*>(nullptr), {2}}};
    RANK_CHECK(refusal([&] { fsdp::average_buffers(engine, list); }) ==
               "rank 0: average_buffers: buffer 'gone' is nullptr");
    fsdp::average_buffers(engine, {});
  });
  CHECK_RANKS();
}

TEST_CASE("a list that is refused on one rank is refused on all, and no buffer changes") {
  for (bool const twice : {false, true}) {
    on_ranks(2, [&](Comm comm) {
      Trainer trainer(std::move(comm));
      auto& engine = trainer.engine;
      float mine[2] = {1.0f + static_cast<float>(engine.rank()), 5.0f};
      std::vector<fsdp::ModuleBuffer> list{{"a", mine, {2}}};
      auto const right = list;
      if (engine.rank() == 1 && twice) list.push_back(list[0]);
      if (engine.rank() == 1 && !twice) list[0].data = nullptr;
      for (auto const& sync : {fsdp::BufferSync::average, fsdp::BufferSync::broadcast}) {
        auto const error = fsdp::testing::what<fsdp::OrderError>([&] {
          sync == fsdp::BufferSync::average ? fsdp::average_buffers(engine, list)
                                            : fsdp::broadcast_buffers(engine, list);
        });
        RANK_CHECK(has(error, "ranks disagree"));
        RANK_CHECK(has(error, twice ? "two buffers have the name 'a'" : "buffer 'a' is nullptr"));
        RANK_CHECK(mine[0] == 1.0f + static_cast<float>(engine.rank()));
      }
      fsdp::average_buffers(engine, right);
      RANK_CHECK(mine[0] == 1.5f);
    });
    CHECK_RANKS();
  }
}

TEST_CASE("a buffer's shape has no negative extent, and not too many elements") {
  float value = 0;
  auto const made = [&](std::vector<std::int64_t> shape) {
    return fsdp::testing::refusal([&] { fsdp::ModuleBuffer("a", &value, std::move(shape)); });
  };
  CHECK(made({-1}) == "buffer 'a': extents must not be negative, got (-1)");
  CHECK(made({-2, -2}) == "buffer 'a': extents must not be negative, got (-2, -2)");
  CHECK(made({std::int64_t{1} << 62}) == "buffer 'a': shape (4611686018427387904) has too many elements");
  CHECK(has(made({std::int64_t{1} << 40, std::int64_t{1} << 40}), "has too many elements"));
  CHECK(fsdp::ModuleBuffer("a", &value, {}).bytes == sizeof value);
  CHECK(fsdp::ModuleBuffer("a", &value, {3, 0}).bytes == 0);
}
