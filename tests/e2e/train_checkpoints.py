"""Saving checkpoints when the process dies at any moment, and what damaged ones say."""
# slow
import unittest

from train_common import TrainCase


class Checkpoints(TrainCase):
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
                    self.assertLessEqual({name.split("-")[0] for name in self.names() if name != "step-1"}, {".step"})
                    self.assertLessEqual(len(self.names()), 2)
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


if __name__ == "__main__":
    unittest.main()
