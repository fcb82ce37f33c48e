"""Source and documentation use plain technical English.

Every docstring, comment, message and page is searched for the phrases of a list, each with
the words to use instead. Code in backticks or fenced blocks is not prose.
"""

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
MAX_COLUMNS = 105
SUFFIXES = {".py", ".sql", ".lua", ".md"}

FOLDERS = ("src", "docs", "bench", "examples", "tests")

# Decision records quote earlier words, and this file lists them.
UNCHECKED = {ROOT / "docs" / "decisions", Path(__file__)}

# A phrase (a regular expression in which a space matches any white space) and what to write.
PHRASES = {
    r"(?:tells?|says?) whether": "return whether, is whether",
    r"for ever": "forever, indefinitely",
    r"anew": "again",
    r"meanwhile": "in the meantime, while …",
    r"at last": "finally",
    r"just now": "currently",
    r"whoever": "the caller, the process that …",
    r"somebody|nobody|everybody": "another process, no process, every caller",
    r"whole numbers?": "int",
    r"(?:an?|non-empty|no) texts?(?= (?:that|of|such|with|which|is|or|and)\b|[,.;:)]|$)": "string",
    r"(?<!there\s)(?:is|are) no(?= )(?! (?:longer|more|less|fewer|later|earlier|better|safer)\b)": (
        "is not a …, there is no …"
    ),
    r"of before": "previous",
    r"(?:go|goes|going|went|gone) on": "continue, resume",
    r"(?:puts?|putting|laid|lays?|laying) to (?:rest|sleep)": "suspend, settle",
    r"lies|lying": "is stored, is",
    r"(?:it|run|which|that) rests": "is suspended, is settled",
    r"falls? asleep|fell asleep": "is suspended",
    r"in (?:this|each|its|another|a(?: new)?) life": "in this process, in each attempt",
    r"(?<!e-)mails?": "message (or email)",
    r"letters?": "message",
    r"(?:is|was|be|are|were) away": "unavailable",
    r"(?:give|gives|given|gave|giving) back": "return, release",
    r"is said": "is logged, is reported",
    r"hears? of": "is notified of",
    r"also (?:when|if|not|while)": "even when, nor",
    r"longer than nothing": "positive",
    r"what it was asked": "failed",
    r"in (?:our|its|their) (?:own )?words": "translated",
    r"in the box": "built-in",
    r"in vain": "without success",
    r"by turns": "alternately",
    r"very (?:moment|call|run|row|entry|write|database)": "the same …, exactly",
    r"the weather": "timing",
    r"out of our sight": "without our knowledge",
    r"guests?": "the user's code",
    r"lets? who": "let the process that …",
    r"(?:at most|at least|up to|has|have) so many(?! (?:of|that))": "this many, `limit` …",
    r"exist(?:s|ed)? already": "already exists",
    r"any more(?=[.,;:)]|$)": "any longer, no longer",
    r"what bec(?:omes|ame) of": "the outcome of, what happens to",
    r"up to how many": "the maximum number of",
    r"begins the (?:ids?|keys?|names?|paths?)": "the prefix of the …",
    r"(?:give|gives|given|gave|giving) up (?:(?:the|its|their) )?leases?": "release",
    r"com(?:es?|ing) back as (?:itself|themselves)": "is restored",
    r"code of today": "current code",
    r"at hand": "in scope",
    r"for good": "forever, permanently",
    r"recognis\w+": "recognize (as in the standard library)",
}
# A relative clause without a noun: "Who finds it idle writes it." A question is fine.
PHRASES[r"(?-i:Who)(?= (?:[^.?\n]|\n(?!\n))*\.)"] = "A caller that …, a process that …"


def compiled(phrase: str) -> re.Pattern[str]:
    words = phrase.replace(" ", r"\s+")
    return re.compile(rf"(?<![\w-])(?:{words})(?![\w-])", re.IGNORECASE)


PATTERNS = {compiled(phrase): instead for phrase, instead in PHRASES.items()}

# Uses of these words that mean something else.
ALLOWED = re.compile(
    r"""
    \bdead[ -]letters?\b | \bletters?,?\s(?:and|or)\s | \bletters,\s | \b\w+-case\s letters?\b
    | \b(?:ASCII|capital|first|single|Latin)\sletters?\b | \bletters?\s(?:of\sthe|case)\b
    | \bno\s(?:one|op)\b
    """,
    re.VERBOSE | re.IGNORECASE,
)

# (file, phrase) and why it is allowed there.
EXCEPTIONS: dict[tuple[str, str], str] = {
    (
        "src/perdure/stores/sqlite/migrations/0007_search.sql",
        "exist already",
    ): "a migration is never changed",
}

DOCSTRING_BEGINS = re.compile(r"\s*(Gives?|Tells?|Says?\s+whether)\b")
CODE = re.compile(r"^([ \t]*)(```|~~~).*?^\1\2[ \t]*$|``.+?``|`[^`]*`", re.MULTILINE | re.DOTALL)
SQL = re.compile(r"\b(?:SELECT|INSERT|UPDATE|DELETE|CREATE|ALTER|REPLACE|WHERE|VALUES|SET)\b")


@dataclass(frozen=True)
class Prose:
    """A piece of English and the line where it begins."""

    text: str
    line: int
    docstring: bool = False


def checked_files() -> list[Path]:
    pages = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")]
    files = [path for name in FOLDERS for path in sorted((ROOT / name).rglob("*"))]
    return pages + [
        path for path in files if path.suffix in SUFFIXES and not {path, *path.parents} & UNCHECKED
    ]


def prose_of(path: Path) -> Iterator[Prose]:
    text = path.read_text()
    match path.suffix:
        case ".py":
            tree = ast.parse(text)
            yield from strings_of(tree)
            yield from names_of_tests(tree)
            yield from comments_of(text)
        case ".md":
            yield Prose(text, 1)
        case _:
            yield from line_comments_of(text)


def strings_of(tree: ast.Module) -> Iterator[Prose]:
    """Docstrings, and other strings that are more than a name: messages."""
    docstrings = set(docstrings_of(tree))
    parts = {
        value for node in ast.walk(tree) if isinstance(node, ast.JoinedStr) for value in node.values
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            yield from message_of(node.lineno, literal_text(node))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and node not in parts:
            if node in docstrings:
                yield Prose(node.value, node.lineno, docstring=True)
            else:
                yield from message_of(node.lineno, node.value)


def names_of_tests(tree: ast.Module) -> Iterator[Prose]:
    """The name of a test is a sentence too."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name[:5] == "test_":
            yield Prose(node.name[5:].replace("_", " "), node.lineno)


def message_of(line: int, text: str) -> Iterator[Prose]:
    if " " in text.strip() and not SQL.search(text):
        yield Prose(text, line)


def literal_text(node: ast.JoinedStr) -> str:
    return "".join(
        str(value.value) if isinstance(value, ast.Constant) else "{}" for value in node.values
    )


def docstrings_of(tree: ast.Module) -> Iterator[ast.Constant]:
    for node in ast.walk(tree):
        match node:
            case (
                ast.Module(body=[ast.Expr(ast.Constant(str()) as text), *_])
                | ast.ClassDef(body=[ast.Expr(ast.Constant(str()) as text), *_])
                | ast.FunctionDef(body=[ast.Expr(ast.Constant(str()) as text), *_])
                | ast.AsyncFunctionDef(body=[ast.Expr(ast.Constant(str()) as text), *_])
            ):
                yield text


def comments_of(text: str) -> Iterator[Prose]:
    """Comments; those on adjacent lines are one text, as a sentence may span them."""
    comments = {
        token.start[0]: token.string.lstrip("#: ")
        for token in tokenize.generate_tokens(io.StringIO(text).readline)
        if token.type == tokenize.COMMENT
    }
    yield from joined(comments)


def line_comments_of(text: str) -> Iterator[Prose]:
    """Comments of SQL and Lua."""
    lines = enumerate(text.splitlines(), start=1)
    yield from joined({n: line.partition("--")[2].strip() for n, line in lines if "--" in line})


def joined(comments: dict[int, str]) -> Iterator[Prose]:
    for first in comments:
        if first - 1 not in comments:
            last = first
            while last + 1 in comments:
                last += 1
            yield Prose("\n".join(comments[line] for line in range(first, last + 1)), first)


def problems_of(prose: Prose) -> Iterator[tuple[int, str, str]]:
    """Yield the line, the words and what to write instead."""
    begins = DOCSTRING_BEGINS.match(prose.text) if prose.docstring else None
    if begins:
        yield prose.line, f"a docstring begins with {begins[1]!r}", "Return …, Return whether …"
    text = ALLOWED.sub(blank, CODE.sub(blank, prose.text))
    for pattern, instead in PATTERNS.items():
        for match in pattern.finditer(text):
            line = prose.line + text.count("\n", 0, match.start())
            yield line, " ".join(match[0].split()), instead


def blank(match: re.Match[str]) -> str:
    """Replace code by nothing that is a word, and keep the lines."""
    return "§" + "\n" * match[0].count("\n")


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def test_the_words_are_plain_english() -> None:
    """If one is used in another meaning, add its context to `ALLOWED` or `EXCEPTIONS`."""
    problems = [
        f"{name_of(path)}:{line}: {words!r}; write: {instead}"
        for path in checked_files()
        for prose in prose_of(path)
        for line, words, instead in problems_of(prose)
        if (name_of(path), words.lower()) not in EXCEPTIONS
    ]
    if problems:
        pytest.fail("\n".join(problems), pytrace=False)


def test_the_lines_of_pages_are_wrapped() -> None:
    """Tables, code and links cannot be wrapped."""
    assert [
        f"{name_of(page)}: {line}"
        for page in checked_files()
        if page.suffix == ".md"
        for line in CODE.sub(blank, page.read_text()).splitlines()
        if len(line) > MAX_COLUMNS and not line.startswith("|")
    ] == []


PLANTED = {
    "page.md": "One.\n\nA run goes\non until nobody has it.",
    "docstring.py": 'def lease():\n    """Give the lease."""\n',
    "comment.py": "x = 1  # what was\n# The lease of\n# before ends.\n",
    "message.py": "def f(n):\n    raise ValueError(f'{n} is no limit: pass a whole number')\n",
    "test_name.py": "def test_nobody_waits_for_ever():\n    pass\n",
    "script.lua": "local x = 1\n-- It lies in the hash.\n",
    "already.md": "The run exists already, and has at most so many\nsteps.",
}
FOUND = {
    "page.md": [(3, "goes on"), (4, "nobody")],
    "docstring.py": [(2, "a docstring begins with 'Give'")],
    "comment.py": [(2, "of before")],
    "message.py": [(2, "is no"), (2, "whole number")],
    "test_name.py": [(1, "for ever"), (1, "nobody")],
    "script.lua": [(2, "lies")],
    "already.md": [(1, "at most so many"), (1, "exists already")],
}


@pytest.mark.parametrize("name", PLANTED)
def test_a_phrase_is_found_where_it_stands(name: str, tmp_path: Path) -> None:
    path = tmp_path / name
    path.write_text(PLANTED[name])
    problems = [each for prose in prose_of(path) for each in problems_of(prose)]
    assert sorted((line, words) for line, words, _ in problems) == FOUND[name]


@pytest.mark.parametrize(
    "text",
    [
        "Pass `mail=True`, or:\n\n```python\nmail = 'anew'\n```\n",
        "There is no lease, and the run is no longer owned.",
        "Use letters and digits, or a dead letter queue.",
        "Who may write? The owner.",
    ],
)
def test_code_and_ordinary_sentences_pass(text: str) -> None:
    assert list(problems_of(Prose(text, 1))) == []
