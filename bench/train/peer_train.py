#!/usr/bin/env python3
"""The peer of `parvl train` in bfloat16: transformers with float32 master weights, autocast to bfloat16, torch's AdamW.

usage: peer_train.py MODEL_DIR DATA_DIR THREADS MICRO_BATCH STEPS     prints one JSON object
"""
import json
import resource
import statistics
import sys
import time

import torch
import transformers
from PIL import Image


def main():
    path, data, threads, batch, steps = sys.argv[1], sys.argv[2], *map(int, sys.argv[3:])
    torch.set_num_threads(threads)
    model = transformers.AutoModelForImageTextToText.from_pretrained(path, dtype=torch.float32).train()
    tokenizer = transformers.AutoTokenizer.from_pretrained(path)
    processor = transformers.models.qwen2_vl.image_processing_pil_qwen2_vl.Qwen2VLImageProcessorPil.from_pretrained(path)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, betas=(0.9, 0.95), weight_decay=0.0, fused=True)
    lines = [json.loads(line) for line in open(f"{data}/data.jsonl")]
    seconds, tokens = [], 0
    for step in range(steps):
        start = time.perf_counter()
        rows = [lines[(step * batch + i) % len(lines)] for i in range(batch)]
        images = processor([Image.open(f"{data}/{r['messages'][0]['content'][0]['image']}").convert("RGB") for r in rows], return_tensors="pt")
        count = int(images["image_grid_thw"][0].prod()) // 4
        texts = [tokenizer.apply_chat_template(r["messages"], tokenize=False).replace("<|image_pad|>", "<|image_pad|>" * count) for r in rows]
        prefixes = [tokenizer.apply_chat_template(r["messages"][:1], tokenize=False, add_generation_prompt=True) for r in rows]
        ids = [tokenizer(t)["input_ids"] for t in texts]
        assert len({len(i) for i in ids}) == 1, "samples of one length"
        ids = torch.tensor(ids)
        labels = ids.clone()
        for row, prefix in enumerate(prefixes):
            labels[row, :len(tokenizer(prefix.replace("<|image_pad|>", "<|image_pad|>" * count))["input_ids"])] = -100
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = model(input_ids=ids, attention_mask=torch.ones_like(ids), labels=labels, pixel_values=images["pixel_values"],
                         image_grid_thw=images["image_grid_thw"], mm_token_type_ids=(ids == model.config.image_token_id).long()).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        seconds.append(time.perf_counter() - start)
        tokens = ids.numel()
    step_s = statistics.median(seconds[1:])
    print(json.dumps({"step_s": step_s, "tokens_s": tokens / step_s, "loss": loss.item(),
                      "peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024}))


main()
