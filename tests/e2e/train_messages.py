"""What `parvl train` says about recipes, data and folders that cannot be used: one sentence and the right exit status."""
# slow
import json
import os
import shutil
import subprocess
import unittest

from train_common import START, TrainCase, picture, tiny_config, turn


class Messages(TrainCase):
    def test_recipes_that_cannot_be_used(self):
        for setting, part in {
                "config=gone.json": "gone.json: No such file or directory",
                "tokenizer=gone": "gone",
                "data.train=gone.jsonl": "gone.jsonl: No such file or directory",
                "data.global_batch=5": "must be a multiple of micro_batch",
                "optim.lr=-1": "optim.lr",
                "optim.lrr=1": "unknown key 'optim.lrr'; valid here: lr, ",
                "train.freeze=[vision.*]": "train.freeze pattern 'vision.*' matches no parameter",
                "optim.groups=[{match: head.*, lr: 1}]": "optim.groups pattern 'head.*' matches no parameter",
                "train.freeze=['*']": "train.freeze leaves no parameter to train",
                "train.dtype=float16": "train.dtype",
                "parallel.llm_backbone.tp=2": "start 2 (parvl launch --nproc-per-node 2 -- parvl train ...)",
                "parallel.llm_backbone.sp=2": "not available yet",
                "train.out=recipe.yaml/out": "train.out: cannot make the folder",
                "train.resume=nowhere": "nowhere"}.items():
            with self.subTest(setting):
                self.assertIn(part, self.refused(setting))
        run = subprocess.run([*self.command()[:2], "--config", str(self.folder / "gone.yaml")], capture_output=True, text=True, timeout=60)
        self.assertEqual(run.returncode, 2)
        self.assertIn("gone.yaml", run.stderr)

    def test_missing_keys(self):
        recipe = self.folder / "recipe.yaml"
        text = recipe.read_text()
        for line, part in {"config: config.json\n": "config", f"tokenizer: {START}\n": "tokenizer", "out: out, ": "train.out"}.items():
            with self.subTest(line):
                recipe.write_text(text.replace(line, ""))
                self.assertIn(part, self.refused())

    def test_directories_that_cannot_be_used(self):
        damaged = self.folder / "tokenizer"
        shutil.copytree(START, damaged)
        for name, content, part in (("tokenizer.json", "{", "tokenizer.json"), ("tokenizer.json", None, "tokenizer.json"),
                                    ("preprocessor_config.json", "[]", "preprocessor_config.json"),
                                    ("chat_template.jinja", "{% for %}", "template")):
            with self.subTest(name, content=content):
                good = (damaged / name).read_text()
                (damaged / name).unlink() if content is None else (damaged / name).write_text(content)
                self.assertIn(part, self.refused("tokenizer=tokenizer"))
                (damaged / name).write_text(good)
        config = tiny_config(text_only=True)
        for change, part in (({"vocab_size": 300}, "'eos_token_id' 370 is not below 'vocab_size'"), ({"hidden_size": 17}, "config.json"),
                             ({"model_type": "gpt9"}, "gpt9"), ({"attention_dropout": 0.1}, "ropout")):
            with self.subTest(change):
                (self.folder / "config.json").write_text(json.dumps({**config, **change}))
                self.assertIn(part, self.refused())

    def test_several_ranks(self):
        message = self.refused(env={"WORLD_SIZE": "2", "RANK": "0"})
        self.assertIn("WORLD_SIZE is 2, but MASTER_PORT is not set", message)
        self.train("train.steps=1", env={"WORLD_SIZE": "1", "RANK": "0", "LOCAL_RANK": "0"})

    def test_a_sample_that_is_too_long(self):
        lines = [{"messages": [turn("user", "a"), turn("assistant", "b")]}] * 7
        lines.insert(5, {"messages": [turn("user", "red " * 300), turn("assistant", "b")]})
        self.write_data(lines)
        run = self.train("train.steps=2", "data.global_batch=8", code=2)
        self.assert_one_sentence(run)
        self.assertRegex(run.message(), r"data\.jsonl:6: has \d+ tokens, over the maximum length of 256; shorten it or raise data.max_length")
        self.assertIn("data.max_length is 400, over the model's max_position_embeddings of 256", self.refused("data.max_length=400"))
        lines[5] = {"messages": [turn("user", "red " * 120), turn("assistant", "b")]}
        self.write_data(lines)
        message = self.refused("train.steps=1", "data.global_batch=8", "data.max_length=110")
        self.assertRegex(message, r"data\.jsonl:6: has \d+ tokens, over the maximum length of 110")
        self.assertEqual(len(self.train("train.steps=1", "data.global_batch=8", "data.max_length=256").losses()), 1)

    def test_a_picture_that_cannot_be_read(self):
        (self.folder / "4.png").write_bytes((self.folder / "4.png").read_bytes()[:60])
        run = self.train("data.global_batch=12", "data.micro_batch=4", code=2)
        self.assert_one_sentence(run)
        self.assertIn("data.jsonl:5", run.message())
        self.assertIn("4.png", run.message())

    def test_a_loss_that_is_not_finite(self):
        run = self.train("optim.lr=1e30", "train.steps=20", "train.checkpoint_every=1", code=1)
        self.assert_one_sentence(run)
        step = len(run.losses())
        self.assertIn(f"step {step + 1}: the loss is ", run.message())
        self.assertIn("not finite, so this step's update was not made; lower optim.lr", run.message())
        self.assertEqual(sorted(p.name for p in self.out.glob("step-*")), sorted(f"step-{i + 1}" for i in range(step)))

    def test_a_folder_in_use(self):
        process = subprocess.Popen(self.command("train.steps=1000000"), stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
        try:
            process.stdout.readline()  # it trains
            self.assertIn(f"another process trains into {self.out}", self.refused())
        finally:
            process.kill()
            process.stdout.close()
            process.wait()
        self.train("train.steps=1")

    def test_one_step_without_targets(self):
        self.write_data([{"messages": [turn("user", "a")]}] * 4)
        run = self.train("train.steps=2")
        self.assertEqual(run.losses(), [0.0, 0.0])
        self.assertEqual([e["loss_tokens"] for e in run.events if e["event"] == "step"], [0, 0])
        warnings = [line for line in run.stderr.splitlines() if line.startswith("warning: ")]
        self.assertEqual(len(warnings), 1, run.stderr)
        self.assertRegex(warnings[0], "no token of step 1's batch is to be learned, .* nor will any other: .* \"assistant\"; give ")

    def test_a_batch_without_targets_among_others(self):
        self.write_data([{"messages": [turn("user", "a")]}] * 3 + [{"messages": [turn("user", "a"), turn("assistant", "b")]}])
        run = self.train("train.steps=4", "data.micro_batch=1", "data.global_batch=1")
        self.assertEqual(sum(loss > 0 for loss in run.losses()), 1)
        warnings = [line for line in run.stderr.splitlines() if line.startswith("warning: ")]
        self.assertEqual(len(warnings), 1, run.stderr)
        self.assertNotIn("nor will any other", warnings[0])
        self.write_data([{"messages": [turn("user", "a"), turn("assistant", "b")]}])
        run = self.train("train.steps=1", "data.micro_batch=1", "data.global_batch=1", "train.out=other")
        self.assertNotIn("warning", run.stderr)

    def test_text_only(self):
        (self.folder / "config.json").write_text(json.dumps(tiny_config(text_only=True)))
        tokenizer = self.folder / "tokenizer"
        shutil.copytree(START, tokenizer, ignore=shutil.ignore_patterns("preprocessor_config.json", "config.json"))
        self.write_data([{"messages": [turn("user", f"what is {i}?"), turn("assistant", "circle")]} for i in range(4)])
        run = self.train("tokenizer=tokenizer", "train.steps=40", "optim.lr=0.02")
        self.assertLess(run.losses()[-1], 0.1 * run.losses()[0])
        picture(self.folder / "p.png", 1)
        self.write_data([{"messages": [turn("user", {"type": "image", "image": "p.png"}, {"type": "text", "text": "x"}),
                                       turn("assistant", "b")]}])
        self.assertIn("holds an image, but this model takes no images", self.refused("tokenizer=tokenizer", "train.out=other"))

    def test_output_for_people(self):
        run = subprocess.run(self.command("train.steps=4", "train.log_every=2", "data.eval=data.jsonl", flags=()), capture_output=True,
                             text=True, timeout=60)
        self.assertEqual((run.returncode, run.stderr), (0, ""))
        lines = run.stdout.splitlines()
        self.assertRegex(lines[0], r"^step 2/4  loss \d+\.\d+  grad_norm \S+  lr 1\.000e-03  tokens/s \d+  memory \d+ MiB")
        self.assertTrue(lines[1].startswith("step 4/4  "))
        self.assertEqual(lines[2], f"saved {self.out}/step-4")
        self.assertRegex(lines[3], r"^step 4  eval_loss \d+\.\d+  eval_accuracy [\d.]+  \(10 samples")
        self.assertEqual(len(lines), 4)

    def test_output_that_nobody_reads(self):
        """A closed pipe does not end hours of training."""
        read, write = os.pipe()
        os.close(read)
        run = subprocess.run(self.command("train.steps=3", flags=()), stdout=write, stderr=subprocess.PIPE, timeout=60)
        os.close(write)
        self.assertTrue((self.out / "step-3" / "config.json").exists(), run)


if __name__ == "__main__":
    unittest.main()
