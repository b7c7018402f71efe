"""The contract of the HTTP side as a table: every endpoint and field, values that are taken and refused, and what they do.

Words of a row: what is asked → the status, the error's `param` and `code`, or what must hold of the answer. conformance.py runs
the rows against a server with the example model. A new field gets its rows here.
"""
from serve_common import ask, data_uri, png

QUESTION = ask("what color is the shape?")
PICTURE = ask("what color is the shape?", data_uri(png()))
BIG = 10**30
WORDS = ["hot", [], {}]  # what no number may be
NO_WHOLE = [1.5, "5", [], {}, True]
HUGE_PROMPT = ask("word " * 100_000)

# field: (values that are taken, values that are refused with 400 naming the field). null is as if it were left out.
COMMON = {
    "model": (["tiny", None], [5, []]),
    "stream": ([False, None], ["yes", 1, []]),
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
    "response_format": ([{"type": "text"}, None], [5, {}, {"type": 5}, {"type": "no such type"}]),
    "some_new_field": ([{"x": [1]}, "y", None], []),
}
CHAT = COMMON | {
    "max_completion_tokens": ([1, 7, None], [0, -1, *NO_WHOLE]),
    "logprobs": ([True, False, None], [3, "x", []]),
    "messages": ([QUESTION, PICTURE, [{"role": "system", "content": "s"}, *QUESTION], [{"role": "developer", "content": "s"}, *QUESTION]],
                 [5, [], {}, None, HUGE_PROMPT]),
    "mm_processor_kwargs": ([{}, {"max_pixels": 4096}, {"min_pixels": None}, None], [5, [], {"max_pixels": 0}, {"max_pixels": "x"},
                                                                                      {"other": 1}, {"min_pixels": 9000, "max_pixels": 10}]),
    "tools": ([[], None], [5, "x", {}]),
    "tool_choice": (["none", None], []),
    "modalities": ([["text"], None], [["audio"], 5]),
}
COMPLETION = COMMON | {
    "logprobs": ([0, 3, None], [-1, 21, *NO_WHOLE]),
    "prompt": (["hi", ["hi", "there"], [1, 2, 3], [[1, 2], [3]]], [5, [], {}, None, "", [1.5], [-1], [10**9], ["a"] * 129, "word " * 100_000]),
    "echo": ([False, None], [5, "x"]),
    "suffix": (["", None], [5, []]),
    "best_of": ([1, None], ["x", []]),
}

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
