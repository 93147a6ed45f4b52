# SPDX-License-Identifier: Apache-2.0
# How run.sh and tests/run.sh come by what the build needs. Sourced, in the repository's root: `. cmake/install_missing.sh`.
#
# CMake says what it does not find (FsdpMissing.cmake), and exactly that is installed, by apt-get. Where everything is there,
# no package manager and no network is asked. The caller has the functions say (progress) and die (an error, which ends the
# script), and may set install=0 afterwards, which forbids installing.
install=1
apt_updated=
apt_trouble=

# Why packages cannot be installed here, or nothing.
why_not_installable() {
  if ((!install)); then echo "installing was forbidden"
  elif ! command -v apt-get > /dev/null; then echo "this system has no apt-get to install it with"
  elif ((EUID != 0)) && ! command -v sudo > /dev/null; then echo "installing takes root, and there is no sudo"
  fi
}
with_root() { if ((EUID == 0)); then "$@"; else sudo "$@"; fi; }
apt_install() { # waits for another package manager, such as a new machine's own updates
  with_root env DEBIAN_FRONTEND=noninteractive apt-get install -q -y --no-install-recommends -oDPkg::Lock::Timeout=300 "$@" < /dev/null
}
is_installed() { [[ $(dpkg-query -W -f='${Status}' "$1" 2> /dev/null) == *" ok installed" ]]; }
apt_update() { # once in a script's run
  [[ -z $apt_updated ]] || return 0
  apt_updated=yes
  if ! with_root apt-get update -q -o APT::Update::Error-Mode=any; then
    apt_trouble="apt-get could not update its lists, nor install it (see above): is there a network?"
    if ((EUID != 0)) && ! sudo -n true 2> /dev/null; then apt_trouble="installing takes root, and sudo refused it (see above)"; fi
  fi
}

# install_missing LINE...: installs packages, or ends with the sentence that names what cannot be had and who needs it.
# A LINE is "package<TAB>who needs what".
install_missing() {
  local line package reason needs="" packages=() absent=()
  for line in "$@"; do
    package=${line%%$'\t'*}
    needs+="${needs:+, }$package (${line#*$'\t'})"
    [[ " ${packages[*]-} " == *" $package "* ]] || packages+=("$package")
  done
  reason=$(why_not_installable)
  [[ -z $reason ]] || die "missing $needs: $reason"
  say "installing $needs"
  apt_update
  apt_install "${packages[@]}" && return
  # apt-get also fails if it has installed these, and any other package is half installed.
  for package in "${packages[@]}"; do is_installed "$package" || absent+=("$package"); done
  ((${#absent[@]})) || return 0
  [[ -z $apt_trouble ]] || die "missing $needs: $apt_trouble"
  for line in "$@"; do # which one it is
    package=${line%%$'\t'*}
    apt_install "$package" > /dev/null 2>&1 || is_installed "$package" || die "missing $package (${line#*$'\t'}): apt-get could not install it (see above)"
  done
}

still_missing() { die "missing ${1%%$'\t'*} (${1#*$'\t'}): apt-get reported success, and still $2"; }

# A program is there only if it runs.
runs() { "$1" --version > /dev/null 2>&1; }
# What could not say that it is missing: a compiler, a build tool and CMake. One line for each.
missing_tools() {
  [[ -n ${CXX:-} ]] || command -v c++ g++ clang++ > /dev/null || printf 'g++\tthe build needs a C++20 compiler\n'
  runs ninja || command -v make gmake > /dev/null || printf 'make\tthe build needs make or ninja\n'
  command -v cmake > /dev/null || printf 'cmake\tthe build needs CMake 3.25 or newer\n'
}
need_tools() {
  local version missing=()
  [[ -z ${CXX:-} ]] || command -v "${CXX%% *}" > /dev/null || die "CXX=$CXX: there is no such compiler"
  mapfile -t missing < <(missing_tools)
  if ((${#missing[@]})); then
    install_missing "${missing[@]}"
    mapfile -t missing < <(missing_tools)
    ((${#missing[@]} == 0)) || still_missing "${missing[0]}" "it is not found"
  fi
  version=$(cmake --version | sed -n 's/^cmake version \([0-9]*\.[0-9]*\).*/\1/p')
  [[ $(printf '3.25\n%s\n' "$version" | sort -V | head -n 1) == 3.25 ]] ||
    die "this system's cmake is $version, and the build needs 3.25 or newer"
}

# What nothing needs: installed where that asks nobody for a password; elsewhere nothing is said.
install_wish() { # install_wish WHY PACKAGE...
  local why=$1
  shift
  if (($# == 0)) || [[ -n $(why_not_installable) ]]; then return; fi
  if ((EUID != 0)) && ! sudo -n true 2> /dev/null; then return; fi
  say "installing $* (for $why)"
  apt_update
  apt_install "$@" || true
}
wish_for() { # wish_for COMMAND=PACKAGE...: for quicker builds
  local wish packages=()
  for wish in "$@"; do
    command -v "${wish%%=*}" > /dev/null || packages+=("${wish#*=}")
  done
  install_wish "quicker builds" ${packages[@]+"${packages[@]}"}
}
# oneDNN, where this processor multiplies bf16. FSDP_CPUINFO: another processor's, for tests.
wish_for_bf16() {
  grep -qwE 'avx512_bf16|amx_bf16' "${FSDP_CPUINFO:-/proc/cpuinfo}" 2> /dev/null || return 0
  if is_installed libdnnl-dev || ${CXX:-c++} -E -include dnnl.hpp -x c++ /dev/null > /dev/null 2>&1; then return; fi
  install_wish "bf16 on this processor" libdnnl-dev
}
use_quick_tools() { # a fresh build folder takes ninja; one that exists keeps its generator
  if [[ -z ${CMAKE_GENERATOR:-} ]] && runs ninja; then export CMAKE_GENERATOR=Ninja; fi
  export CMAKE_CXX_COMPILER_LAUNCHER=${CMAKE_CXX_COMPILER_LAUNCHER-$PWD/cmake/compiler_launcher.sh}
  export CMAKE_CUDA_COMPILER_LAUNCHER=${CMAKE_CUDA_COMPILER_LAUNCHER-$PWD/cmake/compiler_launcher.sh}
}

# configure PRESET [cmake arguments...]: build/PRESET, with what CMake finds missing installed first.
configure() {
  local attempt preset=$1 log=build/$1.log list=build/$1/missing-packages.txt missing=() tool fresh=()
  mkdir -p build
  # A folder whose ninja (or make) is gone is configured anew, for the tool that is there.
  tool=$(sed -n 's/^CMAKE_MAKE_PROGRAM:[A-Z]*=//p' "build/$1/CMakeCache.txt" 2> /dev/null) || true
  if [[ -n $tool ]] && ! runs "$tool"; then fresh=(--fresh); fi
  for attempt in first second; do
    rm -f "$list"
    if cmake --preset "$@" ${fresh[@]+"${fresh[@]}"} > "$log" 2>&1; then return; fi
    if [[ ! -s $list ]]; then
      cat "$log" >&2
      die "CMake could not configure build/$preset (its messages are above, and in $log)"
    fi
    mapfile -t missing < "$list"
    if [[ $attempt == first ]]; then install_missing "${missing[@]}"; fi
  done
  still_missing "${missing[0]}" "CMake does not find it ($log)"
}
