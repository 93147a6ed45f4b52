#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Which text run.sh trains on: the one it is given, else the works of Shakespeare, downloaded once and checked, else,
# where there is no network, the text of this repository.
#
#   choose_text.sh FOLDER [FILE]
#
# Prints the data set's name and the text's path, separated by a tab; says on stderr what it does.
set -euo pipefail

say() { printf '== %s\n' "$*" >&2; }
die() { printf 'run.sh: error: %s\n' "$*" >&2; exit 1; }

repository=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
folder=$1
url=https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt
sha256=86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed

is_shakespeare() { [[ -s $1 ]] && [[ $(sha256sum < "$1") == "$sha256 "* ]]; }
fetch() { # fetch URL FILE
  if command -v curl > /dev/null; then
    curl --silent --fail --location --connect-timeout 10 --max-time 60 --output "$2" "$1"
  elif command -v wget > /dev/null; then
    timeout 60 wget --quiet --tries=1 --timeout=10 --output-document="$2" "$1"
  else
    say "neither curl nor wget is installed"
    return 1
  fi
}
# The repository's own text, in an order that does not change.
own_text() (
  cd "$repository"
  mapfile -d '' -t files < <(git ls-files -z -- '*.md' '*.hpp' '*.cpp' 2> /dev/null)
  if ((${#files[@]} == 0)); then # not a clone, or no git
    mapfile -d '' -t files < <(find . -path ./build -prune -o \( -name '*.md' -o -name '*.hpp' -o -name '*.cpp' \) -type f -print0)
  fi
  mapfile -d '' -t files < <(printf '%s\0' "${files[@]}" | LC_ALL=C sort -z)
  for file in "${files[@]}"; do
    if [[ -f $file ]]; then cat -- "$file"; fi
  done
)

if (($# > 1)); then
  [[ -f $2 && -r $2 ]] || die "--data: cannot read '$2'"
  [[ -s $2 ]] || die "--data: '$2' is empty"
  printf 'own_%s\t%s\n' "$(sha256sum < "$2" | cut -c1-12)" "$2"
  exit
fi

text=$folder/input.txt
if ! is_shakespeare "$text"; then
  say "downloading the works of Shakespeare"
  if ! fetch "$url" "$text.part"; then
    problem="THERE IS NO DOWNLOAD"
  elif ! is_shakespeare "$text.part"; then
    problem="THE DOWNLOAD IS NOT THE EXPECTED FILE (its sha256 differs)"
  else
    mv "$text.part" "$text"
    problem=
  fi
  if [[ -n $problem ]]; then
    rm -f "$text.part"
    say "$problem: training on the text of this repository instead"
    own_text > "$folder/repository.txt"
    printf 'repository_text\t%s\n' "$folder/repository.txt"
    exit
  fi
fi
printf 'shakespeare_char\t%s\n' "$text"
