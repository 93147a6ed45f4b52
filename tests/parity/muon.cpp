// SPDX-License-Identifier: Apache-2.0
// Muon on shards: the bits of whole matrices on one rank, for every strategy and 1 to 4 ranks; and Newton-Schulz
// iterations in double.
#include <algorithm>
#include <cmath>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "fsdp/muon.hpp"
#include "tests/catch.hpp"
#include "tests/support/gradient_units.hpp"
#include "tests/support/messages.hpp"
#include "tests/support/rank_checks.hpp"

namespace {

using fsdp::testing::has;
using Matrix = std::vector<double>;  // row-major

/// (m, k) times (k, n)
Matrix multiply(Matrix const& a, Matrix const& b, std::size_t m, std::size_t k, std::size_t n) {
  Matrix c(m * n);
  for (std::size_t i = 0; i < m; ++i)
    for (std::size_t t = 0; t < k; ++t)
      for (std::size_t j = 0; j < n; ++j) c[i * n + j] += a[i * k + t] * b[t * n + j];
  return c;
}
Matrix transposed(Matrix const& a, std::size_t rows, std::size_t columns) {
  Matrix t(a.size());
  for (std::size_t i = 0; i < rows; ++i)
    for (std::size_t j = 0; j < columns; ++j) t[j * rows + i] = a[i * columns + j];
  return t;
}
/// Muon's iteration as its paper has it, in double.
Matrix orthogonalised(Matrix x, std::size_t rows, std::size_t columns, int iterations) {
  double norm = 0;
  for (double const v : x) norm += v * v;
  for (double& v : x) v /= std::max(std::sqrt(norm), 1e-7);
  bool const tall = rows > columns;
  if (tall) x = transposed(x, rows, columns);
  auto const r = std::min(rows, columns), n = std::max(rows, columns);
  for (int step = 0; step < iterations; ++step) {
    auto const gram = multiply(x, transposed(x, r, n), r, n, r);
    auto polynomial = multiply(gram, gram, r, r, r);
    for (std::size_t i = 0; i < polynomial.size(); ++i) polynomial[i] = -4.7750 * gram[i] + 2.0315 * polynomial[i];
    auto const moved = multiply(polynomial, x, r, r, n);
    for (std::size_t i = 0; i < x.size(); ++i) x[i] = 3.4445 * x[i] + moved[i];
  }
  return tall ? transposed(x, r, n) : x;
}

template <class E>
std::vector<std::vector<float>> weights_of(E& engine) {
  std::vector<std::vector<float>> all;
  fsdp::export_full(engine, [&](auto const&, auto values) { all.emplace_back(values.begin(), values.end()); });
  return all;
}
template <class E>
std::vector<std::vector<float>> gradients_of(E& engine) {
  std::vector<std::vector<float>> all;
  fsdp::export_gradients(engine, [&](auto const&, auto values) { all.emplace_back(values.begin(), values.end()); });
  return all;
}

/// Six steps of Muon and AdamW, the last two clipped. @return all weights as fp32
template <class P>
std::vector<float> train(toy::World const& world, fsdp::MuonOptions const& options) {
  return toy::on_patches<P>(world.strategy, world.ranks, world.group, [&](auto& engine, auto& patches) {
    fsdp::Muon muon{engine, fsdp::TensorSelection::all(), options, {{.tensors = "patches.1.*", .lr_scale = 0.5f}}};
    fsdp::AdamW adamw{engine, muon.rest()};
    fsdp::Optimizers both{muon, adamw};
    for (int step = 0; step < 6; ++step) {
      patches.step({.step = step, .alike = true});
      both.step({0.05f, 0.01f}, fsdp::clip_grad_norm(engine, step < 4 ? 1e9f : 1.0f));
    }
    return toy::all_parameters(engine);
  });
}

}  // namespace

TEST_CASE("Muon has the bits of whole matrices on one rank") {
  fsdp::MuonOptions const options{.weight_decay = 0.1f};
  auto const one = train<fsdp::Fp32>(toy::worlds()[0], options);
  auto const rounded = train<fsdp::Bf16>(toy::worlds()[0], options);
  CHECK((one != rounded));
  for (auto const& world : toy::worlds()) {
    INFO(world.strategy.name << " on " << world.ranks << " ranks");
    CHECK((train<fsdp::Fp32>(world, options) == one));
    CHECK((train<fsdp::Bf16>(world, options) == rounded));
  }
  CHECK_RANKS();
}

TEST_CASE("Muon with masters in bf16, rounded at random, has the same bits in every world") {
  fsdp::MuonOptions const options{.stochastic_rounding = true, .seed = 5};
  auto const one = train<fsdp::Precision<fsdp::bf16, float, fsdp::bf16>>(toy::worlds()[0], options);
  for (auto const& world : toy::worlds()) {
    INFO(world.strategy.name << " on " << world.ranks << " ranks");
    CHECK((train<fsdp::Precision<fsdp::bf16, float, fsdp::bf16>>(world, options) == one));
  }
  CHECK_RANKS();
}

TEST_CASE("Muon follows its formula in double, wide and tall, with Nesterov's rule and without") {
  bool const nesterov = GENERATE(true, false);
  auto const scale = GENERATE(fsdp::MuonScale::original, fsdp::MuonScale::match_rms_adamw);
  double most = 0;
  toy::on_patches<fsdp::Fp32>(fsdp::FullShard{}, 3, 0, [&](auto& engine, auto& patches) {
    fsdp::Muon muon{engine,
                    fsdp::matching("*.weight"),
                    {.momentum = 0.9f, .nesterov = nesterov, .weight_decay = 0.1f, .scale = scale}};
    fsdp::Sgd sgd{engine, muon.rest()};
    fsdp::Optimizers both{muon, sgd};
    auto const tensors = fsdp::tensor_list(engine);
    std::vector<Matrix> weights, momenta;
    for (auto const& values : weights_of(engine)) {
      weights.emplace_back(values.begin(), values.end());
      momenta.emplace_back(values.size());
    }
    for (int step = 0; step < 5; ++step) {
      patches.step({.step = step});
      auto const gradients = gradients_of(engine);
      both.step({0.02f, 0.0f});
      auto const now = weights_of(engine);
      for (std::size_t t = 0; t < weights.size(); ++t) {
        if (tensors[t].shape.size() != 2) continue;
        auto const rows = static_cast<std::size_t>(tensors[t].shape[0]);
        auto const columns = static_cast<std::size_t>(tensors[t].shape[1]);
        Matrix update(rows * columns);
        for (std::size_t i = 0; i < update.size(); ++i) {
          double const g = gradients[t][i];
          auto& m = momenta[t][i];
          m = 0.9 * m + 0.1 * g;
          update[i] = nesterov ? 0.9 * m + 0.1 * g : m;
        }
        update = orthogonalised(update, rows, columns, 5);
        double const r = static_cast<double>(rows), c = static_cast<double>(columns);
        double const factor =
            scale == fsdp::MuonScale::original ? std::sqrt(std::max(1.0, r / c)) : 0.2 * std::sqrt(std::max(r, c));
        for (std::size_t i = 0; i < update.size(); ++i) {
          auto& w = weights[t][i];
          w = w * (1 - 0.02 * 0.1) - 0.02 * factor * update[i];
          most = std::max(most, std::abs(w - static_cast<double>(now[t][i])));
        }
      }
    }
    return 0;
  });
  CHECK(most > 0.0);
  CHECK(most <= 1e-6);
  CHECK_RANKS();
}

TEST_CASE("an orthogonalised matrix has singular values near 1") {
  for (auto const& [rows, columns] : {std::pair{48, 48}, std::pair{17, 200}, std::pair{300, 5}, std::pair{1, 70}}) {
    fsdp::MemoryAccount account;
    fsdp::host::Device const device;
    auto stream = fsdp::host::Stream::inline_stream("compute");
    fsdp::detail::Orthogonaliser<fsdp::host::Device, fsdp::BlockProducts> orthogonalise({}, 5, 1e-7f);
    orthogonalise.allocate(device, account, rows * columns, std::min(rows, columns));
    std::vector<float> x(static_cast<std::size_t>(rows * columns)), y(x.size());
    for (std::size_t i = 0; i < x.size(); ++i) x[i] = toy::noise(7, static_cast<std::int64_t>(i));
    orthogonalise(device, stream, rows, columns, x.data(), y.data(), 1.0f);
    auto const m = static_cast<std::size_t>(rows), n = static_cast<std::size_t>(columns);
    auto const expected = orthogonalised({x.begin(), x.end()}, m, n, 5);
    Matrix const wide(y.begin(), y.end());
    double squares = 0, far = 0;
    for (std::size_t i = 0; i < y.size(); ++i) {
      squares += wide[i] * wide[i];
      far = std::max(far, std::abs(wide[i] - expected[i]));
    }
    CHECK(far <= 2e-5);
    // The mean square of the singular values: the iteration leaves them between 0.7 and 1.2.
    CHECK(squares / std::min(rows, columns) > 0.45);
    CHECK(squares / std::min(rows, columns) < 1.5);
    auto const floats = [](std::int64_t count) { return 4 * fsdp::align_up(count, fsdp::layout_alignment); };
    auto const least = std::int64_t{std::min(rows, columns)};
    CHECK(account.reserved(fsdp::MemoryTag::workspace) ==
          2 * floats(rows * columns) + 2 * floats(least * least) + 8 * fsdp::layout_alignment);
  }
  CHECK_RANKS();
}

namespace {
/// Products by another function, which counts them.
struct CountedProducts {
  int* calls;
  template <class D>
  void operator()(D const& device, typename D::Stream& stream, std::int64_t m, std::int64_t n, std::int64_t k,
                  float alpha, float const* a, float const* b, float beta, float* c) const {
    ++*calls;
    fsdp::kernels::product(device, stream, m, n, k, alpha, a, b, beta, c);
  }
};
}  // namespace

TEST_CASE("each matrix is orthogonalised by one rank of its shard group, and memory is as said") {
  for (auto const& world : toy::worlds()) {
    std::vector<int> calls(4, 0);
    toy::on_patches<fsdp::Fp32>(world.strategy, world.ranks, world.group, [&](auto& engine, auto& patches) {
      auto& mine = calls[static_cast<std::size_t>(engine.rank())];
      auto const reserved = [&](fsdp::MemoryTag tag) { return engine.account().reserved(tag); };
      engine.seal();
      auto const workspace = reserved(fsdp::MemoryTag::workspace);
      fsdp::Muon muon{engine, fsdp::matching("*"), {.iterations = 2}, {}, CountedProducts{&mine}};
      std::int64_t momenta = 0, largest = 0;
      for (std::size_t u = 0; u < 3; ++u) {
        auto const& unit = engine.shards()[u];
        largest = std::max(largest, unit.full_numel());
        for (auto const& part : unit.layout().segments(unit.shard()))
          if (part.tensor == 0) momenta += fsdp::align_up(part.count, fsdp::layout_alignment);
      }
      RANK_CHECK(reserved(fsdp::MemoryTag::optimizer) == 4 * momenta);
      // (3, 130) has the most elements, and (40, 9) the most rows.
      auto const floats = [](std::int64_t count) { return 4 * fsdp::align_up(count, fsdp::layout_alignment); };
      RANK_CHECK(reserved(fsdp::MemoryTag::workspace) - workspace ==
                 2 * 4 * largest + 2 * floats(390) + 2 * floats(81) + 8 * fsdp::layout_alignment);
      fsdp::AdamW adamw{engine, muon.rest()};
      fsdp::Optimizers both{muon, adamw};
      patches.step({.step = 0});
      both.step();
      return 0;
    });
    int sum = 0;
    for (int const count : calls) sum += count;
    auto const groups = world.strategy.shards ? (world.group > 0 ? world.ranks / world.group : 1) : world.ranks;
    INFO(world.strategy.name << " on " << world.ranks << " ranks");
    CHECK(sum == 3 * 2 * 3 * groups);  // matrices, iterations, products
  }
  CHECK_RANKS();
}

TEST_CASE("Muon refuses a selection without matrices, and options out of range") {
  using fsdp::testing::what;
  toy::on_patches<fsdp::Fp32>(fsdp::FullShard{}, 2, 0, [](auto& engine, auto& patches) {
    RANK_CHECK(has(what([&] {
                     fsdp::Muon{engine, fsdp::matching("*.bias")};
                   }),
                   "Muon: expected a tensor that trains and has two dimensions, got none among: '*.bias'"));
    RANK_CHECK(has(what([&] {
                     fsdp::Muon{engine, fsdp::matching("*"), {.momentum = 1.0f}};
                   }),
                   "the momentum must be in [0, 1)"));
    RANK_CHECK(has(what([&] {
                     fsdp::Muon{engine, fsdp::matching("*"), {.iterations = 0}};
                   }),
                   "iterations must be from 1 to 100"));
    RANK_CHECK(has(what([&] { fsdp::Muon{engine, fsdp::matching("*"), {.eps = 0.0f}}; }), "eps 0 finite and positive"));
    RANK_CHECK(
        has(what([&] { fsdp::Muon(engine, fsdp::matching("*"), {}, {{.tensors = "*.bias", .momentum = 0.5f}}); }),
            "Muon: the group '*.bias' matches no tensor of the optimizer"));
    fsdp::Muon muon{engine, fsdp::matching("*")};
    patches.step({.step = 0});
    RANK_CHECK(has(what([&] { muon.step(); }), "Muon: tensor 'patches.0.bias' belongs to another optimizer"));
    return 0;
  });
  CHECK_RANKS();
}
