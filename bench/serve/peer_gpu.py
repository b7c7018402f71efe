#!/usr/bin/env python3
"""The GPU's peer: transformers with a Qwen2-VL directory in bfloat16, at the work of gpu_bench and `parvl-engine bench --image 32 32`.

  decode   a greedy step of 1 and of 32 sequences with 400 tokens of context each, the chosen tokens brought to the host
  ttft     an image of 1,024 patches and 64 text tokens, from pixels on the host to the first token there
  vision   the encoder with its projector for 1, 4 and 16 such images, from pixels on the host

Each is done in several ways (eager, compiled, recorded as a CUDA graph); the fastest counts, a way that does not work is named in
"problems". Prints one JSON object, with what there is when --seconds are over; progress goes to standard error.

usage: peer_gpu.py MODEL_DIR [--parts decode,ttft,vision] [--seconds 180] [--device cuda] [--backend inductor]
"""
import argparse
import inspect
import json
import os
import random
import statistics
import sys
import threading
import time

import torch
import transformers

START = time.perf_counter()
CONTEXT, STEPS, WARM_UP = 400, 50, 10
GRID = (1, 32, 32)
TEXT_TOKENS = 64


class Peer:
    def __init__(self, args):
        self.device, self.backend, self.compiled = torch.device(args.device), args.backend, False
        self.model = transformers.AutoModelForImageTextToText.from_pretrained(args.model, dtype=torch.bfloat16, attn_implementation="sdpa")
        self.model = self.model.to(self.device).eval()
        self.text, self.visual = self.model.model.language_model, self.model.model.visual
        names = inspect.signature(self.text.forward).parameters
        self.cache_name = "cache" if "cache" in names else "past_key_values"  # later versions, earlier ones
        vision = self.model.config.vision_config
        self.patch_values = 3 * vision.temporal_patch_size * vision.patch_size**2
        self.merged = GRID[1] * GRID[2] // vision.spatial_merge_size**2

    def compile(self, function, **options):
        return torch.compile(function, backend=self.backend, dynamic=False, **options)

    def compile_in_place(self):
        """The encoder's blocks are alike, so one is compiled a shape; the decoder's know their number, so it is compiled whole."""
        if not self.compiled:
            for block in self.visual.blocks:
                block.compile(backend=self.backend, dynamic=False)
            self.text.forward = self.compile(self.text.forward)
        self.compiled = True

    def synchronize(self):
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def median_ms(self, call, count, warm_up):
        times = []
        for i in range(warm_up + count):
            self.synchronize()
            start = time.perf_counter()
            call()
            self.synchronize()
            times.append((time.perf_counter() - start) * 1e3)
        return statistics.median(times[warm_up:])


class Decode:
    """Sequences whose next tokens are computed a step at a time, in place, so that a step can be recorded."""

    def __init__(self, peer, count):
        self.peer, self.count = peer, count
        self.cache = transformers.StaticCache(config=peer.model.config, max_cache_len=CONTEXT + STEPS + WARM_UP + 4)
        self.ids = torch.zeros(count, 1, dtype=torch.long, device=peer.device)
        context = torch.randint(256, (count, CONTEXT - 1), device=peer.device)
        self.hidden(context)  # makes room for keys and values and fills them

    def hidden(self, ids):
        return self.peer.text(input_ids=ids, use_cache=True, **{self.peer.cache_name: self.cache}).last_hidden_state

    def choose(self, ids):
        return self.peer.model.lm_head(self.hidden(ids)[:, -1:]).argmax(-1)

    def rewind(self):
        for layer in self.cache.layers:
            layer.cumulative_length.fill_(CONTEXT - 1)

    def recorded_ms(self, compiled):
        """By one CUDA graph a step."""
        choose = compiled(self.choose)

        def step():
            self.ids.copy_(choose(self.ids))

        self.rewind()
        step()  # compiles
        if self.peer.device.type != "cuda":
            return self.median_ms(step)
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(2):
                step()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            step()
        return self.median_ms(graph.replay)

    def trees_ms(self):
        """By torch.compile's own CUDA graphs."""
        choose = self.peer.compile(self.choose, mode="reduce-overhead")

        def step():
            torch.compiler.cudagraph_mark_step_begin()
            self.ids.copy_(choose(self.ids))

        self.rewind()
        for _ in range(3):
            step()
        return self.median_ms(step)

    def median_ms(self, step):
        def to_host():
            step()
            return self.ids.tolist()

        self.rewind()
        return self.peer.median_ms(to_host, STEPS, WARM_UP)


def image_batch(peer, count):
    generator = torch.Generator().manual_seed(0)
    pixels = torch.rand(count * GRID[1] * GRID[2], peer.patch_values, generator=generator) * 2 - 1
    return pixels, torch.tensor([GRID] * count)


def vision_ms(peer, count, compiled=False):
    if compiled:
        peer.compile_in_place()
    pixels, grid = image_batch(peer, count)

    def call():
        peer.visual(pixels.to(peer.device).to(torch.bfloat16), grid_thw=grid.to(peer.device))

    return peer.median_ms(call, 10, 3) / count


def ttft_ms(peer, compiled=False):
    if compiled:
        peer.compile_in_place()
    pixels, grid = image_batch(peer, 1)
    config, rng = peer.model.config, random.Random(1)
    text = [rng.randrange(256) for _ in range(TEXT_TOKENS)]
    ids = torch.tensor([text[:1] + [config.image_token_id] * peer.merged + text[1:]])
    inputs = {"input_ids": ids, "pixel_values": pixels, "image_grid_thw": grid, "mm_token_type_ids": (ids == config.image_token_id).long()}

    def call():
        placed = {name: tensor.to(peer.device) for name, tensor in inputs.items()}
        return peer.model(**placed, use_cache=True, logits_to_keep=1).logits[:, -1].argmax(-1).item()

    return peer.median_ms(call, 10, 3)


class Figures:
    """What has been measured; an end that is due while something still compiles prints it as well."""

    def __init__(self, seconds):
        self.values = {"torch": torch.__version__, "transformers": transformers.__version__, "problems": []}
        self.lock = threading.Lock()
        self.timer = threading.Timer(max(1, seconds - (time.perf_counter() - START)), self.end, [f"{seconds} s were over"])
        self.timer.daemon = True
        self.timer.start()

    def end(self, problem=None):
        self.timer.cancel()
        self.lock.acquire()  # for ever: nobody prints twice
        if problem:
            self.values["problems"].append(problem)
        print(json.dumps(self.values), flush=True)
        os._exit(0)  # also when other threads compile

    def attempt(self, name, way, measure):
        """Keeps `name`'s fastest way; returns whether this one worked."""
        print(f"{time.perf_counter() - START:6.1f} s: {name}, {way} ...", file=sys.stderr, flush=True)
        try:
            with torch.no_grad():
                ms = measure()
        except Exception as failure:  # whatever a version or a device may lack
            with self.lock:
                self.values["problems"].append(f"{name}, {way}: {type(failure).__name__}: {str(failure)[:300]}")
            print(f"         {type(failure).__name__}: {failure}", file=sys.stderr, flush=True)
            return False
        print(f"         {ms:.3f} ms", file=sys.stderr, flush=True)
        with self.lock:
            entry = self.values.setdefault(name, {"ms": ms, "how": way, "ways": {}})
            entry["ways"][way] = ms
            if ms < entry["ms"]:
                entry.update(ms=ms, how=way)
        return True


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--parts", default="decode,ttft,vision")
    parser.add_argument("--seconds", type=float, default=180)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--backend", default="inductor", help="of torch.compile")
    args = parser.parse_args()
    parts = args.parts.split(",")
    figures = Figures(args.seconds)
    torch._dynamo.config.recompile_limit = 64
    peer = Peer(args)
    images = (1, 4, 16) if "vision" in parts else ()
    for count in images:
        figures.attempt(f"vision_{count}", "eager", lambda: vision_ms(peer, count))
    if "ttft" in parts:
        figures.attempt("ttft", "eager", lambda: ttft_ms(peer))
    for count in (1, 32) if "decode" in parts else ():
        name = f"decode_{count}"
        figures.attempt(name, "eager, recorded", lambda: Decode(peer, count).recorded_ms(lambda choose: choose))
        if not figures.attempt(name, "compiled, recorded", lambda: Decode(peer, count).recorded_ms(peer.compile)):
            figures.attempt(name, "compiled with reduce-overhead", lambda: Decode(peer, count).trees_ms())
    for count in images:
        figures.attempt(f"vision_{count}", "compiled", lambda: vision_ms(peer, count, compiled=True))
    if "ttft" in parts:
        figures.attempt("ttft", "compiled", lambda: ttft_ms(peer, compiled=True))
    figures.end()


main()
