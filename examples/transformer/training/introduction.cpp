// SPDX-License-Identifier: Apache-2.0
#include "transformer/training/introduction.hpp"

#include <fmt/format.h>

#include <cstdio>
#include <cstdlib>
#include <thread>

#include "transformer/launch/program.hpp"
#include "transformer/report/escape.hpp"
#include "transformer/report/metrics.hpp"
#include "transformer/run/choices.hpp"

namespace transformer {

void introduce(Introduction const& about, Job const& job, Prepared const& ready) {
  auto const& s = job.settings;
  int const ranks = about.ranks;
  for (auto const& name : s.given)
    fmt::print("overriding: {} = {}\n", name, report::printable(find_setting(name)->text_of(s)));
  for (auto const& line : ready.lines) fmt::print("{}\n", report::printable(line));
  for (auto const& note : notes_on(s, ranks, job.shares_gpus)) fmt::print("{}\n", note);
  fmt::print("tokens per iteration will be: {}\n", with_commas(s.tokens_per_step()));
  fmt::print("{}, strategy {}, device {}, dtype {}", job.world_kind, about.strategy, job.device, job.dtype);
  if (ranks > 1) fmt::print(", gradients summed in {}", summed_in(s));
  fmt::print("\n");
  if (!job.dtype_note.empty()) fmt::print("note: {}\n", job.dtype_note);
  if (int const cores = static_cast<int>(std::thread::hardware_concurrency()); cores > 0 && job.threads > cores)
    fmt::print("note: each rank uses {} threads, but the machine has only {} cores\n", job.threads, cores);
  if (job.device == "cpu") {
    auto const& blas = about.blas;
    bool const wide = job.dtype == "float32";
    auto const own =
        blas.own_products ? fmt::format(", most products by AVX-512 kernels of {}'s own", program_name) : std::string();
    fmt::print("{}, {} thread{} a rank; {}: {:.1f} GFLOP/s a rank (mfu is relative to it)\n",
               wide ? fmt::format("OpenBLAS core {}{}", blas.core, own) : "products by oneDNN", job.threads,
               job.threads == 1 ? "" : "s", ready.peak.source, ready.peak.flops / ranks / 1e9);
    if (wide && blas.wider_idle)
      fmt::print("warning: this processor has AVX-512, but OpenBLAS runs its '{}' kernels: {}\n", blas.core,
                 std::getenv("OPENBLAS_CORETYPE") != nullptr ? "unset OPENBLAS_CORETYPE, or set it to SkylakeX"
                                                             : "set OPENBLAS_CORETYPE=SkylakeX");
  }
  if (job.device != "cpu")
    fmt::print("mfu is relative to the {}: {:.1f} TFLOP/s for all ranks\n", ready.peak.source, ready.peak.flops / 1e12);
  if (!ready.dataset) fmt::print("there is no data/{}: the batches are random tokens\n", s.dataset);
  fmt::print("{}", report::printable(about.start));
  for (auto const split : {Split::train, Split::val}) {
    if (!ready.dataset) continue;
    auto const files = ready.dataset->split(split).files();
    if (files.empty() || (files.size() == 1 && s.train_data.empty() && s.val_data.empty())) continue;
    fmt::print("{} tokens: {}, in {}\n", name(split), with_commas(ready.dataset->split(split).size()),
               files.size() == 1 ? fmt::format("'{}'", files[0].path().string())
                                 : fmt::format("{} files, '{}' to '{}'", files.size(), files.front().path().string(),
                                               files.back().path().string()));
  }
  if (auto const* const rows = ready.dataset ? ready.dataset->rows(Split::train) : nullptr) {
    fmt::print("train documents: {}, a row each\n", with_commas(rows->size()));
    if (auto const cut = rows->count_cut(s.block_size); cut > 0)
      fmt::print("note: {} of them {} more than {} tokens (block_size) and {} cut\n", with_commas(cut),
                 cut == 1 ? "has" : "have", s.block_size, cut == 1 ? "is" : "are");
  }
  if (ready.dataset && ready.dataset->meta.path.empty())
    fmt::print("no meta.json: vocabulary of {} ({})\n", about.vocab_size,
               about.vocab_size == Meta{}.vocab_size ? "GPT-2's 50257, padded" : "the model's");
  if (ready.dataset && !ready.dataset->meta.path.empty())
    fmt::print("found vocab_size = {} (inside {})\n", ready.dataset->meta.vocab_size,
               ready.dataset->meta.path.string());
  fmt::print("number of parameters: {:.2f}M\n", static_cast<double>(about.parameters) / 1e6);
  auto const trained = about.decayed.elements + about.others.elements;
  if (trained < about.elements)
    fmt::print("fine-tuning: {} of {} parameters train ({:.2f} %)\n", with_commas(trained), with_commas(about.elements),
               100.0 * static_cast<double>(trained) / static_cast<double>(about.elements));
  fmt::print("num decayed parameter tensors: {}, with {} parameters\n", about.decayed.tensors,
             with_commas(about.decayed.elements));
  fmt::print("num non-decayed parameter tensors: {}, with {} parameters\n", about.others.tensors,
             with_commas(about.others.elements));
  std::fflush(stdout);
}

}  // namespace transformer
