"""Build the haystack corpus: English text whose licence allows redistribution, from Debian packages.

    python bench_longctx/train_tiny/corpus.py --out .train_data

downloads four packages with `apt-get download`, unpacks them without installing anything, turns them into
plain paragraphs (one a line) and writes `train.txt.xz` (for training) and `heldout.txt.xz` (whole works and
chapters that training never sees). README.md names the sources and their licences.
"""

from __future__ import annotations

import argparse
import gzip
import html
import lzma
import re
import subprocess
import tempfile
import zlib
from pathlib import Path

PACKAGES = ("r-cran-janeaustenr", "bible-kjv-text", "bible-kjv", "dict-jargon", "postgresql-doc-15")
HELDOUT_NOVEL = "persuasion"
HELDOUT_BOOKS = ("Ruth", "Est", "Jonah", "Luke", "Acts", "Jas")
_TIDY = str.maketrans(
    {
        "\u2018": "'",
        "\u2019": "'",
        "\u201c": '"',
        "\u201d": '"',
        "\u2013": "-",
        "\u2014": "--",
        "\u2026": "...",
        "\u00a0": " ",
        "\u2212": "-",
    }
)


def tidy(text: str) -> str:
    """Collapse white space and replace typographic punctuation by ASCII."""
    return re.sub(r"\s+", " ", text.translate(_TIDY)).strip()


def unpack(work: Path) -> Path:
    """Download the Debian packages into `work` and unpack them under `work/root`."""
    subprocess.run(["apt-get", "download", *PACKAGES], cwd=work, check=True, stdout=subprocess.DEVNULL)
    for deb in work.glob("*.deb"):
        subprocess.run(["dpkg", "-x", str(deb), str(work / "root")], check=True)
    return work / "root"


def r_strings(data: bytes) -> list[str]:
    """Read the first character vector of an R object in XDR serialisation."""
    at = data.index(b"\x00\x00\x00\x10") + 4
    count = int.from_bytes(data[at : at + 4], "big")
    at += 4
    lines = []
    for _ in range(count):
        size = int.from_bytes(data[at + 4 : at + 8], "big", signed=True)
        at += 8
        lines.append(data[at : at + max(size, 0)].decode("utf-8"))
        at += max(size, 0)
    return lines


def paragraphs(lines: list[str]) -> list[str]:
    """Join hard-wrapped lines: an empty line ends a paragraph."""
    blocks = "\n".join(line.strip() for line in lines).split("\n\n")
    return [p for p in (tidy(b) for b in blocks) if len(p) > 40]


def austen(root: Path) -> dict[str, list[str]]:
    """Six novels as lists of paragraphs, by name."""
    base = root / "usr/lib/R/site-library/janeaustenr/data"
    names = re.findall(
        rb"(?s)\x00\x04\x00\x09\x00\x00\x00.([a-z]{4,20})", gzip.decompress((base / "Rdata.rdx").read_bytes())
    )
    data = (base / "Rdata.rdb").read_bytes()
    works = {}
    for name in [n.decode() for n in names[1:7]]:
        stream = zlib.decompressobj()
        works[name] = paragraphs(r_strings(stream.decompress(data[4:])))
        data = stream.unused_data
    return works


def king_james(root: Path) -> dict[str, list[str]]:
    """The King James Bible, five verses a paragraph, by the program's abbreviation of each book."""
    command = [str(root / "usr/bin/bible"), "-f", "-p", str(root / "usr/lib"), "gen1:1-rev22:21"]
    text = subprocess.run(command, check=True, capture_output=True, text=True, cwd=root).stdout
    verses: dict[str, list[str]] = {}
    for book, verse in re.findall(r"^(\d?[A-Z][A-Za-z]*)\d+:\d+ (.+)$", text, re.M):
        verses.setdefault(book, []).append(tidy(verse))
    return {b: [" ".join(v[i : i + 5]) for i in range(0, len(v), 5)] for b, v in verses.items()}


def jargon(root: Path) -> list[str]:
    """The Jargon File's entries as paragraphs."""
    text = gzip.decompress(next((root / "usr/share/dictd").glob("jargon.dict*")).read_bytes()).decode("utf-8")
    body = text[text.index("(TM)") :]
    return [p for p in paragraphs(body.splitlines()) if p.count(" ") > 8]


def postgres(root: Path) -> list[list[str]]:
    """The PostgreSQL manual's prose paragraphs, one list a page (sorted by file name)."""
    pages = []
    for path in sorted((root / "usr/share/doc/postgresql-doc-15/html").glob("*.html")):
        if path.name.startswith(("release", "bookindex", "biblio", "acronyms")):
            continue
        source = re.sub(r"(?s)<pre.*?</pre>", " ", path.read_text("utf-8"))
        found = [
            tidy(html.unescape(re.sub(r"<[^>]+>", "", p))) for p in re.findall(r"(?s)<p>(.*?)</p>", source)
        ]
        page = [p for p in found if len(p) > 80]
        if page:
            pages.append(page)
    return pages


def build(out: Path) -> None:
    """Write `train.txt.xz` and `heldout.txt.xz` under `out`."""
    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as work:
        root = unpack(Path(work))
        novels, bible, manual, lexicon = austen(root), king_james(root), postgres(root), jargon(root)
    train: list[str] = []
    held: list[str] = []
    for name, text in novels.items():
        (held if name == HELDOUT_NOVEL else train).extend(text)
    for book, text in bible.items():
        (held if book in HELDOUT_BOOKS else train).extend(text)
    for number, page in enumerate(manual):
        (held if number % 10 == 9 else train).extend(page)
    cut = len(lexicon) // 10
    held.extend(lexicon[:cut])
    train.extend(lexicon[cut:])
    for name, text in (("train", train), ("heldout", held)):
        data = "\n".join(text).encode("utf-8")
        packed = lzma.compress(data, preset=9 | lzma.PRESET_EXTREME)
        (out / f"{name}.txt.xz").write_bytes(packed)
        print(f"{name}: {len(data):,} bytes, {len(text):,} paragraphs, {len(packed):,} compressed")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, default=Path(".train_data"))
    build(parser.parse_args().out)
