"""What the site needs beside Markdown.

Pages that stand beside docs/, notebooks as pages, and guarantees in boxes of their own.
"""

import json
import re
from pathlib import Path

import griffe
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

BESIDE = ("CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md", "LICENSE")
UP = re.compile(rf"\]\(\.\./((?:\.\./)*(?:{'|'.join(map(re.escape, BESIDE))}))(?=[#)])")
NOTEBOOK = re.compile(r"\]\(((?:\.\./)*notebooks/\w+)\.ipynb\)")
GUARANTEES = re.compile(r"^### Formal Guarantees\n(.*)", re.MULTILINE | re.DOTALL)


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds the files beside docs/ that pages link to, and notebooks, as if they were pages."""
    root = Path(config.config_file_path).parent
    for name in BESIDE:
        files.append(File.generated(config, name, abs_src_path=str(root / name)))
    for path in sorted((root / "docs" / "notebooks").glob("*.ipynb")):
        name = f"notebooks/{path.stem}.md"
        files.append(File.generated(config, name, content=_markdown(path)))
    return files


def _markdown(notebook: Path) -> str:
    """Its cells, text and code, and a link to the notebook."""
    cells = json.loads(notebook.read_text("utf-8"))["cells"]
    parts = ["".join(cell["source"]) for cell in cells]
    shown = [
        text if cell["cell_type"] == "markdown" else f"```python\n{text}\n```"
        for cell, text in zip(cells, parts, strict=True)
    ]
    return "\n\n".join([*shown, f"[This page as a notebook]({notebook.name})\n"])


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Links to those files and to notebooks, for where they stand in the site."""
    if page.file.src_uri in BESIDE:
        return markdown.replace("](docs/", "](")
    return NOTEBOOK.sub(r"](\1.md)", UP.sub(r"](\1", markdown))


class Docstrings(griffe.Extension):
    """Reads docstrings as `help` shows them, with guarantees as a section of their own."""

    def on_package(self, *, pkg: griffe.Module, **_: object) -> None:
        """A name is that of the function where a module has the same one."""
        for name, member in list(pkg.members.items()):
            path = getattr(member, "target_path", "").removeprefix(f"{pkg.name}.")
            named = pkg[path] if path.endswith(f".{name}") else None
            if isinstance(named, griffe.Module) and name in named.members:
                pkg.set_member(name, griffe.Alias(name, named[name]))

    def on_instance(self, *, obj: griffe.Object, **_: object) -> None:
        """A section that the parser of docstrings knows, in place of a heading."""
        if obj.docstring:
            obj.docstring.value = GUARANTEES.sub(_section, obj.docstring.value)


def _section(found: re.Match[str]) -> str:
    lines = found[1].splitlines(keepends=True)
    return "Formal Guarantees:\n" + "".join(
        f"    {line}" if line.strip() else line for line in lines
    )
