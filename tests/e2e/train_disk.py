"""Training into folders whose disk is full, read-only or slow."""
# slow
import ctypes
import os
import subprocess
import time
import unittest

from train_common import FAULTS, TrainCase


class Disk(TrainCase):
    def test_disk_full_at_any_moment(self):
        first, last = self.moments()
        for moment in sorted({*range(first + 1, last - 2, max(1, (last - first) // 6)), first + 1, last - 3}):
            with self.subTest(moment=moment - first):
                run = self.with_fault(f"full:{moment}", "train.steps=3", "train.checkpoint_every=1", code=1)
                self.assert_one_sentence(run)
                self.assertIn("the checkpoint of step 2 was not saved: ", run.message())
                self.assertIn("No space left on device", run.message())
                self.assertIn("the one of step 1 is whole", run.message())
                self.assertEqual(self.names(), ["step-1"])
                self.assert_whole(self.out / "step-1")
                self.start_over()

    def test_a_disk_that_is_really_full(self):
        libc = ctypes.CDLL(None, use_errno=True)
        self.out.mkdir()
        self.train("train.steps=1", "train.out=one")
        used = sum(p.stat().st_blocks * 512 for p in (self.folder / "one").rglob("*"))
        size = f"size={used * 3 // 2 // 4096 * 4096}".encode()
        if libc.mount(b"tmpfs", str(self.out).encode(), b"tmpfs", 0, size) != 0:
            self.skipTest(f"cannot mount a small tmpfs: {os.strerror(ctypes.get_errno())}")
        self.addCleanup(lambda: libc.umount2(str(self.out).encode(), 2))
        run = self.train("train.steps=3", "train.checkpoint_every=1", code=1)
        self.assert_one_sentence(run)
        self.assertIn("No space left on device", run.message())
        self.assertEqual(self.names(), ["step-1"])
        self.assert_whole(self.out / "step-1")

    def test_a_read_only_folder(self):
        libc = ctypes.CDLL(None, use_errno=True)
        self.out.mkdir()
        if libc.mount(b"tmpfs", str(self.out).encode(), b"tmpfs", 1, b"size=65536") != 0:  # 1: read-only
            self.skipTest(f"cannot mount a read-only tmpfs: {os.strerror(ctypes.get_errno())}")
        self.addCleanup(lambda: libc.umount2(str(self.out).encode(), 2))
        self.assertIn(f"train.out: cannot write to the folder {self.out}: Read-only file system", self.refused())

    def test_no_silence_while_the_disk_is_slow(self):
        command = self.command("train.steps=1", flags=())
        environment = {**os.environ, "LD_PRELOAD": str(FAULTS), "FAULT": "slow:1500"}
        process = subprocess.Popen(command, stdout=subprocess.PIPE, env=environment)
        start = last = time.monotonic()
        longest, text = 0.0, b""
        while chunk := os.read(process.stdout.fileno(), 65536):
            now = time.monotonic()
            longest, last, text = max(longest, now - last), now, text + chunk
        process.stdout.close()
        self.assertEqual(process.wait(), 0)
        self.assertGreater(last - start, 8)  # or the disk was not slow
        self.assertIn(b"saving ... ", text)
        self.assertLess(longest, 5.0)


if __name__ == "__main__":
    unittest.main()
