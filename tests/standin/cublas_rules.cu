// SPDX-License-Identifier: Apache-2.0
// The stand-in for cuBLASLt reports each broken rule by its name, refuses the call and leaves the result alone; what is
// allowed it computes.
// environment: FSDP_STANDIN_DEVICES=2
#include <cublasLt.h>
#include <cublas_v2.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <functional>
#include <limits>
#include <string>
#include <string_view>
#include <vector>

#include "fsdp/cuda.hpp"
#include "tests/catch.hpp"
#include "tests/standin/cublas/cublas.hpp"
#include "tests/standin/cublas/rules.hpp"
#include "tests/standin/runtime/runtime.hpp"

namespace {

namespace rule = standin::cublas::rule;
using fsdp::cuda::Device;

std::vector<std::string> reports;

/// Takes reports as long as it lives.
class Reports {
 public:
  Reports() {
    reports.clear();
    before_ = standin::set_handler([](std::string_view name, std::string const&) { reports.emplace_back(name); });
  }
  Reports(Reports const&) = delete;
  Reports& operator=(Reports const&) = delete;
  ~Reports() { standin::set_handler(before_); }

 private:
  standin::Handler before_;
};

/// Holds settings as long as it lives.
struct Configured {
  explicit Configured(standin::cublas::Settings const& settings) { standin::cublas::configure(settings); }
  Configured(Configured const&) = delete;
  Configured& operator=(Configured const&) = delete;
  ~Configured() { standin::cublas::configure({}); }
};

/// Floats of device memory.
class Floats {
 public:
  Floats(Device const& device, Device::Stream& stream, std::vector<float> const& values)
      : device_(device), count_(values.size()), memory_(device.allocate(bytes())) {
    auto* const pinned = static_cast<float*>(device.allocate_pinned(bytes()));
    std::copy(values.begin(), values.end(), pinned);
    device.copy_async(stream, memory_, pinned, bytes());
    device.synchronize(stream);
    device.deallocate_pinned(pinned);
  }
  Floats(Floats const&) = delete;
  Floats& operator=(Floats const&) = delete;
  ~Floats() { device_.deallocate(memory_, bytes()); }

  std::size_t bytes() const { return count_ * sizeof(float); }
  float* data() const { return static_cast<float*>(memory_); }
  std::vector<float> values(Device::Stream& stream) const {
    auto* const pinned = static_cast<float*>(device_.allocate_pinned(bytes()));
    device_.copy_async(stream, pinned, memory_, bytes());
    device_.synchronize(stream);
    std::vector<float> result(pinned, pinned + count_);
    device_.deallocate_pinned(pinned);
    return result;
  }

 private:
  Device device_;
  std::size_t count_;
  void* memory_;
};

std::vector<float> ramp(std::size_t count) {
  std::vector<float> values;
  for (std::size_t i = 0; i < count; ++i) values.push_back(static_cast<float>(i % 7) - 3);
  return values;
}

constexpr int rows = 24, columns = 16, depth = 32, copies = 2;
constexpr std::size_t workspace_bytes = 1 << 16;

/// D (24 x 16) = A (24 x 32) B (32 x 16), twice, as it should be; members are what tests spoil.
struct Product {
  Device device;
  Device::Stream stream = device.make_stream("product");
  Floats memory_a{device, stream, ramp(copies*rows*depth)}, memory_b{device, stream, ramp(copies*depth*columns)};
  Floats memory_d{device, stream, std::vector<float>(copies*rows*columns, 7.0f)},
      memory_bias{device, stream, ramp(rows)};
  Floats memory_workspace{device, stream, std::vector<float>(workspace_bytes / sizeof(float))};
  cublasLtHandle_t handle = nullptr;
  cublasLtMatmulDescOpaque_t operation{};
  cublasLtMatrixLayoutOpaque_t a{}, b{}, c{}, d{};
  cublasLtMatmulPreferenceOpaque_t wish{};
  std::array<cublasLtMatmulHeuristicResult_t, 8> found{};
  int count = 0;
  cublasLtMatmulAlgo_t algorithm{};
  float alpha = 1, beta = 0;
  float const *alpha_pointer = &alpha, *beta_pointer = &beta;
  void *data_a = memory_a.data(), *data_b = memory_b.data(), *data_c = memory_d.data(), *data_d = memory_d.data();
  void* workspace = memory_workspace.data();
  std::size_t bytes = workspace_bytes;
  cudaStream_t on = stream.get();

  explicit Product(cublasComputeType_t compute = CUBLAS_COMPUTE_32F, cudaDataType_t scale = CUDA_R_32F) {
    REQUIRE(cublasLtCreate(&handle) == CUBLAS_STATUS_SUCCESS);
    REQUIRE(cublasLtMatmulDescInit(&operation, compute, scale) == CUBLAS_STATUS_SUCCESS);
    lay_out(a, rows, depth);
    lay_out(b, depth, columns);
    lay_out(c, rows, columns);
    lay_out(d, rows, columns);
    REQUIRE(cublasLtMatmulPreferenceInit(&wish) == CUBLAS_STATUS_SUCCESS);
    set(wish, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, std::uint64_t{workspace_bytes});
  }
  Product(Product const&) = delete;
  Product& operator=(Product const&) = delete;
  ~Product() {
    if (handle != nullptr) cublasLtDestroy(handle);
  }

  static void lay_out(cublasLtMatrixLayoutOpaque_t& layout, std::uint64_t height, std::uint64_t width) {
    REQUIRE(cublasLtMatrixLayoutInit(&layout, CUDA_R_32F, height, width, static_cast<std::int64_t>(height)) ==
            CUBLAS_STATUS_SUCCESS);
    set(layout, CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT, std::int32_t{copies});
    set(layout, CUBLASLT_MATRIX_LAYOUT_STRIDED_BATCH_OFFSET, static_cast<std::int64_t>(height * width));
  }
  template <class Value>
  static cublasStatus_t set(cublasLtMatrixLayoutOpaque_t& layout, cublasLtMatrixLayoutAttribute_t what, Value value) {
    return cublasLtMatrixLayoutSetAttribute(&layout, what, &value, sizeof value);
  }
  template <class Value>
  static cublasStatus_t set(cublasLtMatmulPreferenceOpaque_t& to, cublasLtMatmulPreferenceAttributes_t what,
                            Value value) {
    return cublasLtMatmulPreferenceSetAttribute(&to, what, &value, sizeof value);
  }
  template <class Value>
  cublasStatus_t set(cublasLtMatmulDescAttributes_t what, Value value) {
    return cublasLtMatmulDescSetAttribute(&operation, what, &value, sizeof value);
  }
  /// Another extent of D, which everything else follows.
  void resize(std::uint64_t height, std::uint64_t width) {
    for (auto* matrix : {&a, &c, &d}) {
      set(*matrix, CUBLASLT_MATRIX_LAYOUT_ROWS, height);
      set(*matrix, CUBLASLT_MATRIX_LAYOUT_LD, static_cast<std::int64_t>(height));
    }
    for (auto* matrix : {&b, &c, &d}) set(*matrix, CUBLASLT_MATRIX_LAYOUT_COLS, width);
    for (auto* matrix : {&a, &b, &c, &d})
      set(*matrix, CUBLASLT_MATRIX_LAYOUT_STRIDED_BATCH_OFFSET, std::int64_t{1} << 40);
  }
  void add_bias() {
    set(CUBLASLT_MATMUL_DESC_EPILOGUE, std::uint32_t{CUBLASLT_EPILOGUE_BIAS});
    set(CUBLASLT_MATMUL_DESC_BIAS_POINTER, static_cast<void const*>(memory_bias.data()));
  }

  /// Asks the heuristic, and takes the first result that is one.
  cublasStatus_t plan() {
    auto const status = cublasLtMatmulAlgoGetHeuristic(handle, &operation, &a, &b, &c, &d, &wish,
                                                       static_cast<int>(found.size()), found.data(), &count);
    for (int i = count - 1; status == CUBLAS_STATUS_SUCCESS && i >= 0; --i)
      if (found[static_cast<std::size_t>(i)].state == CUBLAS_STATUS_SUCCESS)
        algorithm = found[static_cast<std::size_t>(i)].algo;
    return status;
  }
  cublasStatus_t multiply() {
    return cublasLtMatmul(handle, &operation, alpha_pointer, data_a, &a, data_b, &b, beta_pointer, data_c, &c, data_d,
                          &d, &algorithm, workspace, bytes, on);
  }
  std::vector<float> result() { return memory_d.values(stream); }
  std::vector<float> expected(float of_d = 0, bool bias = false) const {
    auto const left = ramp(copies * rows * depth), right = ramp(copies * depth * columns), vector = ramp(rows);
    std::vector<float> all;
    for (std::size_t copy = 0; copy < copies; ++copy)
      for (std::size_t j = 0; j < columns; ++j)
        for (std::size_t i = 0; i < rows; ++i) {
          float sum = of_d * 7 + (bias ? vector[i] : 0);
          for (std::size_t p = 0; p < depth; ++p)
            sum += left[(copy * depth + p) * rows + i] * right[(copy * columns + j) * depth + p];
          all.push_back(sum);
        }
    return all;
  }
};

using Names = std::vector<std::string>;

}  // namespace

TEST_CASE("a product by the rules is computed, and nothing is reported", "[standin]") {
  Reports const taken;
  auto const before = standin::cublas::calls();
  Product product;
  REQUIRE(product.plan() == CUBLAS_STATUS_SUCCESS);
  REQUIRE(product.multiply() == CUBLAS_STATUS_SUCCESS);
  CHECK(product.result() == product.expected());
  CHECK(standin::cublas::calls().heuristics == before.heuristics + 1);
  CHECK(standin::cublas::calls().products == before.products + 1);
  CHECK(reports.empty());
}

TEST_CASE("beta = 0 does not read C, and beta = 1 adds it", "[standin]") {
  Reports const taken;
  Product product;
  float const nan = std::numeric_limits<float>::quiet_NaN();
  Floats const undefined(product.device, product.stream, std::vector<float>(copies * rows * columns, nan));
  REQUIRE(product.plan() == CUBLAS_STATUS_SUCCESS);
  product.data_c = product.data_d = undefined.data();
  REQUIRE(product.multiply() == CUBLAS_STATUS_SUCCESS);
  CHECK(undefined.values(product.stream) == product.expected());
  product.data_c = nullptr;
  product.data_d = product.memory_d.data();
  REQUIRE(product.multiply() == CUBLAS_STATUS_SUCCESS);
  product.data_c = product.data_d;
  product.beta = 1;
  REQUIRE(product.multiply() == CUBLAS_STATUS_SUCCESS);
  auto twice = product.expected();
  for (auto& value : twice) value *= 2;
  CHECK(product.result() == twice);
  CHECK(reports.empty());
}

TEST_CASE("a bias is added to every column", "[standin]") {
  Reports const taken;
  Product product;
  product.add_bias();
  REQUIRE(product.plan() == CUBLAS_STATUS_SUCCESS);
  REQUIRE(product.multiply() == CUBLAS_STATUS_SUCCESS);
  CHECK(product.result() == product.expected(0, true));
  CHECK(reports.empty());
}

namespace {

constexpr auto invalid = CUBLAS_STATUS_INVALID_VALUE, unsupported = CUBLAS_STATUS_NOT_SUPPORTED;

/// A description that breaks a rule: both the heuristic and the product report it.
struct Misdescribed {
  std::string_view what;
  standin::Rule rule;
  cublasStatus_t status;
  std::function<void(Product&)> spoil;
};
std::vector<Misdescribed> const misdescribed{
    {"another compute type", rule::types, unsupported,
     [](Product& p) { p.set(CUBLASLT_MATMUL_DESC_COMPUTE_TYPE, std::int32_t{CUBLAS_COMPUTE_16F}); }},
    {"another scale type", rule::types, unsupported,
     [](Product& p) { p.set(CUBLASLT_MATMUL_DESC_SCALE_TYPE, std::int32_t{CUDA_R_64F}); }},
    {"operands of two types", rule::types, unsupported,
     [](Product& p) { Product::set(p.a, CUBLASLT_MATRIX_LAYOUT_TYPE, std::int32_t{CUDA_R_16BF}); }},
    {"results narrower than operands", rule::types, unsupported,
     [](Product& p) {
       for (auto* matrix : {&p.c, &p.d}) Product::set(*matrix, CUBLASLT_MATRIX_LAYOUT_TYPE, std::int32_t{CUDA_R_16BF});
     }},
    {"C of another type than D", rule::types, unsupported,
     [](Product& p) { Product::set(p.c, CUBLASLT_MATRIX_LAYOUT_TYPE, std::int32_t{CUDA_R_16BF}); }},
    {"pointers of the device", rule::scalars, unsupported,
     [](Product& p) { p.set(CUBLASLT_MATMUL_DESC_POINTER_MODE, std::int32_t{CUBLASLT_POINTER_MODE_DEVICE}); }},
    {"rows", rule::order, unsupported,
     [](Product& p) { Product::set(p.b, CUBLASLT_MATRIX_LAYOUT_ORDER, std::int32_t{CUBLASLT_ORDER_ROW}); }},
    {"no rows", rule::shape, invalid, [](Product& p) { p.resize(0, columns); }},
    {"no columns", rule::shape, invalid, [](Product& p) { p.resize(rows, 0); }},
    {"too many rows", rule::shape, invalid, [](Product& p) { p.resize(std::uint64_t{1} << 31, columns); }},
    {"too many columns", rule::shape, invalid, [](Product& p) { p.resize(rows, std::uint64_t{1} << 31); }},
    {"A of other rows", rule::shape, invalid,
     [](Product& p) { Product::set(p.a, CUBLASLT_MATRIX_LAYOUT_ROWS, std::uint64_t{rows - 1}); }},
    {"B of other columns", rule::shape, invalid,
     [](Product& p) { Product::set(p.b, CUBLASLT_MATRIX_LAYOUT_COLS, std::uint64_t{columns - 1}); }},
    {"A of other columns than B of rows", rule::shape, invalid,
     [](Product& p) { Product::set(p.a, CUBLASLT_MATRIX_LAYOUT_COLS, std::uint64_t{depth - 1}); }},
    {"C of other rows", rule::shape, invalid,
     [](Product& p) { Product::set(p.c, CUBLASLT_MATRIX_LAYOUT_ROWS, std::uint64_t{rows - 1}); }},
    {"a small leading dimension", rule::shape, invalid,
     [](Product& p) { Product::set(p.a, CUBLASLT_MATRIX_LAYOUT_LD, std::int64_t{rows - 1}); }},
    {"an operand that is not transposed", rule::shape, invalid,
     [](Product& p) { p.set(CUBLASLT_MATMUL_DESC_TRANSA, std::int32_t{CUBLAS_OP_T}); }},
    {"C of other columns", rule::shape, invalid,
     [](Product& p) { Product::set(p.c, CUBLASLT_MATRIX_LAYOUT_COLS, std::uint64_t{columns - 1}); }},
    {"C transposed", rule::shape, invalid,
     [](Product& p) { p.set(CUBLASLT_MATMUL_DESC_TRANSC, std::int32_t{CUBLAS_OP_T}); }},
    {"another batch", rule::batch, invalid,
     [](Product& p) { Product::set(p.b, CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT, std::int32_t{1}); }},
    {"no batch", rule::batch, invalid,
     [](Product& p) {
       for (auto* matrix : {&p.a, &p.b, &p.c, &p.d})
         Product::set(*matrix, CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT, std::int32_t{0});
     }},
    {"a negative stride", rule::batch, invalid,
     [](Product& p) { Product::set(p.a, CUBLASLT_MATRIX_LAYOUT_STRIDED_BATCH_OFFSET, std::int64_t{-1}); }},
    {"results that overlap", rule::batch, invalid,
     [](Product& p) {
       for (auto* matrix : {&p.c, &p.d})
         Product::set(*matrix, CUBLASLT_MATRIX_LAYOUT_STRIDED_BATCH_OFFSET, std::int64_t{rows * columns - 1});
     }},
    {"no bias", rule::epilogue, invalid,
     [](Product& p) { p.set(CUBLASLT_MATMUL_DESC_EPILOGUE, std::uint32_t{CUBLASLT_EPILOGUE_BIAS}); }},
    {"a bias of another type", rule::epilogue, invalid,
     [](Product& p) {
       p.add_bias();
       p.set(CUBLASLT_MATMUL_DESC_BIAS_DATA_TYPE, std::int32_t{CUDA_R_16BF});
     }},
    {"biases in the other direction", rule::epilogue, invalid,
     [](Product& p) {
       p.add_bias();
       p.set(CUBLASLT_MATMUL_DESC_BIAS_BATCH_STRIDE, std::int64_t{-1});
     }},
    {"GELU", rule::epilogue, unsupported,
     [](Product& p) { p.set(CUBLASLT_MATMUL_DESC_EPILOGUE, std::uint32_t{CUBLASLT_EPILOGUE_GELU}); }},
    {"a layout that nobody initialised", rule::descriptor, invalid, [](Product& p) { p.c = {}; }},
    {"an operation that nobody initialised", rule::descriptor, invalid, [](Product& p) { p.operation = {}; }},
};

/// A call that breaks a rule of addresses, after the heuristic was asked.
struct Miscalled {
  std::string_view what;
  standin::Rule rule;
  cublasStatus_t status;
  std::function<void(Product&)> spoil;
};
std::vector<Miscalled> const miscalled{
    {"A off the promised alignment", rule::alignment, invalid, [](Product& p) { p.data_a = p.memory_a.data() + 1; }},
    {"D off its elements", rule::alignment, invalid,
     [](Product& p) { p.data_d = reinterpret_cast<std::byte*>(p.memory_d.data()) + 2; }},
    {"no workspace", rule::workspace, invalid, [](Product& p) { p.workspace = nullptr; }},
    {"a small workspace", rule::workspace, invalid, [](Product& p) { p.bytes = 8; }},
    {"a workspace off 256", rule::workspace, invalid,
     [](Product& p) {
       p.workspace = p.memory_workspace.data() + 4;
       p.bytes -= 16;
     }},
    {"no alpha", rule::scalars, invalid, [](Product& p) { p.alpha_pointer = nullptr; }},
    {"an algorithm that is none", rule::algorithm, invalid, [](Product& p) { p.algorithm = p.found[0].algo; }},
    {"another problem's algorithm", rule::algorithm, invalid,
     [](Product& p) {
       p.set(CUBLASLT_MATMUL_DESC_TRANSB, std::int32_t{CUBLAS_OP_C});
       Product::lay_out(p.b, columns, depth);
     }},
    {"D over A", rule::overlap, invalid, [](Product& p) { p.data_d = p.data_a; }},
    {"D over a part of C", rule::overlap, invalid,
     [](Product& p) {
       p.data_c = p.memory_a.data();
       p.data_d = p.memory_a.data() + 64;
       p.data_a = p.memory_workspace.data();
       p.beta = 1;
     }},
    {"no handle", rule::handle, CUBLAS_STATUS_NOT_INITIALIZED, [](Product& p) { cublasLtDestroy(p.handle); }},
};

}  // namespace

TEST_CASE("what a description does wrong is reported by the heuristic and by the product", "[standin]") {
  for (auto const& wrong : misdescribed) {
    CAPTURE(wrong.what);
    Reports const taken;
    Product product;
    REQUIRE(product.plan() == CUBLAS_STATUS_SUCCESS);
    auto const algorithm = product.algorithm;
    wrong.spoil(product);
    REQUIRE(reports.empty());
    CHECK(product.plan() == wrong.status);
    CHECK(product.count == 0);
    CHECK(reports == Names{std::string(wrong.rule.name)});
    product.algorithm = algorithm;
    CHECK(product.multiply() == wrong.status);
    CHECK(reports == Names(2, std::string(wrong.rule.name)));
    CHECK(product.result() == std::vector<float>(copies * rows * columns, 7.0f));
  }
}

TEST_CASE("what a call does wrong is reported, and nothing is enqueued", "[standin]") {
  for (auto const& wrong : miscalled) {
    CAPTURE(wrong.what);
    Reports const taken;
    Product product;
    for (auto const what : {CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES})
      Product::set(product.wish, what, std::uint32_t{16});
    for (auto const what : {CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES})
      Product::set(product.wish, what, std::uint32_t{1});
    REQUIRE(product.plan() == CUBLAS_STATUS_SUCCESS);
    wrong.spoil(product);
    REQUIRE(reports.empty());
    CHECK(product.multiply() == wrong.status);
    CHECK(reports == Names{std::string(wrong.rule.name)});
    CHECK(product.result() == std::vector<float>(copies * rows * columns, 7.0f));
    if (wrong.rule.name == rule::handle.name) product.handle = nullptr;
  }
}

TEST_CASE("operands are device memory, over their whole extents", "[standin]") {
  std::vector<float> host(copies * rows * depth);
  auto const wrong = [&](std::function<void(Product&)> const& spoil) {
    Reports const taken;
    Product product;
    product.add_bias();
    spoil(product);
    REQUIRE(product.plan() == CUBLAS_STATUS_SUCCESS);
    REQUIRE(reports.empty());
    CHECK(product.multiply() == CUBLAS_STATUS_EXECUTION_FAILED);
    CHECK(reports.size() == 1);
    CHECK(product.result() == std::vector<float>(copies * rows * columns, 7.0f));
  };
  wrong([&](Product& p) {
    p.set(CUBLASLT_MATMUL_DESC_BIAS_BATCH_STRIDE, std::int64_t{1});  // of 24 + 1 floats
  });
  wrong([&](Product& p) {
    Product::set(p.b, CUBLASLT_MATRIX_LAYOUT_STRIDED_BATCH_OFFSET, std::int64_t{depth * columns + 1});
  });
  wrong([&](Product& p) { Product::set(p.a, CUBLASLT_MATRIX_LAYOUT_LD, std::int64_t{rows + 1}); });
  wrong([&](Product& p) {
    Product::set(p.wish, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, std::uint32_t{4});
    p.data_a = host.data();
  });
  wrong([&](Product& p) { p.bytes = workspace_bytes + 1; });
}

TEST_CASE("results side by side do not overlap, and share their rows with nobody", "[standin]") {
  Reports const taken;
  Product product;
  for (auto* matrix : {&product.c, &product.d}) {
    Product::set(*matrix, CUBLASLT_MATRIX_LAYOUT_LD, std::int64_t{copies * rows});
    Product::set(*matrix, CUBLASLT_MATRIX_LAYOUT_STRIDED_BATCH_OFFSET, std::int64_t{rows});
  }
  REQUIRE(product.plan() == CUBLAS_STATUS_SUCCESS);
  CHECK(product.multiply() == CUBLAS_STATUS_SUCCESS);
  auto const got = product.result(), expected = product.expected();
  for (std::size_t copy = 0; copy < copies; ++copy)
    for (std::size_t j = 0; j < columns; ++j)
      for (std::size_t i = 0; i < rows; ++i)
        REQUIRE(got[(j * copies + copy) * rows + i] == expected[(copy * columns + j) * rows + i]);
  CHECK(reports.empty());
}

TEST_CASE("attributes and structures have their sizes", "[standin]") {
  Reports const taken;
  Product product;
  std::uint64_t const wide = 1;
  CHECK(cublasLtMatmulDescSetAttribute(&product.operation, CUBLASLT_MATMUL_DESC_TRANSA, &wide, sizeof wide) == invalid);
  CHECK(cublasLtMatrixLayoutSetAttribute(&product.a, CUBLASLT_MATRIX_LAYOUT_LD, &wide, 4) == invalid);
  CHECK(cublasLtMatmulPreferenceSetAttribute(&product.wish, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, &wide, 4) ==
        invalid);
  CHECK(cublasLtMatrixLayoutSetAttribute(&product.a, CUBLASLT_MATRIX_LAYOUT_LD, nullptr, 8) == invalid);
  CHECK(Product::set(product.a, CUBLASLT_MATRIX_LAYOUT_PLANE_OFFSET, std::int64_t{0}) == invalid);
  CHECK(cublasLtMatrixLayoutSetAttribute(&product.a, CUBLASLT_MATRIX_LAYOUT_PLANE_OFFSET, &wide, 0) == invalid);
  CHECK(product.set(CUBLASLT_MATMUL_DESC_TRANSA, std::int32_t{9}) == invalid);
  CHECK(Product::set(product.wish, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, std::uint32_t{24}) == invalid);
  CHECK(reports == Names(8, std::string(rule::attribute.name)));
  cublasLtMatrixLayoutOpaque_t none{};
  CHECK(Product::set(none, CUBLASLT_MATRIX_LAYOUT_LD, std::int64_t{4}) == invalid);
  CHECK(cublasLtMatmulPreferenceInit_internal(&product.wish, 8) == CUBLAS_STATUS_ALLOC_FAILED);
  CHECK(reports.size() == 10);
  CHECK(reports.back() == rule::descriptor.name);
}

TEST_CASE("a handle serves its device and streams of it", "[standin]") {
  REQUIRE(fsdp::cuda::device_count() == 2);
  Reports const taken;
  Product product;
  REQUIRE(product.plan() == CUBLAS_STATUS_SUCCESS);
  Device const second(1);
  auto const other = second.make_stream("other");  // leaves the second device current
  CHECK(product.multiply() == invalid);
  product.device.make_current();
  product.on = other.get();
  CHECK(product.multiply() == invalid);
  CHECK(reports == Names(2, std::string(rule::device.name)));
}

TEST_CASE("the heuristic obeys the preference, and its first result is to be looked at", "[standin]") {
  Reports const taken;
  Product product;
  for (auto* matrix : {&product.a, &product.b})  // sums that are worth cutting into parts; nothing is read
    Product::set(*matrix, matrix == &product.a ? CUBLASLT_MATRIX_LAYOUT_COLS : CUBLASLT_MATRIX_LAYOUT_ROWS,
                 std::uint64_t{1024});
  Product::set(product.b, CUBLASLT_MATRIX_LAYOUT_LD, std::int64_t{1024});
  auto const results = [&](std::uint32_t mask, std::uint64_t bytes) {
    Product::set(product.wish, CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK, mask);
    Product::set(product.wish, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, bytes);
    REQUIRE(product.plan() == CUBLAS_STATUS_SUCCESS);
    CHECK(product.found[0].state != CUBLAS_STATUS_SUCCESS);
    for (int i = 1; i < product.count; ++i) CHECK(product.found[static_cast<std::size_t>(i)].workspaceSize <= bytes);
    return product.count;
  };
  CHECK(results(CUBLASLT_REDUCTION_SCHEME_MASK, 1 << 20) == 6);
  CHECK(results(CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE, 1 << 20) == 4);
  CHECK(results(CUBLASLT_REDUCTION_SCHEME_NONE, 1 << 20) == 3);
  CHECK(results(CUBLASLT_REDUCTION_SCHEME_MASK, 0) == 2);
  {
    Configured const settings({.algorithms = standin::cublas::Algorithms::none_under_the_mask});
    CHECK(product.plan() == CUBLAS_STATUS_SUCCESS);
    Product::set(product.wish, CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK, std::uint32_t{2});
    CHECK(product.plan() == unsupported);
  }
  CHECK(product.plan() == CUBLAS_STATUS_SUCCESS);
  CHECK(reports.empty());
}

TEST_CASE("a product leaves nothing of what was in its workspace", "[standin]") {
  Reports const taken;
  Product product;
  REQUIRE(product.plan() == CUBLAS_STATUS_SUCCESS);
  REQUIRE(product.multiply() == CUBLAS_STATUS_SUCCESS);
  CHECK(std::isnan(product.memory_workspace.values(product.stream)[0]));
}

TEST_CASE("cuBLAS proper: its own rules", "[standin]") {
  Reports const taken;
  auto const handles = standin::cublas::live_handles();
  Product product;
  cublasHandle_t handle = nullptr;
  REQUIRE(cublasCreate(&handle) == CUBLAS_STATUS_SUCCESS);
  CHECK(standin::cublas::live_handles() == handles + 2);
  auto const multiply = [&](std::int64_t lda, cublasComputeType_t compute) {
    return cublasGemmStridedBatchedEx_64(handle, CUBLAS_OP_N, CUBLAS_OP_N, rows, columns, depth, &product.alpha,
                                         product.data_a, CUDA_R_32F, lda, rows * depth, product.data_b, CUDA_R_32F,
                                         depth, depth * columns, &product.beta, product.data_d, CUDA_R_32F, rows,
                                         rows * columns, copies, compute, CUBLAS_GEMM_DEFAULT);
  };
  CHECK(cublasSetWorkspace(handle, product.memory_workspace.data() + 1, 256) == invalid);
  CHECK(reports == Names{std::string(rule::workspace.name)});
  REQUIRE(cublasSetWorkspace(handle, product.workspace, workspace_bytes) == CUBLAS_STATUS_SUCCESS);
  REQUIRE(cublasSetStream(handle, product.on) == CUBLAS_STATUS_SUCCESS);
  CHECK(multiply(rows, CUBLAS_COMPUTE_32F) == invalid);
  CHECK(reports.back() == rule::lost_workspace.name);
  REQUIRE(cublasSetWorkspace(handle, product.workspace, workspace_bytes) == CUBLAS_STATUS_SUCCESS);
  CHECK(multiply(rows - 1, CUBLAS_COMPUTE_32F) == invalid);
  CHECK(reports.back() == rule::shape.name);
  CHECK(multiply(rows, CUBLAS_COMPUTE_32F_FAST_TF32) == unsupported);
  CHECK(reports.back() == rule::types.name);
  CHECK(cublasSetMathMode(handle, CUBLAS_TF32_TENSOR_OP_MATH) == unsupported);
  CHECK(reports.size() == 5);
  CHECK(product.result() == std::vector<float>(copies * rows * columns, 7.0f));
  CHECK(multiply(rows, CUBLAS_COMPUTE_32F) == CUBLAS_STATUS_SUCCESS);
  CHECK(product.result() == product.expected());
  CHECK(cublasDestroy(handle) == CUBLAS_STATUS_SUCCESS);
  CHECK(multiply(rows, CUBLAS_COMPUTE_32F) == CUBLAS_STATUS_NOT_INITIALIZED);
  CHECK(reports.back() == rule::handle.name);
}
