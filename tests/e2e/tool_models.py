"""The example model with what it lacks for calls of tools and for filling in: chat templates of two families, added tokens."""
import json
import pathlib
import shutil

from serve_common import MODEL

HERMES = """{%- if tools %}{{ '<|im_start|>system\\nFunctions:' }}{%- for tool in tools %}{{ '\\n' + (tool | tojson) }}{%- endfor %}\
{{ '<|im_end|>\\n' }}{%- endif %}{%- for message in messages %}{%- if message.role == 'tool' %}\
{{ '<|im_start|>user\\n<tool_response>\\n' + message.content + '\\n</tool_response>' }}{%- else %}\
{{ '<|im_start|>' + message.role + '\\n' }}{%- if message.content is string %}{{ message.content }}{%- else %}\
{%- for part in message.content %}{%- if part.type == 'image' %}{{ '<|vision_start|><|image_pad|><|vision_end|>' }}{%- else %}\
{{ part.text }}{%- endif %}{%- endfor %}{%- endif %}{%- for call in message.tool_calls or [] %}{%- set call = call.function %}\
{{ '\\n' if not loop.first or message.content }}{{ '<tool_call>\\n{"name": "' + call.name + '", "arguments": ' + (call.arguments | tojson) + \
'}\\n</tool_call>' }}{%- endfor %}{%- endif %}{{ '<|im_end|>\\n' }}{%- endfor %}{%- if add_generation_prompt %}\
{{ '<|im_start|>assistant\\n' }}{%- endif %}"""
LLAMA = """{%- if tools %}{{ '<|im_start|>system\\nFunctions:' }}{%- for tool in tools %}{{ '\\n' + (tool | tojson) }}{%- endfor %}\
{{ '<|im_end|>\\n' }}{%- endif %}{%- for message in messages %}{{ '<|im_start|>' + message.role + '\\n' }}{%- if message.tool_calls %}\
{%- if message.tool_calls | length != 1 %}{{ raise_exception('one call at a time') }}{%- endif %}\
{%- set call = message.tool_calls[0].function %}{{ '{"name": "' + call.name + '", "parameters": ' + (call.arguments | tojson) + '}' }}\
{%- else %}{{ message.content }}{%- endif %}{{ '<|im_end|>\\n' }}{%- endfor %}{%- if add_generation_prompt %}\
{{ '<|im_start|>assistant\\n' }}{%- endif %}"""
TOOLS = [
    {"type": "function", "function": {"name": "get_weather", "description": "The weather", "parameters": {
        "type": "object", "properties": {"town": {"type": "string", "maxLength": 8}, "days": {"type": "integer", "minimum": 1, "maximum": 9}},
        "required": ["town", "days"]}}},
    {"type": "function", "function": {"name": "now"}},
]
# Ids that the model has weights for and no text.
TOOL_CALL = 375
ADDED = {TOOL_CALL: "<tool_call>", 376: "<|fim_prefix|>", 377: "<|fim_suffix|>", 378: "<|fim_middle|>"}


def model_with(template, folder):
    """A copy of the example model in `folder`, with this chat template and the added tokens; its path."""
    path = pathlib.Path(folder) / "model"
    shutil.copytree(MODEL, path)
    (path / "chat_template.jinja").write_text(template)
    tokenizer = json.loads((path / "tokenizer.json").read_text())
    tokenizer["added_tokens"] += [{"id": number, "content": text, "single_word": False, "lstrip": False, "rstrip": False,
                                   "normalized": False, "special": False} for number, text in ADDED.items()]
    (path / "tokenizer.json").write_text(json.dumps(tokenizer))
    return path
