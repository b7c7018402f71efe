#!/usr/bin/env python3
"""Writes a small data set of one size for the training benchmark: COUNT samples of one square image and a text each.

usage: make_data.py OUT_DIR COUNT [IMAGE_SIDE [QUESTION_WORDS [ANSWER_WORDS]]]     224 pixels, 32 words, 32 words; a word is a token
"""
import json
import pathlib
import random
import sys

from PIL import Image


def main():
    out, count = pathlib.Path(sys.argv[1]), int(sys.argv[2])
    side, question, answer_words = (int(value) for value in (*sys.argv[3:], *(224, 32, 32)[len(sys.argv) - 3:]))
    out.mkdir(parents=True, exist_ok=True)
    rng = random.Random(0)
    words = ["what", " color", " is", " the", " shape", " circle", " triangle", " rectangle", " image"]
    with open(out / "data.jsonl", "w") as f:
        for i in range(count):
            image = Image.frombytes("RGB", (side, side), rng.randbytes(side * side * 3))
            image.save(out / f"{i}.png")
            text = "what" + "".join(rng.choice(words[1:]) for _ in range(question - 1))
            answer = "yes" + "".join(rng.choice(words[1:]) for _ in range(answer_words - 1))
            f.write(json.dumps({"messages": [
                {"role": "user", "content": [{"type": "image", "image": f"{i}.png"}, {"type": "text", "text": text}]},
                {"role": "assistant", "content": answer}]}) + "\n")


main()
