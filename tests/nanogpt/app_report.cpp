// SPDX-License-Identifier: Apache-2.0
// A run's log, whatever has happened to it, and the page that is made of it, whatever stands in it.
// links: transformer_report
// skip-tsan
#include <fcntl.h>
#include <fmt/format.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cmath>
#include <csignal>
#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <limits>
#include <nlohmann/json.hpp>
#include <regex>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

#include "fsdp/trace.hpp"
#include "tests/catch.hpp"
#include "tests/nanogpt/well_formed.hpp"
#include "tests/support/messages.hpp"
#include "tests/support/temporary_folder.hpp"
#include "transformer/report/chart.hpp"
#include "transformer/report/csv.hpp"
#include "transformer/report/curves.hpp"
#include "transformer/report/escape.hpp"
#include "transformer/report/jump_watch.hpp"
#include "transformer/report/log_lines.hpp"
#include "transformer/report/log_reader.hpp"
#include "transformer/report/memory_bars.hpp"
#include "transformer/report/notes.hpp"
#include "transformer/report/output.hpp"
#include "transformer/report/page.hpp"
#include "transformer/report/scale.hpp"
#include "transformer/report/sections.hpp"
#include "transformer/report/timeline.hpp"
#include "transformer/report/trace_reader.hpp"
#include "transformer/training/skipped_steps.hpp"

namespace {

using namespace transformer;
using fsdp::testing::has;
using fsdp::testing::TemporaryFolder;
using fsdp::testing::what;
using nanogpt::testing::XmlCheck;
using report::Material;
using report::Run;

std::string contents(std::filesystem::path const& path) {
  std::ifstream stream(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(stream), {}};
}

Run run_of(std::string const& log) {
  std::istringstream stream(log);
  return report::read_log(stream);
}

std::string iteration(std::int64_t number, double loss) {
  return log_line(IterationReport{number, loss, 0.01, 0.5, 1e-3, 1.0, 1e4, 0}) + "\n";
}
std::string start(std::int64_t number, bool resumed) {
  RunHeader header;
  header.iteration = number;
  header.resumed = resumed;
  return log_line(header) + "\n";
}

/// Text that `action` writes to stderr.
template <class Action>
std::string errors_of(TemporaryFolder const& folder, Action&& action) {
  auto const file = folder.path / "errors";
  int const before = ::dup(STDERR_FILENO), to = ::open(file.c_str(), O_CREAT | O_TRUNC | O_WRONLY, 0600);
  ::dup2(to, STDERR_FILENO);
  action();
  ::dup2(before, STDERR_FILENO);
  ::close(to);
  ::close(before);
  return contents(file);
}

/// Two ranks, two units: communication from 0 to 10 us, compute from 4 to 8, in each of two steps.
std::vector<std::vector<fsdp::TraceSpan>> two_ranks(std::string const& unit) {
  std::vector<std::vector<fsdp::TraceSpan>> ranks(2);
  for (auto& spans : ranks)
    for (std::int64_t step = 7; step < 9; ++step) {
      auto const base = 1000 + (step - 7) * 20'000;
      spans.push_back({unit, "all-gather", "forward", fsdp::StreamKind::gather, 64, step, base, base + 10'000});
      spans.push_back({unit, "forward", "forward", fsdp::StreamKind::compute, 0, step, base + 4000, base + 8000});
    }
  return ranks;
}
report::Trace trace_of(std::string const& json) {
  std::istringstream stream(json);
  auto trace = report::read_trace(stream);
  REQUIRE(trace);
  return *trace;
}

constexpr char const* hostile_text = "</script><script>alert(1)</script>\"'&<b>\x01 ]]> \xe2\x80\xae";
constexpr char const* hostile = "</script><script>alert(1)</script>\"'&<b>\x01 ]]> \xff \xe2\x80\xae";

/// As a log gives it back: JSON is UTF-8.
constexpr char const* hostile_text_logged =
    "</script><script>alert(1)</script>\"'&<b>\x01 ]]> \xef\xbf\xbd \xe2\x80\xae";

/// A run in which every text is hostile.
Material hostile_material() {
  RunHeader header;
  header.settings = {{"strategy", hostile, true}, {"start", hostile, false}, {"n_layer", hostile, true}};
  header.environment = {{hostile, hostile}, {"ranks", hostile}, {"device", hostile}};
  header.program = hostile;
  header.plan = {{fsdp::MemoryTag::parameters, 100}};
  header.trace = "/nowhere/trace.json";
  auto run = run_of(log_line(header) + "\n" + iteration(0, 4.0) + iteration(1, 3.0) +
                    log_line(EvaluationReport{1, 3.5, 3.6, 1e-3, -1}) + "\n" +
                    log_line_of_memory(1, {pack(RankMemory{{100, 100, 200, 50, 50, 400, 10, 8, 0}, 300})}) + "\n");
  run.name = hostile;
  run.stopped = hostile;
  run.header.started = hostile;
  return {run, trace_of(fsdp::chrome_trace(two_ranks(hostile_text)))};
}

void expect_whole(std::vector<Material> const& materials) {
  XmlCheck const page(report::page(materials));
  CHECK(page.fault() == "");
  CHECK(page.count("script") == 1);
  CHECK(page.count("b") == 0);
  XmlCheck const picture(report::overview(materials[0]));
  CHECK(picture.fault() == "");
  CHECK(picture.count("script") == 0);
}

}  // namespace

TEST_CASE("lines that are torn, foreign or repeated do not confuse the reader") {
  auto const log =
      start(0, false) + iteration(0, 4.0) + iteration(1, 3.5) + iteration(2, 3.0) + R"({"kind":"iter","iter":3,"lo)" +
      "\n" + start(2, true) + iteration(2, 2.5) +
      "7\nnull\n[1]\n{\"kind\":\"iter\"}\n{\"kind\":\"iter\",\"iter\":-1}\n{\"kind\":\"iter\",\"iter\":1e300}\n\n" +
      log_line(EvaluationReport{2, 2.0, 2.1, 1e-3, -1}) + "\n" + log_line(EvaluationReport{2, 1.0, 1.1, 1e-3, -1}) +
      "\n" + R"({"kind":"iter","iter":3,"loss":1.0)";
  auto const run = run_of(log);
  REQUIRE(run.iterations.size() == 3);
  CHECK(run.iterations[0].loss == 4.0);
  CHECK(run.iterations[2].iteration == 2);
  CHECK(run.iterations[2].loss == 2.5);  // the last that was said of it
  REQUIRE(run.evaluations.size() == 1);
  CHECK(run.evaluations[0].val_loss == 1.1);
  CHECK(run.unread == 8);
  CHECK(run.starts == 2);
  CHECK(run.stopped.empty());
}

TEST_CASE("a start from scratch begins another run") {
  auto const run =
      run_of(start(0, false) + iteration(0, 4.0) + iteration(1, 3.5) + start(0, false) + iteration(0, 4.5));
  REQUIRE(run.iterations.size() == 1);
  CHECK(run.iterations[0].loss == 4.5);
  CHECK(run.earlier == 1);
  CHECK(run.starts == 1);
}

TEST_CASE("a start that resumes belongs to the run that has saved its checkpoint") {
  auto const begins = [](std::string const& id, std::int64_t first, std::string const& from) {
    return fmt::format(R"({{"kind":"run","id":"{}","iter":{},"resumed":{},"from":{}}})", id, first, !from.empty(),
                       from.empty() ? "null" : '"' + from + '"') +
           "\n";
  };
  auto const old = begins("a", 0, "") + iteration(0, 4.0) + iteration(1, 3.5) + begins("b", 2, "a") + iteration(2, 3.0);
  auto const abandoned = begins("c", 0, "") + iteration(0, 9.0) + iteration(1, 9.0) + iteration(2, 9.0);
  for (auto const* const from : {"a", "b"}) {
    auto const run = run_of(old + abandoned + begins("d", 2, from) + iteration(2, 2.5) + iteration(3, 2.0));
    REQUIRE(run.iterations.size() == 4);
    CHECK(run.iterations[0].loss == 4.0);
    CHECK(run.iterations[2].loss == 2.5);
    CHECK(run.starts == 3);
    CHECK(run.earlier == 1);
  }
  // A checkpoint of the new run, of one that the log does not know, or of nobody: the last run goes on.
  for (auto const* const from : {"c", "elsewhere"}) CHECK(run_of(old + abandoned + begins("d", 2, from)).starts == 2);
  CHECK(run_of(old + abandoned + start(2, true)).starts == 2);
}

TEST_CASE("numbers that are none are gaps, and so are those that JSON lacks") {
  auto const run = run_of(iteration(0, std::nan("")) + R"({"kind":"iter","iter":1,"loss":"low","lr":{}})" + "\n");
  REQUIRE(run.iterations.size() == 2);
  CHECK(std::isnan(run.iterations[0].loss));
  CHECK(std::isnan(run.iterations[1].loss));
  CHECK(std::isnan(run.iterations[1].learning_rate));
}

TEST_CASE("what a log says of a run is read back") {
  RunHeader header;
  header.iteration = 5;
  header.settings = {{"n_layer", "3", true}, {"start", hostile, false}};
  header.environment = {{"device", "cpu"}};
  header.ranks = 2;
  header.program = "forward a\nbackward a\n";
  header.model = {{"n_layer", 3}, {"parameters", 1'234'567}};
  header.plan = {{fsdp::MemoryTag::gather, 1234}};
  header.trace = "t.json";
  RankMemory memory;
  memory.reserved[static_cast<std::size_t>(fsdp::MemoryTag::optimizer)] = 77;
  memory.peak_state = 99;
  auto const run = run_of(log_line(header) + "\n" + log_line_of_memory(1, {pack(memory), pack(memory)}) + "\n" +
                          log_line_of_stop(9, "max_iters") + "\n");
  CHECK(run.header.setting("n_layer") == "3");
  CHECK(run.header.given == std::vector<std::string>{"n_layer"});
  CHECK(run.header.ranks == 2);
  CHECK(run.header.parameters == 1'234'567);
  CHECK(run.header.program == header.program);
  CHECK(run.header.plan[static_cast<std::size_t>(fsdp::MemoryTag::gather)] == 1234);
  REQUIRE(run.traces.size() == 1);
  CHECK(run.traces[0].file == "t.json");
  CHECK(run.traces[0].run_id == run_id());
  CHECK(run.traces[0].ranks == 2);
  REQUIRE(run.memory.size() == 2);
  CHECK(run.memory[1].reserved[static_cast<std::size_t>(fsdp::MemoryTag::optimizer)] == 77);
  CHECK(run.memory[1].peak_state == 99);
  CHECK(run.stopped == "max_iters");
  CHECK(run.unread == 0);
}

TEST_CASE("a loss or a norm that jumps is told once, and an ordinary training is quiet") {
  JumpWatch losses{1.2}, norms{5};
  std::vector<Jump> told;
  auto const enter = [&](std::int64_t i, double loss, double norm) {
    if (auto const jump = losses.add(i, loss)) told.push_back(*jump);
    if (auto const jump = norms.add(i, norm)) told.push_back(*jump);
  };
  // Early training: the loss falls, with noise; the norm begins high, falls and grows again.
  for (std::int64_t i = 0; i < 1000; ++i) {
    double const x = static_cast<double>(i), noise = std::sin(x * 12.9) * std::cos(x * 4.1);
    enter(i, 1.5 + 3 * std::exp(-x / 200) + 0.1 * noise, 0.5 + 3 * std::exp(-x / 30) + x / 500 + 0.4 * noise);
  }
  CHECK(told.empty());
  enter(1000, 2.4, 2.5);
  REQUIRE(told.size() == 1);
  CHECK(told[0].iteration == 1000);
  CHECK(told[0].value == 2.4);
  CHECK(told[0].of == 100);
  CHECK(has(text_of(told[0], "loss"),
            "note: iteration 1000: the loss jumps to 2.4000, the median of the last 100 is 1.5"));
  enter(1001, 2.5, 20);  // the loss is still above: told before
  REQUIRE(told.size() == 2);
  CHECK(told[1].value == 20);
  enter(1002, 1.5, 2.5);
  enter(1003, 2.4, 2.5);
  CHECK(told.size() == 3);

  JumpWatch noisy{1.2};  // half the readings are far from the median: twice the median says nothing
  for (std::int64_t i = 0; i < 200; ++i)
    CHECK(!noisy.add(i, i % 7 == 0 ? 4.0 : 2.0 + 0.3 * static_cast<double>(i % 5)));
  JumpWatch calm{1.2};  // far above by deviations, but not by much
  for (std::int64_t i = 0; i < 200; ++i) CHECK(!calm.add(i, i == 199 ? 2.3 : 2 + 0.001 * static_cast<double>(i % 5)));
  JumpWatch young{1.2};  // too few to tell
  for (std::int64_t i = 0; i < 20; ++i) CHECK(!young.add(i, i == 19 ? 100 : 2 + 0.01 * static_cast<double>(i % 3)));
}

TEST_CASE("a line begins on its own after one that was torn, and nothing of old is lost") {
  TemporaryFolder const folder;
  auto const file = folder.file("log.jsonl", "{\"kind\":\"iter\",\"iter\":0,\"loss\":4.0}\n{\"kind\":\"it");
  { LogFile(file).write("{\"kind\":\"iter\",\"iter\":1,\"loss\":3.0}"); }
  { LogFile(file).write("{\"kind\":\"iter\",\"iter\":2,\"loss\":2.0}"); }
  auto const run = report::read_run(folder.path);
  REQUIRE(run.iterations.size() == 3);
  CHECK(run.iterations[1].loss == 3.0);
  CHECK(run.unread == 1);
  CHECK(!has(contents(file), "\n\n"));
}

TEST_CASE("a log that cannot grow is said once and ends nothing") {
  TemporaryFolder const folder;
  auto const file = folder.file("log.jsonl", std::string(65535, ' ') + '\n');
  auto* const before = std::signal(SIGXFSZ, SIG_IGN);
  rlimit limit{}, unlimited{};
  REQUIRE(::getrlimit(RLIMIT_FSIZE, &unlimited) == 0);
  limit = {65536, unlimited.rlim_max};
  auto const said = errors_of(folder, [&] {
    LogFile log(file);
    ::setrlimit(RLIMIT_FSIZE, &limit);
    for (int i = 0; i < 3; ++i) log.write("{}");
    ::setrlimit(RLIMIT_FSIZE, &unlimited);
  });
  std::signal(SIGXFSZ, before);
  CHECK(has(said, "log.jsonl' cannot be written: File too large; training goes on"));
  CHECK(said.find("cannot be written") == said.rfind("cannot be written"));
}

TEST_CASE("a log is a file: no link is followed, and no reader of a pipe is waited for") {
  TemporaryFolder const folder;
  auto const victim = folder.file("victim", "precious"), file = folder.path / "log.jsonl";
  auto const refused = [&] {
    CHECK(
        has(what([&] { LogFile const log(file); }), "log.jsonl' cannot be written: it is a link, a pipe or a device"));
    std::filesystem::remove(file);
  };
  std::filesystem::create_symlink(victim, file);
  refused();
  std::filesystem::create_symlink(folder.path / "nowhere", file);
  refused();
  REQUIRE(::mkfifo(file.c_str(), 0600) == 0);
  CHECK(has(what([&] { static_cast<void>(report::read_run(folder.path)); }), "expected the out_dir"));
  CHECK_FALSE(was_abandoned(file, "id"));
  refused();
  CHECK(contents(victim) == "precious");
  CHECK_FALSE(std::filesystem::exists(folder.path / "nowhere"));
}

TEST_CASE("the reason for a stop is a JSON text, whatever stands in it") {
  auto const object = nlohmann::json::parse(log_line_of_stop(3, "tensor \"a\"\x1b\n"));
  CHECK(object["why"] == "tensor \"a\"\x1b\n");
  CHECK(log_line_of_stop(3, "max_iters").starts_with(R"({"kind":"stop","iter":3,"why":"max_iters","at":")"));
}

TEST_CASE("steps that are skipped in a row are counted, also where not every norm is read") {
  double const infinity = std::numeric_limits<double>::infinity();
  SkippedSteps every;  // reading
  every.add(1, 1, 0);
  for (std::int64_t step = 1; step <= 3; ++step) {
    every.add(infinity, 1, step);
    CHECK(every.in_a_row() == step);
  }
  every.add(2, 1, 0);
  CHECK(every.in_a_row() == 0);
  every.add(std::numeric_limits<double>::quiet_NaN(), 1, 4);
  CHECK(every.in_a_row() == 1);
  SkippedSteps tenth;
  tenth.add(infinity, 10, 10);  // from the first step on
  CHECK(tenth.in_a_row() == 10);
  tenth.add(infinity, 10, 20);
  CHECK(tenth.in_a_row() == 20);
  tenth.add(infinity, 10, 29);  // one of these was taken
  CHECK(tenth.in_a_row() == 1);
  tenth.add(1, 10, 0);
  tenth.add(infinity, 10, 39);  // ten since 29, but when is not known
  CHECK(tenth.in_a_row() == 1);
  tenth.add(infinity, 10, 49);
  CHECK(tenth.in_a_row() == 11);
}

TEST_CASE("a log that cannot be opened, or is none, is an error by its name") {
  TemporaryFolder const folder;
  CHECK(has(what([&] { LogFile const log(folder.path / "no" / "log.jsonl"); }), "log.jsonl' cannot be written"));
  CHECK(has(what([&] { static_cast<void>(report::read_run(folder.path)); }), "expected the out_dir"));
  folder.file("log.jsonl", "nothing\n");
  CHECK(has(what([&] { static_cast<void>(report::read_run(folder.path)); }), "is not the log of a training run"));
}

TEST_CASE("no text controls the terminal") {
  CHECK(report::printable("plain \t\n \xe2\x82\xac \xf0\x9f\x98\x80") == "plain \t\n \xe2\x82\xac \xf0\x9f\x98\x80");
  CHECK(report::printable("\x1b]0;title\x07\r\x7f") == "\\x1b]0;title\\x07\\x0d\\x7f");
  CHECK(report::printable("\xc2\x9b"
                          "31m \x9b \xff") ==
        "\\xc2\\x9b"
        "31m \\x9b \\xff");
  CHECK(report::printable(std::string(1, '\0')) == "\\x00");
}

TEST_CASE("no text becomes markup") {
  CHECK(report::escaped("<a href=\"x\">&'") == "&lt;a href=&quot;x&quot;&gt;&amp;&#39;");
  CHECK(report::escaped(std::string("a\0b\x1b\x7f\xff\xed\xa0\x80\xef\xbf\xbf", 11))
            .find_first_of(std::string("\0\x1b\x7f\xff", 4)) == std::string::npos);
  CHECK(report::escaped("\xe2\x82\xac \xf0\x9f\x98\x80") == "\xe2\x82\xac \xf0\x9f\x98\x80");
  CHECK(report::script_text("</script>\"\\\n\xf0\x9f\x98\x80") ==
        "\"\\u003c/script\\u003e\\u0022\\u005c\\u000a\\ud83d\\ude00\"");
  auto const material = hostile_material();
  expect_whole({material});
  expect_whole({material, material});
  auto const page = report::page({material});
  CHECK(!has(page, "<script>alert"));
  CHECK(!has(page, "]]>"));
}

TEST_CASE("a page asks no network for anything") {
  auto const page = report::page({hostile_material()});
  for (std::size_t at = page.find("://"); at != std::string::npos; at = page.find("://", at + 1))
    CHECK(has(page.substr(at, 23), "://www.w3.org/"));  // names of XML's vocabularies, which nobody fetches
  CHECK(has(page, "default-src 'none'"));
}

TEST_CASE("runs with little in them, or nothing that can be drawn, have whole pages") {
  std::vector<std::string> const logs{
      start(0, false),
      iteration(0, 4.0),
      start(3, true) + iteration(3, 4.0),
      iteration(0, std::nan("")) + iteration(1, std::nan("")),
      iteration(0, 1e308) + iteration(1, -1e308) + iteration(2, 1e-310) + iteration(3, 0.0),
      iteration(0, 1e-90) + iteration(999'999'999'999'999, 1e90),
      iteration(0, 2.0) + iteration(1, std::nan("")) + iteration(2, 2.0),
      log_line(EvaluationReport{0, 4.0, 4.1, 0, -1}) + "\n",
      R"({"kind":"memory","iter":0,"ranks":[{},7,{"parameters":9e18,"gather":9e18,"reduce":-5}]})"
      "\n" +
          iteration(0, 1),
  };
  for (auto const& log : logs) {
    INFO(log);
    expect_whole({{run_of(log), {}}});
    auto const page = report::page({{run_of(log), {}}, {run_of(logs[0]), {}}});
    CHECK(XmlCheck(page).fault() == "");
    CHECK(!has(page, "\"nan"));
    CHECK(!has(page, "inf\""));
  }
}

TEST_CASE("a hundred thousand iterations make a page of a few hundred points, with the lowest and the highest") {
  Run run;
  report::Points points;
  for (std::int64_t i = 0; i < 100'000; ++i) {
    double const loss = i == 54'321 ? 9.0 : i == 76'543 ? 0.5 : 3.0 + 0.1 * std::sin(static_cast<double>(i));
    points.push_back({static_cast<double>(i), loss});
    auto& row = run.iterations.emplace_back();
    row.iteration = i;
    row.loss = row.tokens_per_second = row.learning_rate = loss;
  }
  auto const fewer = report::downsampled(points, 600);
  CHECK(fewer.size() <= 600);
  report::Range range;
  double before = -1;
  for (auto const& point : fewer) {
    range.add(point.y);
    CHECK(point.x > before);
    before = point.x;
  }
  CHECK(range.low == 0.5);
  CHECK(range.high == 9.0);
  CHECK(report::page({{run, {}}}).size() < 300'000);
  range.add(1e308);  // with which no axis can count
  CHECK(range.high == 9.0);
}

TEST_CASE("means have as many neighbours on either side, and no gap in them") {
  double const gap = report::unknown;
  auto const means = report::smoothed({{0, 1}, {1, 4}, {2, 7}, {3, gap}, {4, 5}, {5, 9}}, 2);
  CHECK(means[0].y == 1);
  CHECK(means[1].y == 4);
  CHECK(means[2].y == 7);
  CHECK(std::isnan(means[3].y));
  CHECK(means[4].y == 5);
  CHECK(report::smoothed({{0, 1}, {1, 4}, {2, 10}}, 2)[1].y == 5);
}

TEST_CASE("ticks are round, few, and within the axis") {
  auto const texts = [](double low, double high, bool logarithmic) {
    std::string joined;
    for (auto const& tick : report::ticks({low, high, false}, logarithmic, 5)) {
      CHECK(tick.value >= low * (1 - 1e-9));
      CHECK(tick.value <= high * (1 + 1e-9));
      joined += (joined.empty() ? "" : " ") + tick.text;
    }
    return joined;
  };
  CHECK(texts(0, 300, false) == "0 100 200 300");
  CHECK(texts(1.45, 4.3, false) == "2 3 4");
  CHECK(texts(0, 43'000, false) == "0 10k 20k 30k 40k");
  CHECK(texts(0.1, 2000, true) == "0.1 1 10 100 1,000");
  CHECK(texts(0, 6e-5, false) == "0 2e-05 4e-05 6e-05");
  CHECK(texts(1, 1e90, true).size() < 60);
  CHECK(report::bytes_text(1'608'192) == "1.61 MB");
  CHECK(report::bytes_text(23'999'999) == "24 MB");
  CHECK(report::total_bytes({9'000'000'000'000'000'000, 9'000'000'000'000'000'000}) == 0);
  CHECK(report::total_bytes({1, 2, 3, 4, 5, 6, 7, 8, 9}) == 45);
  CHECK(report::planned_bytes({1, 2, 3, 4, 5, 6, 7, 8, 9}) == 15);
  CHECK(report::number_text(1250) == "1,250");
}

TEST_CASE("a trace is read back, whole or cut short, and no more of it than was asked for") {
  auto const ranks = two_ranks("h.0");
  auto const json = fsdp::chrome_trace(ranks);
  auto const trace = trace_of(json);
  REQUIRE(trace.ranks.size() == 2);
  CHECK(trace.spans == 8);
  CHECK(!trace.cut);
  auto const& span = trace.ranks[1][0];
  CHECK(span.unit == "h.0");
  CHECK(span.what == "all-gather");
  CHECK(span.pass == "forward");
  CHECK(span.kind == fsdp::StreamKind::gather);
  CHECK(span.step == 7);
  CHECK(span.end_ns - span.begin_ns == 10'000);

  CHECK(trace_of(json.substr(0, json.size() * 3 / 4)).cut);
  std::istringstream again(json);
  auto const part = report::read_trace(again, {3, 1024});
  REQUIRE(part);
  CHECK(part->spans == 3);
  CHECK(part->cut);
  for (auto const* const text : {"", "{}", "[]", "nothing", R"({"traceEvents":[{"ph":"X","pid":1e99,"tid":0}]})"}) {
    std::istringstream stream(text);
    CHECK(!report::read_trace(stream));
  }
}

TEST_CASE("a step of middle length is drawn, and what compute does not hide is counted") {
  auto ranks = two_ranks("h.0");
  auto const trace = trace_of(fsdp::chrome_trace(ranks));
  auto const step = report::typical_step(trace);
  CHECK(step.step == 7);
  CHECK(step.end_ns - step.begin_ns == 10'000);
  for (auto& spans : ranks)
    spans.push_back({"h.0", "forward", "forward", fsdp::StreamKind::compute, 0, 9, 60'000, 99'000});
  CHECK(report::typical_step(trace_of(fsdp::chrome_trace(ranks))).step == 8);
  ranks[0].push_back({"h.0", "forward", "forward", fsdp::StreamKind::compute, 0, 10, 99'000, 99'100});
  CHECK(report::typical_step(trace_of(fsdp::chrome_trace(ranks))).step == 8);  // rank 1 knows nothing of 10
  auto const share = report::exposed_communication({Run{}, trace});
  REQUIRE(share);
  CHECK(std::abs(*share - 0.6) < 1e-9);
  auto const page = report::page({{run_of(iteration(7, 3.0)), trace}});
  CHECK(has(page, " ms a step (60 % of it): "));
  CHECK(has(page, " ms after the last backward (unavoidable), "));
  auto const svg = report::timeline_svg(step, 1000);
  CHECK(XmlCheck(svg).fault() == "");
  CHECK(has(svg, "class=\"moved\""));
  CHECK(has(svg, "class=\"exposed\""));
  CHECK(has(svg, "class=\"gap\""));
}

TEST_CASE("a timeline has no more boxes than pixels can show") {
  report::Trace trace;
  trace.ranks.resize(100);
  for (auto& spans : trace.ranks)
    for (std::int64_t i = 0; i < 3000; ++i)
      spans.push_back({"u", "forward", "forward", fsdp::StreamKind::compute, 0, 1, i * 100, i * 100 + 50});
  auto const svg = report::timeline_svg(report::typical_step(trace), 500);
  XmlCheck const check(svg);
  CHECK(check.fault() == "");
  CHECK(check.count("rect") < 8 * 1000);
  CHECK(has(svg, "opacity=\"0.5"));  // half of the time is computed
  CHECK(has(svg, ">rank 7<"));
  CHECK(!has(svg, ">rank 8<"));
}

TEST_CASE("a page goes where a link leads, and into a pipe, and takes the place of neither") {
  TemporaryFolder const folder;
  auto const target = folder.file("target.html", "an older page, and a longer one"), link = folder.path / "link.html";
  std::filesystem::create_symlink("target.html", link);
  report::write_output(link, "page");
  CHECK(std::filesystem::is_symlink(link));
  CHECK(contents(target) == "page");
  std::filesystem::remove(target);
  report::write_output(link, "again");  // of a link that leads nowhere yet, too
  CHECK(contents(target) == "again");

  auto const pipe = folder.path / "pipe";
  REQUIRE(::mkfifo(pipe.c_str(), 0600) == 0);
  int const reader = ::open(pipe.c_str(), O_RDONLY | O_NONBLOCK);
  report::write_output(pipe, "page");
  std::string read(16, '\0');
  auto const bytes = ::read(reader, read.data(), read.size());
  ::close(reader);
  CHECK(bytes == 4);
  CHECK(std::filesystem::is_fifo(pipe));

  report::write_output(target, "new");
  CHECK(contents(target) == "new");
  report::replace_file(link, "page");  // of a name that nobody has chosen
  CHECK(std::filesystem::is_regular_file(std::filesystem::symlink_status(link)));
  CHECK(contents(link) == "page");
  CHECK(contents(target) == "new");
  CHECK(has(what([&] { report::write_output(folder.path, "page"); }), "cannot be written: Is a directory"));
}

TEST_CASE("a page that a device does not take is an error by its name") {
  if (!std::filesystem::exists("/dev/full")) return;
  TemporaryFolder const folder;
  auto const link = folder.path / "page.html";
  std::filesystem::create_symlink("/dev/full", link);
  CHECK_THROWS_AS(report::write_output(link, "page"), fsdp::ResourceError);
  CHECK(has(what([&] { report::write_output(link, std::string(100'000, 'p')); }),
            "page.html' cannot be written: No space left on device"));
  CHECK(std::filesystem::is_symlink(link));
}

TEST_CASE("a run that was resumed has the memory of the start that took most") {
  auto const memory = [](std::int64_t bytes) {
    return log_line_of_memory(1, {pack(RankMemory{{bytes}, 0}), pack(RankMemory{{bytes / 2}, 0})}) + "\n";
  };
  auto run = run_of(start(0, false) + memory(9'000'000) + start(0, false) + memory(7'000'000) + start(2, true) +
                    iteration(2, 3.0) + memory(4'000'000));
  CHECK(report::figures_of(run).memory == 7'000'000);  // 9 MB were another run's
  CHECK(report::total_bytes(run.memory[0].reserved) == 4'000'000);
  CHECK(has(report::tiles({run, {}}), "7 MB"));
  CHECK(has(report::tiles({run, {}}), "largest of the ranks and starts"));
  CHECK(has(report::run_table({{run, {}}, {run, {}}}), "7 MB"));
}

TEST_CASE("a training loss is told with the iteration that it is of") {
  auto const run = run_of(start(0, false) + iteration(19, 4.0) + iteration(20, 3.5) + start(21, true) +
                          log_line(EvaluationReport{21, 2.0, 2.1, 1e-3, -1}) + "\n");
  auto const tiles = report::tiles({run, {}});
  CHECK(has(tiles, "3.5<small>at iteration 20<"));
  CHECK(!has(tiles, "3.5<small>at iteration 21<"));
}

namespace {

/// Ten iterations of 8 tokens and half a second each, then a resumption at iteration 5 with 16 tokens an iteration.
std::string resumed_log() {
  auto const begin = [](std::int64_t first, bool resumed, char const* batch) {
    RunHeader header;
    header.iteration = first;
    header.resumed = resumed;
    header.settings = {
        {"gradient_accumulation_steps", "2", false}, {"batch_size", batch, true}, {"block_size", "4", true}};
    return log_line(header) + "\n";
  };
  auto const row = [](std::int64_t number, double total) {
    return log_line(IterationReport{number, 3, 0.5, 0.5, 1e-3, total, 16, 0, 0.25}) + "\n";
  };
  auto log = begin(0, false, "1") + log_line(EvaluationReport{0, 4.0, 4.1, 1e-3, -1}) + "\n";
  for (std::int64_t i = 0; i < 10; ++i) log += row(i, 0.5 * static_cast<double>(i + 1));
  log += log_line(Jump{9, 9, 3, 20}, "loss") + "\n" + begin(5, true, "2");
  for (std::int64_t i = 5; i < 9; ++i) log += row(i, 0.5 * static_cast<double>(i - 4));
  return log + log_line(EvaluationReport{9, 2.0, 2.1, 1e-3, -1}) + "\n";
}

}  // namespace

TEST_CASE("tokens and time go on where a run is resumed, and a page is drawn by them too") {
  auto const run = run_of(resumed_log());
  REQUIRE(run.iterations.size() == 10);
  CHECK(run.iterations[0].tokens == 0);
  CHECK(run.iterations[4].tokens == 4 * 8);
  CHECK(run.iterations[5].tokens == 5 * 8);
  CHECK(run.iterations[8].tokens == 5 * 8 + 3 * 16);
  CHECK(run.iterations[4].seconds == 2.5);
  CHECK(run.iterations[5].seconds == 3);  // 5 to 9 of the first start are lost, and their time with them
  CHECK(run.iterations[8].seconds == 4.5);
  REQUIRE(run.evaluations.size() == 2);
  CHECK(run.evaluations[0].seconds == 0);
  CHECK(run.evaluations[1].tokens == 5 * 8 + 4 * 16);
  CHECK(run.evaluations[1].seconds == 4.5);
  CHECK(run.iterations[8].gradient_norm == 0.25);
  CHECK(run.jumps.empty());  // of an iteration that is done again

  auto const page = report::page({{run, {}}});
  for (auto const* const id : {"by-iterations", "by-tokens", "by-time", "y-linear", "y-log"})
    CHECK(has(page, std::string("id=\"") + id));
  CHECK(has(page, "Loss, nats per token, by seconds"));
  CHECK(has(page, "Gradient norm, before clipping, by tokens"));
  CHECK(XmlCheck(page).fault() == "");
  CHECK(!has(page, "http-equiv=\"refresh\""));
  CHECK(has(report::page({{run, {}}}, 5), "<meta http-equiv=\"refresh\" content=\"5\"/>"));
  auto const old = report::page({{run_of(iteration(1, 4.0) + iteration(2, 3.0)), {}}});  // a log without settings
  CHECK(!has(old, "id=\"by-tokens\""));
}

TEST_CASE("a scale that is logarithmic has equal ratios at equal distances") {
  auto const run = run_of(iteration(0, 8.0) + iteration(1, 4.0) + iteration(2, 2.0));
  auto const chart = report::loss_chart({&run});
  auto const heights = [&](bool logarithmic) {
    auto const text = report::svg(chart, {1000, 300}, "id", {report::Axis::iterations, logarithmic});
    std::vector<double> found;
    std::regex const point("[ML][0-9.]+ ([0-9.]+)");
    for (std::sregex_iterator at(text.begin(), text.end(), point), end; at != end; ++at)
      found.push_back(std::stod((*at)[1]));
    return found;
  };
  auto const log = heights(true), linear = heights(false);
  REQUIRE(log.size() >= 3);
  REQUIRE(linear.size() >= 3);
  CHECK(std::abs((log[1] - log[0]) - (log[2] - log[1])) < 0.1);
  CHECK(std::abs((linear[1] - linear[0]) - 2 * (linear[2] - linear[1])) < 0.1);
  auto const flat = run_of(iteration(0, 0.0) + iteration(1, 4.0));  // there is no logarithm of 0
  CHECK(!report::can_be_logarithmic(report::loss_chart({&flat})));
}

TEST_CASE("a run whose losses are null says so") {
  double const nan = std::nan("");
  CHECK(report::null_losses(run_of(iteration(0, 4.0))) == "");
  CHECK(report::null_losses(run_of(iteration(0, 4.0) + iteration(1, nan) + iteration(2, nan))) ==
        "2 of 3 training losses are null (not a finite number), from iteration 1 on. The training has diverged.");
  auto const run = run_of(iteration(0, nan) + log_line(EvaluationReport{0, nan, 1, 0, -1}) + "\n");
  auto const said = report::null_losses(run);
  CHECK(has(said, "All of 1 training losses are null"));
  CHECK(has(said, "All of 1 evaluations have a loss that is null."));
  CHECK(has(report::page({{run, {}}}), said));
  CHECK(has(report::page({{run, {}}, {run_of(iteration(0, 4.0)), {}}}), said));
}

TEST_CASE("jumps are marked where they are, and texts that the model wrote are shown, the last one first") {
  auto run = run_of(iteration(0, 4.0) + iteration(1, 9.0) + iteration(2, 4.0) + log_line(Jump{1, 9, 4, 20}, "loss") +
                    "\n" + log_line_of_sample(0, "aaa") + "\n" + log_line_of_sample(2, hostile) + "\n");
  auto const page = report::page({{run, {}}});
  CHECK(has(page, "circle class=\"jump c0"));
  CHECK(has(page, "loss 9 at iteration 1 (median before it 4)"));
  REQUIRE(run.samples.size() == 2);
  CHECK(run.samples[1].text == hostile_text_logged);
  CHECK(page.find("before iteration 2.") < page.find("aaa"));
  expect_whole({{run, {}}});
}

TEST_CASE("runs are a table of values, with a row for each iteration and empty cells for what is not known") {
  auto run = run_of(resumed_log()), other = run_of(iteration(3, std::nan("")));
  run.name = "a, \"b\"";
  other.name = "c";
  auto const table = report::csv({&run, &other});
  std::istringstream lines(table);
  std::vector<std::string> rows;
  for (std::string line; std::getline(lines, line);) rows.push_back(line);
  REQUIRE(rows.size() == 1 + 10 + 1);
  CHECK(rows[0] == "run,iter,tokens,seconds,loss,eval_train_loss,eval_val_loss,lr,grad_norm,time_ms,tokens_per_s,mfu");
  CHECK(rows[1] == "\"a, \"\"b\"\"\",0,0,0.5,3,4,4.1,0.001,0.25,500,16,0.5");
  CHECK(rows[9] == "\"a, \"\"b\"\"\",8,88,4.5,3,,,0.001,0.25,500,16,0.5");
  CHECK(has(rows[10], ",9,"));
  CHECK(has(rows[10], ",2,2.1,"));
  CHECK(rows[11] == "c,3,,1,,,,0.001,,10,10000,0.5");
  for (auto const& row : rows) {
    std::size_t commas = 0;
    bool quoted = false;
    for (char const letter : row) {
      quoted ^= letter == '"';
      commas += letter == ',' && !quoted ? 1 : 0;
    }
    CHECK(commas == 11);
  }
  auto const alone = run_of(log_line(EvaluationReport{7, 2.0, 2.5, 1e-3, -1}) + "\n");
  CHECK(has(report::csv({&alone}), ",7,,0,,2,2.5,,,,,\n"));
}

TEST_CASE("a pointer reads what was logged, where the line is smoothed") {
  std::string log = start(0, false);
  for (std::int64_t i = 0; i < 300; ++i) log += iteration(i, i == 150 ? 3.556 : 4.0);
  auto const long_run = run_of(log), short_run = run_of(start(0, false) + iteration(0, 4.0));
  for (auto const& runs : {std::vector<Run const*>{&long_run}, std::vector<Run const*>{&long_run, &short_run}}) {
    auto const chart = report::loss_chart(runs);
    CHECK(has(report::readings(chart), "[150,\"3.556\",null,1],[151,\"4\",null,1]"));
    CHECK(has(report::readings(chart), "[149,\"4\",null,1]"));
  }
  CHECK(report::loss_chart({&long_run}).curves[1].points[150].y > 3.9);
  std::string const note = "the line is smoothed, and the pointer shows the logged values";
  CHECK(has(report::page({{long_run, {}}}), note));
  CHECK(!has(report::page({{short_run, {}}}), note));
}

TEST_CASE("a trace is drawn in the page of the run that wrote it alone, and what is missing is said") {
  TemporaryFolder const folder;
  RunHeader header;
  header.ranks = 2;
  header.trace = folder.path / "t.json";
  auto const log = log_line(header) + "\n" + iteration(7, 3.0);
  auto const json = fsdp::chrome_trace(two_ranks("h.0"));
  auto const found = [&](std::string const& text, std::string const& trace) {
    folder.file("t.json", trace);
    return report::read_first_trace(run_of(text).traces, folder.path);
  };
  auto const edited = [](std::string text, std::string const& from, std::string const& to) {
    auto const at = text.find(from);
    REQUIRE(at != std::string::npos);
    return text.replace(at, from.size(), to);
  };
  CHECK(found(log, with_run_id(json)).trace);
  CHECK(found(log, with_run_id(json)).missing.empty());
  for (auto const& foreign : {json, edited(with_run_id(json), run_id(), "other")}) {
    auto const other = found(log, foreign);
    CHECK(!other.trace);
    CHECK(has(other.missing, "t.json' belongs to another run."));
  }
  // As older programs wrote them: of ranks alone there is something to compare.
  auto const old = edited(log, "\"id\":\"" + run_id() + "\",", "");
  CHECK(found(old, json).trace);
  CHECK(!found(old, with_run_id(json)).trace);
  CHECK(!found(edited(old, "\"ranks\":2", "\"ranks\":4"), json).trace);

  CHECK(has(found(log, "").missing, "t.json' contains no steps."));
  std::filesystem::remove(folder.path / "t.json");
  auto const gone = report::read_first_trace(run_of(log).traces, folder.path);
  CHECK(has(gone.missing, "t.json' does not exist."));
  auto const page = report::page({{run_of(log), {}, gone.missing}});
  CHECK(XmlCheck(page).fault() == "");
  CHECK(has(page, "<h2>Step</h2>"));
  CHECK(has(page, "t.json&#39; does not exist."));
  CHECK(report::read_first_trace({}, folder.path).missing.empty());
}
