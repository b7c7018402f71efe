"""Saving checkpoints when the process dies, the disk is full or slow, or the files are damaged."""
# slow
import ctypes
import os
import subprocess
import time
import unittest

from train_common import BUILD, TrainCase

FAULTS = BUILD / "probes" / "libtrain_faults.so"


class Checkpoints(TrainCase):
    def with_fault(self, fault, *settings, **kwargs):
        return self.train(*settings, env={"LD_PRELOAD": str(FAULTS), "FAULT": fault}, **kwargs)

    def moments(self, *settings):
        """How many calls the last save of a run with these settings makes on top of those of the saves before it."""
        counts = []
        for steps in (1, 2):
            file = self.folder / "count"
            self.train(*settings, f"train.steps={steps}", "train.checkpoint_every=1", f"train.out=count{steps}",
                       env={"LD_PRELOAD": str(FAULTS), "FAULT_COUNT": str(file)})
            counts.append(int(file.read_text()))
        self.assertGreater(counts[1] - counts[0], 50)
        return counts[0], counts[1]

    def names(self, folder=None):
        return sorted(p.name for p in (folder or self.out).iterdir() if "tfevents" not in p.name)

    def test_killed_while_saving(self):
        """At moments all through the save: nothing half there, and the same end after going on."""
        whole = self.train("train.steps=3", "train.checkpoint_every=1", "train.out=whole")
        first, last = self.moments()
        moments = sorted({*range(first + 1, last + 1, max(1, (last - first) // 8)), first + 1, *range(last - 2, last + 1)})
        # The last moment is the rename that publishes; `killexchange:2` is right after it.
        for fault in [f"kill:{moment}" for moment in moments] + ["killexchange:2"]:
            with self.subTest(fault, first=first, last=last):
                self.with_fault(fault, "train.steps=3", "train.checkpoint_every=1", code=-9)
                self.assert_whole(self.out / "step-1")
                if fault.startswith("kill:"):
                    self.assertLessEqual(set(self.names()), {"step-1", ".step-2.tmp"})
                else:
                    self.assertEqual(self.names(), ["step-1", "step-2"])
                    self.assert_whole(self.out / "step-2")
                if fault in (f"kill:{moments[0]}", f"kill:{last}", "killexchange:2"):
                    rest = self.train("train.steps=3", "train.checkpoint_every=1")
                    self.assertEqual(rest.losses(), whole.losses()[rest.events[0]["step"]:])
                    self.assertEqual(self.names(), ["step-1", "step-2", "step-3"])
                    self.same_state(self.out / "step-3", self.folder / "whole" / "step-3")
                self.start_over()

    def test_killed_while_replacing_on_a_file_system_that_cannot_exchange(self):
        for renames in (1, 2, 3):
            with self.subTest(renames=renames):
                self.train("train.steps=1")
                # Starting over saves step 1 once more: the old one is put aside, the new one published.
                again = self.with_fault(f"killexchange:{renames}", "train.steps=1", "train.resume=never", "optim.lr=0.1",
                                        code=0 if renames == 3 else -9)
                self.assertEqual(again.steps(), [1])
                self.train("train.steps=1")  # cleans up; finds a whole one
                self.assertEqual(self.names(), ["step-1"])
                self.assert_whole(self.out / "step-1")
                self.start_over()

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

    def test_damage_is_named(self):
        self.train("train.steps=2", "train.checkpoint_every=1")
        newest = self.out / "step-2"
        for file in sorted(p for p in newest.rglob("*") if p.is_file()):
            name = str(file.relative_to(newest))
            good = file.read_bytes()
            middle = len(good) // 2
            for bad in (good[:middle] + bytes([good[middle] ^ 4]) + good[middle + 1:], good[:middle], None):
                with self.subTest(name, damage="missing" if bad is None else "short" if len(bad) == middle else "flipped"):
                    file.unlink() if bad is None else file.write_bytes(bad)
                    message = self.refused("train.steps=3")
                    self.assertIn(name, message)
                    self.assertIn(f"{self.out}/step-1 is whole: set train.resume to it", message)
            file.write_bytes(good)
        self.assertEqual(len(self.train("train.steps=3").losses()), 1)

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
