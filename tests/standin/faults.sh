#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Injects faults into the CUDA side, one at a time: at every place of the headers that makes a device current, records or
# awaits an event, lets the host wait, or gives a handle or memory back, the call is left out; and those of faults.txt.
# Each must be noticed by a test on the stand-ins under ThreadSanitizer (a race, a rule that is broken, a wrong value, a
# hang that is named), or faults.txt explains why it is not. A place that is new is a fault of its own.
# labels: full
# skip-sanitizers
# timeout: 7200
#
#   tests/standin/faults.sh [--list] [REGEX]   those whose number, file, line or call match REGEX
#   FSDP_FAULTS=/tmp/faults   where the tree is copied to and built; kept, so that the next run builds what has changed
#
# All faults are compiled in at once, each behind a number that the environment chooses: a program is built once. Without
# a number the programs must pass.
set -euo pipefail
source_root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
if [[ ${1:-} == /* && -d $1 ]]; then shift; fi # ctest's argument, the build folder
exec python3 - "$source_root" "${FSDP_FAULTS:-${TMPDIR:-/tmp}/fsdp_faults}" "$@" <<'PYTHON'
import glob, os, re, shutil, subprocess, sys, time

root, work, arguments = sys.argv[1], sys.argv[2], sys.argv[3:]
only_list = "--list" in arguments
wanted = re.compile(next((a for a in arguments if not a.startswith("-")), ""))
tree = os.path.join(work, "tree")

# Calls that are places of faults, grouped by their replacement.
PLACE = re.compile(r"\b(?:(?P<cuda>cuda(?:SetDevice|StreamWaitEvent|EventRecord|StreamSynchronize|EventSynchronize|"
                   r"DeviceSynchronize|StreamDestroy|EventDestroy|Free|FreeHost))|"
                   r"(?P<nccl>nccl(?:CommDestroy|CommAbort|MemFree|CommWindowDeregister))|"
                   r"(?P<other>make_current|synchronize|synchronize_all|record|wait_for_peers|await|await_pending|"
                   r"signal|drain|attach|end_window|deallocate|deallocate_pinned)|(?P<wait>wait))\(")
FOLDERS = ["include/fsdp/*.hpp"] + ["include/fsdp/" + p for p in
           ("detail/cuda/*.hpp", "detail/local/*.hpp", "detail/nccl/*.hpp", "detail/engine/*.hpp", "detail/optim/*.hpp",
            "detail/checkpoint/*.hpp", "detail/trace/*.hpp")]

def without_comments(text):
    return re.sub(r"//[^\n]*", lambda m: " " * len(m.group()), text)

def closing(text, opening):
    depth = 0
    for at in range(opening, len(text)):
        depth += {"(": 1, ")": -1}.get(text[at], 0)
        if depth == 0:
            return at + 1
    raise SystemExit("faults.sh: a parenthesis is not closed")

def begin_of(text, at):
    """The first character of the expression that calls what stands at `at`: a.b()->c"""
    while at > 0:
        if text[at - 1] == ")":
            depth, at = 1, at - 1
            while depth:
                at -= 1
                depth += {")": 1, "(": -1}.get(text[at], 0)
        elif text[at - 1].isalnum() or text[at - 1] in "_.:" or text[at - 2:at] == "->":
            at -= 2 if text[at - 2:at] == "->" else 1
        else:
            return at
    return at

class Fault:
    def __init__(self, file, begin, end, text, instead, line, name=None):
        self.file, self.begin, self.end, self.text, self.instead, self.line = file, begin, end, text, instead, line
        self.name = name or re.sub(r"\s+", " ", text)
        self.nth, self.reason, self.number = 1, None, 0
    def key(self):
        return self.name + (f" #{self.nth}" if self.nth > 1 else "")

def places(file, text):
    code, found = without_comments(text), []
    for match in PLACE.finditer(code):
        end = closing(code, match.end() - 1)
        begin = begin_of(code, match.start())
        line_begin = code.rfind("\n", 0, begin) + 1
        before, behind = code[line_begin:begin], code[end:end + 40]
        if re.match(r"\s*(const\s*)?(noexcept\s*)?(->[^{;]*)?\{", behind):  # a definition
            continue
        if re.search(r"(\bvoid|\bbool|std::string|\bconcept\b.*|requires.*|^\s*\{) $", before) or "{ device." in code[line_begin:end]:
            continue  # a declaration, a concept
        if "requires" in before or re.search(r"requires\([^)]*\) \{\s*(\{[^{}]*\}[^;]*;\s*)*$", code[:begin]) or (match["wait"] and not re.search(r"device(_|\(\))?\.$", code[begin:match.start()])):
            continue
        if match["other"] == "attach" and "nullptr" not in code[begin:end]:
            continue
        instead = "cudaSuccess" if match["cuda"] else "ncclSuccess" if match["nccl"] else "void()"
        if match["other"] == "drain" and re.search(r"(=|!) ?$", before):
            instead = "true"
        found.append(Fault(file, begin, end, text[begin:end], instead, text.count("\n", 0, begin) + 1))
    return found

def table():
    tests, explained, own, instead = [], [], [], []
    for line in open(os.path.join(root, "tests/standin/faults.txt"), encoding="utf-8"):
        fields = [field.strip() for field in line.rstrip("\n").split(" | ")]
        if not line.strip() or line.startswith("#"):
            continue
        {"tests": tests, "explained": explained, "fault": own, "instead": instead}[fields[0]].append(fields[1:])
    return tests, explained, own, instead

tests, explained, own, replaced = table()
faults = []
texts = {}
for file in sorted({f for p in FOLDERS for f in glob.glob(os.path.join(root, p)) if os.path.isfile(f)}):
    name = os.path.relpath(file, root)
    if os.path.basename(name) in ("concepts.hpp", "host.hpp", "mpi.hpp", "plan.hpp", "simulate.hpp", "bootstrap.hpp"):
        continue  # no part of a program on GPUs, or a concept
    texts[name] = open(file, encoding="utf-8").read()
    of_file = places(name, texts[name])
    for what, where, text, instead in own:
        if where != name:
            continue
        if texts[name].count(text) != 1:
            raise SystemExit(f"faults.sh: '{text}' stands {texts[name].count(text)} times in {name}, not once")
        begin = texts[name].index(text)
        of_file.append(Fault(name, begin, begin + len(text), text, instead, texts[name].count("\n", 0, begin) + 1, what))
    seen = {}
    for fault in sorted(of_file, key=lambda f: (f.begin, -f.end)):
        fault.nth = seen[fault.name] = seen.get(fault.name, 0) + 1
        faults.append(fault)
for number, fault in enumerate(faults, 1):
    fault.number = number
    for file, key, reason in explained:
        if file == fault.file and key == fault.key():
            fault.reason = reason
    for file, key, words in replaced:
        if file == fault.file and key == fault.key():
            fault.instead = words
for file, key, _ in explained + replaced:
    if not any(f.file == file and f.key() == key for f in faults):
        raise SystemExit(f"faults.sh: faults.txt speaks of '{key}' in {file}, which there is not")

def programs_of(fault):
    for pattern, *programs in tests:
        if re.fullmatch(pattern, fault.file):
            return programs
    raise SystemExit(f"faults.sh: faults.txt names no tests for {fault.file}")

chosen = [f for f in faults if wanted.search(f"{f.number} {f.file}:{f.line} {f.key()}")]
if only_list:
    for f in chosen:
        print(f"{f.number:4} {f.file}:{f.line} {f.key()}" + (f"  [explained: {f.reason}]" if f.reason else ""))
    print(f"{len(chosen)} faults")
    sys.exit(0)

# The copy. What has not changed keeps its time.
listed = subprocess.run(["git", "-C", root, "ls-files", "-co", "--exclude-standard"], check=True, capture_output=True, text=True)
for name in listed.stdout.splitlines():
    source = os.path.join(root, name)
    if not os.path.isfile(source):
        continue
    text = open(source, "rb").read()
    if any(f.file == name for f in faults):
        code = texts[name]
        inserted = []
        for f in faults:
            if f.file == name:
                inserted += [(f.begin, 1, f.end, f"(::fsdp_fault({f.number}) ? {f.instead} : "), (f.end, 0, f.begin, ")")]
        # From the back; of two that begin at one place the longer one opens first, of two that end there it closes last.
        for at, opens, other, words in sorted(inserted, key=lambda i: (i[0], i[1], i[2] if not i[1] else -i[2]), reverse=True):
            code = code[:at] + words + code[at:]
        text = code.encode()
    target = os.path.join(tree, name)
    if os.path.exists(target) and open(target, "rb").read() == text:
        continue
    os.makedirs(os.path.dirname(target), exist_ok=True)
    with open(target, "wb") as out:
        out.write(text)
    shutil.copymode(source, target)
header = os.path.join(work, "fault.hpp")
with open(header, "w", encoding="utf-8") as out:
    out.write("""#pragma once
#include <unistd.h>
#include <atomic>
#include <cstdlib>
// Whether this fault is the one that the environment chooses. Orders nothing.
inline std::atomic<int> fsdp_chosen_fault{-1};
inline std::atomic<bool> fsdp_fault_met{false};
inline bool fsdp_fault(int number) noexcept {
  int chosen = fsdp_chosen_fault.load(std::memory_order_relaxed);
  if (chosen < 0) {
    char const* const text = std::getenv("FSDP_FAULT");
    chosen = text == nullptr ? 0 : std::atoi(text);
    fsdp_chosen_fault.store(chosen, std::memory_order_relaxed);
  }
  if (chosen != number) return false;
  if (!fsdp_fault_met.exchange(true, std::memory_order_relaxed)) static_cast<void>(!::write(2, "fault met\\n", 10));
  return true;
}
""")

needed = sorted({p.split()[0] for f in chosen for p in programs_of(f)})
build = os.path.join(tree, "build/standin-tsan")
launcher = ["-DCMAKE_CXX_COMPILER_LAUNCHER=ccache"] if shutil.which("ccache") else []
subprocess.run(["cmake", "--preset", "standin-tsan", "-DFSDP_WERROR=OFF", f"-DCMAKE_CXX_FLAGS=-include {header}", *launcher],
               cwd=tree, check=True, stdout=subprocess.DEVNULL)
subprocess.run(["cmake", "--build", build, "-j", os.environ.get("JOBS", "1"), "--target", *needed], cwd=tree, check=True)

def run(program, number):
    """How a program ends: "" if nothing was noticed, and whether it came to the fault."""
    name, *arguments = program.split()
    environment = dict(os.environ, TSAN_OPTIONS="halt_on_error=1:exitcode=66:symbolize=0:report_signal_unsafe=0",
                       FSDP_FAULT=str(number))
    try:
        ended = subprocess.run([os.path.join(build, "tests", name), "-a", *arguments], env=environment, timeout=180,
                               stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace")
        code, text = ended.returncode, ended.stdout
    except subprocess.TimeoutExpired as error:
        code, text = None, (error.stdout or b"").decode(errors="replace")
    met = "fault met" in text
    rule = re.search(r"^standin: ([a-z_]+): (.*)$", text, re.M)
    if rule and rule[1] != "never":
        return f"rule {rule[1]}", met
    if code is None:
        named = re.search(r"waits? in|waiting in|waits for", text)
        return ("a hang, named" if named else ""), met
    if code == 66:
        return "race", met
    if code == 0:
        return "", met
    why = re.search(r"with message:\n\s*(.*)|^fsdp: (.*)|with expansion:\n\s*(.*)", text, re.M)
    return "failure: " + (next(g for g in why.groups() if g) if why else f"exit code {code}")[:70], met

bad = 0
for program in sorted({p for f in chosen for p in programs_of(f)}):
    begun = time.time()
    noticed, _ = run(program, 0)
    print(f"unchanged: {program}: {noticed or 'passes'} ({time.time() - begun:.1f} s)", flush=True)
    bad += bool(noticed)
caught = given = 0
for f in chosen:
    noticed, met, by = "", False, ""
    for program in programs_of(f):
        noticed, here = run(program, f.number)
        met, by = met or here, program
        if noticed:
            break
    verdict = f"{noticed} [{by}]" if noticed else "not noticed" if met else "NEVER MET"
    if f.reason and not noticed:
        given += 1
        verdict = "explained: " + f.reason
    elif noticed:
        caught += 1
        if f.reason:
            verdict += "; explained in faults.txt although it is noticed"
            bad += 1
    else:
        bad += 1
    print(f"{f.number:4} {f.file[len('include/fsdp/'):]}:{f.line} {f.key()[:90]}: {verdict}", flush=True)
print(f"{len(chosen)} faults, {caught} caught, {given} explained" + (f"; {bad} WRONG" if bad else ""))
sys.exit(bad != 0 or given * 10 > len(chosen))
PYTHON
