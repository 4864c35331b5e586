"""Links from pages to files of the repository that are not pages: checked by the build, and shown so that they work.

Pages link to `../results/...` or `../src/...` as Markdown viewers of a repository expect it. A built site has no such
files, so here images are copied into the site, and every other such link becomes its text with the path behind it. A
path that does not exist gives a warning, which fails a strict build.
"""

from __future__ import annotations

import logging
import os
import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

log = logging.getLogger("mkdocs.hooks.repository_links")

LINK = re.compile(r"(!?)\[((?:[^\[\]]|\[[^\[\]]*\])*)\]\(((?:\.\./)+[^)\s#]*)(?:#[^)\s]*)?\)")
FENCE = re.compile(r"(^```.*?^```)", re.MULTILINE | re.DOTALL)


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Return a page with its links to files outside the docs folder replaced; code blocks stay as they are."""
    docs = Path(config.docs_dir)
    here = (docs / page.file.src_uri).parent

    def replaced(match: re.Match[str]) -> str:
        image, text, target = match.groups()
        path = Path(os.path.normpath(here / target))
        if path.is_relative_to(docs):
            return match.group()
        if not path.exists():
            log.warning("Doc file '%s' contains a link '%s', but there is no such file.", page.file.src_uri, target)
            return match.group()
        name = path.relative_to(docs.parent).as_posix()
        if image:
            if files.get_file_from_path(name) is None:
                files.append(File.generated(config, name, abs_src_path=str(path)))
            return f"![{text}]({os.path.relpath(name, Path(page.file.src_uri).parent)})"
        return f"`{name}`" if text.strip("`") in (name, path.name) else f"{text} (`{name}`)"

    parts = FENCE.split(markdown)
    return "".join(part if part.startswith("```") else LINK.sub(replaced, part) for part in parts)
