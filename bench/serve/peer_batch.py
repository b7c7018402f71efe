#!/usr/bin/env python3
"""The peer of `parvl-engine bench`: transformers generating for the same requests. Either in padded batches of as many as there are
clients (a batch runs to its longest answer; only the tokens that were asked for count), or with its own continuous batching, as many
at once. Prints one JSON object; where continuous batching does not run here, that is {"unavailable": why}.

usage: peer_batch.py MODEL_DIR DTYPE THREADS CLIENTS REQUESTS MAX_PROMPT MAX_NEW [padded | continuous]
"""
import json
import resource
import statistics
import sys
import time

import torch
import transformers


def mixed_hash(i):  # as in apps/mixed_lengths.h
    return (i + 1) * 2654435761 % 2**32 // 65536


def mixed_work(requests, max_prompt, max_new):
    """(prompt's ids, tokens to generate) of each request."""
    work = []
    for i in range(requests):
        prompt, output = 8 + mixed_hash(2 * i) % (max_prompt - 7), 4 + mixed_hash(2 * i + 1) % (max_new - 3)
        work.append(([mixed_hash(i * 1000 + p) % 256 for p in range(prompt)], output))
    return work


def run_padded(model, clients, work):
    """Seconds for all, and milliseconds to the first token of five alone."""
    def generate(batch, tokens):
        longest = max(len(ids) for ids, _ in batch)
        ids = torch.tensor([[0] * (longest - len(i)) + i for i, _ in batch])  # padded on the left
        mask = torch.tensor([[0] * (longest - len(i)) + [1] * len(i) for i, _ in batch])
        return model.generate(input_ids=ids, attention_mask=mask, max_new_tokens=tokens, min_new_tokens=tokens, do_sample=False,
                              eos_token_id=None, pad_token_id=0)

    generate([work[0]], 4)
    first = []
    for one in work[:5]:
        start = time.perf_counter()
        generate([one], 1)
        first.append((time.perf_counter() - start) * 1e3)
    start = time.perf_counter()
    for begin in range(0, len(work), clients):
        batch = work[begin:begin + clients]
        generate(batch, max(output for _, output in batch))
    return time.perf_counter() - start, first


def run_continuous(model, clients, work):
    """As run_padded, by transformers' own continuous batching with memory for `clients` of the longest requests."""
    from transformers.generation import ContinuousBatchingConfig
    page = 32
    pages = clients * max(-(-(len(ids) + output) // page) + 1 for ids, output in work)
    config = ContinuousBatchingConfig(page_size=page, num_blocks=pages, max_batch_tokens=2048, max_requests_per_batch=clients)
    greedy = transformers.GenerationConfig(do_sample=False, eos_token_id=-1, pad_token_id=0)
    with model.continuous_batching_context_manager(generation_config=greedy, continuous_batching_config=config, block=True) as manager:
        def generate(batch):
            expected = {manager.add_request(ids, max_new_tokens=output): output for ids, output in batch}
            while expected:
                result = manager.get_result(timeout=1)
                if result is not None and result.is_finished():
                    if result.error or len(result.generated_tokens) != expected.pop(result.request_id):
                        raise RuntimeError(f"a request ended with {len(result.generated_tokens)} tokens: {result.error}")
                elif result is None and not manager.is_running():
                    raise RuntimeError("its thread ended")

        generate([(work[0][0], 4)])
        first = []
        for ids, _ in work[:5]:
            start = time.perf_counter()
            generate([(ids, 1)])
            first.append((time.perf_counter() - start) * 1e3)
        start = time.perf_counter()
        generate(work)
        return time.perf_counter() - start, first


def main():
    path, dtype, threads, *numbers = sys.argv[1:8]
    continuous = sys.argv[8:] == ["continuous"]
    clients, requests, max_prompt, max_new = map(int, numbers)
    torch.set_num_threads(int(threads))
    model = transformers.AutoModelForImageTextToText.from_pretrained(path, dtype=getattr(torch, dtype)).eval()
    work = mixed_work(requests, max_prompt, max_new)
    try:
        with torch.no_grad():
            seconds, first = (run_continuous if continuous else run_padded)(model, clients, work)
    except Exception as failure:  # whatever a version, a model or a device may lack
        if not continuous:
            raise
        print(json.dumps({"unavailable": f"{type(failure).__name__}: {failure}"}))
        return
    tokens = sum(output for _, output in work)
    print(json.dumps({"requests": requests, "tokens": tokens, "tokens_s": tokens / seconds, "ttft_ms": statistics.median(first),
                      "peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024}))


main()
