"""What the house's rules say about the text of files. Each check takes a tree {path: text} and returns problems, one a line."""
import ast
import collections
import posixpath
import re

# Room → what it may include beside itself and base; an entry with a slash is a file or the beginning of a path.
MAY_INCLUDE = {
    "base": [],
    "plan": [],
    "sched": [],
    "comm": ["plan/model_spec.h"],  # for DType
    "kernels": [],
    "media": [],
    "elastic": ["plan", "sched"],
    "sim": ["plan", "sched", "elastic"],
    "nn": ["kernels", "comm", "plan/cost"],
    "models": ["nn"],
    "exec": ["models", "nn", "sched", "comm", "kernels", "media"],
    "train": ["models", "nn", "kernels", "comm", "plan", "media"],
    "serve": ["sched", "elastic", "media", "comm/transfer", "exec/engine.h", "exec/engine_load.h", "exec/encode_engine.h"],
    "launch": ["comm", "elastic"],
}
# Where torch's headers may be included: (room, kind of file).
TORCH_ANYWHERE = {"nn", "models"}
TORCH_IN_SOURCES = {"exec", "train", "comm"}  # in comm only the folders of a backend

MAX_LINES = {".cc": 400, ".cu": 400, ".py": 400, ".h": 150}
MAX_FUNCTION_LINES = 70

INCLUDE = re.compile(r'^\s*#\s*include\s+(?:"([^"]+)"|<([^>]+)>)', re.MULTILINE)
TORCH_HEADER = re.compile(r"^(torch|ATen|c10|caffe2)/")
CPP = (".cc", ".cu", ".h")

IMPURE = re.compile(
    r"\b(?:std::chrono::)?(?:steady|system|high_resolution|utc|file)_clock::now\b|\b(?:secure_)?getenv\s*\(|\bget_env\s*\(|"
    r"\bs?rand(?:om)?\s*\(\s*\)|\bsrand\s*\(|\brandom_device\b|\bmt19937|\bclock_gettime\b|\bgettimeofday\b|"
    r"\btime\s*\(\s*(?:NULL|nullptr|0)\s*\)|\b(?:at|torch)::(?:rand\w*|normal|bernoulli|multinomial)\b|\bRealClock\b")

# A path that only one machine has, and hosts that files may name. Package indexes are the user's own setting.
MACHINE_PATH = re.compile(r"(?<![\w.}$/])/(?:work|home|root|Users|mnt)/[\w.-]+")
URL = re.compile(r"https?://([\w.-]*\w)")
URL_HOSTS = re.compile(r"^([A-Z]+|localhost|127\.0\.0\.1|0\.0\.0\.0|\d+\.\d+\.\d+\.\d+|(?:[\w-]+\.)*(?:example|invalid|test)(?:\.com|\.org)?|"
                       r"github\.com|huggingface\.co|arxiv\.org|opensource\.org|www\.apache\.org|json-schema\.org|www\.w3\.org)$")


def extension(path):
    return posixpath.splitext(path)[1]


def room_of(path):
    parts = path.split("/")
    return parts[1] if parts[0] == "parvl" and len(parts) > 2 else None


def includes(text):
    for match in INCLUDE.finditer(text):
        yield match.group(1) or match.group(2), text.count("\n", 0, match.start()) + 1


def allowed_include(room, target):
    inside = target.removeprefix("parvl/")
    if inside.split("/")[0] in (room, "base"):
        return True
    for entry in MAY_INCLUDE[room]:
        if inside == entry or inside.startswith(entry + "/"):
            return True
        if "/" in entry and not entry.endswith(".h") and inside.startswith(entry):
            return True  # plan/cost covers plan/cost.h, plan/cost_model.h and plan/cost/
    return False


def include_directions(tree):
    for path, text in tree.items():
        room = room_of(path)
        if extension(path) not in CPP or room is None:
            continue
        if room not in MAY_INCLUDE:
            yield f"{path}: parvl/{room} is not a room of the house"
            continue
        for target, line in includes(text):
            if target.startswith("parvl/") and not allowed_include(room, target):
                may = ", ".join(["base"] + MAY_INCLUDE[room])
                yield f"{path}:{line}: {room} may not include {target} (it may include {may})"
            if TORCH_HEADER.match(target) and not torch_allowed(path, room):
                yield f"{path}:{line}: torch's headers do not belong here"


def torch_allowed(path, room):
    if room == "comm":
        return not path.endswith(".h") and path.count("/") > 2
    return room in TORCH_ANYWHERE or (room in TORCH_IN_SOURCES and not path.endswith(".h"))


def blank_out(text):
    """The code with comments and literals blanked, lines kept."""
    pattern = re.compile(r'R"(?P<d>[^(\s]{0,16})\(.*?\)(?P=d)"|//[^\n]*|/\*.*?\*/|"(?:\\.|[^"\\\n])*"|(?<![\w])\'(?:\\.|[^\'\\\n])+\'',
                         re.DOTALL)
    return pattern.sub(lambda m: re.sub(r"[^\n]", " ", m.group()), text)


NOT_A_FUNCTION = re.compile(r"\b(?:namespace|class|struct|union|enum|extern)\b[^()]*$|=\s*$|^\s*$")


def cpp_functions(text):
    """(first line, lines) of every function body that stands in a namespace or class."""
    code = re.sub(r"^[ \t]*#(?:[^\n]*\\\n)*[^\n]*", lambda m: re.sub(r"[^\n]", " ", m.group()), blank_out(text), flags=re.MULTILINE)
    stack, head_start = [], 0
    for at, char in enumerate(code):
        if char == "{":
            head = code[head_start:at]
            outer = all(kind == "scope" for kind, _ in stack)
            is_function = outer and "(" in head and not NOT_A_FUNCTION.search(head)
            first = head_start + len(head) - len(head.lstrip())
            stack.append(("function" if is_function else "scope" if outer and not head.rstrip().endswith("=") else "block", first))
            head_start = at + 1
        elif char == "}" and stack:
            kind, first = stack.pop()
            if kind == "function":
                begin = code.count("\n", 0, first) + 1
                yield begin, code.count("\n", 0, at) + 2 - begin
            head_start = at + 1
        elif char == ";":
            head_start = at + 1


def python_functions(text):
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            yield node.lineno, node.end_lineno - node.lineno + 1


def sizes(tree):
    """{name: (lines, limit)} of everything over its limit; a function is named FILE:function at its longest."""
    over = {}
    for path, text in tree.items():
        limit = MAX_LINES.get(extension(path))
        if limit is None:
            continue
        lines = text.count("\n")
        if lines > limit:
            over[path] = (lines, limit)
        functions = python_functions(text) if path.endswith(".py") else cpp_functions(text)
        longest, line = max(((length, first) for first, length in functions), default=(0, 0))
        if longest > MAX_FUNCTION_LINES:
            over[f"{path} (function at line {line})"] = (longest, MAX_FUNCTION_LINES)
    return over


def size_problems(tree, exceptions):
    """`exceptions`: {path or "path (function)": lines}. They only shrink: one that is not needed, or too high, is a problem."""
    over = {re.sub(r" \(function at line \d+\)", " (function)", name): (name, *value) for name, value in sizes(tree).items()}
    for name, (where, lines, limit) in over.items():
        if lines > exceptions.get(name, limit):
            yield f"{where}: {lines} lines, over {exceptions.get(name, limit)}"
    for name, allowed in exceptions.items():
        if name not in over:
            yield f"{name}: within the limits now; take it off the list of exceptions"
        elif over[name][1] < allowed:
            yield f"{name}: {over[name][1]} lines now; lower its exception from {allowed}"


def impurity(tree):
    for path, text in tree.items():
        if extension(path) in CPP and room_of(path) not in (None, "base"):
            for match in IMPURE.finditer(blank_out(text)):
                yield f"{path}:{text.count(chr(10), 0, match.start()) + 1}: {match.group().strip()} outside base and apps"


def machine_words(tree):
    for path, text in tree.items():
        for match in MACHINE_PATH.finditer(text):
            yield f"{path}:{text.count(chr(10), 0, match.start()) + 1}: the path {match.group()} of one machine"
        for match in URL.finditer(text):
            if not URL_HOSTS.match(match.group(1)):
                yield f"{path}:{text.count(chr(10), 0, match.start()) + 1}: names the host {match.group(1)}"


def placeholders(tree):
    """Cells of README.md's tables that wait for a figure: | EVAL_ALL |."""
    for number, line in enumerate(tree.get("README.md", "").split("\n"), 1):
        if not line.lstrip().startswith("|"):
            continue
        for cell in line.split("|"):
            if re.fullmatch(r"[A-Z][A-Z0-9]*(?:_[A-Z0-9]+)+", cell.strip()):
                yield f"README.md:{number}: the placeholder {cell.strip()} waits for its value"


def dead_files(tree):
    cmake = "\n".join(text for path, text in tree.items() if path.endswith(("CMakeLists.txt", ".cmake")))
    words = set(re.findall(r"[\w.-]+", cmake))
    included = {target for path, text in tree.items() if extension(path) in CPP for target, _ in includes(text)}
    by_name = {posixpath.basename(target) for target in included}
    imported = {name for path, text in tree.items() if path.endswith(".py")
                for name in re.findall(r"^\s*(?:import|from)\s+([\w.]+)", text, re.MULTILINE)}
    scripts = "\n".join(text for path, text in tree.items() if not path.endswith(CPP))
    for path in tree:
        name, stem = posixpath.basename(path), posixpath.splitext(posixpath.basename(path))[0]
        if path.endswith((".cc", ".cu")) and not {name, stem} & words:
            yield f"{path}: no CMakeLists.txt names it"
        # What stands in for a header that a library's own headers include.
        if path.endswith(".h") and path not in included and name not in by_name and "/standin/" not in path:
            yield f"{path}: nothing includes it"
        if path.endswith((".py", ".sh")) and path.split("/")[0] in ("tests", "tools", "bench", "examples"):
            suite = re.search(r"^import unittest", tree[path], re.MULTILINE) and path.split("/")[0:2] in (["tests", f] for f in ("parity", "e2e", "tidy"))
            if not suite and stem not in imported and scripts.count(name) - tree[path].count(name) < 1:
                yield f"{path}: nothing runs or imports it"


def headers(tree):
    for path, text in tree.items():
        if path.endswith(".h") and "#pragma once" not in text:
            yield f"{path}: has no #pragma once"
        if path.endswith(".h") and path.startswith("parvl/") and not text.startswith("//"):
            yield f"{path}: does not begin with a comment that says what it is for"


def whitespace(tree):
    for path, text in tree.items():
        for number, line in enumerate(text.split("\n"), 1):
            if line != line.rstrip() and not path.endswith(".md"):
                yield f"{path}:{number}: blanks at the end of the line"
            if re.match(r"<<<<<<< |>>>>>>> ", line):
                yield f"{path}:{number}: a merge conflict's mark"
        if text and not text.endswith("\n"):
            yield f"{path}: does not end with a line break"


TYPE = re.compile(r"^(?:struct|class|enum class|enum) (\w+)(?: final)?(?: : [^;{]*)? \{", re.MULTILINE)


def duplicated_types(tree):
    """Two types of one name in headers: whoever links both gets the constructor of one and the destructor of the other."""
    seen = collections.defaultdict(set)
    for path, text in tree.items():
        if extension(path) == ".h" and path.startswith(("parvl/", "apps/")):
            space = ""
            for line in blank_out(text).split("\n"):
                if line.startswith("namespace "):
                    space = line.split()[1] if line.split()[1] != "{" else space
                found = TYPE.match(line + "\n")
                if found:
                    seen[(space, found.group(1))].add(path)
    for (_, name), paths in seen.items():
        if len(paths) > 1:
            yield f"{', '.join(sorted(paths))}: a type named {name} in each"


def duplicated_names(tree):
    """Two files of one name in a room would confuse a reader of an error message or a stack trace."""
    seen = collections.defaultdict(list)
    for path in tree:
        if path.startswith("parvl/") and extension(path) in CPP:
            seen[(room_of(path), posixpath.basename(path))].append(path)
    for paths in seen.values():
        if len(paths) > 1:
            yield f"{', '.join(paths)}: one name twice in a room"
