#!/usr/bin/env python3
"""Writes a Hugging Face directory of a Qwen2-VL shape with random bfloat16 weights, for benchmarks.

The tokenizer, template and preprocessor are the example's; ids beyond its vocabulary have no text.
usage: make_shape.py OUT_DIR [0.5b | tiny]
"""
import json
import pathlib
import shutil
import sys

import torch
import transformers

START = pathlib.Path(__file__).resolve().parent.parent / "examples" / "easy_vqa" / "start"
SHAPES = {
    "0.5b": (dict(hidden_size=896, intermediate_size=4864, num_hidden_layers=24, num_attention_heads=14, num_key_value_heads=2,
                  vocab_size=151936), [8, 12, 12], dict(depth=12, embed_dim=640, num_heads=10, patch_size=14)),
    "tiny": (dict(hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1,
                  vocab_size=512), [4, 6, 6], dict(depth=2, embed_dim=64, num_heads=4, patch_size=14)),
}


def main():
    out = pathlib.Path(sys.argv[1])
    text, sections, vision = SHAPES[sys.argv[2] if len(sys.argv) > 2 else "0.5b"]
    start = json.loads((START / "config.json").read_text())
    config = transformers.Qwen2VLConfig(
        text_config=dict(text, max_position_embeddings=32768, rope_parameters={"rope_type": "default", "rope_theta": 1e6, "mrope_section": sections}),
        vision_config=dict(vision, hidden_size=text["hidden_size"], mlp_ratio=4, spatial_merge_size=2),
        tie_word_embeddings=True, **{k: start[k] for k in ("image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id")})
    torch.manual_seed(0)
    model = transformers.Qwen2VLForConditionalGeneration(config).to(torch.bfloat16)
    model.save_pretrained(out)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json"):
        shutil.copy(START / name, out / name)
    processor = json.loads((START / "preprocessor_config.json").read_text())
    processor.update(patch_size=14, min_pixels=56 * 56, max_pixels=28 * 28 * 1280)
    (out / "preprocessor_config.json").write_text(json.dumps(processor))
    print(sum(p.numel() for p in model.parameters()), "parameters")


main()
