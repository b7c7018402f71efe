#!/usr/bin/env python3
"""Writes a model directory of a Qwen2-VL shape with random bfloat16 weights, for measurements where the answer does not matter.

usage: make.py OUT_DIR SHAPE [--device cuda]      SHAPE: tiny, 0.5b, 1b, 2b or 7b

The tokenizer is a byte-level BPE of the real vocabulary size whose merges are made up; template and special tokens are those of
the example. Weights are written in shards of up to 4 GB as they are made, so memory for one shard is enough. Needs torch and
safetensors.
"""
import argparse
import itertools
import json
import pathlib
import shutil

import torch
from safetensors.torch import save_file

START = pathlib.Path(__file__).resolve().parent.parent / "easy_vqa" / "start"
SHARD_BYTES = 4 << 30
BIG = dict(depth=32, embed_dim=1280, num_heads=16)
# Qwen2-VL-2B and -7B as published; 0.5b is Qwen2-0.5B's decoder behind a smaller encoder, 1b Qwen2-VL-2B with 20 narrower layers
# and an encoder of ViT-L's size.
SHAPES = {
    "tiny": (dict(hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1,
                  vocab_size=512), [4, 6, 6], dict(depth=2, embed_dim=64, num_heads=4), True),
    "0.5b": (dict(hidden_size=896, intermediate_size=4864, num_hidden_layers=24, num_attention_heads=14, num_key_value_heads=2,
                  vocab_size=151936), [8, 12, 12], dict(depth=12, embed_dim=640, num_heads=10), True),
    "1b": (dict(hidden_size=1536, intermediate_size=6144, num_hidden_layers=20, num_attention_heads=12, num_key_value_heads=2,
                vocab_size=151936), [16, 24, 24], dict(depth=24, embed_dim=1024, num_heads=16), True),
    "2b": (dict(hidden_size=1536, intermediate_size=8960, num_hidden_layers=28, num_attention_heads=12, num_key_value_heads=2,
                vocab_size=151936), [16, 24, 24], BIG, True),
    "7b": (dict(hidden_size=3584, intermediate_size=18944, num_hidden_layers=28, num_attention_heads=28, num_key_value_heads=4,
                vocab_size=152064), [16, 24, 24], BIG, False),
}
PATCH, TEMPORAL, MERGE, MLP_RATIO = 14, 2, 2, 4


def tensor_shapes(text, vision, tied):
    """Yields (name, shape) under the names of the published checkpoints."""
    hidden, inter = text["hidden_size"], text["intermediate_size"]
    head = hidden // text["num_attention_heads"]
    kv = text["num_key_value_heads"] * head
    yield "model.embed_tokens.weight", (text["vocab_size"], hidden)
    for i in range(text["num_hidden_layers"]):
        p = f"model.layers.{i}."
        for name, rows in (("q", hidden), ("k", kv), ("v", kv)):
            yield f"{p}self_attn.{name}_proj.weight", (rows, hidden)
            yield f"{p}self_attn.{name}_proj.bias", (rows,)
        yield p + "self_attn.o_proj.weight", (hidden, hidden)
        yield p + "mlp.gate_proj.weight", (inter, hidden)
        yield p + "mlp.up_proj.weight", (inter, hidden)
        yield p + "mlp.down_proj.weight", (hidden, inter)
        yield p + "input_layernorm.weight", (hidden,)
        yield p + "post_attention_layernorm.weight", (hidden,)
    yield "model.norm.weight", (hidden,)
    if not tied:
        yield "lm_head.weight", (text["vocab_size"], hidden)
    width = vision["embed_dim"]
    yield "visual.patch_embed.proj.weight", (width, 3, TEMPORAL, PATCH, PATCH)
    for i in range(vision["depth"]):
        p = f"visual.blocks.{i}."
        for norm in ("norm1", "norm2"):
            yield f"{p}{norm}.weight", (width,)
            yield f"{p}{norm}.bias", (width,)
        for name, shape in (("attn.qkv", (3 * width, width)), ("attn.proj", (width, width)),
                            ("mlp.fc1", (MLP_RATIO * width, width)), ("mlp.fc2", (width, MLP_RATIO * width))):
            yield f"{p}{name}.weight", shape
            yield f"{p}{name}.bias", shape[:1]
    merged = width * MERGE * MERGE
    yield "visual.merger.ln_q.weight", (width,)
    yield "visual.merger.ln_q.bias", (width,)
    for name, shape in (("mlp.0", (merged, merged)), ("mlp.2", (hidden, merged))):
        yield f"visual.merger.{name}.weight", shape
        yield f"visual.merger.{name}.bias", shape[:1]


def write_weights(out, shapes, device):
    generator = torch.Generator(device).manual_seed(0)
    shard, size, shards, index = {}, 0, [], {}

    def flush():
        nonlocal shard, size
        name = f"part-{len(shards):05d}.safetensors"
        save_file(shard, out / name, metadata={"format": "pt"})
        shards.append(name)
        index.update({key: name for key in shard})
        shard, size = {}, 0

    for name, shape in shapes:
        is_norm = name.endswith(("norm.weight", "norm1.weight", "norm2.weight", "ln_q.weight"))
        value = torch.ones(shape, device=device) if is_norm else torch.randn(shape, generator=generator, device=device) * 0.02
        shard[name] = value.to(torch.bfloat16).cpu()
        size += shard[name].nbytes
        if size >= SHARD_BYTES:
            flush()
    if shard:
        flush()
    total = sum((out / name).stat().st_size for name in shards)
    if len(shards) == 1:
        (out / shards[0]).rename(out / "model.safetensors")
    else:
        (out / "model.safetensors.index.json").write_text(json.dumps({"metadata": {"total_size": total}, "weight_map": index}))
    return total


def write_tokenizer(out, vocab_size):
    """Fills the vocabulary up to where the special tokens start with made-up merges; returns {special token: id}."""
    tokenizer = json.loads((START / "tokenizer.json").read_text())
    model, specials = tokenizer["model"], tokenizer["added_tokens"]
    vocab, merges = model["vocab"], model["merges"]
    first_special = min(t["id"] for t in specials) if vocab_size <= 1024 else vocab_size - 512
    letters = [chr(c) for c in range(ord("!"), ord("~") + 1)]
    pairs = [(a, b) for a, b in itertools.product(letters, letters)]
    triples = ((a + b, c) for (a, b), c in itertools.product(pairs, letters))
    for left, right in itertools.chain(pairs, triples):
        if len(vocab) >= first_special:
            break
        if left in vocab and left + right not in vocab:
            vocab[left + right] = len(vocab)
            merges.append([left, right])
    ids = {}
    for i, token in enumerate(specials):
        token["id"] = first_special + i
        ids[token["content"]] = token["id"]
    (out / "tokenizer.json").write_text(json.dumps(tokenizer, ensure_ascii=False))
    config = json.loads((START / "tokenizer_config.json").read_text())
    config["model_max_length"] = 32768
    (out / "tokenizer_config.json").write_text(json.dumps(config, indent=2))
    return ids


def write_configs(out, text, sections, vision, tied, ids):
    config = dict(text, architectures=["Qwen2VLForConditionalGeneration"], model_type="qwen2_vl", torch_dtype="bfloat16",
                  max_position_embeddings=32768, rms_norm_eps=1e-6, rope_theta=1e6, hidden_act="silu",
                  rope_scaling={"type": "mrope", "mrope_section": sections}, tie_word_embeddings=tied, attention_dropout=0.0,
                  use_sliding_window=False, initializer_range=0.02, eos_token_id=ids["<|im_end|>"],
                  image_token_id=ids["<|image_pad|>"], video_token_id=ids["<|video_pad|>"],
                  vision_start_token_id=ids["<|vision_start|>"], vision_end_token_id=ids["<|vision_end|>"],
                  vision_config=dict(vision, hidden_size=text["hidden_size"], mlp_ratio=MLP_RATIO, patch_size=PATCH,
                                     spatial_merge_size=MERGE, temporal_patch_size=TEMPORAL, in_channels=3,
                                     hidden_act="quick_gelu", model_type="qwen2_vl"))
    (out / "config.json").write_text(json.dumps(config, indent=2))
    (out / "generation_config.json").write_text(json.dumps(
        {"do_sample": False, "eos_token_id": ids["<|im_end|>"], "pad_token_id": ids["<|endoftext|>"]}))
    processor = json.loads((START / "preprocessor_config.json").read_text())
    processor.update(patch_size=PATCH, min_pixels=56 * 56, max_pixels=28 * 28 * 1280)
    (out / "preprocessor_config.json").write_text(json.dumps(processor, indent=2))
    shutil.copy(START / "chat_template.jinja", out / "chat_template.jinja")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=pathlib.Path)
    parser.add_argument("shape", choices=SHAPES)
    parser.add_argument("--device", default="cpu", help="where random numbers are made; cuda is much faster for 7b")
    args = parser.parse_args()
    text, sections, vision, tied = SHAPES[args.shape]
    args.out.mkdir(parents=True, exist_ok=True)
    ids = write_tokenizer(args.out, text["vocab_size"])
    write_configs(args.out, text, sections, vision, tied, ids)
    total = write_weights(args.out, tensor_shapes(text, vision, tied), args.device)
    print(f"{args.out}: {total / 2 / 1e9:.2f} B parameters")


if __name__ == "__main__":
    main()
