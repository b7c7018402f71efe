"""The test runner itself: a crash, a hang, a suite without tests and a failure must all turn the result red."""
import contextlib
import json
import os
import pathlib
import select
import subprocess
import sys
import tempfile
import textwrap
import unittest

TESTS = pathlib.Path(__file__).resolve().parents[1]
sys.path.insert(0, str(TESTS))
import run  # noqa: E402  (beside this folder)


def gtest_report(*tests):
    return json.dumps({"testsuites": [{"testsuite": list(tests)}]})


PASSED = {"classname": "A", "name": "B", "status": "RUN", "result": "COMPLETED"}
FAILED = {**PASSED, "name": "C", "failures": [{"failure": "x"}]}
SKIPPED = {**PASSED, "name": "D", "result": "SKIPPED"}


class Runner(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.build = pathlib.Path(folder.name)
        for name in ("tests", "fuzz", "scratch"):
            (self.build / name).mkdir()

    def program(self, name, report="", script="", folder="tests"):
        """A stand-in for a gtest program: writes `report` where it is told to and runs `script`."""
        path = self.build / folder / name
        write = f"printf '%s' '{report}' > \"${{1#--gtest_output=json:}}\"\n" if report else ""
        path.write_text(f"#!/bin/bash\n{write}{script}\n")
        path.chmod(0o755)

    def outcomes(self, limit_s=30):
        suites = [s for s in run.find_suites(self.build, False, "", self.build / "scratch") if s.kind != "python"]
        env = run.environment(self.build)
        return {s.name.split("/")[1]: run.run_suite(s, env, limit_s) for s in suites}

    def test_gtest_results(self):
        self.program("good", gtest_report(PASSED, SKIPPED), "printf '[ RUN      ] A.D\\nx.cc:1: Skipped\\nno GPU\\n[  SKIPPED ] A.D (0 ms)'")
        self.program("bad", gtest_report(PASSED, FAILED), "exit 1")
        self.program("crash", "", "kill -SEGV $$")
        self.program("late_crash", gtest_report(PASSED), "kill -ABRT $$")
        self.program("empty", gtest_report())
        self.program("silent", "", "exit 0")
        self.program("odd", gtest_report(PASSED), "exit 3")
        outcomes = self.outcomes()
        self.assertEqual((outcomes["good"].passed, outcomes["good"].bad), (1, False))
        self.assertEqual(outcomes["good"].skipped, [("A.D", "no GPU")])
        self.assertEqual((outcomes["bad"].passed, outcomes["bad"].failed), (1, 1))
        for name, part in (("crash", "SIGSEGV"), ("late_crash", "SIGABRT"), ("empty", "ran no test"), ("silent", "left no result"),
                           ("odd", "exited with 3")):
            self.assertIn(part, outcomes[name].problem)
            self.assertTrue(outcomes[name].bad)

    def test_a_hang_is_ended_with_all_it_started(self):
        self.program("hang", "", f"sleep 1000 & echo $! > '{self.build}/child'; wait")
        outcome = self.outcomes(limit_s=1)["hang"]
        self.assertIn("over its limit of 1 s", outcome.problem)
        self.assertLess(outcome.seconds, 20)
        try:
            child = os.pidfd_open(int((self.build / "child").read_text()))
        except ProcessLookupError:
            return
        # Killed already; the system takes a moment to end it.
        self.assertTrue(select.select([child], [], [], 20)[0], "the child is still running")
        os.close(child)

    def test_fuzzers(self):
        self.program("calm", folder="fuzz")
        self.program("found", script='echo "seed $2"; exit 77', folder="fuzz")
        outcomes = self.outcomes()
        self.assertEqual((outcomes["calm"].passed, outcomes["calm"].bad), (1, False))
        self.assertIn("exited with 77; run again: ", outcomes["found"].problem)
        self.assertIn("-seed=", outcomes["found"].problem)

    def python_counts(self, body):
        file = self.build / "a_suite.py"
        file.write_text("import unittest\n" + textwrap.dedent(body))
        result = self.build / "result.json"
        process = subprocess.run([sys.executable, TESTS / "run.py", "--run-file", file, "--result", result], capture_output=True)
        counts = json.loads(result.read_text()) if result.exists() else None
        return process.returncode, counts and (counts["passed"], counts["failed"], len(counts["skipped"]))

    def test_python_suites(self):
        self.assertEqual(self.python_counts("""
            class A(unittest.TestCase):
                def test_a(self): pass
                def test_b(self): self.fail()
                def test_c(self): raise OSError()
                @unittest.skip("no GPU")
                def test_d(self): pass
                def test_e(self):
                    for i in range(3):
                        with self.subTest(i=i): self.assertEqual(i, 0)
            """), (1, (1, 3, 1)))
        self.assertEqual(self.python_counts("x = 1"), (0, (0, 0, 0)))
        self.assertEqual(self.python_counts("""
            class A(unittest.TestCase):
                @classmethod
                def setUpClass(cls): raise OSError()
                def test_a(self): pass
            """), (1, (0, 1, 0)))
        self.assertEqual(self.python_counts("import no_such_module")[0], 1)

    def test_the_last_line(self):
        good, bad = run.Outcome(run.Suite("unit", "a", [])), run.Outcome(run.Suite("unit", "b", []))
        good.passed, bad.problem = 3, "crashed"
        for outcomes, code, line in (([good], 0, "3 passed, 0 failed"), ([good, bad], 1, "3 passed, 1 failed"), ([], 1, "0 passed, 1 failed")):
            script = f"import sys; sys.path.insert(0, {str(TESTS)!r}); import run\n"
            for i, outcome in enumerate(outcomes):
                script += f"o{i} = run.Outcome(run.Suite('unit', 's', [])); o{i}.passed = {outcome.passed}; o{i}.problem = {outcome.problem!r}\n"
            script += f"sys.exit(run.conclude([{', '.join(f'o{i}' for i in range(len(outcomes)))}]))"
            process = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
            self.assertEqual((process.returncode, process.stdout.splitlines()[-1]), (code, line))
        good.skipped = [("t", "r")]
        with tempfile.TemporaryFile("w+") as out:
            with contextlib.redirect_stdout(out):
                run.conclude([good])
            out.seek(0)
            self.assertEqual(out.read().splitlines()[-1], "3 passed, 0 failed, 1 skipped")


if __name__ == "__main__":
    unittest.main()
