"""python -m docs.generator TARGET: writes the site there. Warnings are errors."""

from __future__ import annotations

import re
import shutil
import sys
from pathlib import Path

from docs.generator.pages import stage

# What a browser fetches by itself.
LOADED = re.compile(
    r"<(?:script|img|link|iframe|source)\b[^>]*?(?:src|href)=\"((?:https?:)?//[^\"]*)"
)


def main(target: Path) -> int:
    from sphinx.cmd.build import main as sphinx

    source = target.with_name(f"{target.name}-source")
    stage(source)
    shutil.rmtree(target, ignore_errors=True)
    here = str(Path(__file__).parent)
    words = ["-q", "-W", "--keep-going", "-E", "-b", "html", "-d", f"{source}/.doctrees"]
    code: int = sphinx([*words, "-c", here, str(source), str(target)])
    if code:
        return code
    for page in sorted(target.rglob("*.html")):
        if found := LOADED.findall(page.read_text()):
            print(f"{page} loads from other hosts: {', '.join(found)}", file=sys.stderr)
            return 1
    print(f"written: {target / 'index.html'}")
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]).resolve()))
