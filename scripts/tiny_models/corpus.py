"""Owns the training text: Python's own documentation as documents and conversations."""

import ast
import importlib
import inspect
import random
import sysconfig
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from pydoc_data.topics import topics

Message = dict[str, str]

SKIPPED_FOLDERS = frozenset({"site-packages", "dist-packages", "test", "tests", "idlelib", "lib2to3", "pydoc_data"})
# These are written in C, so their documentation is read from the live objects.
LIVE_MODULES = (
    "builtins array atexit binascii bz2 cmath collections datetime errno fcntl functools gc grp io itertools "
    "json math marshal mmap operator os pwd re resource select signal socket string struct sys syslog "
    "termios threading time unicodedata weakref zlib"
).split()
MODULE_ALIASES = {"posixpath": "os.path", "_pydecimal": "decimal", "_pyio": "io"}
QUESTIONS = (
    "What does {name} do?",
    "What is {name}?",
    "Explain {name}.",
    "How do I use {name}?",
    "Can you explain {name} to me?",
    "Describe {name} in a few words.",
    "Please tell me about {name}.",
    "I do not understand {name}. Can you help?",
    "When would I use {name}?",
    "Help me with {name}, please.",
    "I found {name} in some code. What is it for?",
)
READING_QUESTIONS = (
    "What is this text about?\n\n{text}",
    "Read this and tell me what it describes.\n\n{text}",
    "{text}\n\nWhat does this text describe?",
    "{text}\n\nWhat is the answer to the question: what is this?",
)
SYSTEM_PROMPTS = (
    "You are a helpful assistant.",
    "You are a helpful assistant who knows the Python library.",
    "Answer the question of the user.",
    "Answer in plain words.",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """One documented thing: a module, class, function or language topic."""

    name: str
    signature: str
    text: str

    @property
    def held_out(self) -> bool:
        """Whether the subject is one of about 2 %, chosen by name, that are never trained on."""
        return zlib.crc32(self.name.encode()) % 50 == 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One training sample: a plain document or a conversation (exactly one of the two is set)."""

    document: str = ""
    messages: tuple[Message, ...] = ()


def collect_subjects() -> list[Subject]:
    """Return every documented thing of this Python's standard library, sorted by name, each text once."""
    found = sorted([*_from_source(), *_from_live_modules(), *_from_topics()], key=lambda s: (s.name, s.text))
    seen_texts: set[str] = set()
    seen_names: set[str] = set()
    subjects = []
    for subject in found:
        if len(subject.text) < 20 or subject.text in seen_texts or subject.name in seen_names:
            continue
        seen_texts.add(subject.text)
        seen_names.add(subject.name)
        subjects.append(subject)
    return subjects


def _from_source() -> Iterator[Subject]:
    root = Path(sysconfig.get_paths()["stdlib"])
    for path in sorted(root.rglob("*.py")):
        relative = path.relative_to(root)
        if SKIPPED_FOLDERS.intersection(relative.parts):
            continue
        parts = list(relative.with_suffix("").parts)
        if parts[-1] == "__init__":
            parts.pop()
        module = ".".join(parts)
        module = MODULE_ALIASES.get(module, module)
        try:
            tree = ast.parse(path.read_text("utf-8"))
        except (SyntaxError, UnicodeDecodeError):
            # The standard library ships a few files in other encodings, and templates that are not Python.
            continue
        yield from _walk(tree, module)


def _walk(node: ast.AST, name: str) -> Iterator[Subject]:
    if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
        text = ast.get_docstring(node)
        if text:
            is_function = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
            signature = f"({ast.unparse(node.args)})" if is_function else ""
            yield Subject(name=name, signature=signature, text=_tidy(text))
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield from _walk(child, f"{name}.{child.name}")


def _from_live_modules() -> Iterator[Subject]:
    for module_name in LIVE_MODULES:
        module = importlib.import_module(module_name)
        prefix = "" if module_name == "builtins" else f"{module_name}."
        for name, value in sorted(vars(module).items()):
            if name.startswith("_") or not (inspect.isclass(value) or inspect.isroutine(value)):
                continue
            yield from _live_subject(f"{prefix}{name}", value)
            if inspect.isclass(value) and not issubclass(value, BaseException):
                for method_name, method in sorted(vars(value).items()):
                    if not method_name.startswith("_"):
                        yield from _live_subject(f"{prefix}{name}.{method_name}", method)


def _live_subject(name: str, value: object) -> Iterator[Subject]:
    text = getattr(value, "__doc__", None)
    if isinstance(text, str):
        yield Subject(name=name, signature="", text=_tidy(inspect.cleandoc(text)))


def _from_topics() -> Iterator[Subject]:
    for title, text in sorted(topics.items()):
        for number, chunk in enumerate(_chunks(_tidy(text), 1800)):
            suffix = f" (part {number + 1})" if number else ""
            yield Subject(name=f"the topic {title.lower()}{suffix}", signature="", text=chunk)


def _tidy(text: str) -> str:
    lines = [line.rstrip() for line in text.replace("\r", "").expandtabs(4).split("\n")]
    return "\n".join(lines).strip()


def _chunks(text: str, limit: int) -> Iterator[str]:
    """Cut `text` between paragraphs into pieces of at most about `limit` characters."""
    piece: list[str] = []
    for paragraph in text.split("\n\n"):
        if piece and sum(map(len, piece)) + len(paragraph) > limit:
            yield "\n\n".join(piece)
            piece = []
        piece.append(paragraph)
    if piece:
        yield "\n\n".join(piece)


def answer_of(subject: Subject, limit: int = 600) -> str:
    """Return the first paragraphs of a subject's text, as an assistant's answer."""
    first = next(_chunks(subject.text, limit))
    if len(first) <= limit:
        return first
    return first[:limit].rsplit("\n", 1)[0].rstrip()


def make_samples(subjects: list[Subject], rng: random.Random) -> list[Sample]:
    """Return one shuffled epoch: each subject as a document and as a question, and some longer conversations."""
    samples = [Sample(document=f"{s.name}{s.signature}\n\n{s.text}") for s in subjects]
    samples += [Sample(messages=_conversation([s], rng)) for s in subjects]
    shuffled = rng.sample(subjects, len(subjects))
    position = 0
    while position < len(shuffled):
        num_turns = rng.randint(2, 6)
        samples.append(Sample(messages=_conversation(shuffled[position : position + num_turns], rng)))
        position += 2 * num_turns
    long_subjects = [s for s in subjects if len(s.text) > 900]
    samples += [Sample(messages=_reading(s, rng)) for s in long_subjects]
    rng.shuffle(samples)
    return samples


def _conversation(subjects: list[Subject], rng: random.Random) -> tuple[Message, ...]:
    messages = _maybe_system(rng)
    for subject in subjects:
        messages.append({"role": "user", "content": rng.choice(QUESTIONS).format(name=subject.name)})
        messages.append({"role": "assistant", "content": answer_of(subject)})
    return tuple(messages)


def _reading(subject: Subject, rng: random.Random) -> tuple[Message, ...]:
    messages = _maybe_system(rng)
    text = subject.text[:2600]
    messages.append({"role": "user", "content": rng.choice(READING_QUESTIONS).replace("{text}", text)})
    messages.append({"role": "assistant", "content": f"This is about {subject.name}. {answer_of(subject, 300)}"})
    return tuple(messages)


def _maybe_system(rng: random.Random) -> list[Message]:
    if rng.random() < 0.7:
        return []
    return [{"role": "system", "content": rng.choice(SYSTEM_PROMPTS)}]
