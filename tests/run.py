#!/usr/bin/env python3
"""Runs the tests: gtest programs of BUILD/tests, short runs of the fuzzers of BUILD/fuzz, and the unittest files of
tests/parity, tests/e2e and tests/tidy, each in a process of its own with a time limit.

A file of those folders without `import unittest` is a helper. A unittest file with a line `# slow` is left out by
--quick, as are the programs of SLOW_PROGRAMS. The last line is `N passed, N failed` (and `, N skipped` when any).
"""
import argparse
import concurrent.futures
import ctypes
import json
import os
import pathlib
import re
import signal
import subprocess
import sys
import tempfile
import time
import unittest

ROOT = pathlib.Path(__file__).resolve().parent.parent
PYTHON_FOLDERS = ("tidy", "parity", "e2e")
SLOW_PROGRAMS = {"comm_transfer_chaos_test", "exec_engine_test", "exec_given_features_test", "exec_memory_test", "exec_pipeline_test", "exec_tensor_parallel_test", "media_template_limits_test", "media_grammar_limits_test", "serve_pools_fleet_test", "train_formulas_test",
                 "train_oracle_test", "train_parallel_test", "train_shares_test", "train_state_test", "train_trainer_test"}
TIME_LIMIT_S = {"unit": 300, "fuzz": 120, "python": 900}
FUZZ_SECONDS = 4


class Suite:
    def __init__(self, kind: str, name: str, command: list[str], result: str = ""):
        self.kind, self.name, self.command, self.result = kind, name, command, result


class Outcome:
    def __init__(self, suite: Suite):
        self.suite = suite
        self.passed = self.failed = 0
        self.skipped: list[tuple[str, str]] = []  # test, reason
        self.problem = ""  # why the suite itself failed: a crash, a time limit, no test
        self.output = ""
        self.seconds = 0.0

    @property
    def bad(self) -> bool:
        return bool(self.failed or self.problem)


def environment(build: pathlib.Path) -> dict[str, str]:
    env = dict(os.environ)
    env["PARVL"] = str(build / "parvl")
    env["PARVL_BUILD"] = str(build)
    env["OMP_NUM_THREADS"] = "1"
    env["PYTHONPATH"] = os.pathsep.join(str(ROOT / ".deps" / folder) for folder in ("oracle", "torch"))
    env["PYTHONPYCACHEPREFIX"] = str(ROOT / ".deps" / "pycache")
    env["HF_HUB_OFFLINE"] = "1"
    stubs = ROOT / ".deps" / "cuda-stubs"
    if stubs.is_dir() and not has_gpu():  # Python's torch links CUDA libraries that a machine without a GPU lacks
        env["LD_LIBRARY_PATH"] = os.pathsep.join(filter(None, [str(stubs), env.get("LD_LIBRARY_PATH")]))
    return env


def has_gpu() -> bool:
    try:
        ctypes.CDLL("libcuda.so.1")
        return True
    except OSError:
        return False


def programs(folder: pathlib.Path) -> list[pathlib.Path]:
    if not folder.is_dir():
        return []
    return sorted(p for p in folder.iterdir() if p.is_file() and os.access(p, os.X_OK) and not p.suffix)


def python_suites() -> list[pathlib.Path]:
    files = [f for folder in PYTHON_FOLDERS for f in sorted((ROOT / "tests" / folder).glob("*.py"))]
    return [f for f in files if re.search(r"^import unittest", f.read_text(), re.MULTILINE)]


def find_suites(build: pathlib.Path, quick: bool, only: str, scratch: pathlib.Path) -> list[Suite]:
    suites = []
    for program in programs(build / "tests"):
        if not (quick and program.name in SLOW_PROGRAMS):
            result = str(scratch / f"{program.name}.json")
            suites.append(Suite("unit", f"unit/{program.name}", [str(program), f"--gtest_output=json:{result}"], result))
    for program in programs(build / "fuzz"):
        seconds = 1 if quick else FUZZ_SECONDS
        suites.append(Suite("fuzz", f"fuzz/{program.name}", fuzz_command(program, seconds)))
    for file in python_suites():
        if quick and "# slow" in file.read_text().splitlines():
            continue
        result = str(scratch / f"{file.parent.name}-{file.stem}.json")
        command = [sys.executable, __file__, "--run-file", str(file), "--result", result]
        suites.append(Suite("python", f"{file.parent.name}/{file.name}", command, result))
    return [s for s in suites if only in s.name]


def fuzz_command(program: pathlib.Path, seconds: int, seed: int | None = None) -> list[str]:
    """The options are libFuzzer's; the stand-alone driver reads the same ones."""
    seed = int.from_bytes(os.urandom(4), "little") % 2**31 + 1 if seed is None else seed
    command = [str(program), f"-max_total_time={seconds}", f"-seed={seed}"]
    corpus = ROOT / "tests" / "fuzz" / "corpus" / program.name.removesuffix("_fuzz")
    return command + [str(corpus)] if corpus.is_dir() else command


def run_suite(suite: Suite, env: dict[str, str], limit_s: int) -> Outcome:
    outcome = Outcome(suite)
    start = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="parvl-test-") as work, tempfile.TemporaryFile() as log:
        process = subprocess.Popen(suite.command, stdout=log, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL,
                                   env={**env, "TMPDIR": work}, cwd=work, start_new_session=True)
        try:
            code = process.wait(timeout=limit_s)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            end_group(process)
        log.seek(0)
        outcome.output = log.read().decode(errors="replace")
    outcome.seconds = time.monotonic() - start
    if code is None:
        outcome.problem = f"ran over its limit of {limit_s} s"
    elif code < 0:
        outcome.problem = f"ended by signal {signal.Signals(-code).name}"
    read_result(outcome, code)
    return outcome


def end_group(process: subprocess.Popen) -> None:
    """Ends what the suite left running (a server, say) with it."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        pass
    process.wait()


def read_result(outcome: Outcome, code: int | None) -> None:
    suite = outcome.suite
    if suite.kind == "fuzz":
        outcome.passed = int(code == 0)
        if code and not outcome.problem:
            outcome.problem = f"exited with {code}; run again: {' '.join(suite.command)}"
        return
    try:
        result = json.loads(pathlib.Path(suite.result).read_text())
    except (OSError, ValueError):
        outcome.problem = outcome.problem or f"left no result (exit status {code})"
        return
    if suite.kind == "unit":
        result = gtest_result(result, outcome.output)
    outcome.passed, outcome.failed, outcome.skipped = result["passed"], result["failed"], result["skipped"]
    if outcome.problem or outcome.failed:
        return
    if outcome.passed + len(outcome.skipped) == 0:
        outcome.problem = "ran no test"
    elif code != 0:
        outcome.problem = f"exited with {code} though no test failed"


def gtest_result(report: dict, output: str) -> dict:
    counts = {"passed": 0, "failed": 0, "skipped": []}
    for test in (t for group in report.get("testsuites", []) for t in group["testsuite"]):
        name = f"{test['classname']}.{test['name']}"
        if test.get("failures"):
            counts["failed"] += 1
        elif test.get("status") == "NOTRUN" or test.get("result") in ("SKIPPED", "SUPPRESSED"):
            counts["skipped"].append((name, skip_reason(name, output)))
        else:
            counts["passed"] += 1
    return counts


def skip_reason(name: str, output: str) -> str:
    """gtest's report leaves the reason out; it stands between a test's first and last line of output."""
    _, _, rest = output.partition(f"[ RUN      ] {name}\n")
    text = rest.partition(f"[  SKIPPED ] {name}")[0].strip()
    return text.splitlines()[-1] if text else "no reason given"


class CountingResult(unittest.TextTestResult):
    """Counts a test once, whatever its subtests did."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.bad: set[str] = set()

    def addSubTest(self, test, subtest, error):
        super().addSubTest(test, subtest, error)
        if error is not None:
            self.bad.add(test.id())

    def addFailure(self, test, error):
        super().addFailure(test, error)
        self.bad.add(test.id())

    def addError(self, test, error):
        super().addError(test, error)
        self.bad.add(test.id())

    def addUnexpectedSuccess(self, test):
        super().addUnexpectedSuccess(test)
        self.bad.add(test.id())


def run_file(file: str, result: str) -> int:
    """Inside a suite's own process: runs one unittest file and writes its counts."""
    path = pathlib.Path(file)
    sys.path[0] = str(path.parent)
    sys.argv = [file]
    tests = unittest.defaultTestLoader.loadTestsFromName(path.stem)
    outcome = unittest.TextTestRunner(resultclass=CountingResult, verbosity=2, stream=sys.stdout).run(tests)
    skipped = [(test.id(), reason) for test, reason in outcome.skipped]
    passed = max(0, outcome.testsRun - len(skipped) - len({b for b in outcome.bad if "setUpClass" not in b}))
    counts = {"passed": passed, "failed": len(outcome.bad), "skipped": skipped}
    pathlib.Path(result).write_text(json.dumps(counts))
    return 1 if outcome.bad else 0


def describe(outcome: Outcome) -> str:
    word = "FAIL" if outcome.bad else "ok"
    skipped = f", {len(outcome.skipped)} skipped" if outcome.skipped else ""
    return (f"{word:4} {outcome.suite.name:44} {outcome.passed:4} passed{skipped}"
            f"{f', {outcome.failed} failed' if outcome.failed else ''} {outcome.seconds:7.1f} s")


def report(outcome: Outcome) -> None:
    print(describe(outcome), flush=True)
    for test, reason in outcome.skipped:
        print(f"     skipped {test}: {reason}")
    if outcome.bad:
        tail = outcome.output if len(outcome.output) < 20_000 else "[...]\n" + outcome.output[-20_000:]
        print(tail.rstrip())
        if outcome.problem:
            print(f"     {outcome.suite.name} {outcome.problem}")
    sys.stdout.flush()


def run_all(suites: list[Suite], env: dict[str, str], jobs: int, limits: dict[str, int]) -> list[Outcome]:
    outcomes = []
    with concurrent.futures.ThreadPoolExecutor(jobs) as pool:
        futures = [pool.submit(run_suite, s, env, limits[s.kind]) for s in suites]
        try:
            for future in concurrent.futures.as_completed(futures):
                outcomes.append(future.result())
                report(outcomes[-1])
        except KeyboardInterrupt:
            for future in futures:
                future.cancel()
            raise
    return outcomes


def conclude(outcomes: list[Outcome]) -> int:
    passed = sum(o.passed for o in outcomes)
    failed = sum(max(o.failed, int(bool(o.problem))) for o in outcomes)
    skipped = sum(len(o.skipped) for o in outcomes)
    if not outcomes:
        print("no suite to run; build first (`make all`), and see --only")
        failed = 1
    for outcome in outcomes:
        if outcome.bad:
            print(f"FAIL {outcome.suite.name} {outcome.problem}".rstrip())
    print(f"{passed} passed, {failed} failed" + (f", {skipped} skipped" if skipped else ""))
    return 1 if failed else 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--build", default="build", help="the build folder (default: build)")
    parser.add_argument("--quick", action="store_true", help="leave out what is marked slow")
    parser.add_argument("--only", default="", metavar="SUBSTRING", help="only suites whose name holds this")
    parser.add_argument("--jobs", type=int, default=2, help="suites at a time (default: 2)")
    parser.add_argument("--run-file", help=argparse.SUPPRESS)
    parser.add_argument("--result", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.run_file:
        return run_file(args.run_file, args.result)
    build = pathlib.Path(args.build).resolve()
    with tempfile.TemporaryDirectory(prefix="parvl-results-") as scratch:
        suites = find_suites(build, args.quick, args.only, pathlib.Path(scratch))
        return conclude(run_all(suites, environment(build), args.jobs, TIME_LIMIT_S))


if __name__ == "__main__":
    sys.exit(main())
