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
    """Counts; `finish` exits 1 when a check failed or fewer than `at_least` ran."""

    def __init__(self):
        self.passed = 0
        self.failed = 0

    def check(self, ok, what):
        if ok:
            self.passed += 1
        else:
            self.failed += 1
            if self.failed <= 20:
                print(f"FAILED: {what}")
        return ok

    def finish(self, at_least):
        print(f"{self.passed} checks passed, {self.failed} failed")
        if self.failed or self.passed < at_least:
            raise SystemExit(1)
