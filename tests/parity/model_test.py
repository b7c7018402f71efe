"""Logits, gradients and written checkpoints against transformers, on small random checkpoints of each family."""
# slow
import copy
import json
import os
import subprocess
import tempfile
import unittest

import numpy as np
import torch
import transformers

import tiny_models

PROBE = os.path.join(os.path.dirname(os.environ["PARVL"]), "probes", "model_probe")


def probe(*args):
    done = subprocess.run([PROBE, *map(str, args)], capture_output=True, text=True)
    if done.returncode != 0:
        raise AssertionError(f"model_probe {args}: {done.stderr}")


def write_inputs(folder, sequences):
    path = os.path.join(folder, "inputs.json")
    with open(path, "w") as f:
        json.dump([s.as_json(folder, f"s{i}") for i, s in enumerate(sequences)], f)
    return path


def error(got, want, floor):
    return np.abs(got - want).max() / max(np.abs(want).max(), floor)


class ModelParity(unittest.TestCase):
    def setUp(self):
        self.folder_object = tempfile.TemporaryDirectory()
        self.folder = self.folder_object.name
        self.addCleanup(self.folder_object.cleanup)

    def save(self, family, **kwargs):
        model = tiny_models.make(family)
        path = os.path.join(self.folder, family)
        model.save_pretrained(path, **kwargs)
        return model, path

    def logits(self, path, sequences, dtype="float32"):
        out = os.path.join(self.folder, "logits")
        probe("logits", path, write_inputs(self.folder, sequences), out, dtype)
        flat = np.fromfile(out).reshape(-1, tiny_models.VOCAB)
        cuts = np.cumsum([len(s.ids) for s in sequences])[:-1]
        return np.split(flat, cuts)

    @torch.no_grad()
    def test_logits(self):
        for family in tiny_models.FAMILIES:
            with self.subTest(family):
                model, path = self.save(family)
                sequences = tiny_models.sequences(family)
                got = self.logits(path, sequences)
                spread, moved = [], []
                for sequence, mine in zip(sequences, got):
                    want = model(**sequence.model_inputs(torch.float32)).logits[0].double().numpy()
                    self.assertLess(np.abs(mine - want).max(), 1e-4)
                    spread.append(want.std())
                    if sequence.images:
                        sequence.images[0] = (*sequence.images[0][:2], torch.randn_like(sequence.images[0][2]))
                        other = model(**sequence.model_inputs(torch.float32)).logits[0].double().numpy()
                        moved.append(np.abs(other - want).max())
                # A checkpoint fit for the comparison: logits spread, and an image that is swapped shows.
                self.assertGreater(min(spread), 1.0)
                if family in tiny_models.VISION_FAMILIES:
                    self.assertGreater(min(moved), 0.1)

    def test_gradients(self):
        for family in tiny_models.FAMILIES:
            model, path = self.save(family)
            model = tiny_models.as_double(model)
            sequences = tiny_models.sequences(family)
            count = sum(sum(s.targets) for s in sequences)
            loss = 0
            with tiny_models.promote_only():
                for sequence in sequences:
                    logits = model(**sequence.model_inputs(torch.float64)).logits[0]
                    assert logits.dtype == torch.float64
                    rows = torch.tensor([i - 1 for i, t in enumerate(sequence.targets) if t], dtype=torch.long)
                    targets = torch.tensor(sequence.ids)[rows + 1]
                    loss = loss + torch.nn.functional.cross_entropy(logits[rows], targets, reduction="sum") / count
                loss.backward()
            want = {name: p.grad.numpy() for name, p in model.named_parameters()}
            floor = 1e-5 * max(np.abs(g).max() for g in want.values())
            for recompute in ["none", "full"]:
                with self.subTest(family=family, recompute=recompute):
                    out = tempfile.mkdtemp(dir=self.folder)
                    probe("grads", path, write_inputs(self.folder, sequences), out, "float64", recompute)
                    self.assertLess(abs(np.fromfile(out + "/loss")[0] - loss.item()), 1e-9)
                    seen = set()
                    for file, names in json.load(open(out + "/names.json")).items():
                        key = self.find(names["checkpoint_name"], want)
                        seen.add(key)
                        got = np.fromfile(f"{out}/{file}")
                        self.assertLess(error(got, want[key].reshape(-1), floor), 1e-8, names["name"])
                    self.assertEqual(seen, set(want))

    @staticmethod
    def find(checkpoint_name, parameters):
        spellings = [checkpoint_name, "model." + checkpoint_name, checkpoint_name.replace("model.", "model.language_model.", 1)]
        return next(name for name in spellings if name in parameters)

    @torch.no_grad()
    def test_written_checkpoint_loads(self):
        for family in tiny_models.FAMILIES:
            for dtype in ["float32", "bfloat16"]:
                with self.subTest(family=family, dtype=dtype):
                    model, path = self.save(family)
                    written = tempfile.mkdtemp(dir=self.folder)
                    probe("save", path, written, dtype)
                    self.assertTrue(os.path.exists(written + "/model.safetensors.index.json"), "expected several shards")
                    loaded, report = type(model).from_pretrained(written, dtype="auto", output_loading_info=True)
                    self.assertFalse(any(report[k] for k in ("missing_keys", "unexpected_keys", "mismatched_keys")), report)
                    reference = copy.deepcopy(model).to(getattr(torch, dtype))
                    self.assertEqual(loaded.dtype, reference.dtype)
                    got, want = loaded.state_dict(), reference.state_dict()
                    self.assertEqual(set(got), set(want))
                    for name, value in want.items():
                        self.assertTrue(torch.equal(got[name], value), name)
                    # In float32, since a model cast to 16 bits also rounds its rotary frequencies and one loaded so does not.
                    loaded = type(model).from_pretrained(written, dtype=torch.float32).eval()
                    rounded = copy.deepcopy(model)
                    for p in rounded.parameters():
                        p.copy_(p.to(getattr(torch, dtype)))
                    for sequence in tiny_models.sequences(family):
                        inputs = sequence.model_inputs(torch.float32)
                        difference = loaded(**inputs).logits - rounded(**inputs).logits
                        self.assertLess(difference.abs().max().item(), 1e-4)

    @torch.no_grad()
    def test_sharded_half_precision_directories_load(self):
        for family in ["qwen2", "qwen2_vl"]:
            for dtype in [torch.bfloat16, torch.float16]:
                with self.subTest(family=family, dtype=dtype):
                    model = tiny_models.make(family).to(dtype)
                    path = os.path.join(self.folder, f"{family}-{dtype}")
                    model.save_pretrained(path, max_shard_size="100KB")
                    self.assertTrue(os.path.exists(path + "/model.safetensors.index.json"))
                    wide = type(model).from_pretrained(path, dtype=torch.float32).eval()
                    sequences = tiny_models.sequences(family)
                    for sequence, got in zip(sequences, self.logits(path, sequences)):
                        want = wide(**sequence.model_inputs(torch.float32)).logits[0].double().numpy()
                        self.assertLess(np.abs(got - want).max(), 1e-4)


if __name__ == "__main__":
    unittest.main()
