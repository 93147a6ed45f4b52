#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Chooses the text that run.sh trains on: the given one, or the works of Shakespeare, downloaded once and checked. If nothing can
# be downloaded, it is the documentation of this repository.
#
#   choose_text.sh FOLDER [FILE]
#
# Prints the data set's name, the text's path and a description of the text, separated by tabs; reports its steps on stderr.
set -euo pipefail

say() { printf '== %s\n' "$*" >&2; }
die() { printf 'run.sh: error: %s\n' "$*" >&2; exit 1; }

repository=$(cd "$(dirname "${BASH_SOURCE[0]}")/../../.." && pwd)
folder=$1
url=https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt
sha256=86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed

is_shakespeare() { [[ -s $1 ]] && [[ $(sha256sum < "$1") == "$sha256 "* ]]; }
# fetch URL FILE: prints why it fails.
fetch() {
  if command -v curl > /dev/null; then
    curl --silent --show-error --fail --location --connect-timeout 10 --max-time 60 --output "$2" "$1" 2>&1
  elif command -v wget > /dev/null; then
    timeout 60 wget --no-verbose --tries=1 --timeout=10 --output-document="$2" "$1" 2>&1
  else
    echo "neither curl nor wget is installed"
    return 1
  fi
}
# The prose of README and docs, in an order that does not change: the ASCII characters of sentences, without
# code, tables, pictures and addresses of links.
documentation() (
  cd "$repository"
  find README.md docs -name '*.md' -type f -print0 | LC_ALL=C sort -z | while IFS= read -r -d '' file; do
    LC_ALL=C sed -E -e '/^ *```/,/^ *```/d' -e '/^<!--.*-->/d' -e '/^<!--/,/-->/d' -e '/^ *(\||!\[|#)/d' \
      -e 's/\[([^][]*)\]\([^()]*\)/\1/g' -e 's/\]\([^()]*\)//g; s/[`*[\x80-\xff]//g' "$file"
  done
)

if (($# > 1)); then
  [[ -f $2 && -r $2 ]] || die "--data: cannot read '$2'"
  [[ -s $2 ]] || die "--data: '$2' is empty"
  printf 'own_%s\t%s\t%s\n' "$(sha256sum < "$2" | cut -c1-12)" "$2" "$2"
  exit
fi

text=$folder/input.txt
if ! is_shakespeare "$text"; then
  say "downloading the works of Shakespeare"
  if ! problem=$(fetch "$url" "$text.part"); then
    problem="the download failed (${problem//$'\n'/; })"
  elif ! is_shakespeare "$text.part"; then
    problem="the download is not the expected file (its sha256 differs)"
  else
    mv "$text.part" "$text"
    problem=
  fi
  if [[ -n $problem ]]; then
    rm -f "$text.part"
    say "$problem: training on the documentation of this repository instead (--data FILE: on a text of yours)"
    documentation > "$folder/documentation.txt"
    printf 'documentation\t%s\tthe documentation of this repository\n' "$folder/documentation.txt"
    exit
  fi
fi
printf 'shakespeare_char\t%s\tthe works of Shakespeare\n' "$text"
