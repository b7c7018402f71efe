"""`parvl generate` against transformers' generate with its own processor and chat template, on whole small directories."""
# slow
import json
import os
import pathlib
import subprocess
import tempfile
import unittest

import numpy as np
import torch

import tiny_models
from generate_common import TOKENS, Reference, image, picture, text

PARVL = os.environ["PARVL"]
PROBE = os.path.join(os.path.dirname(PARVL), "probes", "generate_probe")
MARGIN = 1e-3  # between the likeliest two logits: below it rounding may choose
SIZES = [(37, 53), (60, 60), (91, 23), (7, 200), (200, 9), (24, 24)]


def parvl(*args, code=0):
    done = subprocess.run([PARVL, "generate", *map(str, args)], capture_output=True, timeout=120)
    if done.returncode != code:
        raise AssertionError(f"parvl generate {args} exited with {done.returncode}: {done.stderr.decode()}")
    return done


class GenerateParity(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        folder = tempfile.TemporaryDirectory()
        cls.addClassCleanup(folder.cleanup)
        cls.folder = pathlib.Path(folder.name)
        cls.references = {}
        for family in tiny_models.FAMILIES:
            tiny_models.make_directory(family, cls.folder / family)
            cls.references[family] = Reference(family, cls.folder / family)
        cls.pictures = [picture(cls.folder / f"{i}.png", size, i) for i, size in enumerate(SIZES)]

    def setUp(self):
        self.compared = self.generated = 0

    def tearDown(self):
        self.assertGreaterEqual(self.compared, 0.7 * self.generated, "too little could be compared")

    def compare(self, got_ids, got_logprobs, want):
        """Equal up to the first position where the reference could not tell its two likeliest apart."""
        _, ids, logprobs, margins = want
        certain = next((i for i, m in enumerate(margins) if m < MARGIN), len(margins))
        self.compared += certain
        self.generated += len(ids)
        self.assertEqual(got_ids[:certain], ids[:certain])
        for at in range(certain):
            self.assertAlmostEqual(got_logprobs[at], logprobs[at], delta=1e-4, msg=f"token {at}")

    def by_command(self, family, pictures, question, *flags):
        images = [flag for path in pictures for flag in ("--image", path)]
        out = parvl("--model", self.folder / family, *images, "--prompt", question, "--json", *flags)
        return json.loads(out.stdout)

    def test_checkpoints_are_fit_for_the_comparison(self):
        for family in tiny_models.FAMILIES:
            reference = self.references[family]
            vision = family in tiny_models.VISION_FAMILIES
            margins = []
            for i in range(4):
                parts = ([image(self.pictures[i])] if vision else []) + [text("what color is the shape?" * (i + 1))]
                messages = [{"role": "user", "content": parts}]
                logits = reference.logits(messages)
                self.assertGreater(logits.std().item(), 1.0, family)
                margins += reference.generate(messages)[3]
                if vision:
                    # Another picture of the same size in its place.
                    other = picture(self.folder / "other.png", SIZES[i], 100 + i)
                    moved = reference.logits([{"role": "user", "content": [image(other), *parts[1:]]}]) - logits
                    self.assertGreater(moved.abs().max().item(), 0.1, family)
            self.assertGreater(np.mean([m >= MARGIN for m in margins]), 0.9, family)

    def test_images_before_the_question(self):
        for family in sorted(tiny_models.VISION_FAMILIES):
            cases = [[path] for path in self.pictures] + [self.pictures[:2], self.pictures[1:4], [self.pictures[2]] * 2]
            for pictures in cases:
                with self.subTest(family=family, pictures=[os.path.basename(p) for p in pictures]):
                    question = "is there a blue shape in the image?"
                    want = self.references[family].generate([{"role": "user", "content": [*map(image, pictures), text(question)]}])
                    got = self.by_command(family, pictures, question, "--ignore-eos", "--max-tokens", TOKENS)
                    self.assertEqual(got["prompt_tokens"], len(want[0]))
                    self.assertEqual([entry["token_id"] for entry in got["logprobs"]], got["token_ids"])
                    self.compare(got["token_ids"], [entry["logprob"] for entry in got["logprobs"]], want)

    def test_text_only(self):
        questions = ["what shape is in the image?", "x", "Ünïcödé, 12 345\n\n  and ¿spaces?", "no " * 60]
        for family in tiny_models.FAMILIES:
            for question in questions:
                with self.subTest(family=family, question=question[:20]):
                    want = self.references[family].generate([{"role": "user", "content": [text(question)]}])
                    got = self.by_command(family, [], question, "--ignore-eos", "--max-tokens", TOKENS)
                    self.assertEqual(got["prompt_tokens"], len(want[0]))
                    self.compare(got["token_ids"], [entry["logprob"] for entry in got["logprobs"]], want)

    def conversations(self, family):
        turns = [{"role": "system", "content": [text("you see shapes.")]},
                 {"role": "user", "content": [text("is it red?")]}, {"role": "assistant", "content": [text("no")]},
                 {"role": "user", "content": [text("what color is it then?")]}]
        yield turns
        if family not in tiny_models.VISION_FAMILIES:
            return
        a, b, c = map(image, self.pictures[:3])
        yield [{"role": "user", "content": [text("look at "), a, text(" and tell me the color")]}]
        yield [{"role": "user", "content": [text("first "), a, text(", then "), b, text("?")]}]
        yield [{"role": "user", "content": [a, text("what shape?")]}, {"role": "assistant", "content": [text("a circle")]},
               {"role": "user", "content": [text("and "), b, text("or"), c]}]

    def test_conversations_and_images_inside_the_text(self):
        for family in tiny_models.FAMILIES:
            conversations = list(self.conversations(family))
            requests = "".join(json.dumps({"messages": c, "max_tokens": TOKENS}) + "\n" for c in conversations)
            done = subprocess.run([PROBE, self.folder / family], input=requests, capture_output=True, text=True, timeout=120)
            self.assertEqual(done.returncode, 0, done.stderr)
            replies = [json.loads(line) for line in done.stdout.splitlines()]
            self.assertEqual(len(replies), len(conversations))
            for messages, got in zip(conversations, replies):
                with self.subTest(family=family, messages=str(messages)[:200]):
                    self.assertNotIn("error", got)
                    want = self.references[family].generate(messages)
                    self.assertEqual(got["prompt_ids"], want[0])
                    self.compare(got["token_ids"], [entry["logprob"] for entry in got["logprobs"]], want)

    def test_ends_where_transformers_ends(self):
        """The token that the reference gives in the fourth place, made the end token of the directory."""
        for family in ("qwen2", "qwen2_vl"):
            path, question = self.folder / family, "what color?"
            messages = [{"role": "user", "content": [text(question)]}]
            _, ids, _, margins = self.references[family].generate(messages)
            self.assertGreater(min(margins[:4]), MARGIN)
            config = path / "generation_config.json"
            kept = config.read_text()
            try:
                config.write_text(json.dumps({**json.loads(kept), "eos_token_id": [ids[3]]}))
                got = self.by_command(family, [], question, "--max-tokens", TOKENS)
            finally:
                config.write_text(kept)
            want = self.references[family].generate(messages, end=ids[3])[1]
            self.assertEqual(got["token_ids"], want)
            self.assertEqual(got["finish_reason"], "stop")
            self.assertEqual(self.references[family].processor.decode(want[:-1]), got["text"])

    def test_half_precision_directories(self):
        question = "what color is the shape?"
        for family in ("llama", "qwen2_vl", "qwen2_5_vl"):
            pictures = self.pictures[:1] if family in tiny_models.VISION_FAMILIES else []
            messages = [{"role": "user", "content": [*map(image, pictures), text(question)]}]
            for dtype, near in ((torch.bfloat16, 1.0), (torch.float16, 0.1)):
                with self.subTest(family=family, dtype=dtype):
                    path = self.folder / f"{family}-{dtype}"
                    tiny_models.make_directory(family, path, dtype)
                    reference = Reference(family, path)  # the rounded weights, computed with in float32
                    want = reference.generate(messages)
                    got = self.by_command(path.name, pictures, question, "--ignore-eos", "--max-tokens", TOKENS, "--dtype", "float32")
                    self.compare(got["token_ids"], [entry["logprob"] for entry in got["logprobs"]], want)
                    # In its own type it answers, and near that.
                    own = self.by_command(path.name, pictures, question, "--ignore-eos", "--max-tokens", TOKENS,
                                          "--logit-bias", f"{want[1][0]}=50")
                    self.assertEqual(len(own["token_ids"]), TOKENS)
                    self.assertEqual(own["token_ids"][0], want[1][0])
                    self.assertAlmostEqual(own["logprobs"][0]["logprob"], want[2][0], delta=near)


class WholeCharacters(unittest.TestCase):
    def test_partial_characters_wait(self):
        said = "é🙂水".encode()
        with tempfile.TemporaryDirectory() as folder:
            path = pathlib.Path(folder) / "speaker"
            vocabulary = tiny_models.token_ids()
            ids = [vocabulary[tiny_models.byte_symbol(b)] for b in said]  # all different
            tiny_models.make_speaker("llama", path, {vocabulary["x"]: ids[0], **dict(zip(ids, ids[1:] + ids[:1]))})
            for count in range(1, len(said) + 5):
                with self.subTest(tokens=count):
                    flags = ("--model", path, "--raw", "--prompt", "x", "--max-tokens", count)
                    got = json.loads(parvl(*flags, "--json").stdout)
                    self.assertEqual(got["token_ids"], (ids * 2)[:count])
                    whole = (said * 2)[:count].decode(errors="ignore")
                    cut = whole.encode() != (said * 2)[:count]
                    self.assertEqual(got["text"], whole + "\ufffd" * cut, "a cut character is shown as one that cannot be")
                    self.assertEqual(self.written(flags), got["text"] + "\n")

    def written(self, flags):
        """What the terminal gets; each piece of it must be whole characters."""
        with subprocess.Popen([PARVL, "generate", *map(str, flags)], stdout=subprocess.PIPE, bufsize=0) as process:
            pieces = []
            while piece := os.read(process.stdout.fileno(), 1 << 16):
                pieces.append(piece.decode())  # raises on a part of a character
        self.assertEqual(process.returncode, 0)
        return "".join(pieces)


if __name__ == "__main__":
    unittest.main()
