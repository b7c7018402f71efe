"""What the tests of generation share: transformers' answer for a directory, and pictures."""
import numpy as np
import torch
import transformers
from PIL import Image
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

import tiny_models

TOKENS = 24


class Qwen2VlProcessor(transformers.Qwen2VLProcessor):
    """The processor needs torchvision for its video half alone."""

    def check_argument_for_proper_class(self, name, argument):
        pass


class Qwen25VlProcessor(transformers.Qwen2_5_VLProcessor):
    def check_argument_for_proper_class(self, name, argument):
        pass


PROCESSORS = {"qwen2_vl": Qwen2VlProcessor, "qwen2_5_vl": Qwen25VlProcessor}


class Reference:
    """A directory read by transformers."""

    def __init__(self, family, path, dtype=torch.float32):
        model_class = type(tiny_models.make(family))
        self.model = model_class.from_pretrained(path, dtype=dtype).eval()
        tokenizer = transformers.AutoTokenizer.from_pretrained(path)
        self.processor = tokenizer
        if family in PROCESSORS:
            images = Qwen2VLImageProcessorPil.from_pretrained(path)
            self.processor = PROCESSORS[family](image_processor=images, tokenizer=tokenizer, chat_template=tokenizer.chat_template)

    def inputs(self, messages):
        if not isinstance(self.processor, transformers.PreTrainedTokenizerBase):
            messages = [{**m, "content": [{**p, "image": Image.open(p["image"]).convert("RGB")} if p["type"] == "image" else p
                                          for p in m["content"]]} for m in messages]
        else:
            messages = [{**m, "content": "".join(p["text"] for p in m["content"])} for m in messages]
        return self.processor.apply_chat_template(messages, add_generation_prompt=True, tokenize=True, return_dict=True,
                                                  return_tensors="pt")

    @torch.no_grad()
    def generate(self, messages, tokens=TOKENS, end=None):
        """Prompt ids, new ids, log-probabilities and margins; greedy; `end` is the token that ends the text."""
        inputs = self.inputs(messages)
        out = self.model.generate(**inputs, do_sample=False, max_new_tokens=tokens, eos_token_id=end, pad_token_id=0,
                                  output_logits=True, return_dict_in_generate=True)
        prompt = inputs["input_ids"][0].tolist()
        ids = out.sequences[0, len(prompt):].tolist()
        logits = torch.cat(out.logits).double()
        top = logits.topk(2, -1).values
        chosen = torch.log_softmax(logits, -1)[range(len(ids)), ids]
        return prompt, ids, chosen.tolist(), (top[:, 0] - top[:, 1]).tolist()

    @torch.no_grad()
    def logits(self, messages):
        return self.model(**self.inputs(messages)).logits[0].double()


def picture(path, size, seed):
    """A smooth random picture, so that resizing keeps its content."""
    rng = np.random.default_rng(seed)
    coarse = Image.fromarray(rng.integers(0, 256, (5, 4, 3), dtype=np.uint8))
    coarse.resize(size, Image.Resampling.BICUBIC).save(path)
    return str(path)


def text(words):
    return {"type": "text", "text": words}


def image(path):
    return {"type": "image", "image": path}
