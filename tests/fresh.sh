#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# README's two commands on machines that have nothing: bare Debian 12 and 13, each in a chroot from this machine's own package
# mirror; as root and as a user with sudo; with and without the reference BLAS; on a processor with and without units for
# bf16. Both must succeed; run again, they must install, compile and train nothing. Before that, without network and as a
# user without sudo, they must end in one sentence.
# labels: full
# timeout: 14400
#
#   tests/fresh.sh [options] [-- arguments of the first command]
#
#   --suite=bookworm|trixie|sid  --user=root|sudo  --blas=without|with   only these cases
#   --bf16=without|with|here  what /proc/cpuinfo says of bf16, in all cases; `here`: what this machine's says
#   --cxx=clang++   the compiler, whose package the machine then has; otherwise what the commands install
#   --first         README's first command only
#   --unoptimised   compiles at -O0 without debugging information, in less than half the time
#   --headers       after the commands: each public header compiles alone under clang++ and all together under g++, without warnings
#   --measure       prints wall and CPU seconds of each command, and the seconds of run.sh's phases
#   --cache=DIR     compiler cache that the chroot shares; the machine then has ccache
#   --text=FILE     copied into the chroot as ../text
#   --tests=REGEX   the tests of the host that the second command builds and runs
#   --jobs=N        compilers at a time
#   --keep          leaves chroots and logs
#
# Without options, four cases on each suite, in which every two values of user, BLAS and processor occur together. Needs root,
# mmdebstrap and an apt mirror of Debian, and must be allowed to mount; otherwise ends with 77 and the reason. The first case of a
# suite has no compiler cache until the second command installs one; later cases share it. Nothing stays mounted, and no folder
# stays.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit 1

suites=(bookworm trixie) users=(root sudo) blases=(without with)
bf16='' cxx='' first_only=0 unoptimised=0 headers=0 measure=0 shared_cache='' text='' tests='^unit_|^example_mlp' jobs=2 keep=0
first=(--data README.md --max_iters=20 --eval_iters=2 --n_layer=1 --n_embd=32)
while (($#)); do
  argument=$1
  shift
  case $argument in
    --suite=?*) suites=("${argument#*=}") ;;
    --user=root | --user=sudo) users=("${argument#*=}") ;;
    --blas=with | --blas=without) blases=("${argument#*=}") ;;
    --bf16=with | --bf16=without | --bf16=here) bf16=${argument#*=} ;;
    --cxx=g++ | --cxx=clang++) cxx=${argument#*=} ;;
    --first) first_only=1 ;;
    --unoptimised) unoptimised=1 ;;
    --headers) headers=1 ;;
    --measure) measure=1 ;;
    --cache=/*) shared_cache=${argument#*=} ;;
    --text=?*) text=${argument#*=} ;;
    --tests=?*) tests=${argument#*=} ;;
    --jobs=[1-9]*) jobs=${argument#*=} ;;
    --keep) keep=1 ;;
    --) first=("$@"); break ;;
    -h | --help) sed -n '3,/^[^#]/s/^# \{0,1\}//p' "${BASH_SOURCE[0]}" | grep -vE '^(labels|timeout): '; exit 0 ;;
    *) echo "fresh.sh: unknown argument '$argument' (see --help)" >&2; exit 2 ;;
  esac
done
[[ -z $text || -r $text ]] || { echo "fresh.sh: --text: '$text' cannot be read" >&2; exit 2; }

skip() { echo "skipped: $*"; exit 77; }
((EUID == 0)) || skip "making chroots takes root"
for tool in mmdebstrap apt-get unshare chroot setpriv; do command -v $tool > /dev/null || skip "$tool is not here"; done
unshare --mount --pid --fork --kill-child chroot / true 2> /dev/null || skip "this machine does not allow unshare and chroot"
unshare --mount mount -t tmpfs tmpfs /mnt 2> /dev/null || skip "this machine does not allow mount"
# From this machine's apt: the archive that the system itself comes from, and how to reach it.
mirror=$(. /etc/os-release && [[ $ID == debian ]] &&
  apt-get indextargets --format '$(CODENAME) $(COMPONENT) $(REPO_URI)' 'Identifier: Packages' 2> /dev/null |
  sed -n "s/^$VERSION_CODENAME main //p" | head -n 1)
[[ -n $mirror ]] || skip "this machine's apt has no archive of Debian"
mapfile -t reach < <(apt-config dump | grep -E '^Acquire::((http|https)::|Retries|Check-|ForceIPv)')

work=$(mktemp -d "${TMPDIR:-/var/tmp}/fsdp-fresh.XXXXXX")
running=
cleanup() { # processes and mounts live in namespaces that end with `running`
  if [[ -n $running ]]; then kill -KILL "$running" && wait "$running"; fi 2> /dev/null
  if ((keep)); then echo "kept: $work"; else rm -rf --one-file-system "$work"; fi
}
trap cleanup EXIT
trap 'exit 130' INT TERM

home=/home/newcomer
failures=0
# contained COMMAND...: in namespaces of its own, which end with it or with this script.
contained() {
  setpriv --pdeathsig=KILL unshare --mount --pid --fork --kill-child "$@" < /dev/null &
  running=$!
  wait "$running"
  local code=$?
  running=
  return $code
}
say() { printf '[%5ds] %s\n' "$SECONDS" "$*"; }
fail() {
  say "FAILED: $*"
  failures=$((failures + 1))
}

# make_root FOLDER SUITE PACKAGES: a bare system with these packages, a user, and this repository.
make_root() {
  local root=$1 suite=$2 packages=$3 options=()
  for option in "${reach[@]}"; do options+=("--aptopt=$option"); done
  if [[ -n $packages ]]; then options+=("--include=$packages"); fi
  # Where the mirror is reached by https, the certificates that this machine trusts.
  contained mmdebstrap --variant=apt "${options[@]}" \
    --setup-hook='mkdir -p "$1/etc/ssl/certs"; cp -L /etc/ssl/certs/ca-certificates.crt "$1/etc/ssl/certs/" 2> /dev/null || true' \
    "$suite" "$root" "deb $mirror $suite main" > "$root.log" 2>&1 || return 1
  cp -L /etc/resolv.conf /etc/hosts "$root/etc/"
  local name id=1000 # a bare system has no useradd
  for name in newcomer guest; do
    echo "$name:x:$id:$id::/home/$name:/bin/bash" >> "$root/etc/passwd"
    echo "$name:x:$id:" >> "$root/etc/group"
    echo "$name:*:20000:0:99999:7:::" >> "$root/etc/shadow"
    mkdir -p "$root/home/$name"
    chown $id:$id "$root/home/$name"
    id=$((id + 1))
  done
  mkdir -p "$root/refused" "$root/refusals" "$root/cache" "$root$home/fsdp"
  chmod 777 "$root/refused"
  for tool in apt-get sudo; do # first on PATH where nothing may be installed
    printf '#!/bin/sh\necho "%s $*" >> /refused/calls\nexit 1\n' $tool > "$root/refusals/$tool"
    chmod 755 "$root/refusals/$tool"
  done
  if [[ -d $root/etc/sudoers.d ]]; then echo "newcomer ALL=(ALL) NOPASSWD: ALL" > "$root/etc/sudoers.d/newcomer"; fi
  { git ls-files -z --cached --others --exclude-standard 2> /dev/null || find . -path ./build -prune -o -type f -print0; } |
    tar -c --null --ignore-failed-read -T - 2> /dev/null | tar -x -C "$root$home/fsdp"
  if [[ -n $text ]]; then cp -L "$text" "$root$home/text"; fi
  if ((unoptimised)); then
    printf '#!/bin/sh\nexec %s "$@" -O0 -g0\n' "$home/fsdp/cmake/compiler_launcher.sh" > "$root/unoptimised"
    chmod 755 "$root/unoptimised"
  fi
  # Its processor: this machine's, with or without the flags of bf16.
  sed -E 's/ (avx512_bf16|amx_bf16)\b//g' /proc/cpuinfo > "$root/cpuinfo-without"
  { cat /proc/cpuinfo; echo "flags : avx512_bf16 amx_bf16"; } > "$root/cpuinfo-with"
  ln -s /proc/cpuinfo "$root/cpuinfo-here"
}

# inside USER [unshare options...] -- COMMAND...: runs in the chroot, in namespaces of its own; its text goes to $log.
inside() {
  local user=$1 options=() id=0 folder=/root path=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin
  shift
  while [[ $1 != -- ]]; do
    options+=("$1")
    shift
  done
  shift
  if [[ $user != root ]]; then id=$(chroot "$root" id -u "$user") folder=/home/$user; fi
  local environment=(HOME="$folder" USER="$user" LANG=C.UTF-8 PATH="${first_on_path:+$first_on_path:}$path" JOBS="$jobs"
                     CCACHE_DIR=/cache FSDP_CPUINFO=/cpuinfo-$processor ${cxx:+CXX=$cxx})
  if [[ -z $shared_cache ]]; then environment+=(CCACHE_UMASK=000); fi
  if ((unoptimised)); then environment+=(CMAKE_CXX_COMPILER_LAUNCHER=/unoptimised); fi
  for name in http_proxy https_proxy no_proxy; do
    [[ -z ${!name:-} ]] || environment+=("$name=${!name}")
  done
  contained "${options[@]}" bash -c '
    root=$1 cache=$2 id=$3 folder=$4
    shift 4
    mount -t proc proc "$root/proc" && mount -t sysfs -o ro sysfs "$root/sys" && mount -t tmpfs tmpfs "$root/dev/shm" && chmod 1777 "$root/dev/shm" &&
      mount -t devpts devpts "$root/dev/pts" && mount --bind "$cache" "$root/cache" || exit 125
    exec timeout --kill-after=10 5400 chroot "$root" setpriv --reuid="$id" --regid="$id" --init-groups env -i "$@"
  ' inside "$root" "$cache" "$id" "$folder" "${environment[@]}" sh -c 'cd "$0" && exec "$@"' "$home/fsdp" "$@" > "$log" 2>&1
}
show() { tail -n "${1:-15}" "$log" | sed 's/^/          | /'; }
succeeds() { # succeeds WHAT COMMAND...
  local what=$1 code TIMEFORMAT='%0R %0U %0S' wall user system cpu=''
  shift
  log=$root.$what.log
  { time inside "$person" -- "$@"; } 2> "$root.seconds"
  code=$?
  if ((code != 0)); then
    fail "$what ended with $code"
    show 40
    return 1
  fi
  read -r wall user system < "$root.seconds"
  if ((measure)); then cpu=" ($((user + system)) s of CPU)"; fi
  say "$what: $wall s$cpu; $(grep -o 'installing .*' "$log" | sed 's/ ([^()]*)//g; s/^installing/installed/' | paste -sd ';')"
  if ((measure)); then sed -nE 's/^== ([0-9]+ s: .*)/          | \1/p' "$log"; fi
}
ends_in_sentence() { # ends_in_sentence WHAT END USER [unshare options...]
  local what=$1 end=$2 last
  shift 2
  log=$root.$what.log
  if inside "$@" -- ./examples/nanogpt/run.sh; then fail "$what: succeeded"; fi
  last=$(tail -n 1 "$log")
  if [[ $last == "run.sh: error: missing g++ (the build needs a C++20 compiler), "*" (the build needs "*"): $end" ]]; then say "$what: $last"; else
    fail "$what: no sentence at the end"
    show
  fi
}

trouble= # why there was no case
one_case() { # one_case SUITE USER BLAS PROCESSOR
  local suite=$1 user=$2 blas=$3 processor=$4 packages=()
  root=$work/$suite-$user-$blas cache=${shared_cache:-$work/cache-$suite} person=root first_on_path=
  if [[ $user == sudo ]]; then
    packages+=(sudo)
    person=newcomer
  fi
  if [[ $blas == with ]]; then packages+=(libblas-dev); fi
  if [[ -n $shared_cache || -d $cache ]]; then packages+=(ccache); fi
  case $cxx in
    g++) packages+=(g++) ;;
    clang++) packages+=(clang) ;;
  esac
  mkdir -p "$cache"
  if [[ -z $shared_cache ]]; then chmod 777 "$cache"; fi
  say "--- $suite, user $user, $blas libblas-dev, bf16: $processor${packages[*]:+ (the machine has ${packages[*]})}"
  if ! make_root "$root" "$suite" "$(IFS=,; echo "${packages[*]}")"; then
    trouble="mmdebstrap could make no $suite: $(grep -m 1 -E '^E: |Failed to fetch' "$root.log")"
    say "$trouble"
    tail -n 5 "$root.log" | sed 's/^/          | /'
    return 2
  fi
  log=$root.log
  inside root -- true || skip "this machine does not allow the mounts of a chroot: $(tail -n 1 "$log")"
  say "made"
  chroot "$root" chown -R "$person" "$home"
  chmod 755 "$root$home"

  if [[ -z $cxx ]]; then # with a compiler, other packages are missing
    ends_in_sentence no-network "apt-get could not update its lists, nor install it (see above): is there a network?" "$person" --net
    if [[ $user == sudo ]]; then
      ends_in_sentence not-allowed "installing takes root, and sudo refused it (see above)" guest
    else
      ends_in_sentence no-sudo "installing takes root, and there is no sudo" guest
    fi
  fi

  local train=(./examples/nanogpt/run.sh "${first[@]}")
  local check=(./tests/run.sh "--only=$tests")
  succeeds run.sh "${train[@]}" || return 1
  grep -q '^== a sample' "$log" || fail "run.sh: no sample was written"
  grep -E '^(training on|iter|step) ' "$log" | tail -n 1 | sed 's/^/          | /'
  local wished=no built=no # oneDNN
  if grep -qwE 'avx512_bf16|amx_bf16' "$root/cpuinfo-$processor"; then wished=yes; fi
  if [[ $(chroot "$root" ldd "$home/fsdp/build/cpu/examples/nanogpt/nanogpt") == *libdnnl* ]]; then built=yes; fi
  [[ $built == "$wished" ]] || fail "run.sh: nanogpt with oneDNN: expected $wished, got $built"
  if ((!first_only)); then
    succeeds tests-run.sh "${check[@]}" || return 1
    grep -qE '^100% tests passed.* out of [1-9]' "$log" || fail "tests-run.sh: no test has run"
    show 3
  fi

  if ((headers)); then
    log=$root.clang.log
    inside root -- sh -c 'command -v clang++ || apt-get install -q -y --no-install-recommends clang' || fail "clang could not be installed"
    succeeds headers-gcc tests/headers/check.sh gcc g++ "$home/fsdp/build/headers_gcc" together
    succeeds headers-clang tests/headers/check.sh clang clang++ "$home/fsdp/build/headers_clang" public
  fi

  # Once more: nothing to install, compile or train.
  touch "$root/stamp"
  sleep 1
  first_on_path=/refusals
  succeeds run.sh-again "${train[@]}" || return 1
  grep -q 'not training again' "$log" || fail "run.sh-again: trained again"
  ((first_only)) || succeeds tests-run.sh-again "${check[@]}" || return 1
  [[ ! -e $root/refused/calls ]] || fail "asked for packages again: $(sort -u "$root/refused/calls" | paste -sd ';')"
  local newer
  newer=$(find "$root$home/fsdp/build" -newer "$root/stamp" \( -name '*.o' -o -name '*.a' -o -name nanogpt -o -name model.safetensors \) -type f | head -n 3)
  [[ -z $newer ]] || fail "built again: $newer"
  ((keep)) || rm -rf --one-file-system "$root"
}

tried=0
for suite in "${suites[@]}"; do
  for user in "${users[@]}"; do
    for blas in "${blases[@]}"; do
      # Both processors with each user and with each BLAS.
      processor=without
      if [[ $user-$blas == root-with || $user-$blas == sudo-without ]]; then processor=with; fi
      one_case "$suite" "$user" "$blas" "${bf16:-$processor}"
      case $? in
        2) break 2 ;; # no such suite
        *) tried=$((tried + 1)) ;;
      esac
    done
  done
done
((tried > 0)) || skip "$trouble"
if [[ -n $trouble ]]; then fail "$trouble"; fi
say "$tried cases, $failures failures"
exit $((failures != 0))
