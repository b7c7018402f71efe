"""Runs on several ranks that are hurt at random: killed and stopped ranks, also while they save, flipped bits in checkpoints, full disks.
Each goes on by itself, or says what to do, and ends with the samples, losses and state of a run to which nothing happened, to the bit.
PARVL_RECOVERIES and PARVL_RECOVERY_SEED say how many (8) and which; a failure names both."""
# slow
import ctypes
import json
import os
import random
import shutil
import signal
import subprocess
import unittest

from train_common import FAULTS, PARVL, Run, TrainCase

RECOVERIES = int(os.environ.get("PARVL_RECOVERIES", "8"))
SEED = int(os.environ.get("PARVL_RECOVERY_SEED", "0")) or int.from_bytes(os.urandom(4), "little") % 2**31 + 1
LAYOUTS = {"dp2 zero1": (2, ("parallel.llm_backbone.dp=2", "parallel.zero=1")), "tp2": (2, ("parallel.llm_backbone.tp=2",)),
           "pp2": (2, ("parallel.llm_backbone.pp=2",)), "dp2 tp2": (4, ("parallel.llm_backbone.dp=2", "parallel.llm_backbone.tp=2"))}
KINDS = ("killed", "stopped", "killed saving", "stopped saving", "bit flipped", "disk full", "small disk")
STEPS, EVERY = 6, 2
MS_REMOUNT, MNT_DETACH = 32, 2


class Recovery(TrainCase):
    def setUp(self):
        super().setUp()
        self.reference = {}

    def launch_command(self, layout, *flags):
        ranks, settings = LAYOUTS[layout]
        own = ("data.micro_batch=1", "train.dtype=bfloat16", "optim.clip_norm=1", f"train.steps={STEPS}", f"train.checkpoint_every={EVERY}")
        return [str(PARVL), "launch", "--nproc-per-node", str(ranks), "--grace-seconds", "1", *flags, "--", *self.command(*own, *settings)]

    def launch(self, layout, *flags, env=None, hurt=None):
        """A run to its end. `hurt` hears of every event, with the launcher's process id."""
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PARVL_RANK_SILENCE_SECONDS": "5", **(env or {})}
        with open(self.folder / "errors", "w+") as errors:
            process = subprocess.Popen(self.launch_command(layout, *flags), stdout=subprocess.PIPE, stderr=errors, text=True, env=environment)
            lines = []
            for line in process.stdout:
                lines.append(line)
                if hurt:
                    hurt(json.loads(line), process.pid)
            process.stdout.close()
            process.wait(timeout=240)
            errors.seek(0)
            return Run(subprocess.CompletedProcess(process.args, process.returncode, "".join(lines), errors.read()))

    def undisturbed(self, layout):
        """The run to which nothing happened, and how many moments of saving each rank has."""
        if layout not in self.reference:
            count = self.folder / "count"
            run = self.launch(layout, env={"LD_PRELOAD": str(FAULTS), "FAULT_COUNT": str(count)})
            self.assertEqual(run.code, 0, run.stderr)
            self.assertEqual(run.steps(), list(range(1, STEPS + 1)))
            kept = self.folder / layout.replace(" ", "-")
            shutil.move(self.out, kept)
            moments = [int((self.folder / f"count.{rank}").read_text()) for rank in range(LAYOUTS[layout][0])]
            self.assertGreater(min(moments), 10)
            self.reference[layout] = (run, kept, moments)
        return self.reference[layout]

    def expect_as_undisturbed(self, layout, *parts):
        """The parts of a run, also those that were done again, are parts of the undisturbed one."""
        whole, kept, _ = self.undisturbed(layout)
        want = {e["step"]: (e["loss"], e["grad_norm"], e["samples"]) for e in whole.events if e["event"] == "step"}
        got = [e for part in parts for e in part.events if e["event"] == "step"]
        for event in got:
            self.assertEqual((event["loss"], event["grad_norm"], event["samples"]), want[event["step"]], event["step"])
        self.assertEqual({e["step"] for e in got}, set(want))
        self.same_state(self.out / f"step-{STEPS}", kept / f"step-{STEPS}")
        for checkpoint in self.names():
            self.assert_whole(self.out / checkpoint)

    def signal_at(self, steps, rank, number):
        """Signals the rank when the line of each of these steps is out, once each."""
        left = list(steps)

        def hurt(event, launcher):
            if left and event.get("step") == left[0] and event["event"] == "step":
                left.pop(0)
                os.kill(self.rank_pid(launcher, rank), number)
        return hurt

    def hurt_by_a_signal(self, layout, kind, rng, rank):
        number = signal.SIGKILL if kind == "killed" else signal.SIGSTOP
        steps = [rng.randint(1, STEPS - 1)]
        if rng.random() < 0.3:  # and once more after it was started again, at a step that it then does
            steps.append(min(STEPS - 1, steps[0] + 1))
        run = self.launch(layout, "--max-restarts", "3", hurt=self.signal_at(steps, rank, number))
        self.assertEqual(run.code, 0, run.stderr)
        self.assertIn("restart 1 of 3", run.stderr)
        self.expect_as_undisturbed(layout, run)

    def hurt_while_saving(self, layout, kind, rng, rank):
        fault = {"killed saving": "kill", "stopped saving": "stop", "disk full": "full"}[kind]
        moment = rng.randint(1, self.undisturbed(layout)[2][rank])
        run = self.launch(layout, "--max-restarts", "2", env={"LD_PRELOAD": str(FAULTS), "FAULT_RANK": str(rank), "FAULT": f"{fault}:{moment}"})
        self.assertEqual(run.code, 0, run.stderr)
        if kind != "disk full":  # nothing needs space when only the folder's last sync and name are left
            self.assertIn("restart 1 of 2", run.stderr)
        elif "restart" in run.stderr:
            self.assertRegex(run.stderr, r"was not saved: .*No space left on device")
        self.expect_as_undisturbed(layout, run)

    def flip_a_bit(self, layout, rng, rank):
        first = self.launch(layout, hurt=self.signal_at([rng.randint(EVERY + 1, STEPS - 1)], rank, signal.SIGKILL))
        self.assertEqual(first.code, 1, first.stderr)
        newest = max((p for p in self.out.glob("step-*")), key=lambda p: int(p.name[5:]))
        file = rng.choice(sorted(p for p in newest.rglob("*") if p.is_file()))
        data = bytearray(file.read_bytes())
        bit = rng.randrange(8 * len(data))
        data[bit // 8] ^= 1 << bit % 8
        file.write_bytes(data)
        refused = self.launch(layout, "--max-restarts", "2")
        self.assertEqual(refused.code, 2, refused.stderr)
        self.assertEqual(refused.losses(), [])
        self.assertIn(str(file.relative_to(newest)), refused.stderr)
        older = newest.with_name(f"step-{int(newest.name[5:]) - EVERY}")
        self.assertIn(f"{older} is whole: set train.resume to it" if older.exists() else "no other checkpoint there is whole", refused.stderr)
        shutil.rmtree(newest)
        rest = self.launch(layout)
        self.assertEqual(rest.code, 0, rest.stderr)
        self.expect_as_undisturbed(layout, first, rest)

    def on_a_small_disk(self, layout, rng):
        kept = self.undisturbed(layout)[1]
        used = sum(p.stat().st_blocks * 512 for p in (kept / f"step-{STEPS}").rglob("*"))
        libc = ctypes.CDLL(None, use_errno=True)
        self.out.mkdir()

        def mount(flags, factor):
            size = f"size={int(used * factor) // 4096 * 4096}".encode()
            return libc.mount(b"tmpfs", str(self.out).encode(), b"tmpfs", flags, size) == 0
        if not mount(0, rng.uniform(0.5, 2.8)):
            self.skipTest(f"cannot mount a small tmpfs: {os.strerror(ctypes.get_errno())}")
        try:
            first = self.launch(layout)
            self.assertEqual(first.code, 1, first.stderr)
            self.assertIn("No space left on device", first.stderr)
            self.assertEqual([name for name in self.names() if name.startswith(".")], [])
            self.assertTrue(mount(MS_REMOUNT, 20))
            rest = self.launch(layout)
            self.assertEqual(rest.code, 0, rest.stderr)
            self.expect_as_undisturbed(layout, first, rest)
        finally:
            libc.umount2(str(self.out).encode(), MNT_DETACH)

    def recover(self, number):
        rng = random.Random(f"{SEED} {number}")
        layout, kind = list(LAYOUTS)[number % len(LAYOUTS)], KINDS[(number + SEED + number // len(KINDS)) % len(KINDS)]
        rank = rng.randrange(LAYOUTS[layout][0])
        print(f"recovery {number} of seed {SEED}: {layout}, {kind}, rank {rank}", flush=True)
        self.undisturbed(layout)
        if kind in ("killed", "stopped"):
            self.hurt_by_a_signal(layout, kind, rng, rank)
        elif kind == "bit flipped":
            self.flip_a_bit(layout, rng, rank)
        elif kind == "small disk":
            self.on_a_small_disk(layout, rng)
        else:
            self.hurt_while_saving(layout, kind, rng, rank)

    def test_hurt_runs_end_as_undisturbed_ones(self):
        for number in range(RECOVERIES):
            with self.subTest(number=number, seed=SEED):
                try:
                    self.recover(number)
                finally:
                    shutil.rmtree(self.out, ignore_errors=True)


if __name__ == "__main__":
    unittest.main()
