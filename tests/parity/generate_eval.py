"""`parvl eval`: its accuracies are those of transformers' greedy answers; data sets that cannot be scored are refused."""
# slow
import json
import os
import pathlib
import re
import subprocess
import tempfile
import time
import unittest

import tiny_models
from generate_common import Reference, image, picture, text

PARVL = os.environ["PARVL"]


class Eval(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = pathlib.Path(folder.name)

    def run_eval(self, model, samples, *flags):
        data = self.folder / "data.jsonl"
        data.write_text("".join(json.dumps({"messages": messages}) + "\n" for messages in samples))
        return subprocess.run([PARVL, "eval", "--model", model, "--data", data, "--json", *map(str, flags)],
                              capture_output=True, text=True, timeout=300)

    def scores(self, *args):
        done = self.run_eval(*args)
        self.assertEqual(done.returncode, 0, done.stderr)
        return json.loads(done.stdout)

    def refusal(self, *args, code=2):
        done = self.run_eval(*args)
        self.assertEqual((done.returncode, done.stdout), (code, ""), done.stderr)
        return done.stderr.strip().splitlines()[-1]

    def speaker(self, says="yes"):
        """Answers every question with one word."""
        ids = tiny_models.token_ids()
        path = self.folder / "speaker"
        spoken = [ids["Ċ"], *(ids[letter] for letter in says), ids["<|im_end|>"]]
        tiny_models.make_speaker("qwen2_5_vl", path, dict(zip(spoken, spoken[1:])))
        return path

    def test_answers_are_those_of_transformers(self):
        path = self.folder / "model"
        tiny_models.make_directory("qwen2_vl", path)
        reference = Reference("qwen2_vl", path)
        pictures = [picture(self.folder / f"{i}.png", size, i) for i, size in enumerate([(37, 53), (60, 60), (91, 23)])]
        asked = []
        for i in range(6):
            parts = [image(pictures[i % 3]), text("what color is the shape?"[i:])]
            messages = [{"role": "user", "content": parts}]
            if i >= 3:  # a conversation, with an image in its second question
                messages += [{"role": "assistant", "content": [text("red")]},
                             {"role": "user", "content": [text("and here?"), image(pictures[(i + 1) % 3])]}]
            asked.append(messages)
        # Tokens that end an answer: for each question one that it gives soon, none that any gives in its first two places.
        spoken = [reference.generate(messages)[1] for messages in asked]
        first = {token for ids in spoken for token in ids[:2]}
        ends = sorted({next(token for token in ids if token not in first) for ids in spoken})
        config = json.loads((path / "generation_config.json").read_text())
        (path / "generation_config.json").write_text(json.dumps({**config, "eos_token_id": ends}))
        samples, right = [], 0
        for i, messages in enumerate(asked):
            _, ids, _, margins = reference.generate(messages, end=ends)
            self.assertIn(ids[-1], ends)
            self.assertGreater(min(margins), 1e-3)
            said = reference.processor.tokenizer.decode(ids[:-1])
            self.assertTrue(said.strip())
            right += i % 2 == 0
            samples.append([*messages, {"role": "assistant", "content": said if i % 2 == 0 else said + "s"}])
        self.assertGreater(len({s[-1]["content"] for s in samples}), 3, "answers that depend on the question")
        self.assertEqual(self.scores(path, samples), {"accuracy": right / 6, "accuracy_not_yes_no": right / 6, "n": 6, "n_not_yes_no": 6})

    def test_figures(self):
        path = self.speaker()
        where = {"role": "user", "content": [image(picture(self.folder / "a.png", (30, 40), 1)), text("is it?")]}
        answers = ["yes", " yes\n", "Yes", "no", "NO", "circle", "yes!", "yes"]  # right: the 1st, 2nd and last
        samples = [[where, {"role": "assistant", "content": answer}] for answer in answers]
        self.assertEqual(self.scores(path, samples), {"accuracy": 3 / 8, "accuracy_not_yes_no": 0.0, "n": 8, "n_not_yes_no": 2})
        self.assertEqual(self.scores(path, samples, "--limit", 2), {"accuracy": 1.0, "accuracy_not_yes_no": None, "n": 2, "n_not_yes_no": 0})
        self.assertEqual(self.scores(path, samples, "--limit", 100)["n"], 8)
        plain = subprocess.run([PARVL, "eval", "--model", path, "--data", self.folder / "data.jsonl"], capture_output=True, text=True, timeout=60)
        self.assertEqual(plain.stdout.splitlines(), ["accuracy 0.3750 (3 of 8)", "accuracy 0.0000 (0 of 2) of the answers that are not yes or no"])

    def test_only_what_stands_before_the_last_answer_is_asked(self):
        path = self.speaker()
        after = [{"role": "user", "content": [image(picture(self.folder / "b.png", (30, 40), 1)), text("and?")]}]
        turns = [{"role": "user", "content": "a?"}, {"role": "assistant", "content": "no"}, {"role": "user", "content": "b?"},
                 {"role": "assistant", "content": "yes"}]
        self.assertEqual(self.scores(path, [turns, turns + after])["accuracy"], 1.0)

    def test_samples_that_cannot_be_scored(self):
        path = self.speaker()
        good = [{"role": "user", "content": "a?"}, {"role": "assistant", "content": "yes"}]
        told = self.refusal(path, [good, good, good[:1]])
        self.assertRegex(told, r"data\.jsonl:3\b.*no assistant turn")
        self.assertEqual(self.scores(path, [good, good, good[:1]], "--limit", 2)["n"], 2)
        self.assertRegex(self.refusal(path, [good[1:]]), r"data\.jsonl:1\b.*begins with the assistant turn")
        told = self.refusal(path, [good, [{"role": "user", "content": [image("gone.png")]}, good[1]]])
        self.assertRegex(told, r"data\.jsonl:2\b.*gone\.png")
        long = [{"role": "user", "content": "a?" * 2000}, good[1]]
        self.assertRegex(self.refusal(path, [good, long]), r"data\.jsonl:2\b.*limit is 512")

    def test_refusals(self):
        path = self.speaker()
        good = [{"role": "user", "content": "a?"}, {"role": "assistant", "content": "yes"}]
        self.assertIn("--limit", self.refusal(path, [good], "--limit", -1))
        self.assertIn("missing", self.refusal(self.folder / "missing", [good]))
        self.assertIn("data.jsonl", self.refusal(path, []))
        self.assertIn("--device", self.refusal(path, [good], "--device", "tpu"))

    def test_long_runs_tell_how_far_they_are(self):
        samples = [[{"role": "user", "content": "what? " * 60}, {"role": "assistant", "content": "yes" * 100}]] * 600
        start = time.monotonic()
        done = self.run_eval(self.speaker("yes"), samples)
        seconds = time.monotonic() - start
        self.assertEqual(done.returncode, 0, done.stderr)
        lines = done.stderr.splitlines()
        self.assertGreaterEqual(len(lines), int(seconds / 5), (seconds, lines))
        if seconds > 3:
            self.assertRegex(lines[-1], r"^sample \d+/600  accuracy 0\.0000  eta \S+$")
            counts = [int(m.group(1)) for m in (re.match(r"sample (\d+)/", line) for line in lines) if m]
            self.assertEqual(counts, sorted(counts))


if __name__ == "__main__":
    unittest.main()
