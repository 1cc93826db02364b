"""Fail if a built page loads anything from another host: `python docs/check_site.py FOLDER`."""

import re
import sys
from pathlib import Path

LOADS = re.compile(
    r"<(?:script|img|iframe|source|video|audio)\b[^>]*\bsrc=[\"'](?:https?:)?//[^\"']+"
    r"|<link\b(?=[^>]*\brel=[\"'](?:stylesheet|preload|preconnect|icon|modulepreload))"
    r"[^>]*\bhref=[\"'](?:https?:)?//[^\"']+"
)
IMPORTS = re.compile(r"(?:@import\s+|url\()\s*[\"']?(?:https?:)?//[^\"')]+")


def main(folder: Path) -> int:
    found, pages = [], sorted(folder.rglob("*.html"))
    for page in pages:
        found += [(page, load) for load in LOADS.findall(page.read_text())]
    for style in folder.rglob("*.css"):
        found += [(style, load) for load in IMPORTS.findall(style.read_text())]
    for file, load in found:
        print(f"{file}: {load[:120]}", file=sys.stderr)
    print(f"{len(pages)} pages, {len(found)} of their parts are loaded from other hosts")
    return int(bool(found) or not pages)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
