#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# The site of docs/ and the public headers: Doxygen has no warning, every public name is documented, every link leads somewhere, and
# in headless Chromium pages have no error and fit a screen of 380 pixels. Skipped where there is no Doxygen; without Chromium or
# python3 no page is opened.
#   site.sh [FOLDER]   keeps the site there
set -euo pipefail
source=$(cd "${FSDP_SOURCE:-$(dirname "$0")/../..}" && pwd)
command -v doxygen >/dev/null || { echo "skipped: there is no doxygen"; exit 77; }
folder=${1:-$(mktemp -d)}
(($# > 0)) || trap 'rm -rf "$folder"' EXIT
mkdir -p "$folder/docs"
folder=$(cd "$folder" && pwd)
cd "$folder"
doxyfile=$(<"$source/docs/site/Doxyfile.in")
doxyfile=${doxyfile//@PROJECT_SOURCE_DIR@/"$source"} doxyfile=${doxyfile//@PROJECT_BINARY_DIR@/"$folder"}
echo "${doxyfile//@PROJECT_VERSION@/test}" >Doxyfile
doxygen Doxyfile
failed=0
if [[ -s docs/warnings.log ]]; then
  echo "Doxygen has $(grep -c warning: docs/warnings.log) warnings:"
  head -n 40 docs/warnings.log
  failed=1
fi

# "page#name" for each name, and "page target" for each link, where a target without a page is in this one
cd docs/html
pages=(*.html)
((${#pages[@]} > 200)) || { echo "only ${#pages[@]} pages were found"; failed=1; }
names() { grep -oHE '(id|name)="[^"]+"' "${pages[@]}" | sed -E 's/:(id|name)="/#/; s/"$//'; printf '%s\n' * search/*; }
targets() {
  grep -oHE '(href|src|data)="[^"]+"' "${pages[@]}" | sed -E 's/:(href|src|data)="/ /; s/"$//' | grep -vE ' (https?:|javascript:|data:|#$)' |
    awk '{ print ($2 ~ /^#/ ? $1 $2 : $2) }' | sed 's/&amp;/\&/g; s/#$//'
}
# Doxygen links to the list of nested classes of a class even if all of them are private.
dead=$(comm -13 <(names | sort -u) <(targets | sort -u) | grep -v '#nested-classes$') || true
[[ -z $dead ]] || { echo "links that lead nowhere:"; head -n 20 <<<"$dead"; failed=1; }

browser=
for name in chromium chromium-browser google-chrome; do
  if [[ -z $browser ]] && command -v "$name" >/dev/null; then browser=$name; fi
done
if [[ -z $browser ]] || ! command -v python3 >/dev/null; then
  echo "no page is opened: there is no Chromium, or no python3"
  exit $failed
fi
cd "$folder"
cat >drive.py <<'PYTHON'
import sys

from browser import Browser

program, *files = sys.argv[1:]
failures = 0
browser = Browser(program)
for file in files:
    for width, height, mobile in ((380, 800, True), (1440, 900, False)):
        for scheme in ("light", "dark"):
            browser.open(file, width, height, mobile, scheme)
            problems = list(browser.problems())
            sideways = browser.value("document.documentElement.scrollWidth")
            if sideways > width:
                problems.append(f"the page is {sideways} wide")
            ground = browser.value("getComputedStyle(document.body).backgroundColor")
            if (ground == "rgb(20, 23, 26)") != (scheme == "dark"):
                problems.append(f"the ground is {ground}")
            for problem in problems:
                failures += 1
                print(f"FAILED: {file} at {width} pixels, {scheme}: {problem}")
browser.close()
print(f"{len(files)} pages in 4 ways, {failures} failures")
sys.exit(failures > 0)
PYTHON
PYTHONPATH=$source/tests/support timeout 240 python3 drive.py "$browser" docs/html/{index,doc-readme,doc-strategies,classfsdp_1_1Engine,structfsdp_1_1EngineOptions}.html || failed=1
exit $failed
