"""Training on several processes: `parvl launch`, what it does when a rank dies, and `parvl verify`."""
# slow
import json
import os
import signal
import subprocess
import unittest

from train_common import PARVL, ROOT, Run, TrainCase

DP2 = ("data.micro_batch=1", "parallel.llm_backbone.dp=2")


class Parallel(TrainCase):
    def launch(self, *settings, flags=(), code=0):
        command = [str(PARVL), "launch", "--nproc-per-node", "2", *flags, "--", *self.command(*settings)]
        run = Run(subprocess.run(command, capture_output=True, text=True, timeout=240))
        self.assertEqual(run.code, code, run.stderr)
        return run

    def test_two_processes_learn_what_one_learns(self):
        alone = self.train("train.dtype=float64", "train.out=alone")
        for zero in (0, 1):
            run = self.launch("train.dtype=float64", *DP2, f"parallel.zero={zero}", f"train.out=zero{zero}")
            self.assertEqual(run.steps(), alone.steps())
            for got, want in zip(run.losses(), alone.losses()):
                self.assertAlmostEqual(got, want, delta=1e-11)
            self.assert_whole(self.folder / f"zero{zero}" / "step-6")

    def verify(self, *arguments):
        command = [str(PARVL), "verify", "--json", *arguments]
        done = subprocess.run(command, capture_output=True, text=True, timeout=240)
        self.assertEqual(done.returncode, 0, done.stderr)
        result = json.loads(done.stdout)
        self.assertLess(result["max_relative_error"], 1e-10)
        self.assertLess(result["loss_error"], 1e-12)
        self.assertLess(result["grad_norm_error"], 1e-12)
        self.assertLess(result["weight_error"], 1e-10)
        self.assertIn(".", result["parameter"])
        return result

    def test_layouts_between_processes(self):
        layouts = {"dp=2": 2, "dp=2,zero=1": 2, "tp=2": 2, "pp=2": 2, "dp=2,tp=2": 4, "tp=2,pp=2,zero=1": 4, "dp=2,pp=2": 4, "dp=4,zero=1": 4,
                   "vision_encoder:ranks=1": 2, "dp=2;vision_encoder:ranks=1": 3, "dp=2,zero=1;vision_encoder:ranks=3": 5,
                   "tp=2,pp=2;vision_encoder:ranks=2,tp=2": 6, "tp=2;vision_encoder:tp=2": 2, "tp=2;projector:tp=2": 2, "dp=2,tp=2,zero=1;vision_encoder:dp=2,tp=2;projector:dp=2,tp=2": 4}
        for layout, ranks in layouts.items():
            with self.subTest(layout=layout):
                result = self.verify("--config", str(self.folder / "recipe.yaml"), "--set", "data.micro_batch=1", "--layout", layout)
                self.assertEqual(result["ranks"], ranks)

    def test_verify_of_a_directory(self):
        """Without a recipe the samples are made up, and all ranks may be threads."""
        model = ROOT / "examples" / "easy_vqa" / "model"
        result = self.verify("--model", str(model), "--layout", "tp=2,pp=2", "--ranks-as-threads", "--steps", "1")
        self.assertEqual(result["ranks"], 4)
        for flags, message in ((("--model", str(model), "--config", "recipe.yaml"), "give either --config or --model"),
                               (("--model", str(model), "--layout", "tp:2"), "is no degree; write dp=2,tp=2"),
                               (("--model", str(model), "--layout", "tp=3"), "tp = 3 does not divide")):
            done = subprocess.run([str(PARVL), "verify", "--ranks-as-threads", *flags], capture_output=True, text=True, timeout=60)
            self.assertEqual(done.returncode, 2, done.stderr)
            self.assertIn(message, done.stderr)

    def test_a_killed_rank_costs_no_step(self):
        for name, layout in {"zero": (*DP2, "parallel.zero=1"), "tp": ("parallel.llm_backbone.tp=2",), "pp": ("parallel.llm_backbone.pp=2",),
                             "encoder": ("parallel.vision_encoder.ranks=1",)}.items():
            with self.subTest(layout=name):
                self.kill_a_rank(name, layout)

    def kill_a_rank(self, name, layout):
        """Rank 1 is killed when step 3 is out; all start again from the newest checkpoint and end as if nothing had been."""
        settings = (*layout, "train.checkpoint_every=2")
        whole_out, hurt_out = f"whole-{name}", f"hurt-{name}"
        whole = self.launch(*settings, f"train.out={whole_out}")
        command = [str(PARVL), "launch", "--nproc-per-node", "2", "--max-restarts", "1", "--", *self.command(*settings, f"train.out={hurt_out}")]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        lines, killed = [], False
        for line in process.stdout:
            lines.append(json.loads(line))
            if lines[-1].get("step") == 3 and not killed:
                killed = True
                os.kill(self.rank_pid(process.pid, 1), signal.SIGKILL)
        self.assertEqual(process.wait(timeout=240), 0)
        errors = process.stderr.read()
        process.stderr.close()
        process.stdout.close()
        self.assertIn("rank 1 was ended by SIGKILL; restart 1 of 1", errors)
        self.assertTrue(any(e["event"] == "resumed" for e in lines))
        losses = {e["step"]: e["loss"] for e in lines if e["event"] == "step"}  # of a repeated step the later one
        self.assertEqual([losses[step] for step in whole.steps()], whole.losses())
        self.same_state(self.folder / whole_out / "step-6", self.folder / hurt_out / "step-6")

    def test_a_stopped_rank_is_named_by_the_others(self):
        """A stopped process closes no connection: the other rank finds that it is silent, says so and leaves."""
        for stopped, waits, says in ((1, 0, "rank 1 has given no sign of life for "), (0, 1, "rank 0's store at 127.0.0.1:")):
            command = [str(PARVL), "launch", "--nproc-per-node", "2", "--grace-seconds", "1", "--",
                       *self.command(*DP2, "train.steps=1000000", f"train.out=stopped{stopped}")]
            process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                                       env={**os.environ, "PARVL_RANK_SILENCE_SECONDS": "3"})
            while json.loads(process.stdout.readline()).get("step") != 2:
                pass
            os.kill(self.rank_pid(process.pid, stopped), signal.SIGSTOP)
            _, errors = process.communicate(timeout=240)
            self.assertEqual(process.returncode, 1, errors)
            line = next(line for line in errors.splitlines() if line.startswith("parvl: "))
            self.assertIn(says, line)
            self.assertIn(f"rank {waits} waits ", line)
            self.assertRegex(line, r"in group \S+, call \d+ \(\w+")
            self.assertIn(f"the last calls of rank {waits} in group world:", errors)
            self.assertIn(f"rank {waits} ended with exit code 1", errors)

    def test_what_does_not_fit_is_refused(self):
        run = self.launch("parallel.llm_backbone.dp=4", "data.micro_batch=1", code=2)
        self.assertIn("the recipe's layout has 4 ranks, but 2 processes were started; start 4", run.stderr)
        self.assertIn("layout has 2 ranks, but 1 process was started", self.refused(*DP2))
        done = subprocess.run([str(PARVL), "launch", "--nproc-per-node", "2"], capture_output=True, text=True, timeout=60)
        self.assertEqual(done.returncode, 2)
        self.assertIn("no command given", done.stderr)


if __name__ == "__main__":
    unittest.main()
