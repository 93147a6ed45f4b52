// SPDX-License-Identifier: Apache-2.0
#include "tests/standin/nccl/sum.hpp"

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <cstring>
#include <limits>
#include <type_traits>

namespace standin::nccl {
namespace {

template <class T>
T sum(T a, T b) {
  if constexpr (std::is_integral_v<T>) {
    using Wide = std::make_unsigned_t<std::common_type_t<T, int>>;  // wraps around
    return static_cast<T>(static_cast<Wide>(a) + static_cast<Wide>(b));
  } else {
    return a + b;
  }
}
// The sum in fp32 is rounded once more, to the result that one rounding gives: fp32 has more than twice their digits.
__half sum(__half a, __half b) { return __float2half_rn(__half2float(a) + __half2float(b)); }
__nv_bfloat16 sum(__nv_bfloat16 a, __nv_bfloat16 b) {
  return __float2bfloat16_rn(__bfloat162float(a) + __bfloat162float(b));
}

template <class T>
bool add_as(std::byte* into, std::byte const* from, std::size_t count) {
  for (std::size_t i = 0; i < count; ++i) {
    T a, b;
    std::memcpy(&a, into + i * sizeof(T), sizeof(T));
    std::memcpy(&b, from + i * sizeof(T), sizeof(T));
    a = sum(a, b);
    std::memcpy(into + i * sizeof(T), &a, sizeof(T));
  }
  return true;
}

}  // namespace

std::size_t size_of(ncclDataType_t type) {
  switch (type) {
    case ncclInt8:
    case ncclUint8:
    case ncclFloat8e4m3:
    case ncclFloat8e5m2: return 1;
    case ncclFloat16:
    case ncclBfloat16: return 2;
    case ncclInt32:
    case ncclUint32:
    case ncclFloat32: return 4;
    case ncclInt64:
    case ncclUint64:
    case ncclFloat64: return 8;
    case ncclNumTypes: break;
  }
  return 0;
}

char const* name_of(ncclDataType_t type) {
  switch (type) {
    case ncclInt8: return "int8";
    case ncclUint8: return "uint8";
    case ncclInt32: return "int32";
    case ncclUint32: return "uint32";
    case ncclInt64: return "int64";
    case ncclUint64: return "uint64";
    case ncclFloat16: return "float16";
    case ncclFloat32: return "float32";
    case ncclFloat64: return "float64";
    case ncclBfloat16: return "bfloat16";
    case ncclFloat8e4m3: return "float8e4m3";
    case ncclFloat8e5m2: return "float8e5m2";
    case ncclNumTypes: break;
  }
  return "of no type";
}

bool add(ncclDataType_t type, std::byte* into, std::byte const* from, std::size_t count) {
  switch (type) {
    case ncclInt8: return add_as<std::int8_t>(into, from, count);
    case ncclUint8: return add_as<std::uint8_t>(into, from, count);
    case ncclInt32: return add_as<std::int32_t>(into, from, count);
    case ncclUint32: return add_as<std::uint32_t>(into, from, count);
    case ncclInt64: return add_as<std::int64_t>(into, from, count);
    case ncclUint64: return add_as<std::uint64_t>(into, from, count);
    case ncclFloat16: return add_as<__half>(into, from, count);
    case ncclFloat32: return add_as<float>(into, from, count);
    case ncclFloat64: return add_as<double>(into, from, count);
    case ncclBfloat16: return add_as<__nv_bfloat16>(into, from, count);
    case ncclFloat8e4m3:
    case ncclFloat8e5m2:
    case ncclNumTypes: break;
  }
  return false;
}

}  // namespace standin::nccl
