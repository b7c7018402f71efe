#!/usr/bin/env python3
"""The long runs: every fuzzer for --minutes (default 10), every unit program twenty times in shuffled order (1,000 training steps
that must leave nothing behind among them), 10,000 image requests to one server, 200 steps of the example in parallel layouts, and 100
recoveries of training runs. Seeds are printed; --seed repeats a run. Ends like tests/run.py."""
import argparse
import os
import pathlib
import sys
import tempfile

import run


def soak_suites(build: pathlib.Path, seconds: int, seed: int, only: str, scratch: pathlib.Path) -> list[run.Suite]:
    suites = []
    for program in run.programs(build / "fuzz"):
        suites.append(run.Suite("fuzz", f"fuzz/{program.name}", run.fuzz_command(program, seconds, seed)))
    for program in run.programs(build / "tests"):
        result = str(scratch / f"{program.name}.json")
        # A shuffled order finds tests that lean on each other. gtest takes seeds up to 99999.
        command = [str(program), f"--gtest_output=json:{result}", "--gtest_repeat=20", "--gtest_shuffle", "--gtest_brief=1",
                   f"--gtest_random_seed={seed % 99999 + 1}"]
        suites.append(run.Suite("unit", f"unit/{program.name}", command, result))
    for script in ("serve_load.py", "train_curves.py", "train_recovery.py"):
        result = str(scratch / f"{script}.json")
        command = [sys.executable, str(run.ROOT / "tests" / "run.py"), "--run-file", str(run.ROOT / "tests" / "e2e" / script), "--result", result]
        suites.append(run.Suite("python", f"e2e/{script}", command, result))
    return [s for s in suites if only in s.name]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--build", default="build")
    parser.add_argument("--minutes", type=float, default=10, help="for each fuzzer (default: 10)")
    parser.add_argument("--seed", type=int, default=int.from_bytes(os.urandom(4), "little") % 2**31 + 1)
    parser.add_argument("--only", default="", metavar="SUBSTRING")
    parser.add_argument("--jobs", type=int, default=2)
    args = parser.parse_args()
    build = pathlib.Path(args.build).resolve()
    seconds = max(1, round(args.minutes * 60))
    print(f"soak: seed {args.seed}, {args.minutes:g} minutes for each fuzzer", flush=True)
    limits = {"fuzz": seconds + 120, "unit": 3600, "python": 7200}
    with tempfile.TemporaryDirectory(prefix="parvl-soak-") as scratch:
        suites = soak_suites(build, seconds, args.seed, args.only, pathlib.Path(scratch))
        env = dict(run.environment(build), PARVL_IMAGE_REQUESTS="10000", PARVL_SOAK_STEPS="1000", PARVL_CURVE_STEPS="200",
                   PARVL_RECOVERIES="100", PARVL_RECOVERY_SEED=str(args.seed))
        return run.conclude(run.run_all(suites, env, args.jobs, limits))


if __name__ == "__main__":
    sys.exit(main())
