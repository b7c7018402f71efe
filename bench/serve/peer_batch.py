#!/usr/bin/env python3
"""The peer of engine_bench: transformers generating for the same requests in padded batches of as many as there are clients. A
batch runs to its longest answer; only the tokens that were asked for count. Prints one JSON object.

usage: peer_batch.py MODEL_DIR DTYPE THREADS CLIENTS REQUESTS MAX_PROMPT MAX_NEW
"""
import json
import resource
import statistics
import sys
import time

import torch
import transformers


def mixed_hash(i):  # as in lengths.h
    return (i + 1) * 2654435761 % 2**32 // 65536


def main():
    path, dtype, threads, *numbers = sys.argv[1:8]
    clients, requests, max_prompt, max_new = map(int, numbers)
    torch.set_num_threads(int(threads))
    model = transformers.AutoModelForImageTextToText.from_pretrained(path, dtype=getattr(torch, dtype)).eval()
    work = []
    for i in range(requests):
        prompt, output = 8 + mixed_hash(2 * i) % (max_prompt - 7), 4 + mixed_hash(2 * i + 1) % (max_new - 3)
        work.append(([mixed_hash(i * 1000 + p) % 256 for p in range(prompt)], output))

    def generate(batch, tokens):
        longest = max(len(ids) for ids, _ in batch)
        ids = torch.tensor([[0] * (longest - len(i)) + i for i, _ in batch])  # padded on the left
        mask = torch.tensor([[0] * (longest - len(i)) + [1] * len(i) for i, _ in batch])
        return model.generate(input_ids=ids, attention_mask=mask, max_new_tokens=tokens, min_new_tokens=tokens, do_sample=False,
                              eos_token_id=None, pad_token_id=0)

    with torch.no_grad():
        generate([work[0]], 4)
        first = []
        for one in work[:5]:
            start = time.perf_counter()
            generate([one], 1)
            first.append((time.perf_counter() - start) * 1e3)
        start = time.perf_counter()
        for begin in range(0, requests, clients):
            batch = work[begin:begin + clients]
            generate(batch, max(output for _, output in batch))
        seconds = time.perf_counter() - start
    tokens = sum(output for _, output in work)
    print(json.dumps({"requests": requests, "tokens": tokens, "tokens_s": tokens / seconds, "ttft_ms": statistics.median(first),
                      "peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024}))


main()
