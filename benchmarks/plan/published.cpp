// SPDX-License-Identifier: Apache-2.0
// Compares published throughputs of other trainers with the plan's forecast, and with the calibration run's throughput.
//
// Sources: llm-foundry, scripts/train/benchmarking/README.md, tables of 2,048 tokens (commit 061f2c7ce64e, "A100 40GB
// with 1600 Gbps node-node interconnect", "H100 80GB BF16"); torchtitan, benchmarks/llama3_h100_202412_torchtitan.md
// (commit 31a17bfdb70b, tables 1 and 3). Rows with a model, microbatch and recomputation of which there are runs on
// several numbers of GPUs; all of them.
//
// Calibration, named before anything is compared: the smallest run of each model and microbatch gives the efficiency of
// its matrix products. One row of each cluster (`Role::jitter`) gives the cluster's jitter, where there are more than
// two rows. All other rows are tested. Bandwidths are those of data sheets; latencies are those of
// examples/nanogpt/deploy/hardware/dgx_h100.txt.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <string>
#include <string_view>
#include <vector>

#include "fsdp/fsdp.hpp"
#include "fsdp/plan.hpp"

namespace {

using fsdp::plan::Hardware;

struct Shape {
  std::string_view name;
  int layers;
  std::int64_t width, heads, kv_heads, hidden, vocabulary;
  bool gated, tied;
};
constexpr Shape m125{"125m", 12, 768, 12, 12, 3072, 50368, false, true},
    m350{"350m", 24, 1024, 16, 16, 4096, 50368, false, true}, m760{"760m", 24, 1536, 12, 12, 6144, 50368, false, true},
    m1{"1b", 24, 2048, 16, 16, 8192, 50368, false, true}, m3{"3b", 32, 2560, 20, 20, 10240, 50368, false, true},
    m7{"7b", 32, 4096, 32, 32, 16384, 50368, false, true}, m13{"13b", 40, 5120, 40, 40, 20480, 50368, false, true},
    llama{"llama 8b", 32, 4096, 32, 8, 14336, 128256, true, false};

enum class Again { none, selective, all };
enum class Role { calibration, jitter, tested };
struct Row {
  int cluster;
  Shape const* shape;
  int gpus, batch, length, micro_steps;
  Again again;
  double published;  ///< tokens per second and GPU
  Role role;
};
constexpr std::string_view clusters[]{"A100 40GB", "H100 80GB", "H100 96GB eager", "H100 96GB compiled"};
constexpr Row rows[]{
    {0, &m125, 8, 26, 2048, 3, Again::none, 136334, Role::calibration},
    {0, &m125, 16, 26, 2048, 1, Again::none, 130535, Role::tested},
    {0, &m125, 32, 26, 2048, 1, Again::none, 127122, Role::tested},
    {0, &m125, 64, 26, 2048, 1, Again::none, 125234, Role::tested},
    {0, &m125, 128, 26, 2048, 1, Again::none, 123936, Role::jitter},
    {0, &m350, 16, 18, 2048, 1, Again::none, 55413, Role::calibration},
    {0, &m350, 32, 18, 2048, 1, Again::none, 53811, Role::tested},
    {0, &m350, 64, 18, 2048, 1, Again::none, 52689, Role::tested},
    {0, &m350, 128, 18, 2048, 1, Again::none, 51934, Role::tested},
    {0, &m760, 8, 12, 2048, 4, Again::none, 30173, Role::calibration},
    {0, &m760, 16, 12, 2048, 1, Again::none, 29607, Role::tested},
    {0, &m760, 32, 12, 2048, 1, Again::none, 29648, Role::tested},
    {0, &m760, 64, 12, 2048, 1, Again::none, 29344, Role::tested},
    {0, &m760, 128, 12, 2048, 1, Again::none, 28940, Role::tested},
    {0, &m1, 8, 8, 2048, 8, Again::none, 19271, Role::calibration},
    {0, &m1, 16, 8, 2048, 1, Again::none, 19085, Role::tested},
    {0, &m1, 32, 10, 2048, 1, Again::none, 15555, Role::calibration},
    {0, &m1, 64, 10, 2048, 1, Again::none, 19001, Role::tested},
    {0, &m1, 128, 10, 2048, 1, Again::none, 18647, Role::tested},
    {0, &m3, 8, 5, 2048, 8, Again::none, 10065, Role::calibration},
    {0, &m3, 16, 5, 2048, 1, Again::none, 9750, Role::tested},
    {0, &m3, 32, 6, 2048, 1, Again::none, 9914, Role::calibration},
    {0, &m3, 64, 6, 2048, 1, Again::none, 9736, Role::tested},
    {0, &m3, 128, 6, 2048, 1, Again::none, 9538, Role::tested},
    {0, &m7, 32, 18, 2048, 1, Again::all, 3725, Role::calibration},
    {0, &m7, 64, 18, 2048, 1, Again::all, 3665, Role::tested},
    {0, &m7, 128, 18, 2048, 1, Again::all, 3623, Role::tested},
    {0, &m13, 64, 16, 2048, 1, Again::all, 1976, Role::calibration},
    {0, &m13, 128, 16, 2048, 1, Again::all, 1972, Role::tested},
    {1, &m760, 8, 24, 2048, 2, Again::none, 63147, Role::calibration},
    {1, &m760, 16, 24, 2048, 1, Again::none, 68551, Role::tested},
    {1, &m760, 32, 24, 2048, 1, Again::none, 67971, Role::tested},
    {1, &m1, 16, 20, 2048, 1, Again::none, 46037, Role::calibration},
    {1, &m1, 32, 20, 2048, 1, Again::none, 45130, Role::tested},
    {1, &m1, 64, 20, 2048, 1, Again::none, 44402, Role::jitter},
    {1, &m3, 32, 6, 2048, 3, Again::none, 23021, Role::calibration},
    {1, &m3, 64, 6, 2048, 3, Again::none, 22525, Role::tested},
    {1, &m13, 8, 2, 2048, 1, Again::none, 4792, Role::calibration},
    {1, &m13, 16, 2, 2048, 1, Again::none, 4767, Role::tested},
    {1, &m13, 32, 2, 2048, 1, Again::none, 4811, Role::tested},
    {1, &m13, 64, 2, 2048, 1, Again::none, 4800, Role::tested},
    {2, &llama, 8, 2, 8192, 1, Again::selective, 5762, Role::calibration},
    {2, &llama, 128, 2, 8192, 1, Again::selective, 5605, Role::tested},
    {3, &llama, 8, 2, 8192, 1, Again::selective, 6667, Role::calibration},
    {3, &llama, 128, 2, 8192, 1, Again::selective, 6514, Role::tested},
};

/// Data sheets: peak, memory, NVLink in one direction, network cards of a node divided by its GPUs.
Hardware cluster(int number) {
  Hardware hardware;
  hardware.gpus_per_node = 8;
  hardware.launch = 20e-6, hardware.node_latency = 3.4e-6, hardware.network_latency = 14e-6;
  if (number == 0) {
    hardware.flops = 312e12, hardware.memory_bandwidth = 1.555e12;
    hardware.node_bandwidth = 300e9, hardware.network_bandwidth = 25e9;
  } else {
    hardware.flops = 989e12, hardware.memory_bandwidth = number == 1 ? 3.35e12 : 2.4e12;
    hardware.node_bandwidth = 450e9, hardware.network_bandwidth = 50e9;
  }
  return hardware;
}

/// A module of one matrix and a vector; only its size and work count.
struct Part {
  std::int64_t elements, norms_elements;
  fsdp::plan::Work load;

  template <class T>
  struct Params {
    fsdp::Tensor<T, 1> matrices, norms;
  };
  template <class T, class Visit>
  void describe(Params<T>& p, Visit&& tensor) const {
    tensor("matrices", p.matrices, {elements});
    tensor("norms", p.norms, {norms_elements});
  }
  fsdp::plan::Work work() const { return load; }
};

/// Tokens per second and GPU.
double throughput(Row const& row, Hardware const& hardware) {
  auto const& shape = *row.shape;
  auto const number = [](std::int64_t value) { return static_cast<double>(value); };
  auto const kv = shape.width * shape.kv_heads / shape.heads;
  auto const block = 2 * shape.width * (shape.width + kv) + (shape.gated ? 3 : 2) * shape.width * shape.hidden;
  auto const tokens = number(row.batch) * number(row.length);
  auto const stream = tokens * number(shape.width) * 2;
  auto const attention = 2 * tokens * number(row.length) * number(shape.width);  // two products, half masked
  double const flop = 2 * number(block) * tokens + attention;
  double const again = row.again == Again::all ? flop : row.again == Again::selective ? 0.25 * flop : 0;
  fsdp::plan::Work const layer{{flop, 14 * stream + 4 * tokens * number(shape.hidden)},
                               {2 * flop + 0.5 * attention + again, 24 * stream + 6 * tokens * number(shape.hidden)}};
  auto const vocabulary = shape.vocabulary * shape.width;
  auto const head = 2 * number(vocabulary) * tokens;
  fsdp::EngineOptions options;
  if (row.cluster == 0) options.reduce_dtype = fsdp::DType::bf16;  // "PURE"
  fsdp::plan::Declaration<fsdp::Bf16> declared(row.gpus, fsdp::FullShard{}, options);
  auto const root = declared.add_unit("root");
  declared.shard(Part{vocabulary, 1, {{0, 3 * stream}, {0, 6 * stream}}}, "embedding", root);
  for (int i = 0; i < shape.layers; ++i) declared.shard(Part{block, 2 * shape.width, layer}, "h." + std::to_string(i));
  // A tied head has the embedding's matrix.
  declared.shard(
      Part{vocabulary,
           1,
           {{head, tokens * number(shape.vocabulary) * 6}, {2 * head, tokens * number(shape.vocabulary) * 4}}},
      shape.tied ? "embedding" : "head", root);
  auto const input = declared.input();
  auto const forecast = fsdp::plan::forecast(fsdp::compile_program(input), input,
                                             {declared.work(), row.micro_steps, false, true}, hardware);
  return tokens * row.micro_steps / forecast.step;
}

/// The value in [low, high] for which `throughput_of(value)`, which is monotonous, is nearest to `published`.
template <class Of>
double fitted(double low, double high, double published, bool rises, Of const& throughput_of) {
  for (int i = 0; i < 40; ++i) {
    auto const middle = (low + high) / 2;
    ((throughput_of(middle) < published) == rises ? low : high) = middle;
  }
  return (low + high) / 2;
}

bool same_run(Row const& a, Row const& b) {
  return a.cluster == b.cluster && a.shape == b.shape && a.batch == b.batch && a.again == b.again;
}
/// The efficiency that the calibration row of `of` gives, with this jitter.
double efficiency(Row const& of, double jitter, Row const*& calibration) {
  for (auto const& row : rows) {
    if (row.role != Role::calibration || !same_run(row, of)) continue;
    calibration = &row;
    return fitted(0.05, 1.5, row.published, true, [&](double value) {
      auto hardware = cluster(row.cluster);
      hardware.efficiency = value, hardware.jitter = jitter;
      return throughput(row, hardware);
    });
  }
  return 1;
}
double predicted(Row const& row, double jitter, Row const*& calibration) {
  auto hardware = cluster(row.cluster);
  hardware.jitter = jitter;
  hardware.efficiency = efficiency(row, jitter, calibration);
  return throughput(row, hardware);
}

}  // namespace

int main() {
  double jitter[std::size(clusters)]{};
  Row const* calibration = nullptr;
  for (auto const& row : rows)
    if (row.role == Role::jitter)
      jitter[row.cluster] =
          fitted(0, 0.1, row.published, false, [&](double value) { return predicted(row, value, calibration); });
  for (std::size_t i = 0; i < std::size(clusters); ++i)
    std::printf("%s: jitter %.3f ms for each doubling of the nodes\n", std::string(clusters[i]).c_str(),
                1e3 * jitter[i]);
  std::printf("%-20s %-9s %5s %6s %6s | %9s %9s %7s | %9s\n", "cluster", "model", "GPUs", "batch", "steps", "published",
              "forecast", "error %", "trivial %");
  double sum = 0, worst = 0, trivial_sum = 0, trivial_worst = 0;
  int tested = 0, within = 0, trivial_within = 0;
  for (auto const& row : rows) {
    auto const tokens = predicted(row, jitter[row.cluster], calibration);
    auto const error = 100 * (tokens / row.published - 1), trivial = 100 * (calibration->published / row.published - 1);
    bool const test = row.role == Role::tested;
    std::printf("%-20s %-9s %5d %6d %6d | %9.0f %9.0f %+7.1f | %+9.1f%s\n", std::string(clusters[row.cluster]).c_str(),
                std::string(row.shape->name).c_str(), row.gpus, row.batch, row.micro_steps, row.published, tokens,
                error, trivial,
                !test                 ? " (calibration)"
                : std::abs(error) > 5 ? " MISS"
                                      : "");
    if (!test) continue;
    ++tested;
    sum += std::abs(error), worst = std::max(worst, std::abs(error)), within += std::abs(error) <= 5 ? 1 : 0;
    trivial_sum += std::abs(trivial), trivial_worst = std::max(trivial_worst, std::abs(trivial));
    trivial_within += std::abs(trivial) <= 5 ? 1 : 0;
  }
  std::printf("forecast: %d of %d tested rows within 5 %%, mean |error| %.2f %%, worst %.1f %%\n", within, tested,
              sum / tested, worst);
  std::printf("as in the calibration row: %d of %d within 5 %%, mean %.2f %%, worst %.1f %%\n", trivial_within, tested,
              trivial_sum / tested, trivial_worst);
}
