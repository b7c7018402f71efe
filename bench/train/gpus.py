#!/usr/bin/env python3
"""A training step of ParVL on two GPUs against PyTorch's DDP (dp) or DTensor tensor parallelism (tp), in interleaved pairs.

Both stay loaded; in turns, the first of a pair changing, each makes a few steps while the other rests. The ratio is the peer's time over
ParVL's: above 1 ParVL is faster. Its lower bound is that of a one-sided 95 % confidence interval of the mean of the pairs' logarithms.

usage: gpus.py --build BUILD --model DIR --data DIR --parallel dp|tp [--micro-batch 16] [--pairs 20] [--steps 4] [--compile] [--python PYTHON] [--json FILE]
MODEL: examples/shapes/make.py DIR 1b; DATA: bench/train/make_data.py DIR 256 448 100 128
"""
import argparse
import json
import math
import os
import pathlib
import socket
import statistics
import subprocess
import sys
import tempfile

ROOT = pathlib.Path(__file__).resolve().parents[2]
RANKS = 2
# Student's t, one-sided 95 %, by degrees of freedom; above them the normal distribution's.
T95 = {1: 6.314, 2: 2.92, 3: 2.353, 4: 2.132, 5: 2.015, 7: 1.895, 9: 1.833, 11: 1.796, 14: 1.761, 19: 1.729, 24: 1.711, 29: 1.699, 39: 1.685}


def free_port():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


class Side:
    """The ranks of one program, which make steps when told to."""

    def __init__(self, name, command, threads):
        self.name, self.log = name, tempfile.TemporaryFile("w+")
        shared = {"WORLD_SIZE": str(RANKS), "LOCAL_WORLD_SIZE": str(RANKS), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()),
                  "OMP_NUM_THREADS": str(threads), "PARVL_RANK_SILENCE_SECONDS": "600"}
        self.ranks = [subprocess.Popen([str(c) for c in command], env={**os.environ, **shared, "RANK": str(rank), "LOCAL_RANK": str(rank)},
                                       stdin=subprocess.PIPE, stdout=subprocess.PIPE if rank == 0 else subprocess.DEVNULL, stderr=self.log, text=True)
                      for rank in range(RANKS)]

    def tell(self, what, count):
        for rank in self.ranks:
            rank.stdin.write(f"{what} {count}\n")
            rank.stdin.flush()
        line = self.ranks[0].stdout.readline()
        if not line:
            self.log.seek(0)
            self.end()
            sys.exit(f"gpus.py: {self.name} ended early:\n{self.log.read()[-4000:]}")
        return json.loads(line)

    def end(self):
        for rank in self.ranks:
            rank.stdin.close()
        for rank in self.ranks:
            try:
                rank.wait(timeout=30)
            except subprocess.TimeoutExpired:
                rank.kill()


def lower_bound(ratios):
    logs = [math.log(ratio) for ratio in ratios]
    freedom = len(logs) - 1
    t = T95[max(known for known in T95 if known <= freedom)]
    return math.exp(statistics.mean(logs) - t * statistics.stdev(logs) / math.sqrt(len(logs)))


def sides(args, out):
    per_step = args.micro_batch * (RANKS if args.parallel == "dp" else 1)
    sets = [f"model={args.model}", f"data.train={args.data}/data.jsonl", f"train.out={out}", f"data.micro_batch={args.micro_batch}",
            f"data.global_batch={per_step}", f"parallel.llm_backbone.{args.parallel}={RANKS}", "train.device=cuda", "train.steps=1000000",
            "optim.clip_norm=1", *args.set]
    mine = Side("ParVL", [args.build / "bench" / "steps_bench", ROOT / "bench" / "train" / "recipe.yaml", *sets], args.threads)
    if args.alone:
        return [mine]
    peer = Side("the peer", [args.python, ROOT / "bench" / "train" / "peer_gpus.py", args.model, args.data, args.parallel, args.micro_batch,
                             *(["--compile"] if args.compile else [])], args.threads)
    return [mine, peer]


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--build", type=pathlib.Path, required=True)
    parser.add_argument("--model", type=pathlib.Path, required=True)
    parser.add_argument("--data", type=pathlib.Path, required=True)
    parser.add_argument("--parallel", choices=("dp", "tp"), required=True)
    parser.add_argument("--micro-batch", type=int, default=16)
    parser.add_argument("--pairs", type=int, default=20)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--warm-up", type=int, default=6)
    parser.add_argument("--threads", type=int, default=8)
    parser.add_argument("--python", default=sys.executable)
    parser.add_argument("--set", action="append", default=[], help="key=value over ParVL's recipe")
    parser.add_argument("--alone", action="store_true", help="ParVL alone, with the parts of its step")
    parser.add_argument("--compile", action="store_true", help="the peer's layers through torch.compile")
    parser.add_argument("--json", type=pathlib.Path)
    args = parser.parse_args()
    args.model, args.data = args.model.resolve(), args.data.resolve()
    with tempfile.TemporaryDirectory() as out:
        both = sides(args, out)
        warm = {side.name: side.tell("run", args.warm_up) for side in both}
        result = {"parallel": args.parallel, "micro_batch": args.micro_batch, "warm": warm, "phases": both[0].tell("phases", 5)}
        pairs = []
        for pair in range(args.pairs):
            order = both if pair % 2 == 0 else both[::-1]
            told = {side.name: side.tell("run", args.steps) for side in order}
            pairs.append({side.name: told[side.name]["seconds"] / args.steps for side in both})
        result |= {"pairs": pairs, "last": told}
        for side in both:
            side.end()
    for name in pairs[0]:
        times = [pair[name] * 1e3 for pair in pairs]
        print(f"{args.parallel}: {name}: {statistics.median(times):.2f} ms a step (median of {len(times)}, {min(times):.2f} to {max(times):.2f}), "
              f"memory {result['last'][name]['memory_bytes'] / 2**30:.1f} GiB, loss {result['last'][name]['loss']:.4f}")
    print(f"{args.parallel}: parts of ParVL's step: " + ", ".join(f"{name} {seconds * 1e3:.2f} ms" for name, seconds in result["phases"].items()))
    if not args.alone:
        ratios = [pair["the peer"] / pair["ParVL"] for pair in pairs]
        result |= {"ratio": statistics.median(ratios), "lower_bound": lower_bound(ratios)}
        print(f"{args.parallel}: ratio {result['ratio']:.3f} (median of {len(ratios)} pairs), lower 95 % confidence bound of the mean {result['lower_bound']:.3f}")
    if args.json:
        args.json.write_text(json.dumps(result))


if __name__ == "__main__":
    main()
