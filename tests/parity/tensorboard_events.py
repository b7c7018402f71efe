"""The event files that ParVL writes, read back by TensorBoard's own reader."""
import os
import pathlib
import subprocess
import tempfile
import unittest

from tensorboard.backend.event_processing import event_accumulator

PROBE = pathlib.Path(os.environ["PARVL_BUILD"]) / "probes" / "events_probe"


class EventFile(unittest.TestCase):
    def read(self, folder):
        reader = event_accumulator.EventAccumulator(folder, size_guidance={event_accumulator.SCALARS: 0})
        reader.Reload()
        return reader

    def test_scalars_come_back(self):
        with tempfile.TemporaryDirectory() as folder:
            subprocess.run([PROBE, folder, "300"], check=True)
            reader = self.read(folder)
            self.assertEqual(sorted(reader.Tags()["scalars"]), ["lr", "train/loss with a long name " + "x" * 200])
            losses = reader.Scalars("train/loss with a long name " + "x" * 200)
            # The probe writes loss = 1 / (step + 1) and lr = step * 1e-5, one step a second.
            self.assertEqual([e.step for e in losses], [i << 20 for i in range(300)])
            for i, event in enumerate(losses):
                self.assertAlmostEqual(event.value, 1 / (i + 1), places=6)
                self.assertEqual(event.wall_time, 1_700_000_000.25 + i)
            for i, event in enumerate(reader.Scalars("lr")):
                self.assertAlmostEqual(event.value, i * 1e-5, places=9)

    def test_two_files_of_a_folder_are_one_run(self):
        with tempfile.TemporaryDirectory() as folder:
            subprocess.run([PROBE, folder, "3"], check=True)
            subprocess.run([PROBE, folder, "5"], check=True)
            self.assertEqual(len(list(pathlib.Path(folder).iterdir())), 2)
            self.assertEqual(len(self.read(folder).Scalars("lr")), 8)

    def test_records_are_whole_while_the_writer_lives(self):
        """A reader that looks in the middle of a run sees every record so far."""
        with tempfile.TemporaryDirectory() as folder:
            with subprocess.Popen([PROBE, folder, "4", "wait"], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as probe:
                self.assertEqual(probe.stdout.readline(), b"written\n")
                self.assertEqual(len(self.read(folder).Scalars("lr")), 4)
                probe.kill()


if __name__ == "__main__":
    unittest.main()
