"""What the site needs beside Markdown: pages beside docs/, and guarantees in boxes of their own."""

import re
from pathlib import Path

import griffe
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

BESIDE = ("CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md", "LICENSE")
UP = re.compile(rf"\]\(\.\./((?:\.\./)*(?:{'|'.join(map(re.escape, BESIDE))}))(?=[#)])")
GUARANTEES = re.compile(r"^### Formal Guarantees\n(.*)", re.MULTILINE | re.DOTALL)


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds the files beside docs/ that pages link to, as if they were in it."""
    root = Path(config.config_file_path).parent
    for name in BESIDE:
        files.append(File.generated(config, name, abs_src_path=str(root / name)))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Links between docs/ and those files, for where they stand in the site."""
    if page.file.src_uri in BESIDE:
        return markdown.replace("](docs/", "](")
    return UP.sub(r"](\1", markdown)


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
