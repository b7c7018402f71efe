# slow
"""Stopping and resuming `parvl train`: to the bit, by signal, by every mode of train.resume."""
import signal
import unittest

from train_common import TrainCase, turn


class Resume(TrainCase):
    def test_to_the_bit_after_a_signal(self):
        for dtype, number in (("float32", signal.SIGINT), ("bfloat16", signal.SIGTERM)):
            with self.subTest(dtype=dtype, signal=number.name):
                settings = (f"train.dtype={dtype}", "train.steps=30", "optim.schedule=cosine", "optim.weight_decay=0.1",
                            "data.augment=dihedral", "optim.clip_norm=1")
                whole = self.train(*settings, f"train.out={dtype}-whole")
                self.assertEqual(whole.steps(), list(range(1, 31)))
                stopped = self.train_until(7, *settings, number=number)
                self.assertEqual(stopped.code, 0, stopped.stderr)
                saved = [e for e in stopped.events if e["event"] == "saved"]
                self.assertEqual([e["step"] for e in saved], stopped.steps()[-1:])  # what was done is saved before leaving
                self.assertLess(saved[0]["step"], 30)
                self.assertIn("as asked; the same command continues from there", stopped.stderr)
                self.assert_whole(self.out / f"step-{saved[0]['step']}")
                rest = self.train(*settings)
                self.assertEqual(rest.events[0]["event"], "resumed")
                self.assertEqual(stopped.steps() + rest.steps(), whole.steps())
                self.assertEqual(stopped.losses() + rest.losses(), whole.losses())
                self.same_state(self.out / "step-30", self.folder / f"{dtype}-whole" / "step-30")
                self.start_over()

    def test_a_killed_run_goes_on_from_its_last_checkpoint(self):
        settings = ("train.steps=40", "train.checkpoint_every=4")
        whole = self.train(*settings, "train.out=whole")
        killed = self.train_until(10, *settings, number=signal.SIGKILL)
        self.assertEqual(killed.code, -signal.SIGKILL)
        rest = self.train(*settings)
        first = rest.events[0]["step"]
        self.assertGreaterEqual(first, 8)
        self.assertEqual(first % 4, 0)
        self.assertEqual(rest.losses(), whole.losses()[first:])
        self.same_state(self.out / "step-40", self.folder / "whole" / "step-40")

    def test_modes(self):
        self.assertIn("holds no checkpoint", self.refused("train.resume=must"))
        first = self.train("train.checkpoint_every=3")
        done = self.train("train.resume=must")
        self.assertEqual([e["event"] for e in done.events], ["resumed"])
        self.assertIn("all 6 steps are done", done.stderr)
        branch = self.train("train.resume=out/step-3", "train.out=branch")
        self.assertEqual(branch.losses(), first.losses()[3:])
        again = self.train("train.resume=never")
        self.assertEqual(again.losses(), first.losses())
        self.assertIn("is no whole checkpoint", self.refused("train.resume=out"))
        self.assertIn("train.steps is 2, but the resumed checkpoint already has 6", self.refused("train.steps=2"))

    def test_another_runs_checkpoint(self):
        self.train("train.steps=2")
        for setting, difference in {"data.global_batch=6": "data.global_batch was 4, is now 6",
                                    "data.shuffle_seed=1": "data.shuffle_seed was 0, is now 1",
                                    "train.dtype=bfloat16": "train.dtype was float32, is now bfloat16",
                                    "optim.name=sgd": "optim.name was adamw, is now sgd",
                                    "seed=6": "weights at the start was "}.items():
            message = self.refused(setting)
            self.assertIn("belongs to another run: " + difference, message)
        self.write_data([{"messages": [turn("user", "a"), turn("assistant", "b")]}])
        self.assertIn("data.train was 12 samples", self.refused())


if __name__ == "__main__":
    unittest.main()
