"""Ranks over Gloo of which one calls something else, or does not come: all others name it, its call and shapes."""
# slow
import os
import pathlib
import unittest

from rank_probes import RankProbes

PROBE = pathlib.Path(os.environ.get("PARVL", pathlib.Path(__file__).resolve().parents[2] / "build" / "parvl")).parent / "probes" / "comm_probe"


class Faults(RankProbes, unittest.TestCase):
    def run_ranks(self, fault, count=6, deadline=600, silence=600, stopped=None):
        return self.run_probes([PROBE, fault, str(count)], 3, stopped, PARVL_RANK_DEADLINE_SECONDS=deadline, PARVL_RANK_SILENCE_SECONDS=silence,
                               OMP_NUM_THREADS=1)

    def test_right_calls_are_fine(self):
        for count in (6, 1 << 20):
            self.all_say(self.run_ranks("none", count), "fine", code=0)

    def test_other_calls(self):
        """Small ones, which Gloo sends at once, and large ones, for which it waits."""
        for count in (6, 1 << 20):
            usual = f"called all_reduce (sum) of {count} float32 at mlp"
            for fault, other in (("shape", f"rank 1 called all_reduce (sum) of {count - 1} float32 at mlp"),
                                 ("dtype", f"rank 1 called all_reduce (sum) of {count // 2} float64 at mlp"),
                                 ("op", f"rank 1 called all_reduce (max) of {count} float32 at mlp"),
                                 ("kind", f"rank 1 called all_gather of {count} float64 at mlp"),
                                 ("reorder", f"rank 1 called all_gather of {count} float64 at mlp"),
                                 ("skip", "rank 1 called all_gather of 1 float64 at compare")):
                if count > 6 and fault in ("op", "kind", "reorder"):
                    continue
                with self.subTest(fault=fault, count=count):
                    self.all_say(self.run_ranks(fault, count), "group world, call 6: ", other, "ranks 0, 2 " + usual)
            with self.subTest(fault="root", count=count):
                self.all_say(self.run_ranks("root", count), f"rank 1 called broadcast of {count} float32 from rank 2 at mlp",
                             f"ranks 0, 2 called broadcast of {count} float32 from rank 0 at mlp")

    def test_a_message_of_another_size(self):
        for count in (6, 1 << 20):
            self.all_say(self.run_ranks("message", count), f"rank 1 called send of {count + 1} float32 to rank 2 at mlp",
                         f"rank 2 receive of {count} float32 from rank 1")

    def test_a_stopped_process(self):
        """Rank 1 stops itself; nobody comes back to it. Its process stays, so no connection closes."""
        ranks = self.run_ranks("stop", silence=2, stopped=1)
        self.all_say(ranks, "rank 1 has given no sign of life", "group world, call 6 (all_reduce (sum) of 6 float32 at mlp)", code=1)
        self.assertIn("call 5: all_gather of 1 float64 at compare", ranks[0][2])

    def test_a_rank_that_does_not_come(self):
        ranks = self.run_ranks("sleep", deadline=3, stopped=1)
        self.all_say(ranks, "group world, call 6 (all_reduce (sum) of 6 float32 at mlp)", "was not done within 3 s", "missing: rank 1 is in no call",
                     code=1)

    def test_an_abort_reaches_processes(self):
        ranks = self.run_ranks("abort")
        del ranks[1]
        self.all_say(ranks, "rank 1 has no more memory", code=1)

    def test_a_killed_process(self):
        """Its connections close: the others end at once, and say which call was under way."""
        ranks = self.run_ranks("kill", silence=5)
        del ranks[1]
        self.all_say(ranks, "all_reduce", code=1)


if __name__ == "__main__":
    unittest.main()
