#!/usr/bin/env python3
"""The peer of generate_bench: transformers on the same directory, prompt length, threads and type. Prints one JSON object.

usage: peer_generate.py MODEL_DIR DTYPE THREADS PROMPT_TOKENS NEW_TOKENS REPEATS [IMAGE]
"""
import json
import random
import resource
import statistics
import sys
import time

import torch
import transformers


def main():
    path, dtype, threads, prompt_tokens, new_tokens, repeats = sys.argv[1:7]
    torch.set_num_threads(int(threads))
    start = time.perf_counter()
    model = transformers.AutoModelForImageTextToText.from_pretrained(path, dtype=getattr(torch, dtype)).eval()
    load = time.perf_counter() - start
    inputs, ids = {}, []
    if len(sys.argv) > 7:
        from PIL import Image
        tokenizer = transformers.AutoTokenizer.from_pretrained(path)
        processor = transformers.models.qwen2_vl.image_processing_pil_qwen2_vl.Qwen2VLImageProcessorPil.from_pretrained(path)
        image = processor(Image.open(sys.argv[7]).convert("RGB"), return_tensors="pt")
        inputs.update(pixel_values=image["pixel_values"], image_grid_thw=image["image_grid_thw"])
        count = int(image["image_grid_thw"].prod()) // 4
        text = tokenizer.apply_chat_template([{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "what is it?"}]}],
                                             tokenize=False, add_generation_prompt=True)
        ids = tokenizer(text.replace("<|image_pad|>", "<|image_pad|>" * count))["input_ids"]
    rng = random.Random(1)
    while len(ids) < int(prompt_tokens):
        ids.append(rng.randrange(256))
    inputs["input_ids"] = torch.tensor([ids])
    inputs["attention_mask"] = torch.ones_like(inputs["input_ids"])
    if "pixel_values" in inputs:
        inputs["mm_token_type_ids"] = (inputs["input_ids"] == model.config.image_token_id).long()

    def run(tokens):
        start = time.perf_counter()
        out = model.generate(**inputs, max_new_tokens=tokens, min_new_tokens=tokens, do_sample=False, eos_token_id=None, pad_token_id=0)
        assert out.shape[1] == len(ids) + tokens
        return (time.perf_counter() - start) * 1e3

    with torch.no_grad():
        run(2)
        first = statistics.median(run(1) for _ in range(int(repeats)))
        whole = statistics.median(run(int(new_tokens)) for _ in range(int(repeats)))
    print(json.dumps({"prompt_tokens": len(ids), "ttft_ms": first, "tpot_ms": (whole - first) / (int(new_tokens) - 1), "load_s": load,
                      "peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024}))


main()
