"""The example's recipe in parallel layouts: the loss follows one process's, within what float32 itself differs from float64."""
# slow
import json
import os
import pathlib
import subprocess
import tempfile
import unittest

from train_common import PARVL, ROOT

STEPS = int(os.environ.get("PARVL_CURVE_STEPS", "20"))
LAYOUTS = {"encoder dp 2, backbone tp 2": ("parallel.llm_backbone.tp=2", "parallel.vision_encoder.dp=2"), "pp 2": ("parallel.llm_backbone.pp=2",)}


class Curves(unittest.TestCase):
    def losses(self, out, dtype, *settings, ranks=1):
        sets = ["train.device=cpu", f"train.dtype={dtype}", f"train.steps={STEPS}", "train.log_every=1", f"train.out={out}", "data.eval=",
                "data.micro_batch=2", "data.global_batch=8", "train.checkpoint_every=0", *settings]
        command = [str(PARVL), "train", "--json", "--config", str(ROOT / "examples" / "easy_vqa" / "recipe.yaml")]
        for setting in sets:
            command += ["--set", setting]
        if ranks > 1:
            command = [str(PARVL), "launch", "--nproc-per-node", str(ranks), "--", *command]
        done = subprocess.run(command, capture_output=True, text=True, timeout=3600, env=dict(os.environ, OMP_NUM_THREADS="1"))
        self.assertEqual(done.returncode, 0, done.stderr)
        events = [json.loads(line) for line in done.stdout.splitlines()]
        return [event["loss"] for event in events if event["event"] == "step"]

    def test_layouts_follow_one_process(self):
        with tempfile.TemporaryDirectory(prefix="parvl-curves-") as folder:
            folder = pathlib.Path(folder)
            exact = self.losses(folder / "exact", "float64")
            alone = self.losses(folder / "alone", "float32")
            self.assertEqual(len(exact), STEPS)
            self.assertLess(exact[-1], exact[0])
            error = max(abs(a - e) / e for a, e in zip(alone, exact))
            print(f"one process, float32 against float64 over {STEPS} steps: {error:.2e}")
            for name, settings in LAYOUTS.items():
                with self.subTest(layout=name):
                    got = self.losses(folder / name.replace(" ", "-").replace(",", ""), "float32", *settings, ranks=2)
                    mine = max(abs(g - e) / e for g, e in zip(got, exact))
                    print(f"{name}: {mine:.2e}")
                    self.assertLessEqual(mine, 4 * error)


if __name__ == "__main__":
    unittest.main()
