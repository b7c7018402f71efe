"""What the tests of `parvl train` share: a tiny recipe with real pictures, running it, and looking at what it wrote."""
import hashlib
import json
import os
import pathlib
import shutil
import signal
import subprocess
import tempfile
from unittest import TestCase

from PIL import Image

ROOT = pathlib.Path(__file__).resolve().parents[2]
PARVL = pathlib.Path(os.environ.get("PARVL", ROOT / "build" / "parvl"))
FAULTS = PARVL.parent / "probes" / "libtrain_faults.so"  # see train_faults.cc
START = ROOT / "examples" / "easy_vqa" / "start"


def tiny_config(text_only=False):
    config = json.loads((START / "config.json").read_text())
    config.update(hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1,
                  initializer_range=0.2, max_position_embeddings=256)
    config["rope_scaling"]["mrope_section"] = [1, 1, 2]
    config["vision_config"].update(depth=2, embed_dim=16, hidden_size=16, num_heads=2, mlp_ratio=2)
    if text_only:
        for key in ("vision_config", "rope_scaling", "image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id"):
            del config[key]
        config.update(model_type="qwen2", architectures=["Qwen2ForCausalLM"])
    return config


def turn(role, *content):
    return {"role": role, "content": list(content) if len(content) > 1 or not isinstance(content[0], str) else content[0]}


def picture(path, seed):
    width, height = 24 + 8 * (seed % 3), 32
    image = Image.new("RGB", (width, height))
    image.putdata([((x * 11 + seed * 40) % 256, (y * 7 + seed) % 256, (x * y * (seed + 1)) % 256) for y in range(height) for x in range(width)])
    image.save(path)


def samples(folder, count, text_only=False):
    """Lines of a data file: one image and one answer mostly; some text only, some of two turns, some without an answer."""
    lines = []
    for i in range(count):
        question = {"type": "text", "text": f"what is the color of {i}?"}
        content = [question]
        if i % 4 != 3 and not text_only:
            picture(folder / f"{i}.png", i)
            content = [{"type": "image", "image": f"{i}.png"}, question]
        messages = [turn("user", *content)]
        if i % 5 != 4:
            messages.append(turn("assistant", ["a red rectangle", "circle", "no"][i % 3]))
        if i % 6 == 2:
            messages += [turn("user", "is it a circle?"), turn("assistant", "yes")]
        lines.append({"messages": messages})
    return lines


class Run:
    """A finished `parvl train --json`."""

    def __init__(self, done):
        self.code, self.stdout, self.stderr = done.returncode, done.stdout, done.stderr
        self.events = [json.loads(line) for line in self.stdout.splitlines()]

    def losses(self):
        return [e["loss"] for e in self.events if e["event"] == "step"]

    def steps(self):
        return [e["step"] for e in self.events if e["event"] == "step"]

    def message(self):
        return self.stderr.splitlines()[-1] if self.stderr else ""


class TrainCase(TestCase):
    text_only = False

    def setUp(self):
        folder = tempfile.TemporaryDirectory(prefix="parvl-train-")
        self.addCleanup(folder.cleanup)
        self.folder = pathlib.Path(folder.name)
        self.out = self.folder / "out"
        (self.folder / "config.json").write_text(json.dumps(tiny_config(self.text_only)))
        self.write_data(samples(self.folder, 12, self.text_only))
        (self.folder / "recipe.yaml").write_text(f"""
config: config.json
tokenizer: {START}
seed: 5
data: {{train: data.jsonl, micro_batch: 2, global_batch: 4}}
train: {{steps: 6, log_every: 1, out: out, device: cpu}}
""")

    def write_data(self, lines, name="data.jsonl"):
        (self.folder / name).write_text("".join(json.dumps(line) + "\n" for line in lines))

    def command(self, *settings, flags=("--json",)):
        command = [str(PARVL), "train", "--config", str(self.folder / "recipe.yaml"), *flags]
        for setting in settings:
            command += ["--set", setting]
        return command

    def train(self, *settings, code=0, env=None, **kwargs):
        environment = {**os.environ, **(env or {})}
        run = Run(subprocess.run(self.command(*settings), capture_output=True, text=True, timeout=120, env=environment, **kwargs))
        self.assertEqual(run.code, code, f"{settings}\n{run.stderr}")
        return run

    def train_until(self, step, *settings, number=signal.SIGINT):
        """A run that gets a signal once the line of `step` is out; with what it still wrote."""
        process = subprocess.Popen(self.command(*settings), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        out = ""
        for line in process.stdout:
            out += line
            if json.loads(line).get("step") == step:
                process.send_signal(number)
                break
        rest, errors = process.communicate(timeout=120)
        return Run(subprocess.CompletedProcess(process.args, process.returncode, out + rest, errors))

    def rank_pid(self, launcher, rank):
        """The process of a rank of a running `parvl launch`."""
        for entry in os.listdir("/proc"):
            try:
                with open(f"/proc/{entry}/stat") as stat, open(f"/proc/{entry}/environ") as environment:
                    if int(stat.read().rsplit(")", 1)[1].split()[1]) == launcher and f"\0RANK={rank}\0" in environment.read():
                        return int(entry)
            except (OSError, IndexError, ValueError):
                continue
        self.fail(f"rank {rank} is not running")

    def refused(self, *settings, **kwargs):
        """The sentence of a run that is refused with exit 2, before any step."""
        run = self.train(*settings, code=2, **kwargs)
        self.assertEqual(run.losses(), [])
        self.assert_one_sentence(run)
        return run.message()

    def assert_one_sentence(self, run):
        self.assertTrue(run.message().startswith("parvl: "), run.stderr)
        self.assertNotIn("terminate", run.stderr)
        self.assertEqual(sum(line.startswith("parvl: ") for line in run.stderr.splitlines()), 1, run.stderr)

    def assert_whole(self, checkpoint):
        """Every file is there with its hash or its tensors' hashes, reckoned here and not by the program."""
        content = json.loads((checkpoint / "trainer" / "manifest.json").read_text())["content"]
        tensor_files = dict(content["weights"])
        for name in content["files"]:
            if name.startswith("trainer/state-"):
                shard = json.loads((checkpoint / name).read_text())
                if shard["file"]["tensors"]:
                    tensor_files[name.replace(".json", ".safetensors")] = shard["file"]
        found = {str(p.relative_to(checkpoint)) for p in checkpoint.rglob("*") if p.is_file()} - {"trainer/manifest.json"}
        self.assertEqual(found, set(content["files"]) | set(tensor_files))
        for name, digest in content["files"].items():
            self.assertEqual(hashlib.sha256((checkpoint / name).read_bytes()).hexdigest(), digest, name)
        for name, hashes in tensor_files.items():
            self.assert_tensors(checkpoint / name, hashes)
        for needed in ("config.json", "tokenizer.json", "trainer/state.json"):
            self.assertIn(needed, content["files"])
        self.assertIn("model.safetensors", tensor_files)

    def assert_tensors(self, path, hashes):
        data = path.read_bytes()
        self.assertEqual(len(data), hashes["bytes"], path)
        begin = 8 + int.from_bytes(data[:8], "little")
        self.assertEqual(hashlib.sha256(data[:begin]).hexdigest(), hashes["header"], path)
        for tensor in hashes["tensors"]:
            first, last = json.loads(data[8:begin])[tensor["name"]]["data_offsets"]
            self.assertEqual(hashlib.sha256(data[begin + first:begin + last]).hexdigest(), tensor["sha256"], tensor["name"])

    def same_state(self, a, b):
        """The same weights and optimizer state to the bit, written in one layout."""
        names = sorted(str(p.relative_to(a)) for p in a.rglob("*.safetensors"))
        self.assertGreater(len(names), 1)
        self.assertEqual(names, sorted(str(p.relative_to(b)) for p in b.rglob("*.safetensors")))
        for name in names:
            self.assertEqual((a / name).read_bytes(), (b / name).read_bytes(), name)

    def with_fault(self, fault, *settings, **kwargs):
        return self.train(*settings, env={"LD_PRELOAD": str(FAULTS), "FAULT": fault}, **kwargs)

    def moments(self, *settings):
        """The moments (see train_faults.cc) after which the second save of a run starts and ends."""
        counts = []
        for steps in (1, 2):
            file = self.folder / "count"
            self.train(*settings, f"train.steps={steps}", "train.checkpoint_every=1", f"train.out=count{steps}",
                       env={"LD_PRELOAD": str(FAULTS), "FAULT_COUNT": str(file)})
            counts.append(int(file.read_text()))
        self.assertGreater(counts[1] - counts[0], 50)
        return counts[0], counts[1]

    def names(self):
        return sorted(p.name for p in self.out.iterdir() if "tfevents" not in p.name)

    def start_over(self):
        shutil.rmtree(self.out)
