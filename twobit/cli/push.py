"""`twobit push`: a model goes to the Hugging Face Hub."""

from __future__ import annotations

import json
import re
from typing import Annotated, Any

from twobit.cli import options, output
from twobit.cli.command import Argument, Option
from twobit.errors import UsageError, impossible


def push(
    folder: Annotated[str, Argument(metavar="DIR", help="Folder of the twobit model")],
    repository: Annotated[str, Argument(metavar="REPO", help="user/name on the Hub, or a name of your own")],
    private: Annotated[
        bool, Option("--private", help="The repository is private afterwards, or nothing is sent")
    ] = False,
    revision: Annotated[str | None, Option("--revision", metavar="R", help="Branch to push to [main]")] = None,
    message: Annotated[str | None, Option("--message", metavar="M", help="Message of the commit")] = None,
    base_model: Annotated[
        str | None, Option("--base-model", metavar="ID", help="Hub id of the source, for the card")
    ] = None,
    evaluation: Annotated[
        str | None, Option("--eval", metavar="FILE", help="Output of `twobit eval --json`, for the card")
    ] = None,
    dry_run: Annotated[bool, Option("--dry-run", help="Check, and list what would go; send nothing")] = False,
    as_json: Annotated[bool, Option("--json", help="One JSON object on stdout, no progress")] = False,
) -> int:
    """Upload a model to the Hugging Face Hub, with a model card, in one commit.

    Token, permission, card and every checksum are checked before anything is sent. A push that was interrupted goes on
    where it was; a second identical one has nothing to do. Only files of the model go, listed by --dry-run. A README.md
    of your own is kept. The token comes from `hf auth login` or HF_TOKEN.

    \b
    twobit push ./smollm2-2bit user/SmolLM2-135M-Instruct-2bit --base-model HuggingFaceTB/SmolLM2-135M-Instruct
    twobit push ./model user/model --private
    twobit push ./model user/model --dry-run
    """
    path = options.local(folder, "DIR")
    if not path.is_dir():
        what = "is a file" if path.exists() else "no such folder"
        raise UsageError(f"{folder}: {what}", "give the folder of a twobit model")
    options.hub_name("REPO", repository)
    if revision is not None and not re.fullmatch(r"[\w][\w./-]*", revision, re.ASCII):
        raise impossible("--revision", revision, "the name of a branch, as in main")
    if message is not None and not options.unicode_text("--message", message).strip():
        raise impossible("--message", message, "a text that is not empty")
    if base_model is not None:
        options.hub_name("--base-model", base_model)
    measured = _evaluation(evaluation)

    from twobit import hub
    from twobit.cli.progress import Bars, quiet_libraries

    bars = Bars(quiet=as_json, unit="B")
    quiet_libraries(as_json)
    try:
        if dry_run:
            _show_plan(
                hub.plan(path, repository, base_model=base_model, evaluation=measured, progress=bars), as_json, bars
            )
            return 0
        done = hub.push(
            path,
            repository,
            private=private,
            revision=revision,
            message=message,
            base_model=base_model,
            evaluation=measured,
            progress=bars,
        )
    except KeyboardInterrupt:
        bars.close()
        output.note("stopped: the same command goes on where it was")
        raise
    finally:
        bars.close()
    if as_json:
        output.result(
            {
                "repository": done.repository,
                "url": done.url,
                "private": done.private,
                "uploaded": list(done.changed),
                "deleted": list(done.deleted),
                "bytes": done.bytes,
                "unchanged": not done.changed and not done.deleted,
            }
        )
        return 0
    if not done.changed and not done.deleted:
        output.note("nothing to do: the repository has exactly these files")
    else:
        for name in done.changed:
            output.note(f"uploaded {name}")
        for name in done.deleted:
            output.note(f"deleted {name}, of an older build")
    output.line(done.url)
    return 0


def _evaluation(file: str | None) -> dict[str, Any] | None:
    if file is None:
        return None
    path = options.local(file, "--eval")
    if not path.is_file():
        what = "is a folder" if path.is_dir() else "no such file"
        raise UsageError(f"--eval {file}: {what}", "make it with `twobit eval --json >FILE`")
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        ok = isinstance(data["tokens"], int) and all(
            isinstance(kl[key], float | int) for kl in data["kl"].values() for key in ("mean", "stderr", "top1")
        )
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        ok = False
    if not ok:
        raise UsageError(
            f"--eval {file}: not the output of `twobit eval --json`", "make it with `twobit eval --json >FILE`"
        )
    return dict(data)


def _show_plan(uploads: list[Any], as_json: bool, bars: Any) -> None:
    bars.close()
    total = sum(upload.size for upload in uploads)
    if as_json:
        files = {upload.path: upload.size for upload in uploads}
        output.result({"dry_run": True, "files": files, "bytes": total})
        return
    output.table([("file", "bytes"), *((u.path, f"{u.size:,}") for u in uploads), ("total", f"{total:,}")])
