"""Allocation files at `parvl serve --config`: the contract's example, and what is refused before any weight is loaded."""
# slow
import json
import os
import pathlib
import re
import subprocess
import tempfile
import unittest

PARVL = os.environ["PARVL"]
EXAMPLES = pathlib.Path(__file__).resolve().parents[2] / "examples"
MODEL = EXAMPLES / "easy_vqa" / "model"
EXAMPLE = (EXAMPLES / "allocation.yaml").read_text()


class Allocations(unittest.TestCase):
    def serve(self, text, *flags):
        with tempfile.TemporaryDirectory() as folder:
            path = pathlib.Path(folder) / "allocation.yaml"
            path.write_text(text)
            done = subprocess.run([PARVL, "serve", "--model", str(MODEL), "--config", str(path), *flags], capture_output=True, text=True, timeout=60)
            return done.returncode, done.stdout, done.stderr.strip().replace(folder + "/", "")

    def test_the_example_is_shown_with_every_default(self):
        code, out, err = self.serve(EXAMPLE, "--print-config", "--device-map", "gpu-24gb=cpu,gpu-40gb=cpu")
        self.assertEqual((code, err), (0, ""))
        pools = json.loads(out)["pools"]
        self.assertEqual({name: (pool["role"], pool["instances"], pool["devices_an_instance"], pool["computes_on"]) for name, pool in pools.items()},
                         {"encoder-pool": ("encode", 2, 1, "cpu"), "llm-pool": ("llm", 2, 2, "cpu")})
        self.assertEqual(set(pools["encoder-pool"]["modules"]), {"vision_encoder", "projector"})
        self.assertGreater(pools["llm-pool"]["weight_bytes_a_device"], 0)

    def test_what_does_not_fit_is_refused(self):
        for change, flags, says in ((("tp_size: 2", "tp_size: 3"), ("--print-config",), "allocation.yaml:8: 'model.modules.llm_backbone.tp_size' (3) must divide the 4 attention heads"),
                                    (("policy", "polcy"), (), "allocation.yaml:10: unknown key 'scheduler.polcy'; valid here: policy"),
                                    (("0.75", "7.5"), (), "allocation.yaml:11: 'scheduler.expand_threshold'"),
                                    (("", ""), ("--device-map", "gpu-25gb=cpu"), "--device-map names the device class 'gpu-25gb'"),
                                    (("parallel: tensor, tp_size: 2", "parallel: sequence, sp_size: 2"), (),
                                     "allocation.yaml:8: 'model.modules.llm_backbone.sp_size' (2): llm_backbone cut so is not available yet; leave it out: valid here are tp_size"),
                                    (("parallel: tensor, tp_size: 2", "dp_size: 2"), (), "allocation.yaml:8: 'model.modules.llm_backbone.dp_size' (2): llm_backbone cut so"),
                                    (("data, replicas", "tensor, tp_size: 2, replicas"), (),
                                     "allocation.yaml:7: 'model.modules.vision_encoder.tp_size' (2): vision_encoder over several devices of an instance is not available yet"),
                                    (("    llm_backbone:", "    projector: {pool: llm-pool}\n    llm_backbone:"), (),
                                     "allocation.yaml:8: 'model.modules.projector.pool' (llm-pool): a projector apart from its encoder is not available yet"),
                                    (("", ""), ("--device", "cpu"), "--device is of a server without --config; give --device-map CLASS=cpu for each class"),
                                    (("", ""), ("--max-queue", "9"), "--max-queue is of a server without --config; an allocation says it for each queue: queues: {text: {limit: 9}}")):
            code, out, err = self.serve(EXAMPLE.replace(*change) if change[0] else EXAMPLE, *flags)
            self.assertEqual((code, out), (2, ""), err)
            self.assertTrue(err.startswith(f"parvl: {says}"), err)  # the only line: nothing was started

    def test_a_machine_without_gpus_is_told_the_flag_that_helps(self):
        if os.path.exists("/dev/nvidiactl"):
            self.skipTest("this machine has a GPU")
        code, _, err = self.serve(EXAMPLE, "--port", "0")
        self.assertEqual(code, 2, err)
        self.assertRegex(err.splitlines()[-1], r"parvl: no GPU: .*--device-map CLASS=cpu")

    def test_the_allocations_of_the_documentation_are_valid(self):
        blocks = re.findall(r"```yaml\n(.*?)```", (EXAMPLES.parent / "docs" / "allocation.md").read_text(), re.DOTALL)
        self.assertGreaterEqual(len(blocks), 4)
        for block in blocks:
            code, out, err = self.serve(block, "--print-config")
            self.assertEqual((code, err), (0, ""), block)
            self.assertEqual([{"prefill-pool", "decode-pool"} <= set(json.loads(out)["pools"])], ["role: prefill" in block])


if __name__ == "__main__":
    unittest.main()
