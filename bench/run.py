#!/usr/bin/env python3
"""ParVL against transformers on this machine: one table, ratios first. Each pair of runs alternates, medians are compared.

Where a GPU is, rows of Qwen2-VL-2B and -7B shapes on it too (one run each, of medians) and the table of the kernels alone; --gpu-python
names the Python whose torch has CUDA and that has transformers.

usage: run.py --build BUILD [--threads N] [--rounds N] [--only SUBSTRING] [--keep FOLDER] [--gpu-python PYTHON]
"""
import argparse
import json
import os
import pathlib
import re
import shutil
import statistics
import subprocess
import sys
import tempfile

ROOT = pathlib.Path(__file__).resolve().parent.parent
IMAGE = ROOT / ".deps" / "data" / "easy_vqa" / "data" / "test" / "images" / "0.png"
EXAMPLE = ROOT / "examples" / "easy_vqa" / "model"


class Bench:
    def __init__(self, build, threads, rounds, folder):
        self.build, self.threads, self.rounds, self.folder = build, threads, rounds, folder
        self.env = dict(os.environ, OMP_NUM_THREADS=str(threads), HF_HUB_OFFLINE="1",
                        PYTHONPATH=os.pathsep.join(str(ROOT / ".deps" / f) for f in ("oracle", "torch")))
        # PyTorch's Python package wants CUDA libraries that a machine without a GPU lacks; see tools/stub_cuda_libs.sh.
        self.peer_env = dict(self.env, LD_LIBRARY_PATH=str(ROOT / ".deps" / "cuda-stubs"))
        self.rows, self.notes = [], []

    def run(self, command, env=None):
        done = subprocess.run([str(c) for c in command], env=env or self.env, capture_output=True, text=True)
        if done.returncode != 0:
            sys.exit(f"bench: {' '.join(map(str, command))} failed:\n{done.stdout}{done.stderr}")
        return done.stdout

    def python(self, script, *args):
        return self.run([sys.executable, ROOT / "bench" / script, *args], self.peer_env)

    def row(self, name, mine, peer, unit, higher_is_better=False):
        ratio = mine / peer if higher_is_better else peer / mine
        self.rows.append((name, ratio, mine, peer, unit))
        print(f"  {name}: {ratio:.2f}x", flush=True)

    def generation(self, name, model, dtype, prompt, tokens, image=None):
        print(f"{name} ...", flush=True)
        mine, peer = [], []
        extra = [image] if image else []
        for _ in range(self.rounds):
            args = [model, dtype, self.threads, prompt, tokens, 3, *extra]
            mine.append(json.loads(self.run([self.build / "bench" / "generate_bench", *args])))
            peer.append(json.loads(self.python("serve/peer_generate.py", *args).splitlines()[-1]))
        median = lambda runs, key: statistics.median(r[key] for r in runs)
        assert mine[0]["prompt_tokens"] == peer[0]["prompt_tokens"], (mine[0], peer[0])
        self.row(f"{name}: to the first token", median(mine, "ttft_ms"), median(peer, "ttft_ms"), "ms")
        self.row(f"{name}: a token", median(mine, "tpot_ms"), median(peer, "tpot_ms"), "ms")
        self.row(f"{name}: peak memory", median(mine, "peak_bytes") / 2**20, median(peer, "peak_bytes") / 2**20, "MiB")
        self.rows.append((f"{name}: share of the matrix-vector speed", median(mine, "decode_share_of_gemv"), median(mine, "decode_gb_s"),
                          median(mine, "gemv_gb_s"), "GB/s"))
        print(f"  share of the matrix-vector speed: {self.rows[-1][1]:.2f}", flush=True)

    def batches(self, name, model, dtype, clients, requests, max_prompt, max_new):
        print(f"{name} ...", flush=True)
        mine, padded, continuous = [], [], []
        for _ in range(self.rounds):
            args = [model, dtype, self.threads, clients, requests, max_prompt, max_new]
            mine.append(json.loads(self.run([
                self.build / "parvl-engine", "bench", "--model", model, "--device", "cpu", "--dtype", dtype, "--clients", clients,
                "--requests", requests, "--max-prompt", max_prompt, "--max-new", max_new])))
            mine[-1]["ttft_ms"] = mine[-1]["ttft_ms"]["p50"]
            for how, runs in (("padded", padded), ("continuous", continuous)):
                runs.append(json.loads(self.python("serve/peer_batch.py", *args, how).splitlines()[-1]))
        median = lambda runs, key: statistics.median(r[key] for r in runs)
        for how, peer in (("padded batches", padded), ("its continuous batching", continuous)):
            if "unavailable" in peer[0]:
                self.notes.append(f"{name}: transformers' continuous batching does not run here: {peer[0]['unavailable']}")
                continue
            assert mine[0]["tokens"] == peer[0]["tokens"], (mine[0], peer[0])
            self.row(f"{name}, {how}: tokens a second", median(mine, "tokens_s"), median(peer, "tokens_s"), "tokens/s", higher_is_better=True)
            if clients == 1:
                self.row(f"{name}, {how}: to the first token", median(mine, "ttft_ms"), median(peer, "ttft_ms"), "ms")

    def products(self):
        print("products of the CPU ...", flush=True)
        self.notes.append(self.run([self.build / "bench" / "linear_bench", self.threads]).rstrip())

    def transfers(self):
        print("transfers between processes ...", flush=True)
        self.notes.append(self.run([self.build / "bench" / "transfer_bench"]).rstrip())

    def training(self, name, model, micro_batch, steps):
        print(f"{name} ...", flush=True)
        data = self.folder / "data"
        if not data.exists():
            self.python("train/make_data.py", data, 8)
        mine, peer, mine_memory, peer_memory = [], [], [], []
        for _ in range(self.rounds):
            with tempfile.TemporaryDirectory() as out:
                sets = [f"model={model}", f"data.train={data}/data.jsonl", f"train.out={out}", f"train.steps={steps}",
                        f"data.micro_batch={micro_batch}", f"data.global_batch={micro_batch}"]
                text = self.run([self.build / "parvl", "train", "--config", ROOT / "bench" / "train" / "recipe.yaml",
                                 *(a for s in sets for a in ("--set", s))])
            mine.append(statistics.median([float(x) for x in re.findall(r"tokens/s (\S+)", text)][1:]))
            mine_memory.append(max(float(x) for x in re.findall(r"memory (\d+) MiB", text)))
            done = json.loads(self.python("train/peer_train.py", model, data, self.threads, micro_batch, steps).splitlines()[-1])
            peer.append(done["tokens_s"])
            peer_memory.append(done["peak_bytes"] / 2**20)
        self.row(f"{name}: tokens a second", statistics.median(mine), statistics.median(peer), "tokens/s", higher_is_better=True)
        self.row(f"{name}: memory", statistics.median(mine_memory), statistics.median(peer_memory), "MiB")


class GpuBench:
    """The rows of a GPU, for a Bench's table."""

    CONTEXT = 400  # tokens, as peer_gpu.py's

    def __init__(self, bench, python):
        self.bench, self.interpreter = bench, python
        self.env = dict(os.environ, HF_HUB_OFFLINE="1")

    def missing(self):
        """Why there are no such rows; "" when there are."""
        if shutil.which("nvidia-smi") is None:
            return "no GPU on this machine"
        for program in ("gpu_bench", "cuda_bench"):
            if not (self.bench.build / "bench" / program).exists():
                return f"{program} was not built (no nvcc)"
        check = "import torch, transformers; assert torch.cuda.is_available()"
        if subprocess.run([self.interpreter, "-c", check], env=self.env, capture_output=True).returncode != 0:
            return f"{self.interpreter} has no transformers or no torch with CUDA (--gpu-python names another)"
        return ""

    def python(self, script, *args):
        return self.bench.run([self.interpreter, ROOT / script, *args], self.env)

    def engine(self, model, *args):
        return json.loads(self.bench.run([self.bench.build / "parvl-engine", "bench", "--model", model, "--device", "cuda", "--dtype", "bfloat16",
                                          *args]).splitlines()[-1])

    def shape(self, shape):
        name, model = f"{shape.upper()} bf16 GPU", self.bench.folder / f"shape-{shape}"
        if not model.exists():
            print(f"making a random model of the {shape.upper()} shape ...", flush=True)
            self.python("examples/shapes/make.py", model, shape, "--device", "cuda")
        print(f"{name} ...", flush=True)
        text = self.bench.run([self.bench.build / "bench" / "gpu_bench", model, self.CONTEXT, 1, 32])
        decode = {int(n): float(ms) for n, ms in re.findall(r"(\d+) sequences of \d+ tokens: ([\d.]+) ms a step", text)}
        vision = {int(n): float(ms) for n, ms in re.findall(r"vision encoder: +(\d+) images of \d+ patches: ([\d.]+) ms an image", text)}
        # 64 text tokens in the middle: prompts have 8 to 120 beside the image.
        ttft = self.engine(model, "--requests", 24, "--image", 32, 32, "--max-prompt", 120, "--max-new", 4)["ttft_ms"]["p50"]
        peer = json.loads(self.python("bench/serve/peer_gpu.py", model).splitlines()[-1])
        self.row(f"{name}: decode step, 1 sequence", decode[1], peer, "decode_1")
        self.row(f"{name}: decode, 32 sequences", decode[32], peer, "decode_32", tokens=32)
        self.row(f"{name}: first token with an image", ttft, peer, "ttft")
        for images in (1, 16):
            self.row(f"{name}: vision encoder, an image of {images}", vision[images], peer, f"vision_{images}")
        self.bench.notes += [f"{name}, transformers: {problem}" for problem in peer["problems"]]
        self.long_prompt(name, model)

    def row(self, name, mine_ms, peer, key, tokens=0):
        if key not in peer:
            self.bench.notes.append(f"{name}: {mine_ms:.2f} ms; no figure of transformers")
            return
        peer_ms = peer[key]["ms"]
        self.bench.notes.append(f"{name}: transformers' fastest way was {peer[key]['how']}")
        if tokens:
            self.bench.row(name, tokens / mine_ms * 1e3, tokens / peer_ms * 1e3, "tokens/s", higher_is_better=True)
        else:
            self.bench.row(name, mine_ms, peer_ms, "ms")

    def long_prompt(self, name, model):
        """What a prompt of 4,000 tokens costs eight streams that run."""
        done = self.engine(model, "--clients", 8, "--requests", 24, "--max-prompt", 64, "--max-new", 200, "--long-prompt", 4000)
        itl, chunk = done["itl_ms"], done["prefill_step_ms"]["max"]
        self.bench.notes.append(f"{name}: 8 streams while a prompt of 4,000 tokens comes: between tokens p50 {itl['p50']:.2f} ms, worst "
                                f"{itl['max']:.2f} ms; the longest step with a part of a prompt {chunk:.2f} ms")

    def kernels(self):
        print("GPU kernels ...", flush=True)
        self.bench.notes.append(self.bench.run([self.bench.build / "bench" / "cuda_bench"]).rstrip())


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--build", type=pathlib.Path, required=True)
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", default="")
    parser.add_argument("--keep", type=pathlib.Path, help="folder for the random models, kept for the next run")
    parser.add_argument("--gpu-python", default=sys.executable)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        bench = Bench(args.build.resolve(), args.threads, args.rounds, args.keep or pathlib.Path(temporary))
        half = bench.folder / "shape-0.5b"
        if not half.exists() and any(args.only in name for name in ("0.5b generate", "0.5b engine 1", "0.5b engine 8", "0.5b engine 32", "0.5b train")):
            print("making a random model of 0.56 B parameters ...", flush=True)
            bench.python("../examples/shapes/make.py", half, "0.5b")
        jobs = {
            "0.5b generate": lambda: bench.generation("0.5B bf16, 128 tokens", half, "bfloat16", 128, 24),
            "0.5b engine 1": lambda: bench.batches("0.5B bf16, 1 client", half, "bfloat16", 1, 6, 256, 64),
            "0.5b engine 8": lambda: bench.batches("0.5B bf16, 8 clients", half, "bfloat16", 8, 32, 256, 64),
            "0.5b engine 32": lambda: bench.batches("0.5B bf16, 32 clients", half, "bfloat16", 32, 96, 256, 64),
            "0.5b train": lambda: bench.training("0.5B bf16 training step", half, 2, 4),
            "cpu products": bench.products,
            "transfers": bench.transfers,
            "easy-vqa": lambda: bench.generation("easy-VQA bf16, image", EXAMPLE, "bfloat16", 0, 32, IMAGE),
        }
        gpu = GpuBench(bench, args.gpu_python)
        if missing := gpu.missing():
            bench.notes.append(f"The GPU's rows are left out: {missing}.")
        else:
            jobs |= {"gpu 2b": lambda: gpu.shape("2b"), "gpu 7b": lambda: gpu.shape("7b"), "gpu kernels": gpu.kernels}
        for name, job in jobs.items():
            if args.only in name:
                job()
    print(f"\n{'ratio':>6}  {'':62} {'ParVL':>10} {'transformers':>13}   ({args.threads} threads, medians of {args.rounds} rounds)")
    for name, ratio, mine, peer, unit in bench.rows:
        print(f"{ratio:6.2f}  {name:62} {mine:10.2f} {peer:13.2f}   {unit}")
    for note in bench.notes:
        print(note)
    print("A ratio above 1 is better than transformers; the matrix-vector rows compare decoding with ParVL's own kernel alone.")


main()
