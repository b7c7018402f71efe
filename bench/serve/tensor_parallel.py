"""Decode steps of one sequence with the LLM cut by tensors over two devices, against one device, in one run.

    python3 bench/serve/tensor_parallel.py [--device cuda] [--ranks 2] [--shape 7b|small] [--build build]

Prints one JSON object, the ratio first: how many times as fast a step is. The model has the shape of Qwen2-7B with weights of zero,
which cost what any cost: a sparse file, made in a temporary folder. The contract asks for 1.3 on two H200.
"""
import argparse
import json
import pathlib
import shutil
import struct
import subprocess
import tempfile

ROOT = pathlib.Path(__file__).resolve().parents[2]
TOKENIZER = ROOT / "examples" / "easy_vqa" / "start"
SHAPES = {
    "7b": {"hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": 28, "num_attention_heads": 28, "num_key_value_heads": 4, "vocab_size": 152064},
    "small": {"hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 4, "num_attention_heads": 8, "num_key_value_heads": 4, "vocab_size": 4096},
}


def tensors_of(shape):
    h, i, v = shape["hidden_size"], shape["intermediate_size"], shape["vocab_size"]
    head = h // shape["num_attention_heads"]
    kv = head * shape["num_key_value_heads"]
    yield "model.embed_tokens.weight", [v, h]
    for layer in range(shape["num_hidden_layers"]):
        prefix = f"model.layers.{layer}."
        yield prefix + "input_layernorm.weight", [h]
        for name, out in (("q", h), ("k", kv), ("v", kv)):
            yield f"{prefix}self_attn.{name}_proj.weight", [out, h]
            yield f"{prefix}self_attn.{name}_proj.bias", [out]
        yield prefix + "self_attn.o_proj.weight", [h, h]
        yield prefix + "post_attention_layernorm.weight", [h]
        yield prefix + "mlp.gate_proj.weight", [i, h]
        yield prefix + "mlp.up_proj.weight", [i, h]
        yield prefix + "mlp.down_proj.weight", [h, i]
    yield "model.norm.weight", [h]
    yield "lm_head.weight", [v, h]


def make_model(folder, shape):
    """A Hugging Face directory whose weights are holes in a file."""
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(TOKENIZER / name, folder / name)
    config = {"model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"], "torch_dtype": "bfloat16", "max_position_embeddings": 4096,
              "rms_norm_eps": 1e-6, "rope_theta": 1e6, "tie_word_embeddings": False, "eos_token_id": 370, "hidden_act": "silu", **shape}
    (folder / "config.json").write_text(json.dumps(config))
    header, offset = {}, 0
    for name, sizes in tensors_of(shape):
        size = 2
        for one in sizes:
            size *= one
        header[name] = {"dtype": "BF16", "shape": sizes, "data_offsets": [offset, offset + size]}
        offset += size
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with open(folder / "model.safetensors", "wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        file.truncate(8 + len(text) + offset)


def measure(program, model, device, ranks, new):
    command = [program, "bench", "--model", str(model), "--device", device, "--dtype", "bfloat16", "--clients", "1", "--requests", "4",
               "--max-prompt", "128", "--max-new", str(new), "--max-model-len", "2048", "--tensor-parallel-size", str(ranks)]
    run = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(run.stdout.splitlines()[-1])


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--shape", choices=SHAPES, default="7b")
    parser.add_argument("--build", default=str(ROOT / "build"))
    parser.add_argument("--max-new", type=int, default=256)
    args = parser.parse_args()
    program = str(pathlib.Path(args.build) / "parvl-engine")
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        make_model(folder, SHAPES[args.shape])
        one = measure(program, folder, args.device, 1, args.max_new)
        cut = measure(program, folder, args.device, args.ranks, args.max_new)
    step = {ranks: report["decode_step_ms"]["p50"] for ranks, report in ((1, one), (args.ranks, cut))}
    print(json.dumps({"ratio": round(step[1] / step[args.ranks], 3), "decode_step_ms": step, "device": args.device, "shape": args.shape,
                      "reports": {1: one, args.ranks: cut}}))


if __name__ == "__main__":
    main()
