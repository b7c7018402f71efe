"""`parvl generate` on the example model, and that a server answers the same."""
# slow
import json
import pathlib
import shutil
import subprocess
import tempfile
import unittest

from serve_common import MODEL, PARVL, Server, ask, data_uri, need_model, png

QUESTION = "what color is the shape?"


class Generate(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        need_model()
        cls.folder = tempfile.TemporaryDirectory()
        cls.addClassCleanup(cls.folder.cleanup)
        cls.image = pathlib.Path(cls.folder.name) / "red.png"
        cls.image.write_bytes(png())

    def parvl(self, *flags):
        if "--max-tokens" not in flags:
            flags += ("--max-tokens", 12)
        if "--model" not in flags:
            flags += ("--model", MODEL)
        return subprocess.run([PARVL, "generate", *map(str, flags)], capture_output=True, timeout=120)

    def answer(self, *flags):
        done = self.parvl("--json", "--prompt", QUESTION, *flags)
        self.assertEqual(done.returncode, 0, done.stderr)
        return json.loads(done.stdout)

    def test_json_fields(self):
        reply = self.answer("--image", self.image, "--top-logprobs", 3)
        self.assertEqual(len(reply["token_ids"]), len(reply["logprobs"]))
        self.assertGreater(reply["prompt_tokens"], 0)
        self.assertIn(reply["finish_reason"], ("stop", "length"))
        for token, entry in zip(reply["token_ids"], reply["logprobs"]):
            self.assertEqual(entry["token_id"], token)
            self.assertEqual(len(entry["top"]), 3)
            self.assertEqual(entry["top"][0][0], token)  # greedy unless told otherwise
            self.assertAlmostEqual(entry["top"][0][1], entry["logprob"], places=4)

    def test_terminal_text_is_the_json_text(self):
        done = self.parvl("--prompt", QUESTION, "--image", self.image)
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertEqual(done.stdout.decode(), self.answer("--image", self.image)["text"] + "\n")

    def test_server_answers_the_same(self):
        reply = self.answer("--image", self.image)
        with Server() as server:
            status, _, body = server.chat(messages=ask(QUESTION, data_uri(png())), temperature=0, max_tokens=12)
        self.assertEqual(status, 200)
        self.assertEqual(body["choices"][0]["message"]["content"], reply["text"])
        self.assertEqual(body["usage"]["prompt_tokens"], reply["prompt_tokens"])
        self.assertEqual(body["usage"]["completion_tokens"], len(reply["token_ids"]))

    def test_images_count(self):
        none, one, two = (self.answer(*["--image", self.image] * n)["prompt_tokens"] for n in range(3))
        self.assertGreater(one, none)
        self.assertEqual(two - one, one - none)

    def test_seed_and_temperature(self):
        flags = ("--temperature", 1.9, "--ignore-eos", "--max-tokens", 24)
        first, again, other = (self.answer(*flags, "--seed", seed)["token_ids"] for seed in (5, 5, 6))
        self.assertEqual(first, again)
        self.assertNotEqual(first, other)
        self.assertEqual(len(first), 24)

    def test_bias_and_stops(self):
        reply = self.answer("--image", self.image)
        first = reply["token_ids"][0]
        self.assertNotEqual(self.answer("--image", self.image, "--logit-bias", f"{first}=-100")["token_ids"][0], first)
        stopped = self.answer("--image", self.image, "--stop-token-ids", first)
        self.assertEqual((stopped["token_ids"], stopped["text"], stopped["finish_reason"]), ([first], "", "stop"))
        if len(reply["text"]) > 1:
            self.assertEqual(self.answer("--image", self.image, "--stop", reply["text"][1:])["text"], reply["text"][:1])

    def test_raw_skips_the_template(self):
        raw = self.answer("--raw")
        self.assertLess(raw["prompt_tokens"], self.answer()["prompt_tokens"])

    def damaged_model(self, name, content=None):
        """A copy of the model without the file `name`, or with `content` in it."""
        folder = pathlib.Path(self.folder.name) / self.id().rsplit(".", 1)[1]
        shutil.copytree(MODEL, folder)
        (folder / name).unlink() if content is None else (folder / name).write_text(content)
        return folder

    def test_a_missing_image_processor_is_named(self):
        folder = self.damaged_model("preprocessor_config.json")
        says = f"{folder}/preprocessor_config.json is missing, and the model takes images only with it"
        done = self.parvl("--model", folder, "--prompt", "x", "--image", self.image)
        self.assertEqual(done.returncode, 2)
        self.assertIn(says, done.stderr.decode())
        with Server(model=folder) as server:
            status, _, body = server.chat(messages=ask(QUESTION, data_uri(png())))
            self.assertEqual(status, 400)
            self.assertIn(says, body["error"]["message"])
            self.assertEqual(server.chat(messages=ask(QUESTION), max_tokens=1)[0], 200)

    def test_a_template_without_end(self):
        folder = self.damaged_model("chat_template.jinja", "{% for i in range(1000000) %}{% for j in range(1000000) %}x{% endfor %}{% endfor %}")
        done = self.parvl("--model", folder, "--prompt", "x")
        self.assertEqual(done.returncode, 2)
        self.assertRegex(done.stderr.decode(), "chat template: the template takes more than the limit of [0-9]+ steps; .*line 1")
        with Server(model=folder) as server:
            status, _, body = server.chat(messages=ask(QUESTION))
            self.assertEqual(status, 400)
            self.assertIn("more than the limit of", body["error"]["message"])

    def test_refusals(self):
        broken = self.image.with_name("broken.png")
        broken.write_bytes(png()[:50])
        for flags, says in ((("--prompt", "x", "--audio", "a.wav"), "--audio is not available yet"),
                            (("--prompt", "x", "--video", "a.mp4"), "--video is not available yet"),
                            (("--prompt", "x", "--image", "missing.png"), "missing.png"),
                            (("--prompt", "x", "--image", broken), "broken.png"),
                            (("--prompt", "x", "--temperature", "9"), "temperature must be between 0 and 2"),
                            (("--prompt", "x", "--raw", "--image", self.image), "--raw"),
                            (("--prompt", "word " * 20_000), "limit"),
                            (("--prompt", "x", "--seed", "-1"), "--seed must be a whole number from 0 to 18446744073709551615, found '-1'"),
                            (("--prompt", "x", "--seed", str(2 ** 64)), "--seed must be a whole number from 0 to 18446744073709551615"),
                            ((), "--prompt")):
            done = self.parvl(*flags)
            self.assertEqual(done.returncode, 2, (flags, done.stderr))
            self.assertIn(says, done.stderr.decode().strip().splitlines()[-1])
            self.assertEqual(done.stdout, b"")


if __name__ == "__main__":
    unittest.main()
