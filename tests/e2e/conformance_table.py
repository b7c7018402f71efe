"""The contract of the HTTP side as a table: every endpoint and field, values that are taken and refused, and what they do.

Words of a row: what is asked → the status, the error's `param` and `code`, or what must hold of the answer. conformance.py and
conformance_forms.py run the rows against a server with the example model. A new field gets its rows here: conformance_contract.py
fails while one that the code reads, or that the contract names, has none.
"""
from serve_common import ask, data_uri, png
from tool_models import TOOL_CALL, TOOLS

QUESTION = ask("what color is the shape?")
PICTURE = ask("what color is the shape?", data_uri(png()))
BIG = 10**30
WORDS = ["hot", [], {}]  # what no number may be
NO_WHOLE = [1.5, "5", [], {}, True]
HUGE_PROMPT = ask("word " * 100_000)


def schema_form(schema):
    return {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}


def function(name, parameters=None):
    return {"type": "function", "function": {"name": name} | ({} if parameters is None else {"parameters": parameters})}


COLOR = {"type": "object", "properties": {"color": {"enum": ["red", "green"]}, "count": {"type": "integer", "minimum": 1, "maximum": 9}},
         "required": ["color", "count"]}
NO_SCHEMA = [5, "x", [], {"type": "a kind nobody knows"}, {"not": {}}, {"type": "string", "pattern": "("}]

# field: (values that are taken, values that are refused with 400 naming the field). null is as if it were left out.
COMMON = {
    "model": (["tiny", None], [5, []]),
    "stream": ([False, None], ["yes", 1, []]),
    "stream_options": ([None], [{}, {"include_usage": True}, 5, []]),  # of a stream alone; conformance.py has the streams
    "max_tokens": ([1, 7, 100_000, None], [0, -1, *NO_WHOLE]),
    "temperature": ([0, 0.5, 2, None], [-0.1, 2.1, BIG, *WORDS]),
    "top_p": ([0.1, 1, None], [0, -1, 1.1, *WORDS]),
    "top_k": ([0, -1, 1, 40, None], [-2, *NO_WHOLE]),
    "min_p": ([0, 0.3, 1, None], [-0.1, 1.1, *WORDS]),
    "seed": ([0, 7, -7, 2**63, None], [1.5, "x", [], BIG]),
    "stop": (["zzz", ["zzz", "yyy"], [], None], [5, [5], {}, ["x"] * 17, "x" * 2000]),
    "stop_token_ids": ([[1], [], None], [5, ["x"], [1.5], [-1], [10**9]]),
    "n": ([1, 3, None], [0, -1, 129, *NO_WHOLE]),
    "presence_penalty": ([-2, 0, 2, None], [-2.1, 2.1, *WORDS]),
    "frequency_penalty": ([-2, 0, 2, None], [-2.1, 2.1, *WORDS]),
    "repetition_penalty": ([0.5, 1, 1.5, None], [0, -1, 11, *WORDS]),
    "logit_bias": ([{}, {"5": 1.5, "6": -100}, None], [5, [], {"a": 1}, {"5": "x"}, {"5": 101}, {"999999999": 1}]),
    "ignore_eos": ([True, False, None], ["x", 1, []]),
    "min_tokens": ([0, 2, None], [-1, 6, *NO_WHOLE]),
    "priority": ([0, -5, 5, None], [2**40, *NO_WHOLE]),
    "cache_salt": (["a tenant", None], ["", 5, []]),
    "response_format": ([{"type": "text"}, {"type": "json_object"}, schema_form(COLOR), schema_form({}), None],
                        [5, "json_object", [], {}, {"type": 5}, {"type": "no such type"}, {"type": "json_schema"},
                         {"type": "json_schema", "json_schema": 5}, {"type": "json_schema", "json_schema": {"name": "x"}},
                         *map(schema_form, NO_SCHEMA)]),
    "structured_outputs": ([{}, {"json": COLOR}, {"json_object": True}, {"regex": "[a-c]{1,3}"}, {"choice": ["x", "y"]}, None],
                           [5, [], {"json": 5}, {"json": "{"}, {"regex": 5}, {"regex": "("}, {"choice": []}, {"choice": [""]},
                            {"choice": "x"}, {"grammar": "x"}, {"json": COLOR, "regex": "x"}]),
    "guided_json": ([COLOR, '{"type": "boolean"}', None], ["{", *(schema for schema in NO_SCHEMA if schema != "x")]),
    "some_new_field": ([{"x": [1]}, "y", None], []),
}
CHAT = COMMON | {
    "max_completion_tokens": ([1, 7, None], [0, -1, *NO_WHOLE]),
    "logprobs": ([True, False, None], [3, "x", []]),
    "top_logprobs": ([0, 1, 20, None], [-1, 21, *NO_WHOLE]),
    "messages": ([QUESTION, PICTURE, [{"role": "system", "content": "s"}, *QUESTION], [{"role": "developer", "content": "s"}, *QUESTION]],
                 [5, [], {}, None, HUGE_PROMPT]),
    "mm_processor_kwargs": ([{}, {"max_pixels": 4096}, {"min_pixels": None}, None], [5, [], {"max_pixels": 0}, {"max_pixels": "x"},
                                                                                      {"other": 1}, {"min_pixels": 9000, "max_pixels": 10}]),
    "tools": ([[], None], [5, "x", {}, TOOLS]),  # the example model's chat template knows none
    "tool_choice": (["none", "auto", None], [5, [], {}, "required", "perhaps", {"type": "function", "function": {"name": "now"}}]),
    "parallel_tool_calls": ([True, False, None], ["x", 1, []]),
    "functions": ([[], None], [[{"name": "f"}]]),
    "function_call": (["none", "auto", None], ["f", {"name": "f"}]),
    "modalities": ([["text"], None], [["audio"], 5]),
}
COMPLETION = COMMON | {
    "logprobs": ([0, 3, None], [-1, 21, *NO_WHOLE]),
    "prompt": (["hi", ["hi", "there"], [1, 2, 3], [[1, 2], [3]]], [5, [], {}, None, "", [1.5], [-1], [10**9], ["a"] * 129, "word " * 100_000]),
    "echo": ([True, False, None], [5, "x", []]),
    "suffix": (["", None], [5, [], "the end"]),  # the example model's tokenizer has no fill-in tokens
    "best_of": ([1, None], ["x", []]),
}

# What must be beside a field for its values to be taken.
BESIDE = {"mm_processor_kwargs": {"messages": PICTURE}, "top_logprobs": {"logprobs": True}}

# Answers of a form: (what is asked, its fields, what the answer must be: a JSON schema, or a pattern as a text).
FORMS = [
    ("any object", {"response_format": {"type": "json_object"}}, {"type": "object"}),
    ("a schema", {"response_format": schema_form(COLOR)}, COLOR | {"additionalProperties": False}),
    ("one of a list", {"response_format": schema_form({"enum": ["red", 5, None]})}, {"enum": ["red", 5, None]}),
    ("numbers", {"response_format": schema_form({"type": "array", "items": {"type": "integer"}, "minItems": 2, "maxItems": 2})},
     {"type": "array", "items": {"type": "integer"}, "minItems": 2, "maxItems": 2}),
    ("whatever else is asked", {"response_format": schema_form({"type": "boolean"}), "min_tokens": 30, "ignore_eos": True}, {"type": "boolean"}),
    ("structured_outputs json", {"structured_outputs": {"json": COLOR}}, COLOR),
    ("structured_outputs json as a text", {"structured_outputs": {"json": '{"type": "null"}'}}, {"type": "null"}),
    ("structured_outputs json_object", {"structured_outputs": {"json_object": True}}, {"type": "object"}),
    ("structured_outputs regex", {"structured_outputs": {"regex": "[a-c]{2}-[0-9]"}}, "[a-c]{2}-[0-9]"),
    ("structured_outputs choice", {"structured_outputs": {"choice": ["left", "right"]}}, "left|right"),
    ("guided_json", {"guided_json": {"type": "boolean"}}, {"type": "boolean"}),
]

# Calls, of a model whose template knows them and calls several: (what is asked, fields beside `tools`, the functions that may be
# called, the number of calls (None: one or more)). An empty set of functions: the answer is text.
NOW = {"type": "function", "function": {"name": "now"}}
BEGUN = {"logit_bias": {str(TOOL_CALL): 100}}  # what the model writes begins a call
CALLS = [
    ("required", {"tool_choice": "required"}, {"get_weather", "now"}, None),
    ("required, one", {"tool_choice": "required", "parallel_tool_calls": False}, {"get_weather", "now"}, 1),
    ("required, several allowed", {"tool_choice": "required", "parallel_tool_calls": True}, {"get_weather", "now"}, None),
    ("one function", {"tool_choice": NOW}, {"now"}, 1),
    ("auto, a call begun", {"tool_choice": "auto", "parallel_tool_calls": False, **BEGUN}, {"get_weather", "now"}, 1),
    ("left out, a call begun", {"parallel_tool_calls": False, **BEGUN}, {"get_weather", "now"}, 1),
    ("auto, no call begun", {"tool_choice": "auto", "logit_bias": {str(TOOL_CALL): -100}}, set(), 0),
    ("none, a call begun", {"tool_choice": "none", **BEGUN}, set(), 0),
    ("none beside a form", {"tool_choice": "none", "response_format": schema_form({"type": "boolean"})}, set(), 0),
]
# (fields, the refusal's `param`)
CALLS_REFUSED = [
    *(({"tools": tools}, "tools") for tools in (
        [5], [{}], [{"type": "function"}], [{"type": "tool", "function": {"name": "f"}}], [function("")], [function("a b")], [function(5)],
        [function("f" * 65)], [function("f", 5)], [function("f", {"type": "string"})], [function("f", {"properties": {"a": {"not": {}}}})],
        [function("f"), function("f")], [function(f"f{i}") for i in range(129)])),
    *(({"tools": TOOLS, "tool_choice": choice}, "tool_choice") for choice in (
        5, [], {}, "perhaps", {"type": "function"}, {"type": "function", "function": {"name": 5}}, {"type": "function", "function": {"name": "other"}})),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"tools": [], "tool_choice": "required"}, "tool_choice"),
    ({"tools": TOOLS, "parallel_tool_calls": "x"}, "parallel_tool_calls"),
    ({"tools": TOOLS, "structured_outputs": {"regex": "x"}}, "structured_outputs"),
]


def called(role="assistant", **call):
    return {"role": role, "content": None if role == "assistant" else "x", "tool_calls": [
        {"id": "call_1", "type": "function", "function": {"name": "now", "arguments": "{}"} | call}]}


TOOL_ANSWER = {"role": "tool", "tool_call_id": "call_1", "content": "noon"}
# Messages about calls, of the same model: (what it is, messages, None or the `param` of the refusal)
CALLS_IN_MESSAGES = [
    ("a call and its answer", [*QUESTION, called(), TOOL_ANSWER], None),
    ("arguments that are empty", [*QUESTION, called(arguments=""), TOOL_ANSWER], None),
    ("an empty list of calls", [*QUESTION, {"role": "assistant", "content": "x", "tool_calls": []}], None),
    ("an answer without its call's id", [*QUESTION, called(), {"role": "tool", "content": "noon"}], "messages[2].tool_call_id"),
    ("calls of the user", [called("user")], "messages[0].tool_calls"),
    ("calls that are no list", [*QUESTION, {"role": "assistant", "tool_calls": 5}], "messages[1].tool_calls"),
    ("a call without a name", [*QUESTION, called(name=None)], "messages[1].tool_calls"),
    ("arguments that are no text", [*QUESTION, called(arguments={})], "messages[1].tool_calls"),
    ("arguments that are no JSON", [*QUESTION, called(arguments="{")], "messages[1].tool_calls"),
    ("arguments that are no object", [*QUESTION, called(arguments="5")], "messages[1].tool_calls"),
    ("the older form", [*QUESTION, {"role": "assistant", "function_call": {"name": "now"}}], "messages[1].function_call"),
]


# (what it is, messages, status, words of the refusal's `param` or message)
def part(**fields):
    return [{"role": "user", "content": [fields]}]


MESSAGES = [
    ("no role", [{"content": "x"}], 400, "messages[0].role"),
    ("an unknown role", [{"role": "judge", "content": "x"}], 400, "messages[0].role"),
    ("no content", [{"role": "user"}], 400, "messages[0].content"),
    ("content of another type", [{"role": "user", "content": 5}], 400, "messages[0].content"),
    ("a message that is no object", ["x"], 400, "messages[0]"),
    ("a part without a type", part(text="x"), 400, "messages[0].content[0].type"),
    ("a part of an unknown type", part(type="smell"), 400, "messages[0].content[0].type"),
    ("a text part without text", part(type="text"), 400, "messages[0].content[0].text"),
    ("an image part without a URL", part(type="image_url"), 400, "messages[0].content[0].image_url"),
    ("audio, which the model lacks", part(type="input_audio", input_audio={"data": "", "format": "wav"}), 400, "messages[0].content[0]"),
    ("video, which the model lacks", part(type="video_url", video_url={"url": "data:,x"}), 400, "messages[0].content[0]"),
    ("a tool's answer, which the template lacks", [*QUESTION, TOOL_ANSWER], 400, "messages[1]"),
    ("calls, which the template lacks", [*QUESTION, called()], 400, "messages[1]"),
    ("too many images", ask("x", *[data_uri(png(8, 8))] * 4), 400, "messages"),
    ("an image that is none", ask("x", data_uri(b"text")), 422, "messages[0].content[0].image_url"),
    ("the second image cut", ask("x", data_uri(png()), data_uri(png()[:40])), 422, "messages[0].content[1].image_url"),
    ("broken base64", ask("x", "data:image/png;base64,!!!"), 422, "messages[0].content[0].image_url"),
    ("a file outside", ask("x", "file:///etc/passwd"), 400, "messages[0].content[0].image_url"),
    ("a private address", ask("x", "http://127.0.0.1:1/a.png"), 400, "messages[0].content[0].image_url"),
    ("a scheme nobody knows", ask("x", "ftp://host.test/a"), 400, "messages[0].content[0].image_url"),
]

# method, path, body, status, error code (None: no error), headers that must be there
ENDPOINTS = [
    ("GET", "/livez", None, 200, None, ["Content-Type"]),
    ("GET", "/readyz", None, 200, None, []),
    ("GET", "/health", None, 200, None, []),
    ("GET", "/version", None, 200, None, []),
    ("GET", "/metrics", None, 200, None, []),
    ("GET", "/v1/models", None, 200, None, []),
    ("GET", "/v1/models/tiny", None, 200, None, []),
    ("GET", "/v1/models/other", None, 404, "model_not_found", []),
    ("GET", "/v1/models?x=y", None, 200, None, []),
    ("GET", "/", None, 404, "route_not_found", []),
    ("GET", "/v1/nothing", None, 404, "route_not_found", []),
    ("HEAD", "/livez", None, 200, None, []),
    ("HEAD", "/v1/models", None, 200, None, []),
    ("HEAD", "/v1/chat/completions", None, 405, None, ["Allow"]),
    ("OPTIONS", "/v1/chat/completions", None, 204, None, ["Allow"]),
    ("OPTIONS", "/livez", None, 204, None, ["Allow"]),
    ("OPTIONS", "*", None, 204, None, ["Allow"]),
    ("GET", "/v1/chat/completions", None, 405, "method_not_allowed", ["Allow"]),
    ("GET", "/v1/completions", None, 405, "method_not_allowed", ["Allow"]),
    ("GET", "/tokenize", None, 405, "method_not_allowed", ["Allow"]),
    ("POST", "/livez", {}, 405, "method_not_allowed", ["Allow"]),
    ("POST", "/v1/models", {}, 405, "method_not_allowed", ["Allow"]),
    ("DELETE", "/v1/models/tiny", None, 405, "method_not_allowed", ["Allow"]),
    ("PUT", "/v1/chat/completions", {}, 405, "method_not_allowed", ["Allow"]),
    ("BREW", "/livez", None, 501, "unknown_method", []),
    ("POST", "/v1/chat/completions", {"messages": QUESTION, "model": "other"}, 404, "model_not_found", []),
    ("POST", "/v1/completions", {"prompt": "x", "model": "other"}, 404, "model_not_found", []),
    ("POST", "/v1/chat/completions", {}, 400, None, []),
    ("POST", "/v1/completions", {}, 400, None, []),
    ("POST", "/v1/chat/completions", "x" * 2_000_001, 413, "body_too_large", []),
    ("POST", "/tokenize", {"prompt": "hi"}, 200, None, []),
    ("POST", "/tokenize", {"messages": QUESTION}, 200, None, []),
    ("POST", "/tokenize", {"messages": PICTURE}, 200, None, []),
    ("POST", "/tokenize", {"prompt": "hi", "add_special_tokens": False}, 200, None, []),
    ("POST", "/tokenize", {}, 400, None, []),
    ("POST", "/tokenize", {"prompt": "hi", "messages": QUESTION}, 400, None, []),
    ("POST", "/tokenize", {"prompt": 5}, 400, None, []),
    ("POST", "/tokenize", {"prompt": "hi", "model": "other"}, 404, "model_not_found", []),
    ("POST", "/detokenize", {"tokens": [1, 2]}, 200, None, []),
    ("POST", "/detokenize", {"tokens": []}, 200, None, []),
    ("POST", "/detokenize", {}, 400, None, []),
    ("POST", "/detokenize", {"tokens": [10**9]}, 400, None, []),
    ("POST", "/detokenize", {"tokens": "x"}, 400, None, []),
    ("POST", "/detokenize", {"tokens": [1], "model": "other"}, 404, "model_not_found", []),
]
# Bodies that are no request.
BAD_BODIES = ["", "{", "null", "[]", '"x"', "5", '{"messages": ', "\x00", "{" * 10_000, '{"a": 1, "a": 2', "\ufeff{}"]
