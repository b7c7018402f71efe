"""The reference of the training tests: the same samples through transformers and torch.optim, prepared without ParVL."""
import json
import os
import pathlib
import shutil
import subprocess

import torch
import transformers
from PIL import Image
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

import tiny_models

ROOT = pathlib.Path(__file__).resolve().parents[2]
PARVL = pathlib.Path(os.environ.get("PARVL", ROOT / "build" / "parvl"))
START = ROOT / "examples" / "easy_vqa" / "start"
TEXT_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json")
IM_END = "<|im_end|>"
transformers.utils.logging.disable_progress_bar()


def make_model(family):
    """A small random model that fits the example's tokenizer."""
    torch.manual_seed(sum(map(ord, family)))
    text = dict(vocab_size=384, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
                max_position_embeddings=256, initializer_range=0.15, eos_token_id=370, bos_token_id=368, pad_token_id=368)
    if family == "llama":
        return transformers.LlamaForCausalLM(transformers.LlamaConfig(**text, tie_word_embeddings=False))
    if family == "qwen2":
        return transformers.Qwen2ForCausalLM(transformers.Qwen2Config(**text, tie_word_embeddings=True))
    text["rope_parameters"] = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [1, 1, 2]}
    tokens = dict(image_token_id=373, video_token_id=374, vision_start_token_id=371, vision_end_token_id=372)
    if family == "qwen2_vl":
        vision = dict(depth=2, embed_dim=16, hidden_size=32, num_heads=2, mlp_ratio=2, patch_size=4, initializer_range=0.15)
        config = transformers.Qwen2VLConfig(text_config=text, vision_config=vision, tie_word_embeddings=True, **tokens)
        return transformers.Qwen2VLForConditionalGeneration(config)
    vision = dict(depth=2, hidden_size=16, out_hidden_size=32, num_heads=2, intermediate_size=24, patch_size=4, window_size=16,
                  fullatt_block_indexes=[1], initializer_range=0.15)
    config = transformers.Qwen2_5_VLConfig(text_config=text, vision_config=vision, tie_word_embeddings=False, **tokens)
    return transformers.Qwen2_5_VLForConditionalGeneration(config)


def write_directory(folder, model):
    model.save_pretrained(folder)
    names = TEXT_FILES + (("preprocessor_config.json",) if hasattr(model.config, "vision_config") else ())
    for name in names:
        shutil.copy(START / name, folder / name)


def picture(path, seed):
    width, height = 24 + 16 * (seed % 3), 40 - 8 * (seed % 2)
    image = Image.new("RGB", (width, height))
    image.putdata([((x * 11 + seed * 40) % 256, (y * 7 + seed) % 256, (x * y * (seed + 1)) % 256) for y in range(height) for x in range(width)])
    image.save(path)


def write_samples(folder, count, images):
    """Text only, one or two images, an image in the middle, two turns, no answer; as lines of a data file."""
    lines = []
    for i in range(count):
        text = {"type": "text", "text": f"what is the color of {i}?"}
        content = [text]
        if images and i % 4 != 3:
            names = [f"{i}.png", f"{i}b.png"][:1 + (i % 5 == 0)]
            for k, name in enumerate(names):
                picture(folder / name, i + 7 * k)
            content = [{"type": "image", "image": name} for name in names]
            content.insert(1 if i % 2 else len(content), text)
        messages = [{"role": "user", "content": content}]
        if i % 3 == 1:
            messages.insert(0, {"role": "system", "content": "answer the question"})
        if i % 7 != 6:
            messages.append({"role": "assistant", "content": ["a red rectangle", "circle\n", "no, yes"][i % 3]})
        if i % 4 == 2:
            messages += [{"role": "user", "content": "sure?"}, {"role": "assistant", "content": [{"type": "text", "text": "yes"}]}]
        lines.append({"messages": messages})
    (folder / "data.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return lines


class Reference:
    """Prepares samples by the tokenizers library and the PIL processor; which tokens are learned comes from character offsets."""

    def __init__(self, folder, images):
        self.folder = folder
        self.tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_file=str(START / "tokenizer.json"))
        self.processor = Qwen2VLImageProcessorPil.from_pretrained(START) if images else None

    def prepare(self, line, dtype):
        text, learned, pixels, grids = "", [], [], []
        for message in line["messages"]:
            text += f"<|im_start|>{message['role']}\n"
            begin = len(text)
            content = message["content"]
            for part in [{"type": "text", "text": content}] if isinstance(content, str) else content:
                if part["type"] == "text":
                    text += part["text"]
                    continue
                done = self.processor(images=[Image.open(self.folder / part["image"])], return_tensors="pt")
                pixels.append(done["pixel_values"])
                grids.append(done["image_grid_thw"])
                tokens = int(grids[-1].prod()) // 4
                text += "<|vision_start|>" + "<|image_pad|>" * tokens + "<|vision_end|>"
            text += IM_END
            if message["role"] == "assistant":
                learned.append((begin, len(text)))
            text += "\n"
        encoded = self.tokenizer(text, return_offsets_mapping=True, add_special_tokens=False)
        ids = torch.tensor([encoded["input_ids"]])
        rows = [i - 1 for i, (begin, end) in enumerate(encoded["offset_mapping"]) if any(a <= begin and end <= b for a, b in learned)]
        inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        if pixels:
            inputs["pixel_values"] = torch.cat(pixels).to(dtype)
            inputs["image_grid_thw"] = torch.cat(grids)
            inputs["mm_token_type_ids"] = (ids == 373).long()
        return inputs, torch.tensor(rows, dtype=torch.long)


def sample_order(size, seed, count):
    probe = pathlib.Path(os.environ.get("PARVL_BUILD", PARVL.parent)) / "probes" / "train_order_probe"
    return [int(i) for i in subprocess.run([probe, str(size), str(seed), str(count)], capture_output=True, text=True, check=True).stdout.split()]


def batch_loss(model, batch, dtype):
    """Mean cross-entropy over the learned tokens of the batch, and their number."""
    count, loss = sum(len(rows) for _, rows in batch), 0
    for inputs, rows in batch:
        if len(rows) == 0:
            continue
        logits = model(**inputs).logits[0]
        assert logits.dtype == dtype
        loss = loss + torch.nn.functional.cross_entropy(logits[rows], inputs["input_ids"][0][rows + 1], reduction="sum")
    return loss / count, count


def parvl_train(recipe, *settings):
    command = [PARVL, "train", "--json", "--config", recipe]
    for setting in settings:
        command += ["--set", setting]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    if done.returncode != 0:
        raise AssertionError(f"parvl train {settings}: {done.stderr}")
    return [json.loads(line) for line in done.stdout.splitlines()]


def reference_model(family, folder, dtype):
    """The directory's model as `parvl train` sees it, in the dtype."""
    model = type(make_model(family)).from_pretrained(folder, dtype=dtype).train()
    if dtype == torch.float64:
        return tiny_models.as_double(model)
    model.set_attn_implementation("eager")
    return model
