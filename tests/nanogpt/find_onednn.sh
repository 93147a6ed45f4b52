#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# oneDNN is a wish: it is found where a program with it links, and a header without its library, or of another version than
# it, or one that is gone since the last configuration, is none and no error. The oneDNN here is a small one of our own.
# timeout: 120
# skip-sanitizers
set -uo pipefail

source_folder=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
. "$source_folder/tests/support/script.sh"
work=$(mktemp -d)
at_exit 'rm -rf "$work"'
cd "$work" || exit 1
cat > CMakeLists.txt << EOF2
cmake_minimum_required(VERSION 3.25)
project(finds LANGUAGES CXX)
list(PREPEND CMAKE_MODULE_PATH "$source_folder/cmake")
set(CMAKE_FIND_USE_CMAKE_SYSTEM_PATH OFF)
set(CMAKE_FIND_USE_SYSTEM_ENVIRONMENT_PATH OFF)
find_package(oneDNN QUIET)
message(STATUS "found '\${oneDNN_FOUND}'")
EOF2

header() { # header FUNCTION: of a version whose products are made by this function of the library
  mkdir -p include
  cat > include/dnnl.hpp << EOF2
#include <map>
#include <vector>
enum { DNNL_ARG_SRC, dnnl_cpu_isa_avx512_core_amx };
#define DNNL_MEMORY_NONE nullptr
extern "C" int $1();
namespace dnnl {
enum class scratchpad_mode { user };
struct engine { enum class kind { cpu }; engine(kind, int) {} };
struct stream { explicit stream(engine&) {} };
struct primitive_attr { void set_scratchpad_mode(scratchpad_mode) {} };
struct memory {
  using dims = std::vector<long>;
  enum class data_type { bf16 };
  struct desc { desc(dims, data_type, dims) {} };
  memory(desc, engine, void*) {}
};
struct matmul {
  struct desc { desc(memory::desc, memory::desc, memory::desc) {} };
  struct primitive_desc { primitive_desc(desc, primitive_attr, engine) { $1(); } };
  explicit matmul(primitive_desc) {}
  void execute(stream, std::map<int, memory>) {}
};
inline int get_effective_cpu_isa() { return 0; }
}
EOF2
}
library() { # library FUNCTION
  mkdir -p lib
  echo "extern \"C\" int $1() { return 0; }" | "${CXX:-c++}" -x c++ -shared -fPIC -o lib/libdnnl.so - || fail "no library"
}
configures() { # configures FOUND
  checks=$((checks + 1))
  "${CMAKE:-cmake}" -B build -DCMAKE_CXX_COMPILER="${CXX:-c++}" -DCMAKE_PREFIX_PATH="$work" . > output 2>&1 || fail "CMake ended with $?"
  check "oneDNN is not $1" grep -qF "found '$1'" output
}

header make_product_2
configures FALSE
library make_product_3
configures FALSE
library make_product_2
touch -d '2001-01-01' lib/libdnnl.so
configures TRUE
rm include/dnnl.hpp
configures FALSE
header make_product_2
configures TRUE
library make_product_3
configures FALSE

echo "$checks checks, $failures failures"
exit $((failures != 0))
