"""Memory of `parvl train` over a long run: flat, with pictures of many sizes, augmentation and evaluation."""
# slow
import unittest

from train_common import TrainCase, samples


class Memory(TrainCase):
    def test_flat_over_300_steps(self):
        self.write_data(samples(self.folder, 60))
        # bfloat16 products keep something for every new shape; those caches are bounded too (see apps/train.cc).
        for dtype, steps in (("float32", 330), ("bfloat16", 300)):
            with self.subTest(dtype):
                run = self.train(f"train.dtype={dtype}", f"train.steps={steps}", f"train.out={dtype}", "data.augment=dihedral",
                                 "data.eval=data.jsonl", "train.checkpoint_every=100", "optim.clip_norm=1")
                memory = [e["memory_bytes"] for e in run.events if e["event"] == "step"]
                self.assertEqual(len(memory), steps)
                # The first steps fill the caches of pictures and of the allocator.
                early, late = max(memory[40:80]), max(memory[-40:])
                self.assertLess(late - early, 8 << 20, f"{early >> 20} MiB around step 60, {late >> 20} MiB at the end")


if __name__ == "__main__":
    unittest.main()
