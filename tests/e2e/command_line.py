"""The program's frame: help, version, exit codes, and the root cause as the last line on standard error."""
# slow
import os
import pathlib
import signal
import subprocess
import unittest

PARVL = os.environ["PARVL"]
MODEL = pathlib.Path(__file__).resolve().parents[2] / "examples" / "easy_vqa" / "model"
# Commands of the contract that answer "not available yet"; a line moves out of here when its command is built.
UNAVAILABLE = ("profile", "plan", "simulate", "doctor")


def parvl(*args, **kwargs):
    return subprocess.run([PARVL, *args], capture_output=True, text=True, timeout=60, stdin=subprocess.DEVNULL, **kwargs)


class CommandLine(unittest.TestCase):
    def refused(self, run, code=2):
        """The last line on standard error, after checking that it is one sentence and that nothing was printed as a result."""
        self.assertEqual(run.returncode, code, run)
        self.assertEqual(run.stdout, "")
        lines = run.stderr.splitlines()
        self.assertTrue(lines and lines[-1].startswith("parvl: "), run.stderr)
        return lines[-1]

    def test_help_and_version(self):
        top = parvl("--help")
        self.assertEqual((top.returncode, top.stderr), (0, ""))
        for command in UNAVAILABLE:
            line = next(line for line in top.stdout.splitlines() if line.split()[:1] == [command])
            self.assertIn("(not available yet)", line)
            self.assertEqual(parvl(command, "--help").returncode, 0)
        version = parvl("--version")
        self.assertEqual(version.returncode, 0)
        self.assertRegex(version.stdout, r"^parvl \d+\.\d+\.\d+\n$")

    def test_each_program_describes_itself(self):
        engine = subprocess.run([pathlib.Path(PARVL).with_name("parvl-engine"), "--help"], capture_output=True, text=True, timeout=60)
        self.assertEqual((engine.returncode, engine.stderr), (0, ""))
        self.assertTrue(engine.stdout.startswith("ParVL's engine without the gateway"), engine.stdout)
        self.assertIn("Usage: parvl-engine ", engine.stdout)
        self.assertTrue(parvl("--help").stdout.startswith("ParVL trains and serves"))

    def test_every_command_has_help(self):
        listed = parvl("--help").stdout.split("Subcommands:")[1].splitlines()
        commands = [line.split()[0] for line in listed if line.startswith("  ") and not line.startswith("   ")]
        self.assertGreater(len(commands), len(UNAVAILABLE))
        for command in commands:
            run = parvl(command, "--help")
            self.assertEqual((run.returncode, run.stderr), (0, ""), command)
            self.assertIn(f"parvl {command}", run.stdout)

    def test_usage_errors(self):
        self.assertIn("no command given", self.refused(parvl()))
        self.assertIn("unknown command 'docter'; did you mean doctor?", self.refused(parvl("docter")))
        self.assertIn("unexpected argument '--versoin'; did you mean --version?", self.refused(parvl("--versoin")))
        self.assertIn("unknown command 'x?y'", self.refused(parvl("x\ny")))

    START = (PARVL, "eval", "--model", "no-such-folder", "--data", "easy-vqa:test")

    def signalled(self, number, ignored=False):
        """The exit status and the errors of a command that has got a signal before its main begins: it waits, held back, from
        before the program is there."""
        def send():
            signal.signal(number, signal.SIG_IGN if ignored else signal.SIG_DFL)  # it may be ignored in a background job
            signal.pthread_sigmask(signal.SIG_BLOCK, [number])
            os.kill(os.getpid(), number)

        run = subprocess.run(self.START, capture_output=True, text=True, timeout=60, preexec_fn=send)
        return run.returncode, run.stderr.splitlines()

    def test_signals_while_the_program_starts(self):
        self.assertEqual(self.signalled(signal.SIGINT), (-signal.SIGINT, ["parvl: interrupted"]))
        self.assertEqual(self.signalled(signal.SIGTERM), (-signal.SIGTERM, ["parvl: terminated by SIGTERM"]))
        code, errors = self.signalled(signal.SIGINT, ignored=True)
        self.assertEqual(code, 2)  # as without it: who starts a program may have it ignore a signal
        self.assertNotIn("parvl: interrupted", errors)

    def test_signals_are_held_back_while_the_program_starts(self):
        for _ in range(50):  # a process may be past that before this one looks
            with subprocess.Popen(self.START, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
                while process.poll() is None:
                    if self.signals(process, "SigBlk") >> (signal.SIGTERM - 1) & 1:
                        return
        self.fail("it never holds signals back")

    @staticmethod
    def signals(process, field):
        """A mask of a process's signals: the n-th bit from the right is signal n."""
        with open(f"/proc/{process.pid}/status") as status:
            return int(next(line.split()[1] for line in status if line.startswith(field + ":")), 16)

    def test_empty_names(self):
        for command in (("generate", "--prompt", "x", "--model", ""), ("serve", "--model", ""), ("eval", "--data", "x", "--model", ""),
                        ("eval", "--model", "x", "--data", ""), ("train", "--config", ""), ("model", "inspect", "")):
            with self.subTest(command):
                self.assertIn("must not be empty", self.refused(parvl(*command)))

    def test_a_prompt_that_is_no_text(self):
        run = parvl("generate", "--model", "x", "--prompt", b"a\xff")
        self.assertEqual(self.refused(run), "parvl: --prompt 'a?' is not UTF-8 text")

    def test_help_says_the_defaults(self):
        for command in ("generate", "serve"):
            self.assertRegex(parvl(command, "--help").stdout, r"--max-model-len[^-]*0, the default: the model's")
        self.assertIn("(default: image=16)", parvl("serve", "--help").stdout)
        self.assertIn("parvl model inspect DIR", parvl("--help").stdout)
        self.assertIn("inspect", parvl("model", "--help").stdout)

    def test_unavailable_commands(self):
        for command in UNAVAILABLE:
            run = parvl(command, "--config", "x", "status", "--json")
            self.assertEqual(self.refused(run), f"parvl: 'parvl {command}' is not available yet")

    def test_output_that_cannot_be_written(self):
        with open("/dev/full", "w") as full:
            run = subprocess.run([PARVL, "--help"], stdout=full, stderr=subprocess.PIPE, text=True, timeout=60)
        self.assertEqual(run.returncode, 1)
        self.assertEqual(run.stderr, "parvl: cannot write to standard output\n")

    def test_a_reader_that_has_left_ends_it_quietly(self):
        for args in (["--help"], ["model", "inspect", MODEL], ["model", "inspect", MODEL, "--json"],
                     ["generate", "--model", MODEL, "--device", "cpu", "--prompt", "hi", "--max-tokens", "4"]):
            reading, writing = os.pipe()
            os.close(reading)
            with open(writing, "w") as closed:
                run = subprocess.run([PARVL, *args], stdout=closed, stderr=subprocess.PIPE, text=True, timeout=60)
            self.assertEqual(run.returncode, -signal.SIGPIPE, run.stderr)
            self.assertNotIn("standard output", run.stderr)


if __name__ == "__main__":
    unittest.main()
