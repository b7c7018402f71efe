"""What the media parity tests share: the probe program, and counting of checks."""
import json
import os
import pathlib
import subprocess
import tempfile

ROOT = pathlib.Path(__file__).resolve().parents[2]
BUILD = pathlib.Path(os.environ.get("PARVL_BUILD", ROOT / "build"))


class Probe:
    """A running media_probe; ask(op=..., ...) gives its answer as a dict."""

    def __init__(self):
        self.process = subprocess.Popen([BUILD / "probes" / "media_probe"], stdin=subprocess.PIPE,
                                        stdout=subprocess.PIPE, text=True, encoding="utf-8")
        self.folder = tempfile.TemporaryDirectory()
        self.dir = pathlib.Path(self.folder.name)

    def ask(self, **command):
        self.process.stdin.write(json.dumps(command) + "\n")
        self.process.stdin.flush()
        line = self.process.stdout.readline()
        if not line:
            raise SystemExit(f"media_probe died with {self.process.wait()} on {str(command)[:2000]}")
        return json.loads(line)


class Checks:
    """Counts checks and keeps what failed."""

    def __init__(self):
        self.passed = 0
        self.failures = []

    def check(self, ok, what):
        if ok:
            self.passed += 1
        else:
            self.failures.append(what)
        return ok


def settle(test, checks, at_least):
    """Fails the test case when a check did since the last call, or fewer than `at_least` were made."""
    passed, failures = checks.passed, checks.failures
    checks.passed, checks.failures = 0, []
    test.assertEqual(failures[:20], [], f"{len(failures)} checks failed, {passed} passed")
    test.assertGreaterEqual(passed, at_least)
