# SPDX-License-Identifier: Apache-2.0
"""Makes the token file that both sides read, in the folder of nanogpt's data sets."""
import array
import json
import os
import pathlib
import random

from side import PeersError

NAME = "peers"  # of the data set
RANDOM_TOKENS = 1 << 20


def tokens_file(folder):
    return pathlib.Path(folder) / "data" / NAME / "train.bin"


def read(source, vocabulary):
    ids = array.array("H")
    with open(source, "rb") as file:
        ids.fromfile(file, os.path.getsize(source) // ids.itemsize)
    if max(ids, default=vocabulary) >= vocabulary:
        raise PeersError(f"--data: expected token ids as uint16, below this model's vocabulary of {vocabulary}; "
                         f"'{source}' has {len(ids)} ids, up to {max(ids, default=0)}")
    return ids


def write(folder, vocabulary, source):
    """@param source  a file of token ids; None: random ids"""
    drawn = random.Random(1337).choices(range(vocabulary), k=0 if source else RANDOM_TOKENS)
    ids = read(source, vocabulary) if source else array.array("H", drawn)
    target = tokens_file(folder)
    target.parent.mkdir(parents=True)
    with open(target, "wb") as file:
        ids.tofile(file)
    (target.parent / "val.bin").symlink_to(target.name)  # nanogpt wants one, and does not use it here
    (target.parent / "meta.json").write_text(json.dumps({"vocab_size": vocabulary}))
