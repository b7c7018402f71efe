"""Training on several GPUs over NCCL: every call, what the checks say of a call that is another one, layouts against one process."""
# slow
import json
import os
import signal
import subprocess
import unittest

from rank_probes import RankProbes
from train_common import PARVL, Run, TrainCase

PROBE = PARVL.parent / "probes" / "gpu_probe"


def gpus():
    try:
        done = subprocess.run(["nvidia-smi", "--list-gpus"], capture_output=True, text=True, timeout=60)
    except OSError:
        return 0
    return len(done.stdout.splitlines()) if done.returncode == 0 else 0


COUNT = gpus()


@unittest.skipIf(COUNT < 2, f"two GPUs are needed; this machine has {COUNT}")
class Groups(RankProbes, unittest.TestCase):
    def run_ranks(self, what, stopped=None, silence=600):
        return self.run_probes([PROBE, what], 2, stopped, PARVL_RANK_SILENCE_SECONDS=silence)

    def test_every_call_in_every_type(self):
        self.all_say(self.run_ranks("values"), "fine", code=0)

    def test_calls_that_differ_are_named_and_ended(self):
        """A GPU's calls hang without anybody waiting in them, or do not hang at all: the barrier behind them, or the comparison, finds what differs."""
        for fault, text in (("shape", "rank 1 called all_reduce (sum) of 5 float32 at mlp"),
                            ("skip", "group other, call 0 (all_reduce (sum) of 6 float32 at mlp): rank 1 did not make it"),
                            ("message", "group other: rank 0 has sent 1 messages to rank 1, which has awaited 0")):
            with self.subTest(fault=fault):
                ranks = self.run_ranks(fault)
                self.all_say(ranks, text)
                for _, _, lines in ranks.values():
                    seconds = float(lines.split("after ")[-1].split(" s")[0])
                    self.assertLess(seconds, 6, lines)

    def test_a_stopped_process_and_an_abort(self):
        self.all_say(self.run_ranks("stop", stopped=1, silence=2), "rank 1 has given no sign of life", code=1)
        self.all_say(self.run_ranks("abort"), "rank 1 has no more memory", code=1)


@unittest.skipIf(COUNT < 2, f"two GPUs are needed; this machine has {COUNT}")
class Layouts(TrainCase):
    LAYOUTS = ("dp=2", "dp=2,zero=1", "tp=2", "pp=2", "tp=2;vision_encoder:tp=2", "tp=2;projector:tp=2")

    def verify(self, layout, dtype):
        command = [str(PARVL), "verify", "--json", "--config", str(self.folder / "recipe.yaml"), "--dtype", dtype, "--layout", layout,
                   "--set", "data.micro_batch=1", "--set", "train.device=cuda"]
        return subprocess.run(command, capture_output=True, text=True, timeout=300)

    def test_gradients_losses_and_weights(self):
        """Against one process on a GPU. float64 has the bounds of `parvl verify`; the others are far wider than rounding, and far below a fault."""
        bounds = {"float64": 1e-10, "float32": 1e-4, "bfloat16": 0.3}
        cases = [(layout, "float64") for layout in self.LAYOUTS]
        cases += [(layout, dtype) for dtype in ("float32", "bfloat16") for layout in ("dp=2", "tp=2", "pp=2")]
        for layout, dtype in cases:
            with self.subTest(layout=layout, dtype=dtype):
                done = self.verify(layout, dtype)
                self.assertEqual(done.returncode, 0, done.stderr)
                result = json.loads(done.stdout)
                print(f"{layout} {dtype}: gradients {result['max_relative_error']:.2g}, loss {result['loss_error']:.2g}, "
                      f"weights {result['weight_error']:.2g}")
                self.assertEqual(result["ranks"], 2)
                self.assertLess(result["max_relative_error"], bounds[dtype])

    def launch(self, *settings, code=0):
        command = [str(PARVL), "launch", "--nproc-per-node", "2", "--", *self.command("train.device=cuda", "data.micro_batch=1", *settings)]
        run = Run(subprocess.run(command, capture_output=True, text=True, timeout=240))
        self.assertEqual(run.code, code, run.stderr)
        return run

    def test_a_run_repeats_and_resumes_to_the_bit_in_bfloat16(self):
        settings = ("train.dtype=bfloat16", "parallel.llm_backbone.dp=2", "parallel.zero=1")
        whole = self.launch(*settings, "train.out=whole")
        self.launch(*settings, "train.out=parts", "train.steps=3")
        rest = self.launch(*settings, "train.out=parts")
        self.assertEqual(rest.losses(), whole.losses()[3:])

    def test_a_stopped_rank_is_named_by_the_other(self):
        """Rank 1 is stopped between any two calls of a step; rank 0's GPU waits for it, and rank 0 says so and leaves."""
        for layout in ("dp", "tp", "pp"):
            with self.subTest(layout=layout):
                command = [str(PARVL), "launch", "--nproc-per-node", "2", "--grace-seconds", "1", "--",
                           *self.command("train.device=cuda", "data.micro_batch=1", f"parallel.llm_backbone.{layout}=2", "train.steps=1000000",
                                         f"train.out=stopped-{layout}")]
                process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                                           env={**os.environ, "PARVL_RANK_SILENCE_SECONDS": "3"})
                while json.loads(process.stdout.readline()).get("step") != 2:
                    pass
                os.kill(self.rank_pid(process.pid, 1), signal.SIGSTOP)
                _, errors = process.communicate(timeout=240)
                self.assertEqual(process.returncode, 1, errors)
                line = next(line for line in errors.splitlines() if line.startswith("parvl: "))
                self.assertIn("rank 1 has given no sign of life for ", line)
                self.assertRegex(line, r"rank 0 waits for it in group \S+, call \d+ \(\w+")

    def test_a_rank_too_many_is_refused(self):
        command = [str(PARVL), "launch", "--nproc-per-node", str(COUNT + 1), "--", *self.command("train.device=cuda", f"parallel.llm_backbone.dp={COUNT + 1}",
                   "data.micro_batch=1", f"data.global_batch={COUNT + 1}")]
        done = subprocess.run(command, capture_output=True, text=True, timeout=240)
        self.assertEqual(done.returncode, 2, done.stderr)
        self.assertIn(f"this machine has {COUNT} GPUs for rank {COUNT} of its processes (LOCAL_RANK)", done.stderr)


if __name__ == "__main__":
    unittest.main()
