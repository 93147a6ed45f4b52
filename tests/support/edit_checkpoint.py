# SPDX-License-Identifier: Apache-2.0
# Edits the manifests of checkpoints, and gives them the checksum of the new text.
#
#   python3 edit_checkpoint.py OUT_DIR PATTERN REPLACEMENT     # a regular expression, which must match once in each
import pathlib
import re
import sys

P1, P2, P3, P4, P5 = 11400714785074694791, 14029467366897019727, 1609587929392839161, 9650029242287828579, 2870177450012600261
MASK = (1 << 64) - 1


def rotate(x: int, bits: int) -> int:
    return ((x << bits) | (x >> (64 - bits))) & MASK


def word(data: bytes, at: int, size: int) -> int:
    return int.from_bytes(data[at : at + size], "little")


def xxh64(data: bytes) -> int:
    def mix(lane: int, value: int) -> int:
        return rotate((lane + value * P2) & MASK, 31) * P1 & MASK

    at, size = 0, len(data)
    if size >= 32:
        lanes = [(P1 + P2) & MASK, P2, 0, -P1 & MASK]
        while at + 32 <= size:
            lanes = [mix(lane, word(data, at + 8 * i, 8)) for i, lane in enumerate(lanes)]
            at += 32
        h = sum(rotate(lane, bits) for lane, bits in zip(lanes, (1, 7, 12, 18))) & MASK
        for lane in lanes:
            h = ((h ^ mix(0, lane)) * P1 + P4) & MASK
    else:
        h = P5
    h = (h + size) & MASK
    while at + 8 <= size:
        h = (rotate(h ^ mix(0, word(data, at, 8)), 27) * P1 + P4) & MASK
        at += 8
    if at + 4 <= size:
        h = (rotate(h ^ (word(data, at, 4) * P1 & MASK), 23) * P2 + P3) & MASK
        at += 4
    for byte in data[at:]:
        h = rotate(h ^ (byte * P5 & MASK), 11) * P1 & MASK
    h = (h ^ (h >> 33)) * P2 & MASK
    h = (h ^ (h >> 29)) * P3 & MASK
    return h ^ (h >> 32)


def checksum(text: str) -> str:
    """The checksum covers the object without its last member, in one line."""
    lines = [re.sub(r'^( *"(?:[^"\\]|\\.)*"): ', r"\1:", line).lstrip(" ") for line in text.splitlines()]
    compact = re.sub(r',"xxh64":"[0-9a-f]{16}"\}$', "}", "".join(lines))
    return f"{xxh64(compact.encode()):016x}"


def main() -> int:
    folder, pattern, replacement = sys.argv[1:]
    manifests = sorted(pathlib.Path(folder).glob("step-*/checkpoint.json"))
    last = re.compile(r'("xxh64": ")([0-9a-f]{16})("\n\}\n)$')
    for manifest in manifests:
        text = manifest.read_text()
        found = last.search(text)
        if not found or found[2] != checksum(text):
            print(f"{manifest}: another form than this script knows", file=sys.stderr)
            return 1
        text, count = re.subn(pattern, replacement, text)
        if count != 1:
            print(f"{manifest}: '{pattern}' matches {count} times", file=sys.stderr)
            return 1
        manifest.write_text(last.sub(rf"\g<1>{checksum(text)}\g<3>", text))
    return 0 if manifests else 1


if __name__ == "__main__":
    sys.exit(main())
