"""`parvl model inspect` against what the safetensors files hold."""
# slow
import glob
import json
import os
import pathlib
import resource
import struct
import subprocess
import tempfile
import unittest

import torch
from safetensors import safe_open

import tiny_models

PARVL = os.environ["PARVL"]
TYPES = {torch.float32: ("F32", 4), torch.bfloat16: ("BF16", 2), torch.float16: ("F16", 2)}


def parvl(*args, **kwargs):
    return subprocess.run([PARVL, "model", *map(str, args)], capture_output=True, text=True, timeout=60, **kwargs)


class Inspect(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = pathlib.Path(folder.name)

    def refusal(self, *args):
        done = parvl(*args)
        self.assertEqual((done.returncode, done.stdout), (2, ""), done.stderr)
        return done.stderr.strip().splitlines()[-1]

    def test_lists_what_the_files_hold(self):
        for family in tiny_models.FAMILIES:
            for dtype in (torch.float32, torch.bfloat16):
                with self.subTest(family=family, dtype=dtype):
                    path = self.folder / f"{family}-{dtype}"
                    tiny_models.make(family).to(dtype).save_pretrained(path, max_shard_size="100KB")
                    self.check(path, *TYPES[dtype])

    def check(self, path, type_name, type_bytes):
        held = {}
        for file in glob.glob(str(path / "*.safetensors")):
            with safe_open(file, "pt") as tensors:
                for name in tensors.keys():
                    held[name] = (list(tensors.get_slice(name).get_shape()), os.path.basename(file))
        self.assertGreater(len({file for _, file in held.values()}), 1, "expected several shards")
        done = parvl("inspect", path, "--json")
        self.assertEqual((done.returncode, done.stderr), (0, ""))
        told = json.loads(done.stdout)
        config = json.loads((path / "config.json").read_text())
        self.assertEqual(told["model_type"], config["model_type"])
        stored = [p for p in told["parameters"] if "tied_to" not in p]
        self.assertEqual({p["checkpoint_name"]: (p["checkpoint_shape"], p["file"]) for p in stored}, held)
        sums = {}
        for p in stored:
            count = 1
            for size in p["shape"]:
                count *= size
            self.assertEqual((p["dtype"], p["bytes"]), (type_name, count * type_bytes))
            self.assertTrue(p["name"].startswith(p["module"] + "."))
            for key in (p["module"], "total"):
                tensors, parameters, size = sums.get(key, (0, 0, 0))
                sums[key] = (tensors + 1, parameters + count, size + p["bytes"])
        figures = {name: (m["tensors"], m["parameters"], m["bytes"]) for name, m in {**told["modules"], "total": told["total"]}.items()}
        self.assertEqual(figures, sums)
        tied = [p for p in told["parameters"] if "tied_to" in p]
        self.assertEqual([p["tied_to"] for p in tied], ["llm_backbone.embed.weight"] if config["tie_word_embeddings"] else [])
        self.assertEqual([p["bytes"] for p in tied], [0] * len(tied))
        self.check_table(path, told)

    def check_table(self, path, told):
        done = parvl("inspect", path)
        self.assertEqual((done.returncode, done.stderr), (0, ""))
        rows = {line.split()[0]: line.split()[1:] for line in done.stdout.splitlines() if line.strip()}
        for p in told["parameters"]:
            row = rows[p["name"]]
            self.assertEqual(row[-1], str(p["bytes"]))
            self.assertIn(p.get("tied_to", p["checkpoint_name"]), row)
        for name, figures in {**told["modules"], "total": told["total"]}.items():
            self.assertEqual(rows[name], [str(figures[key]) for key in ("tensors", "parameters", "bytes")])

    def test_reads_headers_alone(self):
        """A file of gigabytes without content (a hole): listing it takes no memory for weights."""
        path = self.folder / "large"
        path.mkdir()
        hidden, wide, vocabulary = 8192, 28672, 128256
        (path / "config.json").write_text(json.dumps({
            "model_type": "llama", "hidden_size": hidden, "intermediate_size": wide, "num_hidden_layers": 1, "num_attention_heads": 64,
            "num_key_value_heads": 8, "vocab_size": vocabulary, "tie_word_embeddings": True, "torch_dtype": "float32"}))
        layer = {"self_attn.q_proj": (hidden, hidden), "self_attn.k_proj": (1024, hidden), "self_attn.v_proj": (1024, hidden),
                 "self_attn.o_proj": (hidden, hidden), "mlp.gate_proj": (wide, hidden), "mlp.up_proj": (wide, hidden),
                 "mlp.down_proj": (hidden, wide), "input_layernorm": (hidden,), "post_attention_layernorm": (hidden,)}
        shapes = {"model.embed_tokens.weight": (vocabulary, hidden), "model.norm.weight": (hidden,),
                  **{f"model.layers.0.{name}.weight": shape for name, shape in layer.items()}}
        header, end = {}, 0
        for name, shape in shapes.items():
            size = 4 * torch.Size(shape).numel()
            header[name] = {"dtype": "F32", "shape": shape, "data_offsets": [end, end + size]}
            end += size
        encoded = json.dumps(header).encode()
        with open(path / "model.safetensors", "wb") as file:
            file.write(struct.pack("<Q", len(encoded)) + encoded)
            file.truncate(8 + len(encoded) + end)
        self.assertGreater(end, 7 << 30)

        def limit():
            resource.setrlimit(resource.RLIMIT_DATA, (1 << 30, 1 << 30))  # of private memory; the mapped file does not count

        done = parvl("inspect", path, "--json", preexec_fn=limit)
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertEqual(json.loads(done.stdout)["total"]["bytes"], end)

    def test_refusals(self):
        self.assertIn("missing", self.refusal("inspect", self.folder / "missing"))
        self.assertIn("DIR", self.refusal("inspect"))
        self.assertIn("subcommand", self.refusal())
        self.assertIn("inspect", self.refusal("inspekt"))
        path = self.folder / "model"
        model = tiny_models.make("qwen2")
        model.save_pretrained(path)
        (path / "adapter_config.json").write_text("{}")
        self.assertIn("adapter_config.json", self.refusal("inspect", path))
        (path / "adapter_config.json").unlink()
        weights = path / "model.safetensors"
        kept = weights.read_bytes()
        weights.write_bytes(kept[:-1])
        self.assertIn("cut short", self.refusal("inspect", path))
        weights.rename(path / "pytorch_model.bin")
        self.assertIn("pytorch_model.bin", self.refusal("inspect", path))
        config = json.loads((path / "config.json").read_text())
        (path / "config.json").write_text(json.dumps({**config, "hidden_size": 60}))
        weights.write_bytes(kept)
        self.assertIn("300×48", self.refusal("inspect", path))

    def test_output_that_cannot_be_written(self):
        path = self.folder / "model"
        tiny_models.make("qwen2").save_pretrained(path)
        with open("/dev/full", "w") as full:
            done = subprocess.run([PARVL, "model", "inspect", path], stdout=full, stderr=subprocess.PIPE, text=True, timeout=60)
        self.assertEqual((done.returncode, done.stderr), (1, "parvl: cannot write to standard output\n"))


if __name__ == "__main__":
    unittest.main()
