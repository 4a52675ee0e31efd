"""Build the site of the documentation: `build.py DIRECTORY`.

Strategy: the pages in docs/ are CommonMark, as code hosts show them; Zensical reads Python-Markdown, which indents
lists, escapes pipes in tables and names headings in other ways. So each page is rendered here, by the parser that the
tests read the pages with: headings and code blocks stay Markdown, with the anchors that code hosts give them, and
everything else is HTML, which Zensical keeps as it is. Links between pages become links of the site. A file that is
linked and is no page (an example, a manifest) becomes a page that shows it, so that the site works without a checkout.
Pages that are made from the code come from reference.py. Nothing is loaded from another host.
"""

import base64
import itertools
import json
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from posixpath import dirname, join, normpath, relpath
from urllib.parse import unquote, urlsplit

from markdown_it import MarkdownIt
from markdown_it.token import Token

sys.path.insert(0, str(Path(__file__).parent))
import reference

ROOT = Path(__file__).resolve().parents[2]
BUILDER = ROOT / ".tools" / "docs" / "bin" / "python", "-m", "zensical", "build", "--strict", "--clean"
STYLE = "site.css"
SHIM = "iframe-worker.js"
SHIM_ELSEWHERE = "https://unpkg.com/iframe-worker/shim"
LANGUAGES = {".py": "python", ".yaml": "yaml", ".yml": "yaml", ".json": "json", ".sql": "sql", ".toml": "toml"}
FILE_BYTES_MAX = 200_000
NAVIGATION = {
    "Start": ["index", "quick-start", "which-timeout", "testing"],
    "Concepts": ["concepts", "lease-simulator", "how-it-works", "reliability", "performance", "comparison"],
    "Protocols": ["sqs", "azure", "mns", "veil-protocol"],
    "Client and patterns": ["client", "patterns/worker", "patterns/lease-keeper", "patterns/receiver", "patterns/*"],
    "Pipeline": ["pipeline", "pipeline-drain", "pipeline-demo", "notebooks/*"],
    "Migration": ["migrate/README", "migrate/*"],
    "Operations": [
        "deploy",
        "releases",
        "operations",
        "observability",
        "cluster",
        "cluster-runbooks",
        "console",
        "checking",
    ],
    "Reference": ["cli", "admin-api", "reference/*"],
    "More": ["*"],
    "Decisions": ["decisions/README", "decisions/*"],
    "About": ["about/*", "examples/README"],
}
"""Sections of the site, and their pages in order; `*` stands for what no other entry names, by name."""


def slugs(tokens: list[Token]) -> list[str]:
    """The anchors of a page's headings in order, as code hosts make them."""
    found: list[str] = []
    for heading, inline in itertools.pairwise(tokens):
        if heading.type != "heading_open":
            continue
        text = "".join(child.content for child in inline.children or [] if child.type in {"text", "code_inline"})
        slug = re.sub(r"[^\w\- ]", "", text.lower()).replace(" ", "-")
        number = 0
        while (name := slug if number == 0 else f"{slug}-{number}") in found:
            number += 1
        found.append(name)
    return found


class Site:
    """The pages of the site below `place`. Links to files outside of docs/ are collected as pages of their own."""

    def __init__(self, place: Path) -> None:
        self.place = place
        self.parser = MarkdownIt().enable(["table", "strikethrough"])
        self.titles: dict[str, str] = {}
        """Title of each page, by its path without `.md`."""
        self.shown: dict[str, str] = {}
        """Pages that show a file of the checkout: file to page."""
        pages = [path.relative_to(ROOT).as_posix() for path in sorted((ROOT / "docs").rglob("*.md"))]
        self.pages = {page: page.removeprefix("docs/") for page in pages} | {"examples/README.md": "examples/README.md"}
        notebooks = [path.relative_to(ROOT).as_posix() for path in sorted((ROOT / "docs").rglob("*.ipynb"))]
        self.pages |= {name: name.removeprefix("docs/").replace(".ipynb", ".md") for name in notebooks}
        roots = sorted(path.name for path in ROOT.glob("*.md"))
        self.pages |= {name: f"about/{name.lower()}" for name in roots}

    def write(self) -> None:
        """All pages, pictures, scripts and the configuration."""
        made = {f"docs/reference/{name}.md": text for name, text in reference.pages().items()}
        self.pages |= {source: source.removeprefix("docs/") for source in made}
        for source, page in self.pages.items():
            text = made[source] if source in made else (ROOT / source).read_text()
            self.page(page, source, self.notebook(text, page) if source.endswith(".ipynb") else text)
        for source, page in list(self.shown.items()):
            self._show(source, page)
        for folder in ("images", "scripts"):
            shutil.copytree(ROOT / "docs" / folder, self.place / "docs" / folder)
        shutil.copy(Path(__file__).parent / STYLE, self.place / "docs")
        self._configure()

    def page(self, page: str, source: str, text: str) -> None:
        """Write `text`, which stands at `source` in the checkout, as `page`."""
        target = self.place / "docs" / page
        target.parent.mkdir(parents=True, exist_ok=True)
        rendered = text if "\n::: " in text else self.render(text, source, page)
        target.write_text(rendered)
        heading = re.search(r"^# (.+?)(?: \{#.*\})?$", rendered, re.M)
        self.titles[page.removesuffix(".md")] = heading[1].replace("`", "") if heading else page

    def render(self, text: str, source: str, page: str) -> str:
        """A page of CommonMark as Markdown that has nothing but headings, code and HTML."""
        tokens = self.parser.parse(text)
        anchors = iter(slugs(tokens))
        lines: list[str] = []
        start = 0
        while start < len(tokens):
            end = start + 1
            while tokens[start].nesting == 1 and not (tokens[end - 1].nesting == -1 and tokens[end - 1].level == 0):
                end += 1
            block, first = tokens[start:end], tokens[start]
            if first.type == "heading_open":
                name = next(anchors)
                # Two underscores would be emphasis to Python-Markdown, also in an anchor.
                lines += (
                    [f'<div id="{name}"></div>', f"{first.markup} {block[1].content}"]
                    if "__" in name
                    else [f"{first.markup} {block[1].content} {{#{name}}}"]
                )
            elif first.type in {"fence", "code_block"}:
                fence = "`" * max(3, 1 + max((len(run) for run in re.findall(r"`+", first.content)), default=0))
                lines.append(f"{fence}{first.info.strip() or 'text'}\n{first.content.rstrip()}\n{fence}")
            elif first.type != "html_block" or not first.content.startswith("<!--"):
                self._relink(block, source, page)
                lines.append(self.parser.renderer.render(block, self.parser.options, {}).strip())
            start = end
        return "\n\n".join(lines) + "\n"

    def notebook(self, text: str, page: str) -> str:
        """A notebook as Markdown: texts, code, what that printed; pictures are written beside it."""
        parts: list[str] = []
        for cell in json.loads(text)["cells"]:
            source = "".join(cell["source"])
            parts.append(source if cell["cell_type"] == "markdown" else f"```python\n{source}\n```")
            for output in cell.get("outputs", []):
                data = output.get("data", {})
                if "image/png" in data:
                    name = f"{Path(page).stem}-{len(parts)}.png"
                    (self.place / "docs" / page).parent.mkdir(parents=True, exist_ok=True)
                    (self.place / "docs" / page).with_name(name).write_bytes(base64.b64decode(data["image/png"]))
                    parts.append(f"![what the code draws]({name})")
                elif printed := "".join(output.get("text", data.get("text/plain", []))).rstrip():
                    parts.append(f"```text\n{printed}\n```")
        return "\n\n".join(parts) + "\n"

    def _relink(self, tokens: list[Token], source: str, page: str) -> None:
        for token in tokens:
            for key in ("href", "src"):
                if isinstance(link := token.attrs.get(key), str):
                    token.attrs[key] = self.link(link, source, page)
            self._relink(token.children or [], source, page)

    def link(self, link: str, source: str, page: str) -> str:
        """Where a link of the checkout's file `source` leads on the site, from `page`."""
        parts = urlsplit(link)
        if parts.scheme or parts.netloc or not parts.path:
            return link
        target = normpath(join(dirname(source), unquote(parts.path)))
        at = self.pages.get(target) or self.shown.get(target)
        if at is None and target.startswith("docs/") and not target.endswith(".md"):
            at = target.removeprefix("docs/")
        elif at is None:
            at = self.shown[target] = f"files/{target}.md"
        to = relpath(re.sub(r"\.md$", ".html", re.sub(r"(^|/)README\.md$", r"\1index.md", at)), dirname(page) or ".")
        return f"{to}#{parts.fragment}" if parts.fragment else to

    def _show(self, source: str, page: str) -> None:
        """A page that shows a file of the checkout, or lists a folder."""
        path = ROOT / source
        title = f"# {source}\n\nFrom the checkout of VeilMQ.\n\n"
        if path.is_dir():
            names = sorted(
                each.name + ("/" if each.is_dir() else "") for each in path.iterdir() if each.name[0] not in "._"
            )
            self.page(page, page, title + "\n".join(f"- `{name}`" for name in names) + "\n")
            return
        if path.suffix != ".md":
            title += f'<p><a href="{path.name}" download>Download it</a></p>\n\n'
            (self.place / "docs" / page).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(path, (self.place / "docs" / page).with_name(path.name))
        content = path.read_bytes()
        if len(content) <= FILE_BYTES_MAX and b"\0" not in content:
            text = content.decode()
            fence = "`" * max(3, 1 + max((len(run) for run in re.findall(r"`+", text)), default=0))
            self.page(page, page, f"{title}{fence}{LANGUAGES.get(path.suffix, 'text')}\n{text.rstrip()}\n{fence}\n")
        else:
            self.page(page, page, f"{title}It has {len(content)} bytes: too much to be shown here.\n")

    def _configure(self) -> None:
        left = {page: None for page in sorted(self.titles) if not page.startswith("files/")}
        for entry in (entry for entries in NAVIGATION.values() for entry in entries if "*" not in entry):
            left.pop(entry, None)
        navigation: list[dict[str, list[dict[str, str]]]] = []
        sections = {section: list[str]() for section in NAVIGATION}
        for is_rest in (False, True):
            for section, entries in NAVIGATION.items():
                for entry in entries:
                    if (entry == "*") != is_rest:
                        continue
                    folder = entry.removesuffix("*")
                    found = [entry] if "*" not in entry else [page for page in left if page.startswith(folder)]
                    for page in found:
                        left.pop(page, None)
                        if page in self.titles:
                            sections[section].append(page)
        for section, pages in sections.items():
            if pages:
                navigation.append({section: [{self.titles[page]: f"{page}.md"} for page in pages]})
        configuration = (
            (Path(__file__).parent / "site.yml").read_text().replace("SOURCES", json.dumps(str(ROOT / "src")))
        )
        (self.place / "mkdocs.yml").write_text(f"{configuration}nav: {json.dumps(navigation)}\n")


def build(place: Path) -> None:
    """Build the site in `place`, anew. Raises SystemExit with the builder's words about what is not there."""
    if not BUILDER[0].exists():
        raise SystemExit(f"{BUILDER[0].relative_to(ROOT)} is missing: run `make setup-test`, or `make docs`")
    with tempfile.TemporaryDirectory(prefix="veilmq-site-") as directory:
        pages = Path(directory)
        Site(pages).write()
        done = subprocess.run(BUILDER, cwd=pages, capture_output=True, text=True, check=False)
        if done.returncode:
            raise SystemExit(re.sub(r"\x1b\[[0-9;]*m", "", done.stdout + done.stderr))
        complete(pages / "site")
        shutil.rmtree(place, ignore_errors=True)
        shutil.move(pages / "site", place)


def complete(site: Path) -> None:
    """Make the site work as files: its search needs a script that the builder takes from another host, and a browser
    shows a folder as a list, not its page."""
    shutil.copy(Path(__file__).parent / SHIM, site / "assets" / "javascripts")

    def named(link: re.Match[str]) -> str:
        target = (path.parent / link[1]).resolve()
        return f'href="{link[1]}/index.html"' if (target / "index.html").is_file() else link[0]

    for path in site.rglob("*.html"):
        above = relpath(site, path.parent)
        text = path.read_text().replace(SHIM_ELSEWHERE, f"{above}/assets/javascripts/{SHIM}")
        path.write_text(re.sub(r'href="?(\.[./\w]*?)/?"?(?=[ >])', named, text))


if __name__ == "__main__":
    build(Path(sys.argv[1]))
