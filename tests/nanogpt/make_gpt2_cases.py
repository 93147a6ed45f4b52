#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Writes gpt2_cases.hpp: hard texts and the ids that two other programs give them from OpenAI's files.

    pip install tiktoken==0.14.0 tokenizers==0.23.3
    python make_gpt2_cases.py FOLDER_WITH_GPT2_FILES > gpt2_cases.hpp

The ids are tiktoken's. Those of tokenizers must be the same, but for the cases that say otherwise: its regular expressions
know another version of Unicode.
"""
import importlib.metadata
import pathlib
import random
import sys

import tiktoken
import tiktoken.load
import tokenizers

PATTERN = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
MARKER = "<|endoftext|>"

CASES = [
    "a",
    " ",
    "  ",
    "\n",
    "Hello world",
    " Hello  world ",
    "   leading and trailing   ",
    "we're they've I'll I'd I'm it's don't 's 't",
    "WE'RE IT'S DON'T I'LL 'S 'T 'Re",
    "''s '''t 'll'll 'r 'v 'l 'x ' s 're've",
    "'s1 1's a's1's",
    "rock'n'roll o'clock's 'tis",
    "tab\tseparated\t\tvalues\n",
    "line\r\nline\r\n\r\n  line\r",
    "one\n\n\ntwo\n \n  three\n\t\tfour",
    "x \n y\n  z \t",
    "int main(void) {\n\treturn 0;  // done\n}\n",
    "def f(x):\n    if x:\n        return x  +  1\n",
    "1 12 123 1234 12345 123456 3.14159 1,000,000 -1e-9 0x1F",
    "a1b2c3 4d5e6f v2.0-rc1",
    "\u00bd \u00be \u00b2\u00b3 \u2168 \u2460 \u0663\u0664\u0665 \u096a\u096b \uff11\uff12 \u3007\u4e00",
    "\u02b0\u02b2 \u01c5 \u00aa\u00ba \u2c7f",
    "...!!! ?!?! --- *** ### $$$ %%% &&& @@@ ((())) [[[]]] {{{}}}",
    "http://example.com/a?b=c&d=e#f user@example.org C:\\dir\\file",
    "a\u00a0b \u00a0 c\u00a0\u00a0d",
    "a\u3000b\u2003c\u2028d\u2029e\u0085f\u1680g\u202fh\u205fi\u200aj",
    "a\u180eb\u200bc\u200dd\u2060e\ufefff",
    "\ufeffByte order mark",
    "a\x00b\x01c\x1bd\x7fe\x0bf\x0cg\x1ch\x1fi",
    "na\u00efve caf\u00e9 \u00fcber stra\u00dfe \u00c5ngstr\u00f6m",
    "nai\u0308ve cafe\u0301 a\u0300\u0301\u0302",
    "\u0418\u0432\u0430\u043d \u043f\u043e\u0448\u0451\u043b \u0432 \u043b\u0435\u0441.",
    "\u4eca\u5929\u5929\u6c14\u5f88\u597d\uff0c\u6211\u4eec\u53bb\u516c\u56ed\u3002",
    "\u3053\u3093\u306b\u3061\u306f\u3001\u4e16\u754c\uff01\u30ab\u30bf\u30ab\u30ca\u30fc",
    "\uc548\ub155\ud558\uc138\uc694 \uc138\uacc4",
    "\u0645\u0631\u062d\u0628\u0627 \u0628\u0627\u0644\u0639\u0627\u0644\u0645",
    "\u05e9\u05dc\u05d5\u05dd \u05e2\u05d5\u05dc\u05dd",
    "\u0928\u092e\u0938\u094d\u0924\u0947 \u0926\u0941\u0928\u093f\u092f\u093e",
    "\u0e2a\u0e27\u0e31\u0e2a\u0e14\u0e35\u0e0a\u0e32\u0e27\u0e42\u0e25\u0e01",
    "\U0001f600 \U0001f468\u200d\U0001f469\u200d\U0001f467 \U0001f1e9\U0001f1ea \u2764\ufe0f \U0001f44d\U0001f3fd",
    "\U0001d400\U0001d401 \U0001d7ce\U0001d7cf \U0001f100 \U00012400",
    "\ufb01\ufb02 \u2126 \u212b \u00b5 \u03bc",
    "\U00010d4a\U00010d4b \U000105c0 \U00010d40\U00010d41",  # letters and digits new in Unicode 16.0
    "\u1c89\ua7cb\ua7da",
    "\U0001e5d0 \U0001e5f1 \U00016d40",
    "\ue000\uf8ff \U000f0000 \U0010ffff \uffff \ufffe",
    "\u0378\u0379 \U0003134f \U000e0100",  # not assigned, or nearly the last
    "\u00ad\u034f\u2061 \u20ac\u00a3\u00a5 \u00a9\u00ae\u2122",
    MARKER,
    "a" + MARKER + "b " + MARKER,
    "<|endoftext", "|>", "<|endoftext|", "< |endoftext|>",
    "a" * 40,
    "A" * 33 + " " + "B" * 17,
    " " * 40 + "x",
    "\n" * 21 + "x",
    "\t" * 9 + " x",
    "=" * 50, "-" * 80, "ab" * 30, "0" * 45, "\u00e9" * 20, "\u4e2d" * 15,
    "antidisestablishmentarianism Donaudampfschiffahrtsgesellschaft pneumonoultramicroscopicsilicovolcanoconiosis",
    "SolidGoldMagikarp rawdownload TheNitromeFan \u30b5\u30fc\u30c6\u30a3\u30ef\u30f3",
    "camelCaseWords snake_case_words kebab-case-words SCREAMING_CASE",
    "\u201cquoted\u201d \u2018s \u2019s don\u2019t \u2014 \u2026",
]
# What tokenizers cannot agree about: the classes of characters that its version of Unicode does not have yet.
NEWER = "\U00010d4a \u1c89 \U0001e5d0".split()


def mixed(seed):
    """A text of random characters out of small sets, so that rare neighbours meet."""
    draw = random.Random(seed)
    sets = ["'stremvld", " \t\n\r", "abzABZ", "019", ".,!-_", "\u00a0\u3000\u2028", "\u00e9\u4e2d\u0430\u05d0", "\u00bd\u0663\u2168",
            "\u0301\u200d\U0001f600\u20ac"]
    return "".join(draw.choice(draw.choice(sets)) for _ in range(60))


def fnv(ids):
    """FNV-1a, 64 bits, over ids as whole numbers."""
    sum_ = 0xCBF29CE484222325
    for id_ in ids:
        sum_ = ((sum_ ^ id_) * 0x100000001B3) % 2**64
    return sum_


def literal(text):
    """A C++ string literal; octal escapes end after three digits."""
    out = ""
    for byte in text.encode():
        plain = 0x20 <= byte < 0x7F and chr(byte) not in '"\\?'
        out += chr(byte) if plain else f"\\{byte:03o}"
    return f'"{out}"sv'


def case(text, ids):
    line, lines = f"    {{{literal(text)}, {{", []
    for id_ in ids:
        if len(line) > 112:
            lines.append(line)
            line = "     "
        line += f"{id_}, "
    return "\n".join([*lines, line.removesuffix(", ") + "}},"])


def main():
    folder = pathlib.Path(sys.argv[1])
    encoder_json, vocab_bpe = str(folder / "gpt2-encoder.json"), str(folder / "gpt2-vocab.bpe")
    ranks = tiktoken.load.data_gym_to_mergeable_bpe_ranks(vocab_bpe, encoder_json)
    encoding = tiktoken.Encoding("gpt2", pat_str=PATTERN, mergeable_ranks=ranks, special_tokens={MARKER: 50256})
    other = tokenizers.ByteLevelBPETokenizer(encoder_json, vocab_bpe)

    texts = CASES + [mixed(seed) for seed in range(24)]
    for text in texts:
        ids = encoding.encode_ordinary(text)
        assert encoding.decode(ids) == text
        if not any(character in text for character in NEWER):
            assert other.encode(text).ids == ids, text
    everything = encoding.encode_ordinary(
        "".join(f"{chr(c)}a {chr(c)} 1{chr(c)}" for c in range(0x110000) if not 0xD800 <= c < 0xE000)
    )

    print(
        f"""// SPDX-License-Identifier: Apache-2.0
// Generated by make_gpt2_cases.py: hard texts and their ids by tiktoken {importlib.metadata.version("tiktoken")}, to which tokenizers {importlib.metadata.version("tokenizers")} agrees.
#pragma once

// clang-format off
#include <cstdint>
#include <string_view>
#include <vector>

namespace fsdp::testing {{

using namespace std::string_view_literals;

struct Gpt2Case {{
  std::string_view text;
  std::vector<std::int64_t> ids;
}};

/// For each scalar value c in turn, with nothing between: c, "a ", c, " 1", c. How many ids these are in one text, and
/// their FNV-1a (64 bits, over the ids as whole numbers).
inline constexpr std::int64_t every_character_count = {len(everything)};
inline constexpr std::uint64_t every_character_sum = {fnv(everything):#x};

inline std::vector<Gpt2Case> const gpt2_cases{{"""
    )
    print("\n".join(case(text, encoding.encode_ordinary(text)) for text in texts))
    print("};\n\n}  // namespace fsdp::testing")


if __name__ == "__main__":
    main()
