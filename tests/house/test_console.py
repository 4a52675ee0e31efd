"""The console's templates and script: nothing there could turn what comes from a queue into markup or code."""

import re
from pathlib import Path

CONSOLE = Path(__file__).parents[2] / "src" / "veilmq" / "console"
TEMPLATES = sorted((CONSOLE / "templates").glob("*.html"))
SCRIPTS = sorted((CONSOLE / "static").glob("*.js"))

IN_TEMPLATES = {
    r"\|\s*safe\b": "text from a queue would be markup",
    r"autoescape": "it is on everywhere",
    r"\son[a-z]+\s*=": "an inline handler, which the policy forbids",
    r"\sstyle\s*=|<style": "an inline style, which the policy forbids",
    r"<script(?![^>]* src=)": "an inline script, which the policy forbids",
    r"(?:src|href|action)\s*=\s*\"(?:https?:)?//": "another origin",
    r"\s[\w-]+=\{\{": "an attribute without quotes",
    r"<form(?![^>]*method=)": "a form that does not say its method",
}
IN_SCRIPTS = {
    r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|createContextualFragment|DOMParser": "markup from text",
    r"\beval\b|new Function|setTimeout\(\s*[\"'`]|javascript:": "code from text",
    r"https?://": "another origin",
    r"localStorage|sessionStorage|document\.cookie": "it keeps nothing",
}
IN_CODE = {r"\bMarkup\b": "text that is not escaped", r"autoescape=(?!True)": "it is on", r"\|\s*safe\b": "not escaped"}
LINES_OF_SCRIPT_MAX = 400


def faults(files: list[Path], rules: dict[str, str]) -> list[str]:
    return [
        f"{file.name}:{text[: found.start()].count(chr(10)) + 1}: {found[0].strip()!r}: {why}"
        for file in files
        for text in [file.read_text()]
        for rule, why in rules.items()
        for found in re.finditer(rule, text)
    ]


def test_templates_hold_no_code_and_escape_everything() -> None:
    assert len(TEMPLATES) > 10
    assert faults(TEMPLATES, IN_TEMPLATES) == []


def _without_values(text: str) -> str:
    """A template with a ? for each value, in which there may be quotes."""
    return re.sub(r"{{.*?}}", "?", text, flags=re.DOTALL)


def test_the_style_sheet_knows_every_class() -> None:
    """One that it does not know has no effect: figures stood on the left that belong on the right."""
    known = set(re.findall(r"\.([a-z][\w-]*)", (CONSOLE / "static" / "console.css").read_text()))
    used = {
        (file.name, name)
        for file in TEMPLATES
        for value in re.findall(r'class="([^"]*)"', re.sub(r"{%.*?%}", " ", _without_values(file.read_text())))
        for name in value.split()
        if "?" not in name
    }
    assert len(used) > 50
    assert [each for each in sorted(used) if each[1] not in known] == []


def test_the_script_makes_no_markup_and_stays_small() -> None:
    assert SCRIPTS
    assert faults(SCRIPTS, IN_SCRIPTS) == []
    assert sum(len(script.read_text().splitlines()) for script in SCRIPTS) < LINES_OF_SCRIPT_MAX


def test_the_code_marks_nothing_as_safe() -> None:
    assert faults(sorted(CONSOLE.rglob("*.py")), IN_CODE | {r"\|\s*safe(?!`)": "not escaped"}) == []


def test_the_rules_find_what_they_forbid(tmp_path: Path) -> None:
    bad = tmp_path / "bad.html"
    bad.write_text(
        '<p onclick="x" style="a">{{ x|safe }}<script>1</script><a href="//e">{% autoescape %}<i a={{ b }}><form>'
    )
    assert len(faults([bad], IN_TEMPLATES)) == len(IN_TEMPLATES)
