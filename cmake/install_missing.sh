# shellcheck shell=bash
# SPDX-License-Identifier: Apache-2.0
# How run.sh and tests/run.sh install the packages that the build needs. Sourced, in the repository's root:
# `. cmake/install_missing.sh`.
#
# CMake says what it does not find (FsdpMissing.cmake), and exactly that is installed, by apt-get. Where a compiler or CMake is
# missing, its list is read from the sources of the configuration instead, so that one call of apt-get installs everything.
# Packages that the build can do without (wishes) are installed by the same call. Where everything is there, no package manager
# and no network is asked. The caller has the functions say (progress) and die (an error, which ends the script), and may set
# install=0 afterwards, which forbids installing.
install=1
apt_log=build/packages.log
apt_updated=
apt_trouble=
wishes=()

# Why packages cannot be installed here, or nothing.
why_not_installable() {
  if ((!install)); then echo "installing was forbidden"
  elif ! command -v apt-get > /dev/null; then echo "this system has no apt-get to install it with"
  elif ((EUID != 0)) && ! command -v sudo > /dev/null; then echo "installing takes root, and there is no sudo"
  fi
}
with_root() { if ((EUID == 0)); then "$@"; else sudo "$@"; fi; }
is_installed() { [[ $(dpkg-query -W -f='${Status}' "$1" 2> /dev/null) == *" ok installed" ]]; }
apt_get() { # waits for another package manager, such as a new machine's own updates
  with_root env LC_ALL=C DEBIAN_FRONTEND=noninteractive apt-get "$1" -q -oDPkg::Lock::Timeout=300 "${@:2}" < /dev/null
}
apt_update() { # once in a script's run
  [[ -z $apt_updated ]] || return 0
  apt_updated=yes
  if ! apt_get update -o APT::Update::Error-Mode=any >> "$apt_log" 2>&1; then
    apt_trouble="apt-get could not update its lists, nor install it (see above): is there a network?"
    if ((EUID != 0)) && ! sudo -n true 2> /dev/null; then apt_trouble="installing takes root, and sudo refused it (see above)"; fi
  fi
}
apt_install() { apt_get install -y --no-install-recommends "$@" >> "$apt_log" 2>&1; }
# How many packages apt-get would install, and their size; nothing if it cannot tell.
apt_size() {
  apt_get install --assume-no --no-install-recommends "$@" 2> /dev/null |
    sed -nE 's/.* ([0-9]+) newly installed.*/\1 packages/p
             s|^Need to get ([^/]* [kMG]?B/)?([0-9.,]+ [kMG]?B) of archives.*|, \2 to download|p
             s/^After this operation, ([0-9.,]+ [kMG]?B) of additional.*/, \1 on the disk/p' | tr -d '\n' || true
}
show_apt_log() { tail -n 15 "$apt_log" | sed 's/^/  | /' >&2; }

# install_missing LINE...: installs packages and all wishes, or ends with the sentence that names what cannot be had and who
# needs it. Fails if nothing was missing, and no wish could be installed. A LINE is "package<TAB>who needs what".
install_missing() {
  local line package reason size note="" needs="" packages=() wished=() all=() absent=()
  for line in "$@"; do
    package=${line%%$'\t'*}
    needs+="${needs:+, }$package (${line#*$'\t'})"
    [[ " ${packages[*]-} " == *" $package "* ]] || packages+=("$package")
  done
  wished=(${wishes[@]+"${wishes[@]}"})
  all=(${packages[@]+"${packages[@]}"} ${wished[@]+"${wished[@]}"})
  wishes=()
  reason=$(why_not_installable)
  if ((${#packages[@]} == 0)); then # nobody is asked for a password
    if ((${#wished[@]} == 0)) || [[ -n $reason ]]; then return 1; fi
    if ((EUID != 0)) && ! sudo -n true 2> /dev/null; then return 1; fi
  fi
  [[ -z $reason ]] || die "missing $needs: $reason"
  { mkdir -p build && : > "$apt_log"; } 2> /dev/null || apt_log=$(mktemp)
  apt_update
  if [[ $apt_trouble == *sudo* ]]; then
    show_apt_log
    die "missing $needs: $apt_trouble"
  fi
  size=$(apt_size "${all[@]}")
  say "installing ${size:+$size: }${all[*]} (log: $apt_log)"
  if ((${#wished[@]})); then
    apt_install "${all[@]}" && return
    note="not installed, and not required: ${wished[*]} ($(grep -m 1 "^E: " "$apt_log" || true))"
    if ((${#packages[@]} == 0)); then
      say "$note"
      return 1
    fi
  fi
  if apt_install "${packages[@]}"; then
    [[ -z $note ]] || say "$note"
    return 0
  fi
  # apt-get also fails if it has installed these, and any other package is half installed.
  for package in "${packages[@]}"; do is_installed "$package" || absent+=("$package"); done
  ((${#absent[@]})) || return 0
  show_apt_log
  [[ -z $apt_trouble ]] || die "missing $needs: $apt_trouble"
  for line in "$@"; do # which one it is
    package=${line%%$'\t'*}
    apt_install "$package" || is_installed "$package" || die "missing $package (${line#*$'\t'}): apt-get could not install it (see above)"
  done
}
still_missing() { die "missing ${1%%$'\t'*} (${1#*$'\t'}): apt-get reported success, and still $2"; }

# A program is there only if it runs.
runs() { "$1" --version > /dev/null 2>&1; }
# Tools without which CMake cannot say what is missing. One line for each.
missing_tools() {
  [[ -n ${CXX:-} ]] || command -v c++ g++ clang++ > /dev/null || printf 'g++\tthe build needs a C++20 compiler\n'
  runs ninja || command -v make gmake > /dev/null || printf 'make\tthe build needs make or ninja\n'
  command -v cmake > /dev/null || printf 'cmake\tthe build needs CMake 3.25 or newer\n'
}
# declared_packages WHO...: the packages that CMake's calls of fsdp_missing() name for these, and that are not installed.
declared_packages() {
  local who what packages package needs
  sed -nE 's/^ *fsdp_missing\(([A-Za-z0-9_:]+) ("([^"$]*)[^"]*"|([^" ]+)) ([^)]*)\).*/\1|\3\4|\5/p' cmake/*.cmake |
    while IFS='|' read -r who what packages; do
      [[ " $* " == *" $who "* ]] || continue
      needs=needs
      if [[ $who == *s ]]; then needs=need; fi # tests, benchmarks
      for package in $packages; do
        is_installed "$package" || printf '%s\t%s %s %s\n' "$package" "$who" "$needs" "$what"
      done
    done
}
# need_tools WHO...: installs missing tools, and with them the packages of WHO (as in fsdp_missing), which CMake could not name.
need_tools() {
  local version missing=() packages=()
  [[ -z ${CXX:-} ]] || command -v "${CXX%% *}" > /dev/null || die "CXX=$CXX: there is no such compiler"
  mapfile -t missing < <(missing_tools)
  if ((${#missing[@]})); then
    mapfile -t packages < <(declared_packages "$@")
    install_missing "${missing[@]}" ${packages[@]+"${packages[@]}"}
    mapfile -t missing < <(missing_tools)
    ((${#missing[@]} == 0)) || still_missing "${missing[0]}" "it is not found"
  fi
  version=$(cmake --version | sed -n 's/^cmake version \([0-9]*\.[0-9]*\).*/\1/p')
  [[ $(printf '3.25\n%s\n' "$version" | sort -V | head -n 1) == 3.25 ]] ||
    die "this system's cmake is $version, and the build needs 3.25 or newer"
}

# Wishes: packages that the build can do without. They are installed with the packages that are missing, or by configure, where
# that asks nobody for a password.
wish_for() { # wish_for COMMAND=PACKAGE...
  local wish
  for wish in "$@"; do
    command -v "${wish%%=*}" > /dev/null || wishes+=("${wish#*=}")
  done
}
# oneDNN, where this processor multiplies bf16. FSDP_CPUINFO: another processor's, for tests.
wish_for_bf16() {
  grep -qwE 'avx512_bf16|amx_bf16' "${FSDP_CPUINFO:-/proc/cpuinfo}" 2> /dev/null || return 0
  if is_installed libdnnl-dev || ${CXX:-c++} -E -include dnnl.hpp -x c++ /dev/null > /dev/null 2>&1; then return; fi
  wishes+=(libdnnl-dev)
}
# Programs that download over https.
wish_for_download() {
  if ! command -v curl wget > /dev/null; then wishes+=(curl); fi
  if [[ ! -s /etc/ssl/certs/ca-certificates.crt ]]; then wishes+=(ca-certificates); fi
}
use_quick_tools() { # a fresh build folder takes ninja; one that exists keeps its generator
  if [[ -z ${CMAKE_GENERATOR:-} ]] && runs ninja; then export CMAKE_GENERATOR=Ninja; fi
  export CMAKE_CXX_COMPILER_LAUNCHER=${CMAKE_CXX_COMPILER_LAUNCHER-$PWD/cmake/compiler_launcher.sh}
  export CMAKE_CUDA_COMPILER_LAUNCHER=${CMAKE_CUDA_COMPILER_LAUNCHER-$PWD/cmake/compiler_launcher.sh}
}

# writable FOLDER: makes it, and ends unless a file can be written there.
writable() {
  { mkdir -p "$1" && echo > "$1/.writable" && rm "$1/.writable"; } 2> /dev/null ||
    die "cannot write to '$1': is it read-only, or its disk full?"
}
# configure PRESET [cmake arguments...]: build/PRESET, with what CMake finds missing, and wishes, installed.
configure() {
  local attempt preset=$1 log=build/$1.log list=build/$1/missing-packages.txt missing=() tool fresh=() is_new=0
  writable "$PWD/build"
  if [[ ! -e build/$1/CMakeCache.txt ]]; then is_new=1; fi
  for attempt in first second; do
    use_quick_tools
    # A folder whose ninja (or make) is gone is configured anew, for the tool that is there; so is one that has just been made
    # without ninja, if that has been installed since.
    tool=$(sed -n 's/^CMAKE_MAKE_PROGRAM:[A-Z]*=//p' "build/$1/CMakeCache.txt" 2> /dev/null) || true
    if [[ -n $tool ]] && { ! runs "$tool" || { ((is_new)) && [[ ${CMAKE_GENERATOR:-} == Ninja && $tool != *ninja* ]]; }; }; then
      fresh=(--fresh)
    fi
    rm -f "$list"
    missing=()
    if ! cmake --preset "$@" ${fresh[@]+"${fresh[@]}"} > "$log" 2>&1; then
      if [[ ! -s $list ]]; then
        cat "$log" >&2
        die "CMake could not configure build/$preset (its messages are above, and in $log)"
      fi
      mapfile -t missing < "$list"
    fi
    if [[ $attempt == second ]] || ! install_missing ${missing[@]+"${missing[@]}"}; then break; fi
  done
  ((${#missing[@]} == 0)) || still_missing "${missing[0]}" "CMake does not find it ($log)"
}
