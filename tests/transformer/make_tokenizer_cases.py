#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Writes tokenizer_cases.hpp: two small vocabularies of SentencePiece, one over bytes, hard texts, and sums of the ids
that the libraries sentencepiece and tokenizers give them.

    pip install sentencepiece==0.2.3 tokenizers==0.23.3 protobuf
    python make_tokenizer_cases.py TOK512_BIN > tokenizer_cases.hpp

TOK512_BIN is the vocabulary of llama2.c's stories260K. The vocabularies are trained on text that is generated here. The
tests write the files of the models from the vocabularies in the header: what `piece_model` and `byte_json` do here.
"""
import importlib.metadata
import io
import json
import random
import struct
import sys

import sentencepiece
import tokenizers
from sentencepiece import sentencepiece_model_pb2

BLANK = "\u2581"
NORMAL, UNKNOWN, CONTROL, USER, BYTE = 1, 2, 3, 4, 6
LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
# Numbers that the library's Digits knows from a newer version of Unicode than our tables.
NEWER_NUMBERS = [*range(0x11DE0, 0x11DEA), 0x16FF4, 0x16FF5, 0x16FF6]

WORDS = (
    "the a knight takes bishop and then moves to an open file while his king looks for shelter there are many ways in "
    "which this game was lost at once because nobody saw what came next your model learns from text that it reads "
    "between lines other people thought about these positions before they played them white black queen rook pawn"
).split()
CODE = [
    "def move(board, square):\n    return board[square]\n",
    "for (int i = 0; i < 10; ++i) {\n\tsum += values[i];\n}\n",
    "if x != None:\n        print(f\"{x}\")\n",
]
OTHER = ["caf\u00e9", "na\u00efve", "stra\u00dfe", "\u0434\u043e\u043c", "\u043c\u0438\u0440", "\u4e2d\u6587", "\u65e5\u672c", "\U0001f600"]

TEXTS = [
    "",
    " ",
    "  ",
    "a",
    "a ",
    " a",
    "   a   b  ",
    "\n\n",
    "\t\tx\r\n\r\n  y \n",
    "1. e4 e5 2. Nf3 Nc6 3. Bb5 a6 4. Ba4 Nf6 5. O-O Nxe4 6. d4 b5 7. Bb3 d5 8. dxe5 Be6 1-0",
    "12. Qxd8# 1/2-1/2 {a comment} $14 25...Rxe1+ 26. a8=Q",
    "The quick brown fox jumps over the lazy dog, and the other people thought about it.",
    "We're THEY'VE i'll I'D it's DON'T 's 'T 'Re '\u017f O'Neil's ''s",
    "def f(x):\n    if x:\n        return x  +  1\n",
    "int main(void) {\n\treturn 0;  // done\n}\n",
    "3.14159 1,000,000 -1e-9 0x1F 1234567 v2.0-rc1 a1b22c333d4444",
    "\u00bd \u00b2\u00b3 \u2168 \u0663\u0664\u0665 \uff11\uff12 \u3007\u4e00",
    "na\u00efve caf\u00e9 stra\u00dfe nai\u0308ve e\u0301\u0302",
    "\u0301\u0308 lone marks \u0300",
    "\u0434\u043e\u043c \u043c\u0438\u0440\u043d\u044b\u0439 \u0451\u0436",
    "\u4e2d\u6587\u65e5\u672c\u8a9e\uff0c\u6f22\u5b57\u3002",
    "\uc548\ub155 \u0645\u0631\u062d\u0628\u0627 \u05e9\u05dc\u05d5\u05dd \u0928\u092e\u0938\u094d\u0924\u0947",
    "\U0001f600 \U0001f468\u200d\U0001f469 \U0001f1e9\U0001f1ea \u2764\ufe0f \U0001d400\U00010348",
    "a\u00a0b\u3000c\u2028d\u0085e\u200bf\ufeffg",
    "\x01\x02a\x1b[0m\x7f\x0b\x0c",
    BLANK,
    BLANK + BLANK + "a" + BLANK,
    " " + BLANK + " a" + BLANK + " ",
    "<s>",
    "</s> x <s>y</s>",
    "<unk><0x41><0xFF>",
    "<|endoftext|> <|im_start|>user\nhi<|im_end|><|im_start|>",
    "abcab<sep>ab c<cls>abca  ab <sep> <sep",
    "zq qzq zqz azq quiz ZQ",
    "Zzyzx  Zzyzx zzyzx Zzyzxa",
    "...!!! ?!?! --- *** (([[{{}}]])) http://example.org/a?b=c&d#e",
    "x \n y\n  z \t",
    "=" * 50 + " " + "-" * 33,
    " " * 41 + "x" + "\n" * 9,
    "a" * 5000,
    "ab" * 700 + "the" * 50,
    " the" * 60,
]
BROKEN = [b"\xff", b"a\xc3", b"\xe2\x96 \x81", b"\xed\xa0\x80x", b"\xf0\x9f\x98", b"\xc0\xa0 \xf4\x90\x80\x80", b" \xe4\xb8\xad\xe4\xb8 the\xfe\xfe"]


def mixed(seed):
    """A text of random characters out of small sets, so that rare neighbours meet."""
    draw = random.Random(seed)
    sets = ["'stremvldSTRE", " \t\n\r", "abcthe", "019", ".,!-<>", "\u00a0\u3000\u2028", "\u00e9\u4e2d\u0434\u05d0", "\u00bd\u0663", "\u0301\u200d\U0001f600" + BLANK]
    return "".join(draw.choice(draw.choice(sets)) for _ in range(60))


def corpus():
    draw, lines = random.Random(5), []
    for _ in range(400):
        lines.append(" ".join(draw.choice(WORDS) for _ in range(12)) + ".")
        moves = [draw.choice(["e4", "Nf3", "O-O", "Bxc6+", "exd5", "Qd8#", "Rxe1", "Nc6"]) for _ in range(8)]
        lines.append(" ".join(f"{i + 1}. {a} {b}" for i, (a, b) in enumerate(zip(moves, moves[1:]))) + " 1-0")
        lines.append(draw.choice(CODE) + draw.choice(OTHER) + " " + draw.choice(OTHER))
    return lines


def trained(**options):
    """The pieces of a SentencePiece model, the best score first, without special ones and bytes."""
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(corpus()), model_writer=model, model_type="bpe", normalization_rule_name="identity",
        remove_extra_whitespaces=False, num_threads=1, minloglevel=2, **options,
    )
    proto = sentencepiece_model_pb2.ModelProto()
    proto.ParseFromString(model.getvalue())
    return [piece.piece for piece in proto.pieces if piece.type == NORMAL]


def special_rows(byte_fallback):
    rows = [("<unk>", 0, UNKNOWN), ("<s>", 0, CONTROL), ("</s>", 0, CONTROL)]
    return rows + [(f"<0x{byte:02X}>", 0, BYTE) for byte in range(256) if byte_fallback]


def piece_rows(pieces, user=(), byte_fallback=True, ties=1, blank=BLANK):
    """(text, score, kind) by id. Of `ties` pieces in a row, all have one score."""
    rows = special_rows(byte_fallback) + [(text, 0, USER) for text in user]
    if user:
        rows.append(("<cls>", 0, CONTROL))
    return rows + [(text.replace(BLANK, blank), -(i // ties), NORMAL) for i, text in enumerate(pieces)]


def piece_model(rows, prefix=True, remove=False, escape=True):
    proto = sentencepiece_model_pb2.ModelProto()
    for text, score, kind in rows:
        proto.pieces.add(piece=text, score=score, type=kind)
    proto.trainer_spec.model_type = 2
    proto.trainer_spec.byte_fallback = any(kind == BYTE for _, _, kind in rows)
    proto.normalizer_spec.name = "identity"
    proto.normalizer_spec.add_dummy_prefix = prefix
    proto.normalizer_spec.remove_extra_whitespaces = remove
    proto.normalizer_spec.escape_whitespaces = escape
    return sentencepiece.SentencePieceProcessor(model_proto=proto.SerializeToString())


def all_merges(tokens, known):
    """Each way to make each token of two, in the tokens' order."""
    return [(t[:i], t[i:]) for t in tokens for i in range(1, len(t)) if t[:i] in known and t[i:] in known]


def added(special):
    return [
        {"id": id_, "content": text, "single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
        for text, id_ in special
    ]


def whole_json(special, model, normalizer, words, decoder):
    fields = {"dropout": None, "continuing_subword_prefix": None, "end_of_word_suffix": None, "fuse_unk": True}
    return {
        "version": "1.0", "truncation": None, "padding": None, "added_tokens": added(special), "normalizer": normalizer,
        "pre_tokenizer": words, "post_processor": None, "decoder": decoder, "model": {"type": "BPE", **fields, **model},
    }


def piece_json(pieces, scheme=None, split=False):
    """tokenizer.json of a model; its normalizer prepends a blank, or else Metaspace has a scheme."""
    rows = piece_rows(pieces)
    replace = {"type": "Replace", "pattern": {"String": " "}, "content": BLANK}
    normalizer = {"type": "Sequence", "normalizers": [{"type": "Prepend", "prepend": BLANK}, replace]}
    words = {"type": "Metaspace", "replacement": BLANK, "prepend_scheme": scheme, "split": split}
    back = {"type": "Replace", "pattern": {"String": BLANK}, "content": " "}
    strip = {"type": "Strip", "content": " ", "start": 1, "stop": 0}
    decoders = [back, {"type": "ByteFallback"}, {"type": "Fuse"}] + ([] if scheme == "never" else [strip])
    merges = [f"{left} {right}" for left, right in all_merges(pieces, set(pieces))]
    model = {"unk_token": "<unk>", "byte_fallback": True, "ignore_merges": False, "merges": merges}
    model["vocab"] = {text: id_ for id_, (text, _, _) in enumerate(rows)}
    special = [(text, id_) for id_, (text, _, kind) in enumerate(rows) if kind in (UNKNOWN, CONTROL)]
    return whole_json(special, model, None if scheme else normalizer, words if scheme else None, {"type": "Sequence", "decoders": decoders})


def byte_alphabet():
    prints = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in prints]
    return [chr(byte if byte in prints else 0x100 + others.index(byte)) for byte in range(256)]


def byte_json(tokens, words, whole_words=False, special_first=False):
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    plain = byte_alphabet() + tokens
    order = special + plain if special_first else plain
    vocab = {text: id_ for id_, text in enumerate(order)}
    merges = [[left, right] for left, right in all_merges(tokens, set(plain))]
    model = {"unk_token": None, "byte_fallback": False, "ignore_merges": whole_words, "vocab": vocab, "merges": merges}
    ids = [(text, vocab.get(text, len(order) + i)) for i, text in enumerate(special)]
    return whole_json(ids, model, None, words, {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True})


def byte_words(first=None):
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    if first is None:
        return level
    level["use_regex"] = first["type"] == "Digits"
    return {"type": "Sequence", "pretokenizers": [first, level]}


DIGITS = {"type": "Digits", "individual_digits": True}
SPLIT = {"type": "Split", "pattern": {"Regex": LLAMA3}, "behavior": "Isolated", "invert": False}


def trained_tokens():
    model = tokenizers.Tokenizer(tokenizers.models.BPE())
    model.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = tokenizers.trainers.BpeTrainer(vocab_size=256 + 160, initial_alphabet=byte_alphabet(), show_progress=False)
    model.train_from_iterator(corpus(), trainer)
    vocab = model.get_vocab()
    return sorted((text for text in vocab if len(text) > 1), key=vocab.get)


def fnv(values):
    """FNV-1a, 64 bits, over whole numbers."""
    sum_ = 0xCBF29CE484222325
    for value in values:
        sum_ = ((sum_ ^ value) * 0x100000001B3) % 2**64
    return sum_


def literal(text):
    """A C++ string literal; octal escapes end after three digits."""
    out = ""
    for byte in text if isinstance(text, bytes) else text.encode():
        plain = 0x20 <= byte < 0x7F and chr(byte) not in '"\\?'
        out += chr(byte) if plain else f"\\{byte:03o}"
    return f'"{out}"s'


def wrapped(items):
    lines, line = [], "   "
    for item in items:
        if len(line) + len(item) > 118:
            lines.append(line)
            line = "   "
        line += f" {item},"
    return "\n".join([*lines, line])


def text_literal(text):
    return f"std::string({len(text)}, 'a')" if len(text) >= 1000 and set(text) == {"a"} else literal(text)


def sums(encode, decode, texts):
    rows = []
    for text in texts:
        ids = encode(text)
        rows.append((fnv(ids), fnv(decode(ids).encode())))
    return rows


def piece_sums(model, texts):
    return sums(model.encode, model.decode, texts)


def json_sums(json_, marker_texts, pieces):
    full = tokenizers.Tokenizer.from_str(json.dumps(json_))
    plain = tokenizers.Tokenizer.from_str(json.dumps({**json_, "added_tokens": []}))
    def decode(ids):
        return full.decode(ids, skip_special_tokens=pieces)
    # The library decodes the unknown piece as nothing, or as "<unk>".
    def encode(text):
        return full.encode(text.replace("<unk>", "") if pieces else text, add_special_tokens=False).ids
    as_text = sums(lambda text: plain.encode(text, add_special_tokens=False).ids, decode, marker_texts)
    return as_text, sums(encode, decode, marker_texts)


def word_sum(words):
    """The ends of the words of many texts, in bytes: for each scalar value c, of 4,096 in a text."""
    ends = []
    for first in range(0, 0x110000, 4096):
        text = "".join(
            f"{chr(c)}a {chr(c)} 1{chr(c)}'{chr(c)}x\r{chr(c)}\n" for c in range(first, first + 4096)
            if not 0xD800 <= c < 0xE000 and c not in NEWER_NUMBERS
        )
        place, bytes_ = 0, 0
        for _, (begin, end) in words.pre_tokenize_str(text):
            assert begin == place
            bytes_ += len(text[begin:end].encode())
            place = end
            ends.append(bytes_)
    return fnv(ends)


def read_tok512(path):
    """The rows of llama2.c's vocabulary, whose pieces have blanks as they are."""
    data, offset, rows = open(path, "rb").read(), 4, special_rows(True)
    for id_ in range(512):
        score, length = struct.unpack_from("<fi", data, offset)
        text = data[offset + 8 : offset + 8 + length].decode()
        offset += 8 + length
        if id_ >= len(special_rows(True)):
            rows.append((text.replace(" ", BLANK), score, NORMAL))
    return rows


def main():
    llama = trained(vocab_size=560, byte_fallback=True, character_coverage=0.998, split_digits=True)
    crossing = trained(vocab_size=230, split_by_whitespace=False, split_by_number=False, split_by_unicode_script=False)
    crossing += ["zq", "qzq", "e" + BLANK + "e"]
    user = ["<sep>", "ab", "abc", BLANK * 3]
    tokens = trained_tokens() + ["Zzyzx"]
    texts = TEXTS + [mixed(seed) for seed in range(16)]

    piece_cases = [
        ("llama", {}, {}), ("no prefix", {}, {"prefix": False}), ("removes blanks", {}, {"remove": True}),
        ("removes blanks, no prefix", {}, {"prefix": False, "remove": True}),
        ("unknown pieces", {"byte_fallback": False}, {}), ("equal scores", {"ties": 9}, {}),
        ("plain blanks", {"blank": " "}, {"escape": False}),
    ]
    cases = [(name, piece_sums(piece_model(piece_rows(llama, **rows), **flags), texts + BROKEN)) for name, rows, flags in piece_cases]
    for name, flags in (("user-defined", {}), ("user-defined, removes blanks", {"remove": True})):
        model = piece_model(piece_rows(crossing, user, byte_fallback=False), **flags)
        cases.append((name, piece_sums(model, texts + BROKEN)))
    cases.append(("tok512", piece_sums(piece_model(read_tok512(sys.argv[1])), texts + BROKEN)))

    json_cases = [("Prepend", piece_json(llama), True)]
    json_cases += [(f"{scheme} {split}".lower(), piece_json(llama, scheme, split), True) for scheme, split in (("first", False), ("always", True), ("never", True))]
    json_cases += [
        ("gpt2", byte_json(tokens, byte_words()), False),
        ("digits", byte_json(tokens, byte_words(DIGITS), special_first=True), False),
        ("llama3", byte_json(tokens, byte_words(SPLIT), whole_words=True), False),
        ("llama3 merged", byte_json(tokens, byte_words(SPLIT)), False),
    ]
    for name, json_, pieces in json_cases:
        as_text, as_token = json_sums(json_, texts, pieces)
        cases += [(name, as_text), (name + " token", as_token)]

    pre = tokenizers.pre_tokenizers
    split = pre.Split(tokenizers.Regex(LLAMA3), "isolated")
    digits = pre.Sequence([pre.Digits(individual_digits=True), pre.ByteLevel(add_prefix_space=False)])
    versions = [f"{name} {importlib.metadata.version(name)}" for name in ("sentencepiece", "tokenizers")]
    print(
        f"""// SPDX-License-Identifier: Apache-2.0
// Generated by make_tokenizer_cases.py: vocabularies, hard texts, and what {versions[0]} and {versions[1]} make of them.
#pragma once

// clang-format off
#include <cstdint>
#include <map>
#include <string>
#include <vector>

namespace fsdp::testing {{

using namespace std::string_literals;

/// Pieces that are made by merging, the best score first.
inline std::vector<std::string> const llama_pieces{{
{wrapped(map(literal, llama))}
}};
/// Pieces of a vocabulary that go across blanks; two of them have characters that are no pieces.
inline std::vector<std::string> const crossing_pieces{{
{wrapped(map(literal, crossing))}
}};
inline std::vector<std::string> const user_defined_pieces{{{", ".join(map(literal, user))}}};
/// Tokens over bytes, in the alphabet of their files, the lowest rank first. No merge makes the last one.
inline std::vector<std::string> const byte_tokens{{
{wrapped(map(literal, tokens))}
}};

inline std::vector<std::string> const tokenizer_texts{{
{wrapped(map(text_literal, texts))}
}};
/// Texts that are not UTF-8.
inline std::vector<std::string> const broken_texts{{
{wrapped(map(literal, BROKEN))}
}};

/// FNV-1a (64 bits) of the ids of a text, as whole numbers, and of the bytes of the text that they decode to.
struct TokenSums {{
  std::uint64_t ids, text;
}};
inline std::map<std::string, std::vector<TokenSums>> const token_sums{{"""
    )
    for name, rows in cases:
        print(f'  {{"{name}", {{')
        print(wrapped(f"{{{ids:#x}, {text:#x}}}" for ids, text in rows))
        print("  }},")
    print(
        f"""}};

/// FNV-1a of the ends of words, in bytes. Each text has 4,096 code points, of which each scalar value c but the newer
/// numbers gives: c, "a ", c, " 1", c, "'", c, "x\\r", c, "\\n".
inline std::vector<char32_t> const newer_numbers{{{", ".join(f"{c:#x}" for c in NEWER_NUMBERS)}}};
inline constexpr std::uint64_t llama3_word_sum = {word_sum(split):#x};
inline constexpr std::uint64_t digits_word_sum = {word_sum(digits):#x};

}}  // namespace fsdp::testing"""
    )


if __name__ == "__main__":
    main()
