#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# The page of a run in headless Chromium, on a phone and on a desk, light and dark: no error, no request to a network, no
# scrolling sideways, and values under a pointer. Skipped where there is no Chromium or no python3.
# skip-sanitizers
# programs: nanogpt
# labels: full
# timeout: 300
#
#   report_browser.sh BINARY_DIR
set -uo pipefail

. "$(dirname "${BASH_SOURCE[0]}")/../support/script.sh"

nanogpt=$1/examples/nanogpt/nanogpt
support=$(cd "$(dirname "${BASH_SOURCE[0]}")/../support" && pwd)
browser=
for name in chromium chromium-browser google-chrome; do
  if [[ -z $browser ]] && command -v "$name" >/dev/null; then browser=$name; fi
done
if [[ -z $browser ]] || ! command -v python3 >/dev/null; then
  echo "skipped: there is no Chromium, or no python3"
  exit 77
fi
enter "$nanogpt"
export OPENBLAS_NUM_THREADS=1
for i in $(seq 1 300); do echo "the quick brown fox $i"; done >text
"$nanogpt" prepare --dataset=d --data=text >output 2>&1 || fail "prepare"
small=(train --dataset=d --n_layer=2 --n_head=2 --n_embd=16 --block_size=8 --batch_size=2 --gradient_accumulation_steps=2
  --ranks=2 --eval_iters=1 --eval_interval=5 --max_iters=20)
long=a_folder_whose_name_is_far_too_long_for_any_phone_and_has_no_blank_to_break_it_at_so_that_it_must_be_cut
patiently 120 "$nanogpt" "${small[@]}" --out_dir=$long --trace=$long/trace.json >output 2>&1 || fail "train"
patiently 120 "$nanogpt" "${small[@]}" --out_dir='two "& <b>' --strategy=shard_grad_op >output 2>&1 || fail "train"
"$nanogpt" report $long 'two "& <b>' --to=both.html --svg=picture.svg >output 2>&1 || fail "report"
"$nanogpt" report $long >output 2>&1 || fail "report"

cat >drive.py <<'PYTHON'
import sys

from browser import Browser

program, *files = sys.argv[1:]
failures = 0

def say(text):
    global failures
    failures += 1
    print("FAILED: " + text)

browser = Browser(program)
value = browser.value

def middle():  # of the first chart that is shown
    return value("""(() => {
      const shown = [...document.querySelectorAll("figure[data-curves] svg")].find(svg => svg.getBoundingClientRect().width > 0);
      shown.scrollIntoView();
      const box = shown.getBoundingClientRect();
      return [box.left + box.width / 2, box.top + box.height / 2];
    })()""")

for file in files:
    for width, height, mobile in ((390, 844, True), (1440, 900, False)):
        for scheme in ("light", "dark"):
            what = f"{file} at {width} pixels, {scheme}"
            browser.open(file, width, height, mobile, scheme)
            if file.endswith(".html"):
                sideways = value("document.documentElement.scrollWidth")
                if sideways > width:
                    say(f"{what}: the page is {sideways} wide")
                dark = value("getComputedStyle(document.body).backgroundColor") == "rgb(16, 19, 23)"
                if dark != (scheme == "dark"):
                    say(f"{what}: the ground has the other scheme's colour")
                box = middle()
                browser.ask("Input.dispatchMouseEvent", type="mouseMoved", x=box[0], y=box[1])
                read = value("""document.querySelector(".read").textContent""")
                if not read.startswith("iteration "):
                    say(f"{what}: a pointer over the first chart reads '{read}'")
                for axis, scale, ending in (("by-tokens", "y-log", " tokens"), ("by-time", "y-linear", " s")):
                    value(f"""for (const id of ["{axis}", "{scale}"]) document.querySelector(`label[for=${{id}}]`).click()""")
                    shown = value("""[...document.querySelectorAll("figure[data-curves]")].map(figure =>
                      [...figure.querySelectorAll("svg")].filter(svg => svg.getBoundingClientRect().width > 0).length).join()""")
                    if set(shown.split(",")) != {"1"}:
                        say(f"{what}: {axis} and {scale} show {shown} charts of a figure")
                    box = middle()  # what was clicked was scrolled to
                    browser.ask("Input.dispatchMouseEvent", type="mouseMoved", x=box[0] + 1, y=box[1])
                    read = value("""document.querySelector(".read").textContent""")
                    if not read.split(" \u00b7 ")[0].endswith(ending):
                        say(f"{what}: {axis} and {scale}: a pointer reads '{read}'")
                value("sessionStorage.clear()")
            for problem in browser.problems():
                say(f"{what}: {problem}")
browser.close()
print(f"{len(files)} files in 4 ways, {failures} failures")
sys.exit(failures > 0)
PYTHON
patiently 240 env PYTHONPATH="$support" python3 drive.py "$browser" $long/report.html both.html picture.svg >output 2>&1 || fail "in the browser"
tail -n 1 output
((failures == 0))
