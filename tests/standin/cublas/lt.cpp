// SPDX-License-Identifier: Apache-2.0
// cuBLASLt: handles, the heuristic, products.
#include <algorithm>
#include <cstring>
#include <vector>

#include "handles.hpp"
#include "tests/standin/runtime/runtime.hpp"

/// The object of a cublasLtHandle_t.
struct cublasLtContext {
  int device = 0;
};

using namespace standin::cublas;

namespace {

/// Structures of a call, read. @return success, or what the call returns, reported
cublasStatus_t read(Problem& problem, cublasLtMatmulDesc_t operation, cublasLtMatrixLayout_t a,
                    cublasLtMatrixLayout_t b, cublasLtMatrixLayout_t c, cublasLtMatrixLayout_t d) {
  bool initialised = operation != nullptr && a != nullptr && b != nullptr && c != nullptr && d != nullptr;
  if (initialised) {
    problem.operation = contents_of<Operation>(operation);
    problem.a = contents_of<Layout>(a);
    problem.b = contents_of<Layout>(b);
    problem.c = contents_of<Layout>(c);
    problem.d = contents_of<Layout>(d);
    initialised = problem.operation.tag == Operation::own_tag;
    for (auto const* matrix : {&problem.a, &problem.b, &problem.c, &problem.d})
      initialised = initialised && matrix->tag == Layout::own_tag;
  }
  if (!initialised)
    return refuse(CUBLAS_STATUS_INVALID_VALUE, rule::descriptor,
                  fsdp::formatted("{}: a descriptor that was not initialised", problem.call));
  return check_problem(problem);
}

/// The largest power of two up to `most` that divides an address.
std::uint16_t alignment_of(void const* pointer, std::uintptr_t most) {
  auto const address = reinterpret_cast<std::uintptr_t>(pointer);
  return static_cast<std::uint16_t>(std::min(address == 0 ? most : address & (~address + 1), most));
}

/// All algorithms for a problem, the best first: sums in parts for few results of many products each, then whole ones.
/// Algorithms that round between the parts come first: a caller that does not want them must say so.
std::vector<Algorithm> algorithms_for(Problem const& problem) {
  Algorithm whole;
  whole.problem = problem.fingerprint();
  whole.align_bias = problem.operation.adds_bias() ? alignment_of(problem.operation.bias, 16) : std::uint16_t{1};
  std::vector<Algorithm> all;
  auto const sum_bytes = problem.a.type == CUDA_R_64F ? 8 : 4;
  if (problem.k() >= 256 && problem.m() * problem.n() <= 128 * 128) {
    auto part = whole;
    part.splits = static_cast<std::int32_t>(std::min<std::int64_t>(8, problem.k() / 128));
    auto const parts = static_cast<std::uint64_t>(part.splits * problem.m() * problem.n());
    auto const add = [&](cublasLtReductionScheme_t scheme, std::uint64_t bytes) {
      part.reduction = scheme;
      part.workspace_bytes = bytes;
      all.push_back(part);
    };
    add(CUBLASLT_REDUCTION_SCHEME_INPLACE, 1024);  // counters
    add(CUBLASLT_REDUCTION_SCHEME_OUTPUT_TYPE, parts * static_cast<std::uint64_t>(problem.d.element_bytes()));
    add(CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE, parts * static_cast<std::uint64_t>(sum_bytes));
  }
  auto roomy = whole;
  roomy.workspace_bytes = 4096;
  all.push_back(roomy);
  all.push_back(whole);
  return all;
}

bool fits(Algorithm const& algorithm, Preference const& preference) {
  bool const allowed =
      algorithm.reduction == CUBLASLT_REDUCTION_SCHEME_NONE || (algorithm.reduction & preference.reduction_mask) != 0;
  bool const aligned = algorithm.splits == 1 || (preference.align_a >= 16 && preference.align_b >= 16);
  return allowed && aligned && algorithm.workspace_bytes <= preference.workspace_bytes;
}

/// A result that is not to be used: its state says so, and nothing else does.
cublasLtMatmulHeuristicResult_t useless() {
  cublasLtMatmulHeuristicResult_t result;
  std::memset(&result, 0xff, sizeof result);
  result.state = CUBLAS_STATUS_NOT_SUPPORTED;
  result.workspaceSize = 0;
  return result;
}

}  // namespace

namespace standin::cublas {

void configure(Settings const& settings) {
  std::lock_guard const lock(shared().mutex);
  shared().settings = settings;
}
Calls calls() {
  std::lock_guard const lock(shared().mutex);
  return shared().calls;
}
std::int64_t live_handles() {
  std::lock_guard const lock(shared().mutex);
  return static_cast<std::int64_t>(shared().handles.size());
}

}  // namespace standin::cublas

extern "C" {

cublasStatus_t cublasLtCreate(cublasLtHandle_t* handle) { return create("cublasLtCreate", handle); }
cublasStatus_t cublasLtDestroy(cublasLtHandle_t handle) { return destroy("cublasLtDestroy", handle); }

/// The first result always has a state that is not success, as the documentation allows: a caller must look.
cublasStatus_t cublasLtMatmulAlgoGetHeuristic(cublasLtHandle_t handle, cublasLtMatmulDesc_t operation,
                                              cublasLtMatrixLayout_t a, cublasLtMatrixLayout_t b,
                                              cublasLtMatrixLayout_t c, cublasLtMatrixLayout_t d,
                                              cublasLtMatmulPreference_t preference, int requestedAlgoCount,
                                              cublasLtMatmulHeuristicResult_t results[], int* returnAlgoCount) {
  constexpr char const* call = "cublasLtMatmulAlgoGetHeuristic";
  standin::count_call(call);
  if (auto const status = expect_usable(call, handle); status != CUBLAS_STATUS_SUCCESS) return status;
  if (requestedAlgoCount <= 0 || results == nullptr || returnAlgoCount == nullptr)
    return refuse(CUBLAS_STATUS_INVALID_VALUE, rule::algorithm, fsdp::formatted("{}: no room for results", call));
  *returnAlgoCount = 0;
  Problem problem;
  problem.call = call;
  if (auto const status = read(problem, operation, a, b, c, d); status != CUBLAS_STATUS_SUCCESS) return status;
  auto const wish = preference == nullptr ? Preference{} : contents_of<Preference>(preference);
  if (preference == nullptr || wish.tag != Preference::own_tag)
    return refuse(CUBLAS_STATUS_INVALID_VALUE, rule::descriptor, fsdp::formatted("{}: no preference", problem.text()));

  auto const algorithms = settings().algorithms;
  bool const masked = wish.reduction_mask != CUBLASLT_REDUCTION_SCHEME_MASK;
  if (algorithms == Algorithms::none || (algorithms == Algorithms::none_under_the_mask && masked))
    return CUBLAS_STATUS_NOT_SUPPORTED;
  auto const add = [&](cublasLtMatmulHeuristicResult_t const& result) {
    if (*returnAlgoCount < requestedAlgoCount) results[(*returnAlgoCount)++] = result;
  };
  if (requestedAlgoCount > 1) add(useless());
  for (auto algorithm : algorithms_for(problem)) {
    if (!fits(algorithm, wish)) continue;
    algorithm.align_a = static_cast<std::uint16_t>(wish.align_a);
    algorithm.align_b = static_cast<std::uint16_t>(wish.align_b);
    algorithm.align_c = static_cast<std::uint16_t>(wish.align_c);
    algorithm.align_d = static_cast<std::uint16_t>(wish.align_d);
    cublasLtMatmulHeuristicResult_t result{};
    write_contents(&result.algo, algorithm);
    result.workspaceSize = algorithm.workspace_bytes;
    result.state = CUBLAS_STATUS_SUCCESS;
    result.wavesCount = 1;
    add(result);
  }
  count(&Calls::heuristics);
  return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatmul(cublasLtHandle_t handle, cublasLtMatmulDesc_t operation, void const* alpha, void const* A,
                              cublasLtMatrixLayout_t a, void const* B, cublasLtMatrixLayout_t b, void const* beta,
                              void const* C, cublasLtMatrixLayout_t c, void* D, cublasLtMatrixLayout_t d,
                              cublasLtMatmulAlgo_t const* algo, void* workspace, size_t workspaceSizeInBytes,
                              cudaStream_t stream) {
  constexpr char const* call = "cublasLtMatmul";
  standin::count_call(call);
  if (auto const status = expect_usable(call, handle); status != CUBLAS_STATUS_SUCCESS) return status;
  Problem problem;
  problem.call = call;
  if (auto const status = read(problem, operation, a, b, c, d); status != CUBLAS_STATUS_SUCCESS) return status;
  if (alpha == nullptr || beta == nullptr)
    return refuse(CUBLAS_STATUS_INVALID_VALUE, rule::scalars,
                  fsdp::formatted("{}: alpha or beta is null", problem.text()));
  Algorithm algorithm;  // without one, cuBLASLt looks for one itself: any will do
  algorithm.problem = problem.fingerprint();
  if (algo != nullptr) algorithm = contents_of<Algorithm>(algo);
  if (algorithm.problem != problem.fingerprint())
    return refuse(CUBLAS_STATUS_INVALID_VALUE, rule::algorithm,
                  fsdp::formatted("{}: the algorithm {}", problem.text(),
                                  algorithm.tag != Algorithm::own_tag ? "is none of the heuristic's"
                                                                      : "was found for another problem"));
  auto const scalar = [&](void const* value) {
    if (problem.operation.scale == CUDA_R_64F) return *static_cast<double const*>(value);
    return static_cast<double>(*static_cast<float const*>(value));
  };
  problem.alpha = scalar(alpha);
  problem.beta = scalar(beta);
  problem.data_a = A;
  problem.data_b = B;
  problem.data_c = C;
  problem.data_d = D;
  auto const status = enqueue_product(problem, algorithm, handle->device, workspace, workspaceSizeInBytes, stream);
  if (status == CUBLAS_STATUS_SUCCESS) count(&Calls::products);
  return status;
}

}  // extern "C"
