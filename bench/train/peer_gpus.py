#!/usr/bin/env python3
"""One rank of the peer of ParVL on several GPUs: transformers with torch's DDP or DTensor tensor parallelism, making steps when told to.

usage (with torchrun's variables): peer_gpus.py MODEL_DIR DATA_DIR dp|tp MICRO_BATCH [--compile] [--device cpu]
--compile: torch.compile of every layer of the decoder and block of the encoder.
Each line "run N" on standard input makes N steps; rank 0 prints {"seconds", "loss", "memory_bytes"}.

Its job is ParVL's: float32 weights, gradients and their sums over ranks, products in bfloat16 (autocast), PyTorch's own attention kernels
(SDPA), the gradient norm clipped at 1, fused AdamW, one micro batch a rank and step. What spares it work that ParVL has: samples are made
before the clock starts and lie in pinned memory; logits and loss are computed for the answers' tokens alone; nothing is read back from the GPU
between the steps of a line. Tensor parallelism cuts the decoder's matrices, the vocabulary and the loss (loss_parallel), and the encoder's MLPs;
the encoder's attention, whose queries, keys and values are one matrix, is computed whole on every rank.
"""
import argparse
import contextlib
import json
import os
import sys
import time

import torch
import torch.distributed as dist
import transformers
from PIL import Image
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, loss_parallel, parallelize_module


def batches(args, rank, replicas, device):
    """Every micro batch of this rank, in its order: (ids, labels of the answers, places of the tokens before them, pixels, grids)."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(args.model)
    processor = transformers.models.qwen2_vl.image_processing_pil_qwen2_vl.Qwen2VLImageProcessorPil.from_pretrained(args.model)
    lines = [json.loads(line) for line in open(f"{args.data}/data.jsonl")]
    out = []
    for begin in range(args.micro_batch * (rank % replicas), len(lines) - args.micro_batch + 1, args.micro_batch * replicas):
        rows = lines[begin:begin + args.micro_batch]
        images = processor([Image.open(f"{args.data}/{r['messages'][0]['content'][0]['image']}").convert("RGB") for r in rows], return_tensors="pt")
        count = int(images["image_grid_thw"][0].prod()) // 4
        pad = "<|image_pad|>"
        texts = [tokenizer.apply_chat_template(r["messages"], tokenize=False).replace(pad, pad * count) for r in rows]
        prefix = tokenizer.apply_chat_template(rows[0]["messages"][:1], tokenize=False, add_generation_prompt=True).replace(pad, pad * count)
        ids = [tokenizer(text)["input_ids"] for text in texts]
        assert len({len(i) for i in ids}) == 1, "samples of one length"
        ids, first = torch.tensor(ids), len(tokenizer(prefix)["input_ids"])
        last = ids.shape[1] - 1  # the newline after the end of the turn is not learned
        batch = (ids, ids[:, first:last].contiguous(), torch.arange(first - 1, last - 1), images["pixel_values"], images["image_grid_thw"])
        out.append([part.pin_memory() if device.type == "cuda" else part for part in batch])
    return out


def cut(model, mesh):
    """The matrices over the ranks, in the places where transformers keeps them."""
    inner = model.model
    plan = {}
    for i in range(len(inner.language_model.layers)):
        for name in ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.up_proj"):
            plan[f"model.language_model.layers.{i}.{name}"] = ColwiseParallel()
        for name in ("self_attn.o_proj", "mlp.down_proj"):
            plan[f"model.language_model.layers.{i}.{name}"] = RowwiseParallel()
    for i in range(len(inner.visual.blocks)):
        plan[f"model.visual.blocks.{i}.mlp.fc1"] = ColwiseParallel()
        plan[f"model.visual.blocks.{i}.mlp.fc2"] = RowwiseParallel()
    plan["model.language_model.embed_tokens"] = RowwiseParallel(input_layouts=Replicate())
    plan["lm_head"] = ColwiseParallel(output_layouts=Shard(-1), use_local_output=False)
    parallelize_module(model, mesh, plan)
    model.lm_head.weight = inner.language_model.embed_tokens.weight  # tied, both cut by the vocabulary


class Peer:
    def __init__(self, args):
        self.rank, self.world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        self.device = torch.device(args.device, int(os.environ["LOCAL_RANK"]) if args.device == "cuda" else None)
        if args.device == "cuda":
            torch.cuda.set_device(self.device)
        dist.init_process_group("nccl" if args.device == "cuda" else "gloo")
        model = transformers.AutoModelForImageTextToText.from_pretrained(args.model, dtype=torch.float32, attn_implementation="sdpa").train()
        self.model, self.parallel = model.to(self.device), args.parallel
        if args.compile:
            for layer in (*model.model.language_model.layers, *model.model.visual.blocks):
                layer.compile()
        self.image_token = model.config.image_token_id
        if args.parallel == "tp":
            cut(model, dist.init_device_mesh(args.device, (self.world,)))
        else:
            ids = [self.device.index] if args.device == "cuda" else None
            self.model = torch.nn.parallel.DistributedDataParallel(model, device_ids=ids, gradient_as_bucket_view=True, static_graph=True)
        # Cut and whole tensors do not go together into one call over many.
        self.cut = [p for p in model.parameters() if isinstance(p, DTensor)]
        self.whole = [p for p in model.parameters() if not isinstance(p, DTensor)]
        groups = [{"params": part} for part in (self.cut, self.whole) if part]
        self.optimizer = torch.optim.AdamW(groups, lr=1e-5, betas=(0.9, 0.95), weight_decay=0.0, fused=True)
        replicas = self.world if args.parallel == "dp" else 1
        self.batches, self.done = batches(args, self.rank, replicas, self.device), 0

    def synchronize(self):
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def step(self):
        ids, labels, places, pixels, grids = (part.to(self.device, non_blocking=True) for part in self.batches[self.done % len(self.batches)])
        self.done += 1
        with loss_parallel() if self.parallel == "tp" else contextlib.nullcontext():
            with torch.autocast(self.device.type, dtype=torch.bfloat16):
                logits = self.model(input_ids=ids, attention_mask=None, pixel_values=pixels, image_grid_thw=grids, use_cache=False,
                                    mm_token_type_ids=(ids == self.image_token).long(), logits_to_keep=places).logits
            loss = torch.nn.functional.cross_entropy(logits.float().flatten(0, 1), labels.flatten())
            loss.backward()
        self.clip(1.0)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    def clip(self, largest):
        cut, whole = [p.grad.to_local() for p in self.cut], [p.grad for p in self.whole]
        square = torch.nn.utils.get_total_norm(cut).square() if cut else torch.zeros((), device=self.device)
        if cut:
            dist.all_reduce(square)
        norm = (square + torch.nn.utils.get_total_norm(whole).square()).sqrt() if whole else square.sqrt()
        torch._foreach_mul_(cut + whole, (largest / (norm + 1e-6)).clamp(max=1.0))

    def run(self, steps):
        dist.barrier()
        self.synchronize()
        begin = time.perf_counter()
        for _ in range(steps):
            loss = self.step()
        self.synchronize()
        seconds = time.perf_counter() - begin
        loss = loss.full_tensor() if hasattr(loss, "full_tensor") else loss
        if self.parallel == "dp":  # each rank has its own samples'
            dist.all_reduce(loss)
            loss /= self.world
        memory = torch.cuda.max_memory_allocated() if self.device.type == "cuda" else 0
        if self.rank == 0:
            print(json.dumps({"seconds": seconds, "loss": loss.item(), "memory_bytes": memory}), flush=True)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("model")
    parser.add_argument("data")
    parser.add_argument("parallel", choices=("dp", "tp"))
    parser.add_argument("micro_batch", type=int)
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--device", default="cuda")
    peer = Peer(parser.parse_args())
    for line in sys.stdin:
        peer.run(int(line.split()[1]))
    dist.destroy_process_group()


main()
