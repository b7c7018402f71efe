#!/usr/bin/env python3
"""Writes a small data set of one size for the training benchmark: COUNT samples of one 224×224 image and a text each.

usage: make_data.py OUT_DIR COUNT
"""
import json
import pathlib
import random
import sys

from PIL import Image


def main():
    out, count = pathlib.Path(sys.argv[1]), int(sys.argv[2])
    out.mkdir(parents=True, exist_ok=True)
    rng = random.Random(0)
    words = ["what", " color", " is", " the", " shape", " circle", " triangle", " rectangle", " image"]
    with open(out / "data.jsonl", "w") as f:
        for i in range(count):
            image = Image.frombytes("RGB", (224, 224), rng.randbytes(224 * 224 * 3))
            image.save(out / f"{i}.png")
            text = "what" + "".join(rng.choice(words[1:]) for _ in range(31))
            answer = "yes" + "".join(rng.choice(words[1:]) for _ in range(31))
            f.write(json.dumps({"messages": [
                {"role": "user", "content": [{"type": "image", "image": f"{i}.png"}, {"type": "text", "text": text}]},
                {"role": "assistant", "content": answer}]}) + "\n")


main()
