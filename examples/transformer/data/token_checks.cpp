// SPDX-License-Identifier: Apache-2.0
// Compares every token of a data set with the vocabulary, once.
#include "transformer/data/token_checks.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <filesystem>
#include <map>
#include <nlohmann/json.hpp>
#include <system_error>

#include "transformer/launch/cache_folder.hpp"
#include "transformer/launch/program.hpp"

namespace transformer {
namespace {

namespace fs = std::filesystem;
using Json = nlohmann::json;

/// A file of answers, and the file's name in it.
struct Place {
  fs::path answers;
  std::string name;
};

/// Beside the file, and in the cache folder.
std::vector<Place> places_of(fs::path const& file) {
  std::vector<Place> places{
      {file.parent_path() / fmt::format(".{}_tokens.json", program_name), file.filename().string()}};
  std::error_code error;
  auto const whole = fs::absolute(file, error).lexically_normal();
  if (auto const cache = cache_folder(); cache && !error) places.push_back({*cache / "tokens.json", whole.string()});
  return places;
}

/// A file as it was when it was opened.
Json identity_of(TokenFile const& file) {
  return {{"bytes", file.file_bytes()}, {"modified_ns", file.modified_ns()}, {"token_bytes", file.token_bytes()}};
}

}  // namespace

std::optional<std::int64_t> remembered_largest(TokenFile const& file) {
  if (file.file_bytes() < least_remembered_bytes) return std::nullopt;
  auto const wanted = identity_of(file);
  for (auto const& place : places_of(file.path())) {
    auto const answers = read_answers(place.answers);
    auto const found = answers.find(place.name);
    if (found == answers.end() || !found->is_object()) continue;
    auto answer = *found;
    auto const largest = answer.value("largest", Json());
    answer.erase("largest");
    if (answer == wanted && largest.is_number_integer()) return largest.get<std::int64_t>();
  }
  return std::nullopt;
}

void remember_largest(std::vector<CheckedFile> const& files) {
  std::map<fs::path, Json> changed;  // by file of answers
  auto const put = [&](Place const& place, CheckedFile const& checked) {
    auto& answers = changed.try_emplace(place.answers, read_answers(place.answers)).first->second;
    answers[place.name] = identity_of(*checked.file);
    answers[place.name]["largest"] = checked.largest;
  };
  std::vector<CheckedFile> kept;
  for (auto const& checked : files)
    if (checked.file->file_bytes() >= least_remembered_bytes && checked.file->is_unchanged()) kept.push_back(checked);
  for (auto const& checked : kept) put(places_of(checked.file->path())[0], checked);
  std::map<fs::path, bool> written;
  for (auto const& [file, answers] : changed) written[file] = write_answers(file, answers);
  changed.clear();
  for (auto const& checked : kept) {
    auto const places = places_of(checked.file->path());
    if (!written[places[0].answers] && places.size() > 1) put(places[1], checked);
  }
  for (auto const& [file, answers] : changed) write_answers(file, answers);
}

std::vector<std::int64_t> check_part(std::vector<TokenFile const*> const& files, std::int64_t vocab_size, int rank,
                                     int ranks, CheckProgress const& progress) {
  constexpr std::int64_t step = 4 << 20;  // tokens
  auto const bound = [&](std::int64_t size, int of) { return size / ranks * of + size % ranks * of / ranks; };
  std::uint64_t total = 0, done = 0;
  for (auto const* const file : files) total += file->file_bytes() / static_cast<std::uint64_t>(ranks);
  std::vector<std::int64_t> largest;
  for (auto const* const file : files) {
    auto const last = bound(file->size(), rank + 1);
    std::int64_t most = -1;
    for (auto first = bound(file->size(), rank); first < last; first += step) {
      auto const end = std::min(first + step, last);
      auto const found = file->largest(first, end);
      if (found >= vocab_size) file->check_ids(vocab_size, first, end);
      most = std::max(most, found);
      done += static_cast<std::uint64_t>(end - first) * file->token_bytes();
      if (progress) progress(done, total);
    }
    largest.push_back(most);
  }
  return largest;
}

}  // namespace transformer
