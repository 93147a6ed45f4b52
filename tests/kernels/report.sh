#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Every CUDA kernel of nanogpt and of the library, as the trainer uses it: registers, memory, spills, and how wide its
# accesses to global memory are. Fails on spills, and where a kernel of packs moves no 16 bytes at once. Needs no GPU.
#
# long
# timeout: 900
# programs: nanogpt
# usage: tests/kernels/report.sh [NVCC [WORK_DIR [FOLDER... | ARCHITECTURE...]]]   (nvcc, a temporary folder, 90a and 80)
#
# With FOLDERs the kernels are those of the CUDA objects in them, which hold uncompressed PTX (tests/CMakeLists.txt asks for it).
# Otherwise they are compiled here.
#
# Columns: architecture, registers of a thread, bytes of static shared memory, of the stack, of spill stores and loads,
# bytes of loads from global memory (each width that occurs; +cp: copies into shared memory behind the thread's back),
# of stores, kernel with the types of its arguments. Dynamic shared memory is not in a kernel's code: see the kernel's
# shared_bytes.
set -euo pipefail
nvcc=${1:-nvcc} work=${2:-}
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
if [[ -z $work ]]; then
  work=$(mktemp -d)
  trap 'rm -rf "$work"' EXIT
fi
mkdir -p "$work"
architectures=("${@:3}")
if ((${#architectures[@]} == 0)); then architectures=(90a 80); fi
ptxas=$(dirname "$(command -v "$nvcc")")/ptxas
fmt=()
if [[ -n ${FSDP_FMT_INCLUDE:-} ]]; then fmt=(-Xcompiler=-idirafter,"$FSDP_FMT_INCLUDE"); fi

modules=()
if [[ -d ${architectures[0]} ]]; then
  mapfile -t objects < <(find "${architectures[@]}" -name '*.cu.o' | sort)
  ((${#objects[@]})) || { echo "FAILED: no CUDA objects in ${architectures[*]}"; exit 1; }
  for object in "${objects[@]}"; do
    # Each text between two zero bytes that begins like PTX is a module.
    module=$work/$(basename "$object" .cu.o)
    rm -f "$module".*.ptx
    tr '\0' '\001' <"$object" | LC_ALL=C awk -v RS='\001' -v module="$module" '
      /(^|\n)\.version / { out = module "." ++n ".ptx"; sub(/^.*\n\.version /, ".version "); print > out; close(out) }
      END { exit n == 0 }' || { echo "FAILED: $object holds no uncompressed PTX"; exit 1; }
    modules+=("$module".*.ptx)
  done
else
  # The library's own kernels, as an engine and an optimizer use them.
  library=$work/library.cu
  cat >"$library" <<'EOF'
#include "fsdp/local.hpp"
#include "fsdp/cuda.hpp"
#include "nanogpt/instances/layers_cuda.hpp"
#include "nanogpt/instances/rank.hpp"
#include "fsdp/communicator.hpp"
namespace transformer {
using Gpu = fsdp::cuda::Device;
template int run_rank<fsdp::Fp32>(fsdp::AnyCommunicator<Gpu>, Job const&);
template int run_rank<fsdp::Bf16>(fsdp::AnyCommunicator<Gpu>, Job const&);
template fsdp::AnyCommunicator<Gpu>::AnyCommunicator(fsdp::local::Communicator<Gpu>);
}  // namespace transformer
EOF
  for architecture in "${architectures[@]}"; do
    for source in "$root"/examples/nanogpt/instances/layers_cuda.cu "$library"; do
      ptx=$work/$(basename "$source" .cu).$architecture.ptx
      "$nvcc" -std=c++20 -DFSDP_FMT_LIBRARY=1 -DFMT_USE_CONSTEXPR=1 -arch="compute_$architecture" -I"$root/include" \
        -I"$root/examples" "${fmt[@]}" -ptx -o "$ptx" "$source"
      modules+=("$ptx")
    done
  done
fi

for ptx in "${modules[@]}"; do
  architecture=$(sed -n 's/^\.target sm_\([0-9a-z]*\).*/\1/p;/^\.target/q' "$ptx")
  "$ptxas" -v -arch="sm_$architecture" -o /dev/null "$ptx" 2>"$ptx.log" || { cat "$ptx.log"; exit 1; }
  # Widths out of the PTX, then figures of ptxas, by mangled name.
  awk -v architecture="$architecture" '
    function note(list, width) { return index(list, " " width " ") ? list : list width " " }
    function bytes(instruction,   count, parts, n, i) {
      count = 1
      n = split(instruction, parts, ".")
      for (i = 2; i <= n; ++i) {
        if (parts[i] ~ /^v[248]$/) count = substr(parts[i], 2)
        if (parts[i] ~ /^[bfsu](8|16|32|64|128)$/) return count * substr(parts[i], 2) / 8
      }
      return 0
    }
    FNR == NR {
      if ($0 ~ /\.entry /) { name = $0; sub(/.*\.entry /, "", name); sub(/\(.*/, "", name); loads[name] = stores[name] = " " }
      if ($0 ~ /^}/) name = ""
      if (name == "") next
      for (i = 1; i <= 2; ++i) {
        if ($i ~ /^cp\.async\.c[ag]\.shared\.global$/) loads[name] = note(loads[name], "16+cp")
        else if ($i ~ /^ld\./ && $i !~ /^ld\.(param|shared|local|const)/) loads[name] = note(loads[name], bytes($i))
        else if ($i ~ /^st\./ && $i !~ /^st\.(param|shared|local)/) stores[name] = note(stores[name], bytes($i))
      }
      next
    }
    /Compiling entry function/ { split($0, quoted, "\047"); name = quoted[2] }
    /bytes stack frame/ && name != "" { stack = $1; out = $5; back = $9 }
    /Used [0-9]+ registers/ && name != "" {
      shared = 0
      for (i = 1; i <= NF; ++i) {
        if ($i == "Used") registers = $(i + 1)
        if ($(i + 1) == "bytes" && $(i + 2) ~ /^smem/) shared = $i
      }
      l = loads[name]; s = stores[name]
      gsub(/^ | $/, "", l); gsub(/ /, ",", l); gsub(/^ | $/, "", s); gsub(/ /, ",", s)
      printf "%s\t%d\t%d\t%d\t%d\t%d\t%s\t%s\t%s\n", architecture, registers, shared, stack, out, back, l == "" ? "-" : l, s == "" ? "-" : s, name
      name = ""
    }' "$ptx" "$ptx.log"
done | c++filt -p | sed -E 's/\bfsdp::v[0-9_]+::/fsdp::/g; s/fsdp::cuda::detail::run_kernel<(.*)>(\(.*)?$/\1/; s/ *$//
  s/\((int|bool|fsdp::NormKind)\)//g; s/(nanogpt|transformer|fsdp|kernels|pairwise|detail)::(detail::)?//g' |
  sort -u | sort -t $'\t' -k 9,9 -k 1,1 >"$work/table"

(printf 'sm\tregs\tshared\tstack\tst\tld\tloads\tstores\tkernel\n'; cat "$work/table") |
  awk -F'\t' '{ printf "%-4s%5s%7s%6s%4s%4s  %-14s%-12s%s\n", $1, $2, $3, $4, $5, $6, $7, $8, $9 }' | tee "$work/kernels.txt"
awk -F'\t' '
  # Kernels of packs: by a template argument, or those that leave packs to the block (fsdp/detail/cuda/block.hpp).
  function has_packs() {
    return $9 ~ /^blocks::(ColumnSums<[248]>|LayerNormRows|DropoutPacks)/ ||
           $9 ~ /^(Gelu|GeluBackward|Add|BiasAdd|BiasGelu|BiasResidual|CrossEntropyRows|CausalSoftmax|LayerNormForward|EmbeddingForward|Accumulate|Cast|AdamW|Scale|NormPartials|SumFew)[<,]/
  }
  $5 + $6 > 0 {
    print "FAILED: spills " $5 " bytes: sm_" $1 ": " $9
    failed = 1
  }
  $9 ~ /SumFew/ { sums = 1 }  # of local::Communicator
  has_packs() {
    ++packed
    if (("," $7 ",") !~ /,16[,+]/) { print "FAILED: no load of 16 bytes: sm_" $1 ": " $9; failed = 1 }
  }
  END {
    print NR " kernels, " packed + 0 " of packs"
    if (packed < 20 || !sums) { print "FAILED: too few kernels were found"; failed = 1 }
    exit failed
  }' "$work/table"
