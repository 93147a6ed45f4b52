// SPDX-License-Identifier: Apache-2.0
// The rules of a product: of its description, then of its addresses.
#include <algorithm>
#include <array>
#include <limits>
#include <utility>
#include <vector>

#include "fsdp/detail/base/format.hpp"
#include "problem.hpp"
#include "rules.hpp"
#include "tests/standin/runtime/runtime.hpp"

namespace standin::cublas {

namespace {

using fsdp::formatted;

std::string_view type_name(std::int32_t type) {
  switch (type) {
    case CUDA_R_64F: return "fp64";
    case CUDA_R_32F: return "fp32";
    case CUDA_R_16BF: return "bf16";
    case CUDA_R_16F: return "fp16";
    default: return "another type";
  }
}

/// A row of the table of regular matrices in cuBLAS's documentation of cublasLtMatmul(), and of cublasGemmEx().
struct TypesRow {
  std::int32_t compute, scale, operands, results;
};
constexpr std::array<TypesRow, 6> type_table{{{CUBLAS_COMPUTE_32F, CUDA_R_32F, CUDA_R_32F, CUDA_R_32F},
                                              {CUBLAS_COMPUTE_32F, CUDA_R_32F, CUDA_R_16BF, CUDA_R_16BF},
                                              {CUBLAS_COMPUTE_32F, CUDA_R_32F, CUDA_R_16BF, CUDA_R_32F},
                                              {CUBLAS_COMPUTE_32F, CUDA_R_32F, CUDA_R_16F, CUDA_R_16F},
                                              {CUBLAS_COMPUTE_32F, CUDA_R_32F, CUDA_R_16F, CUDA_R_32F},
                                              {CUBLAS_COMPUTE_64F, CUDA_R_64F, CUDA_R_64F, CUDA_R_64F}}};

bool types_go_together(Problem const& p) {
  if (p.a.type != p.b.type || p.c.type != p.d.type) return false;
  return std::any_of(type_table.begin(), type_table.end(), [&](TypesRow const& row) {
    return row.compute == p.operation.compute && row.scale == p.operation.scale && row.operands == p.a.type &&
           row.results == p.d.type;
  });
}

cublasStatus_t invalid(Rule const& rule, Problem const& p, std::string const& what) {
  return refuse(CUBLAS_STATUS_INVALID_VALUE, rule, formatted("{}: {}", p.text(), what));
}

cublasStatus_t check_shape(Problem const& p) {
  constexpr std::uint64_t largest = std::numeric_limits<std::int32_t>::max();
  std::array<std::pair<char, Layout const*>, 4> const all{{{'A', &p.a}, {'B', &p.b}, {'C', &p.c}, {'D', &p.d}}};
  for (auto const& [name, matrix] : all) {
    std::string const of = formatted("matrix {}", std::string_view(&name, 1));
    if (matrix->order != CUBLASLT_ORDER_COL)
      return refuse(CUBLAS_STATUS_NOT_SUPPORTED, rule::order,
                    formatted("{}: {} is not stored by columns", p.text(), of));
    if (matrix->rows == 0 || matrix->columns == 0 || matrix->rows > largest || matrix->columns > largest)
      return invalid(rule::shape, p, formatted("{} is {} x {}", of, matrix->rows, matrix->columns));
    if (matrix->leading < static_cast<std::int64_t>(matrix->rows))
      return invalid(rule::shape, p,
                     formatted("{} has {} rows and the leading dimension {}", of, matrix->rows, matrix->leading));
    if (matrix->batch < 1 || matrix->batch != p.d.batch)
      return invalid(rule::batch, p, formatted("{} is a batch of {}, D of {}", of, matrix->batch, p.d.batch));
    if (matrix->stride < 0) return invalid(rule::batch, p, formatted("{} has the stride {}", of, matrix->stride));
  }
  auto const& op = p.operation;
  bool const turned_a = op.transpose_a != CUBLAS_OP_N, turned_b = op.transpose_b != CUBLAS_OP_N;
  if (op.transpose_c != CUBLAS_OP_N) return invalid(rule::shape, p, "C cannot be transposed");
  if ((turned_a ? p.a.columns : p.a.rows) != p.d.rows || (turned_b ? p.b.rows : p.b.columns) != p.d.columns ||
      (turned_a ? p.a.rows : p.a.columns) != (turned_b ? p.b.columns : p.b.rows) || p.c.rows != p.d.rows ||
      p.c.columns != p.d.columns)
    return invalid(rule::shape, p,
                   formatted("op(A) of {} x {} and op(B) of {} x {} stored, C of {} x {} do not fit", p.a.rows,
                             p.a.columns, p.b.rows, p.b.columns, p.c.rows, p.c.columns));
  return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t check_epilogue(Problem const& p) {
  auto const& op = p.operation;
  if (op.epilogue == CUBLASLT_EPILOGUE_DEFAULT) return CUBLAS_STATUS_SUCCESS;
  if (!op.adds_bias() || p.d.type == CUDA_R_64F)
    return refuse(CUBLAS_STATUS_NOT_SUPPORTED, rule::epilogue,
                  formatted("{}: epilogue {} of {} results", p.text(), op.epilogue, type_name(p.d.type)));
  if (op.bias_type != -1 && op.bias_type != p.d.type)
    return invalid(rule::epilogue, p,
                   formatted("a bias of {} for results of {}", type_name(op.bias_type), type_name(p.d.type)));
  if (op.bias == nullptr) return invalid(rule::epilogue, p, "the epilogue adds a bias, and there is none");
  if (p.d.batch > 1 && op.bias_stride < 0) return invalid(rule::epilogue, p, "a bias with a negative stride");
  return CUBLAS_STATUS_SUCCESS;
}

using Interval = std::pair<std::int64_t, std::int64_t>;  // addresses, begin and end

/// Columns of all matrices, by address.
std::vector<Interval> columns_of(void const* data, Layout const& matrix) {
  auto const first = static_cast<std::int64_t>(reinterpret_cast<std::uintptr_t>(data));
  std::vector<Interval> columns;
  for (std::int64_t batch = 0; batch < matrix.batch; ++batch)
    for (std::int64_t j = 0; j < static_cast<std::int64_t>(matrix.columns); ++j) {
      auto const begin = first + (batch * matrix.stride + j * matrix.leading) * matrix.element_bytes();
      columns.emplace_back(begin, begin + static_cast<std::int64_t>(matrix.rows) * matrix.element_bytes());
    }
  std::sort(columns.begin(), columns.end());
  return columns;
}

/// Whether matrices of a batch share an element.
bool shares_with_itself(Layout const& matrix) {
  auto const rows = static_cast<std::int64_t>(matrix.rows), columns = static_cast<std::int64_t>(matrix.columns);
  bool const apart = matrix.stride >= (columns - 1) * matrix.leading + rows;
  bool const side_by_side = matrix.stride >= rows && (matrix.batch - 1) * matrix.stride + rows <= matrix.leading;
  if (matrix.batch == 1 || apart || side_by_side) return false;
  auto const intervals = columns_of(nullptr, matrix);
  return std::adjacent_find(intervals.begin(), intervals.end(), [](Interval const& left, Interval const& right) {
           return right.first < left.second;
         }) != intervals.end();
}

/// Whether two matrices share an element.
bool share(void const* left_data, Layout const& left, void const* right_data, Layout const& right) {
  auto const a = reinterpret_cast<std::uintptr_t>(left_data), b = reinterpret_cast<std::uintptr_t>(right_data);
  if (a + static_cast<std::uintptr_t>(left.bytes()) <= b || b + static_cast<std::uintptr_t>(right.bytes()) <= a)
    return false;
  auto const some = columns_of(left_data, left), others = columns_of(right_data, right);
  for (std::size_t i = 0, j = 0; i < some.size() && j < others.size();) {
    if (some[i].first < others[j].second && others[j].first < some[i].second) return true;
    some[i].second <= others[j].first ? ++i : ++j;
  }
  return false;
}

/// The bias as a matrix of one column.
Layout layout_of_bias(Problem const& p) {
  Layout vector;
  vector.type = p.d.type;
  vector.rows = p.d.rows;
  vector.columns = 1;
  vector.leading = static_cast<std::int64_t>(p.d.rows);
  vector.batch = p.d.batch;
  vector.stride = p.operation.bias_stride;
  return vector;
}

}  // namespace

std::string Problem::text() const {
  return formatted("{} {} x {} x {} by {} ({} to {})", call, d.rows, d.columns, k(), d.batch, type_name(a.type),
                   type_name(d.type));
}

std::uint64_t Problem::fingerprint() const {
  std::uint64_t hash = 14695981039346656037u;  // FNV-1a
  auto const add = [&](auto value) { hash = (hash ^ static_cast<std::uint64_t>(value)) * 1099511628211u; };
  for (auto const* matrix : {&a, &b, &c, &d}) {
    for (auto const value : {matrix->type, matrix->order, matrix->batch}) add(value);
    for (auto const value : {matrix->rows, matrix->columns}) add(value);
    for (auto const value : {matrix->leading, matrix->stride}) add(value);
  }
  for (auto const value : {operation.compute, operation.scale, operation.pointer_mode, operation.transpose_a,
                           operation.transpose_b, operation.bias_type})
    add(value);
  add(operation.epilogue);
  add(operation.bias_stride);
  return hash;
}

cublasStatus_t refuse(cublasStatus_t status, Rule const& rule, std::string const& text) {
  report(rule.name, text);
  return status;
}

cublasStatus_t check_problem(Problem const& p) {
  if (!types_go_together(p))
    return refuse(CUBLAS_STATUS_NOT_SUPPORTED, rule::types,
                  formatted("{}: no product of {} and {} plus {} to {} with compute type {} and scale type {}", p.call,
                            type_name(p.a.type), type_name(p.b.type), type_name(p.c.type), type_name(p.d.type),
                            p.operation.compute, type_name(p.operation.scale)));
  if (p.operation.pointer_mode != CUBLASLT_POINTER_MODE_HOST)
    return refuse(CUBLAS_STATUS_NOT_SUPPORTED, rule::scalars,
                  formatted("{}: pointer mode {}", p.text(), p.operation.pointer_mode));
  if (auto const status = check_shape(p); status != CUBLAS_STATUS_SUCCESS) return status;
  if (shares_with_itself(p.d)) return invalid(rule::batch, p, "matrices of D overlap");
  return check_epilogue(p);
}

cublasStatus_t check_operands(Problem const& p, Algorithm const& algorithm, int device) {
  bool const reads_c = p.beta != 0;
  auto const bias = layout_of_bias(p);
  struct Operand {
    std::string_view name;
    void const* data;
    Layout const& layout;
    std::int64_t promised;
    bool used;
  };
  std::array<Operand, 5> const all{{{"A", p.data_a, p.a, algorithm.align_a, true},
                                    {"B", p.data_b, p.b, algorithm.align_b, true},
                                    {"C", p.data_c, p.c, algorithm.align_c, reads_c},
                                    {"D", p.data_d, p.d, algorithm.align_d, true},
                                    {"bias", p.operation.bias, bias, algorithm.align_bias, p.operation.adds_bias()}}};
  for (auto const& operand : all) {
    if (!operand.used) continue;
    auto const address = reinterpret_cast<std::uintptr_t>(operand.data);
    auto const alignment = std::max(operand.promised, operand.layout.element_bytes());
    if (auto const behind = address % static_cast<std::uintptr_t>(alignment); behind != 0)
      return invalid(rule::alignment, p,
                     formatted("operand {} begins {} bytes behind a multiple of the {} that it needs, or that the "
                               "heuristic was promised",
                               operand.name, behind, alignment));
    auto const bytes = static_cast<std::size_t>(operand.layout.bytes());
    expect_device_operand(device, operand.data, bytes, formatted("operand {} of {}", operand.name, p.text()));
    auto const region = region_of(operand.data);  // where a handler took the report, it is not touched
    if (!region || static_cast<std::byte const*>(operand.data) + bytes > region->begin + region->bytes)
      return CUBLAS_STATUS_EXECUTION_FAILED;
    bool const is_c = &operand.layout == &p.c, is_d = &operand.layout == &p.d;
    if (is_d) continue;
    if (is_c && p.data_c == p.data_d && p.c == p.d) continue;
    if (share(operand.data, operand.layout, p.data_d, p.d))
      return invalid(
          rule::overlap, p,
          formatted("D overwrites elements of {}{}", operand.name, is_c ? ", which is not the same matrix" : ""));
  }
  return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t enqueue_product(Problem const& problem, Algorithm const& algorithm, int device, void* workspace,
                               std::size_t workspace_bytes, cudaStream_t stream) {
  if (auto const of_stream = device_of(stream); of_stream != device)
    return refuse(CUBLAS_STATUS_INVALID_VALUE, rule::device,
                  formatted("{}: a handle of device {} and a stream of device {}", problem.text(), device, of_stream));
  if (auto const status = check_operands(problem, algorithm, device); status != CUBLAS_STATUS_SUCCESS) return status;
  auto const wrong = [&](std::string const& what) {
    return invalid(rule::workspace, problem, formatted("the workspace {}", what));
  };
  if (algorithm.workspace_bytes > workspace_bytes)
    return wrong(formatted("has {} bytes, and the algorithm asks for {}", workspace_bytes, algorithm.workspace_bytes));
  if (workspace_bytes > 0) {
    if (workspace == nullptr) return wrong("is null");
    if (auto const behind = reinterpret_cast<std::uintptr_t>(workspace) % 256; behind != 0)
      return wrong(formatted("begins {} bytes behind a multiple of 256", behind));
    expect_device_operand(device, workspace, workspace_bytes, formatted("workspace of {}", problem.text()));
    auto const region = region_of(workspace);
    if (!region || static_cast<std::byte*>(workspace) + workspace_bytes > region->begin + region->bytes)
      return CUBLAS_STATUS_EXECUTION_FAILED;
  }
  auto const enqueued = enqueue(stream, problem.text(), [problem, algorithm, workspace] {
    compute(problem, algorithm, workspace);
    return true;
  });
  return enqueued == cudaSuccess ? CUBLAS_STATUS_SUCCESS : CUBLAS_STATUS_EXECUTION_FAILED;
}

}  // namespace standin::cublas
