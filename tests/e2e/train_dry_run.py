"""`parvl train --dry-run`: what a layout holds and says, without data, weights or other ranks."""
# slow
import json
import re
import subprocess
import unittest

from train_common import TrainCase, tiny_config

LAYOUT = ("parallel.llm_backbone.tp=2", "parallel.llm_backbone.dp=2", "parallel.zero=1", "data.global_batch=8", "data.max_length=64")


class DryRun(TrainCase):
    def dry_run(self, *settings, flags=(), code=0):
        run = subprocess.run(self.command(*settings, flags=("--dry-run", *flags)), capture_output=True, text=True, timeout=60)
        self.assertEqual(run.returncode, code, run.stderr)
        self.assertFalse(self.out.exists())
        return run.stdout if code == 0 else run.stderr

    def test_nothing_but_the_configuration_is_read(self):
        (self.folder / "data.jsonl").unlink()
        out = self.dry_run(*LAYOUT, "tokenizer=gone")
        self.assertRegex(out, r"(?m)^rank  llm_backbone \(tp sp dp pp\) ")
        self.assertRegex(out, r"(?m)^   3  1 0 1 0  ")
        self.assertIn("each of a replica's 2 micro batches: 2 samples of 64 tokens (data.max_length), all but the first to learn, each with an "
                      "image of 16 x 16 patches.", out)
        self.assertRegex(out, r"(?m)^rank +weights +gradients +optimizer +activations +together$")
        self.assertRegex(out, r"(?m)^llm_backbone.data\[1\] +1 3 +reduce_scatter +\d")
        self.assertRegex(out, r"(?m)^all ranks together send .* a step$")

    def test_for_machines(self):
        result = json.loads(self.dry_run(*LAYOUT, flags=("--json",)))
        self.assertEqual(result["assumed"], {"micro_batches": 2, "tokens": 128, "targets": 126, "image_patches": 256})
        self.assertEqual([one["rank"] for one in result["ranks"]], [0, 1, 2, 3])
        self.assertEqual(result["ranks"][3]["modules"]["llm_backbone"], {"tp": 1, "sp": 0, "dp": 1, "pp": 0})
        # Two moments in float32; of the backbone each of two ranks has half, of the vision encoder each of four a quarter.
        whole = json.loads(self.dry_run(*LAYOUT, "parallel.zero=0", flags=("--json",)))["ranks"][0]
        self.assertEqual(whole["optimizer"], 2 * whole["gradients"])
        self.assertLess(result["ranks"][0]["optimizer"], 0.51 * whole["optimizer"])
        self.assertGreater(result["ranks"][0]["optimizer"], 0.25 * whole["optimizer"])
        world = [row for row in result["traffic"] if row["group"] == "world"]
        self.assertEqual(world[0]["ranks"], [0, 1, 2, 3])

    def test_an_encoder_on_ranks_of_its_own(self):
        layout = (*LAYOUT, "parallel.vision_encoder.ranks=1")
        out = self.dry_run(*layout)
        self.assertRegex(out, r"(?m)^   3  1 0 1 0 +- +-$")
        self.assertRegex(out, r"(?m)^   4  - +0 0 0 0 +0 0 0 0$")
        result = json.loads(self.dry_run(*layout, flags=("--json",)))
        self.assertEqual(set(result["ranks"][4]["modules"]), {"vision_encoder", "projector"})
        images = {row["group"]: row for row in result["traffic"] if ".images." in row["group"]}
        self.assertEqual(len(images), 8)  # to each of the four ranks that are a first stage, and back
        # Two micro batches of two images of 8 x 8 merged rows of 16 float32, to either tensor rank of either replica.
        self.assertEqual(images["vision_encoder.images.4>3"]["ranks"], [4, 3])
        self.assertEqual((images["vision_encoder.images.4>3"]["calls"], images["vision_encoder.images.4>3"]["bytes"]), (2, 2 * 2 * 64 * 16 * 4))

    def test_one_process_needs_no_calls(self):
        out = self.dry_run()
        self.assertRegex(out, r"(?m)^   0  0 0 0 0  ")
        self.assertNotIn("all ranks together", out)
        self.assertEqual(json.loads(self.dry_run(flags=("--json",)))["traffic"], [])

    def test_environment_of_a_launcher_is_not_needed(self):
        """More ranks than could ever be started here."""
        (self.folder / "config.json").write_text(json.dumps({**tiny_config(), "num_hidden_layers": 64}))
        out = self.dry_run("parallel.llm_backbone.pp=32", "parallel.llm_backbone.dp=4", "data.micro_batch=1", "data.global_batch=128")
        self.assertEqual(len(re.findall(r"(?m)^ *\d+  0 0 \d+ \d+ ", out)), 128)

    def test_layouts_that_do_not_fit(self):
        for settings, part in ((("parallel.llm_backbone.tp=3", ), "tp = 3 does not divide the 2 parts that llm_backbone.layers.0.attn.q.weight has"),
                               (("parallel.llm_backbone.pp=3", ), "pp = 3 is more stages than the model's 2 layers"),
                               (("parallel.llm_backbone.dp=4", ), "global_batch"),
                               (("parallel.llm_backbone.tp=2", "parallel.vision_encoder.dp=3"), "does not fit: dp"),
                               (("parallel.llm_backbone.sp=2", ), "not available yet"),
                               (("data.max_length=400", ), "over the model's max_position_embeddings of 256"),
                               (("train.freeze=[vision.*]", ), "train.freeze pattern 'vision.*' matches no parameter"),
                               (("config=gone.json", ), "gone.json: No such file or directory")):
            with self.subTest(settings):
                message = self.dry_run(*settings, code=2)
                self.assertIn(part, message.splitlines()[-1])


if __name__ == "__main__":
    unittest.main()
