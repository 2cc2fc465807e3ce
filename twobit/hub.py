"""The Hugging Face Hub: push a model, download one, read one's headers from afar.

A push is one commit: all large files are sent first, then the commit makes them and the index appear at once, so a
repository never shows half a model, and whatever was interrupted only lacks what was not sent yet (the Hub knows the
content of files by their SHA-256). `HfApi.upload_folder` would split large folders into several commits and answer a
refused commit with smaller ones. Only permanent answers stop at once; 429, 5xx and broken connections are tried again.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from twobit import card
from twobit.errors import FormatError, HubError, TwobitError, UsageError
from twobit.format import reader
from twobit.format.manifest import Manifest, parse_json
from twobit.format.safetensors_file import MAX_HEADER, Header, header_from
from twobit.format.writer import INDEX_NAME, OUTPUT_NAME
from twobit.progress import Progress
from twobit.state import state_folder

if TYPE_CHECKING:
    from huggingface_hub import HfApi

T = TypeVar("T")
MAX_FILE = 50_000_000_000  # bytes; what the Hub serves over plain HTTP
TRIES = 4  # of an upload or commit, on top of what huggingface_hub tries itself
MAX_WAIT = 900  # seconds; where the Hub asks for more, the push ends and says so
TOKENS_PAGE = "https://huggingface.co/settings/tokens"
_SMALL = ["*.json", "*.jinja", "tokenizer.model", "vocab.txt", "merges.txt"]
_CHECKPOINT = [*_SMALL, "*.safetensors", "*.bin", "*.gguf", "README.md", "LICEN*", "NOTICE*", "USE_POLICY.md"]
_ELSEWHERE = ["*/*", "consolidated*"]  # other formats' folders, and Mistral's second copy
_HEAD = 1 << 16  # bytes of a shard that are asked for first


@dataclass(frozen=True)
class Upload:
    """One file of a push. source: a path, or the bytes themselves."""

    path: str
    source: Path | bytes
    size: int

    def digests(self) -> tuple[str, str]:
        """(SHA-256, git blob id) of the content, as the Hub names files."""
        sha, git = hashlib.sha256(), hashlib.sha1(b"blob %d\0" % self.size)
        for piece in self._pieces():
            sha.update(piece)
            git.update(piece)
        return sha.hexdigest(), git.hexdigest()

    def _pieces(self) -> Iterator[bytes]:
        if isinstance(self.source, bytes):
            yield self.source
            return
        with open(self.source, "rb") as file:
            while piece := file.read(8 << 20):
                yield piece


@dataclass(frozen=True)
class Pushed:
    """The outcome of a push. changed: uploaded paths, none where there was nothing to do; deleted: shards of an older
    build that are gone."""

    repository: str
    url: str
    private: bool | None
    changed: Sequence[str] = field(default_factory=tuple)
    deleted: Sequence[str] = field(default_factory=tuple)
    bytes: int = 0


# -- push ---------------------------------------------------------------------------------------------------


def files_of(folder: Path) -> tuple[Manifest, list[Upload]]:
    """What a push of the model folder would send, without the card: config.json, the index, the shards that it names,
    and what belongs to the model by name (tokenizer, chat template, licence). Nothing else of the folder goes.

    Raises FormatError where the model is incomplete or a file is a link that leaves it.
    """
    _refuse_large(folder)
    model = reader.open_model(folder)
    names = [
        entry.name
        for entry in os.scandir(folder)
        if OUTPUT_NAME.fullmatch(entry.name)
        and not entry.name.startswith("twobit-")
        and entry.name not in ("config.json", INDEX_NAME, card.README, ".gitattributes")
        and not entry.is_dir()
    ]
    # the order in which they are sent and listed: the index last
    ordered = [*sorted(model.files), *sorted(names), "config.json", INDEX_NAME]
    real = {name: reader.model_file(folder, name) for name in ordered}
    return model.manifest, [Upload(name, real[name], real[name].stat().st_size) for name in ordered]


def _refuse_large(folder: Path) -> None:
    for path in sorted(folder.glob("twobit-*.safetensors")):
        if path.is_file() and (size := path.stat().st_size) > MAX_FILE:
            raise HubError(
                f"{path} has {size:,} bytes; the Hub takes files of at most {MAX_FILE:,} bytes",
                "quantize again: shards then stay below 5,000,000,000 bytes",
            )


def push(
    folder: Path,
    repository: str,
    *,
    private: bool = False,
    revision: str | None = None,
    message: str | None = None,
    base_model: str | None = None,
    evaluation: Mapping[str, Any] | None = None,
    progress: Progress | None = None,
) -> Pushed:
    """Uploads a model folder to `repository` (user/name, or a name of one's own) in one commit.

    Before anything is sent: the token, its permission, the card and every checksum are checked. private: the repository
    is private afterwards, whatever it was, or nothing is sent. HubError where the Hub refuses; the same call goes on
    where an interrupted one was.
    """
    progress = progress or Progress()
    with _told(progress):
        api, user = _login()
        repository = repository if "/" in repository else f"{user}/{repository}"
        manifest, uploads = files_of(folder)
        _check_evaluation(evaluation, manifest)
        exists = _exists(api, repository)
        remote = _remote_files(api, repository, revision) if exists else {}
        readme = _card(api, folder, repository, manifest, base_model, evaluation, remote, revision)
        if readme is not None:
            uploads.append(Upload(card.README, readme, len(readme)))
            _validate(api, readme)
        _verify(folder, progress)
        changed = _changed(uploads, remote, progress)
        listed = {upload.path for upload in uploads}
        stale = [path for path in remote if path.startswith("twobit-") and path not in listed]

        is_private = _prepare(api, repository, exists, private, bool(changed or stale))
        url = f"{api.endpoint}/{repository}"
        if not changed and not stale:
            return Pushed(repository, url, is_private)
        total = sum(upload.size for upload in changed)
        progress.line(f"sending {len(changed)} files, {total:,} bytes, to {repository}")
        _commit(api, repository, changed, stale, revision, message or f"Push {manifest.build_id[:12]}", progress)
        return Pushed(repository, url, is_private, [upload.path for upload in changed], stale, total)


def plan(
    folder: Path,
    repository: str,
    *,
    base_model: str | None = None,
    evaluation: Mapping[str, Any] | None = None,
    progress: Progress | None = None,
) -> list[Upload]:
    """What a push would send to a new repository, all checks but the Hub's made; asks the Hub nothing."""
    manifest, uploads = files_of(folder)
    _check_evaluation(evaluation, manifest)
    readme = _local_card(folder, repository, manifest, base_model, evaluation)
    _verify(folder, progress or Progress())
    return [*uploads, Upload(card.README, readme, len(readme))]


def _login() -> tuple[HfApi, str]:
    """The API with a token that may write, and the user's name. The first thing that is asked of the Hub."""
    import huggingface_hub
    from huggingface_hub import HfApi

    token = huggingface_hub.get_token()
    hint = f"make a token with write access at {TOKENS_PAGE}, then `hf auth login` or set HF_TOKEN"
    if not token:
        raise HubError("no Hugging Face token was found", hint)
    api = HfApi(token=token)
    try:
        who = _again(api.whoami)
    except HubError as error:
        if error.status in (401, 403):
            raise HubError(f"the Hub does not accept the token ({error})", hint, error.status) from error
        raise
    role = ((who.get("auth") or {}).get("accessToken") or {}).get("role")
    if role == "read":
        raise HubError(f"the token of {who.get('name')} may only read", hint)
    return api, str(who.get("name"))


def _exists(api: HfApi, repository: str) -> bool:
    try:
        _again(lambda: api.repo_info(repository, repo_type="model"))
    except HubError as error:
        if error.status == 404:
            return False
        raise
    return True


def _remote_files(api: HfApi, repository: str, revision: str | None) -> dict[str, tuple[str, str | None]]:
    """Path -> (git blob id, SHA-256 where the file is a large one) of what the repository holds."""
    from huggingface_hub.hf_api import RepoFile

    try:
        found = _again(lambda: list(api.list_repo_tree(repository, recursive=True, revision=revision)))
    except HubError as error:
        if error.status == 404:  # nothing was committed yet, or to another revision only
            return {}
        raise
    return {f.path: (f.blob_id, f.lfs.sha256 if f.lfs else None) for f in found if isinstance(f, RepoFile)}


def _card(
    api: HfApi,
    folder: Path,
    repository: str,
    manifest: Manifest,
    base_model: str | None,
    evaluation: Mapping[str, Any] | None,
    remote: Mapping[str, object],
    revision: str | None,
) -> bytes | None:
    """The README to send; None where the repository has one of its own that stays."""
    known: dict[str, Any] = {}
    if card.README in remote and not os.path.lexists(folder / card.README):
        there = _again(
            lambda: Path(api.hf_hub_download(repository, card.README, revision=revision)).read_text("utf-8", "replace")
        )
        if not card.is_ours(there):
            return None
        known = card.metadata(there)
    return _local_card(folder, repository, manifest, base_model, evaluation, known)


def _local_card(
    folder: Path,
    repository: str,
    manifest: Manifest,
    base_model: str | None,
    evaluation: Mapping[str, Any] | None,
    known: Mapping[str, Any] | None = None,
) -> bytes:
    """The folder's own README, or the card written for it. known: metadata to go by where the folder has none."""
    found = dict(known or {})
    if os.path.lexists(folder / card.README):
        own = reader.model_file(folder, card.README).read_bytes()
        text = own.decode("utf-8", "replace")
        if not card.is_ours(text):
            return own
        found = card.metadata(text)
    if base_model:
        found["base_model"] = base_model
    chat = (folder / "chat_template.jinja").exists() or "chat_template" in _json(folder / "tokenizer_config.json")
    return card.model_card(manifest, repository, found, evaluation, chat=chat).encode()


def _json(path: Path) -> dict[str, Any]:
    try:
        data = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return data if isinstance(data, dict) else {}


def _check_evaluation(evaluation: Mapping[str, Any] | None, manifest: Manifest) -> None:
    if evaluation is None:
        return
    if evaluation.get("build_id") != manifest.build_id:
        raise UsageError(
            f"the evaluation is of build {str(evaluation.get('build_id'))[:80]}, the model is {manifest.build_id}",
            "run `twobit eval MODEL --reference SRC --json` on this model",
        )


def _validate(api: HfApi, readme: bytes) -> None:
    """Ask the Hub what it thinks of the card, before anything large is sent."""
    from huggingface_hub import constants
    from huggingface_hub.utils import build_hf_headers, get_session, hf_raise_for_status

    text = readme.decode("utf-8", "replace")

    def ask() -> Any:
        response = get_session().post(
            f"{api.endpoint or constants.ENDPOINT}/api/validate-yaml",
            json={"content": text, "repoType": "model"},
            headers=build_hf_headers(token=api.token),
        )
        if response.status_code != 400:
            hf_raise_for_status(response)
        return response

    response = _again(ask)
    if response.status_code == 400:
        try:
            said = "; ".join(str(e.get("message")) for e in response.json()["errors"])
        except (ValueError, KeyError, AttributeError, TypeError):
            said = response.text.strip()[:300]
        raise HubError(
            f"the Hub refuses README.md: {said}",
            "correct the metadata at its top; nothing was sent",
            response.status_code,
        )


def _verify(folder: Path, progress: Progress) -> None:
    model = reader.open_model(folder)
    progress.stage("checking the weights", sum(a.nbytes for a in (*model.planes.values(), *model.plain.values())))
    reader.verify_checksums(model, advance=progress.advance)


def _changed(
    uploads: Sequence[Upload], remote: Mapping[str, tuple[str, str | None]], progress: Progress
) -> list[Upload]:
    """Those whose content the repository does not have under their path."""
    progress.stage("comparing with the Hub", sum(u.size for u in uploads if u.path in remote))
    changed = []
    for upload in uploads:
        if upload.path in remote:
            blob, sha = remote[upload.path]
            own_sha, own_blob = upload.digests()
            progress.advance(upload.size)
            if (own_sha == sha) if sha else (own_blob == blob):
                continue
        changed.append(upload)
    return changed


def _prepare(api: HfApi, repository: str, exists: bool, private: bool, writes: bool) -> bool | None:
    """Makes sure that the repository is there, may be written, and is private where that was asked; returns whether it
    is private."""
    if not exists:
        try:
            _again(lambda: api.create_repo(repository, private=private, repo_type="model"))
        except HubError as error:
            if error.status in (401, 403):
                raise HubError(
                    f"{repository} does not exist and the token may not create it: {error}",
                    f"create it at https://huggingface.co/new, or give the token that permission at {TOKENS_PAGE}",
                    error.status,
                ) from error
            if error.status != 409:  # 409: someone made it in the meantime
                raise
    elif writes or private:
        _check_writable(api, repository)
    is_private = _again(lambda: api.repo_info(repository, repo_type="model")).private
    if private and not is_private:
        why = ""
        try:
            _again(lambda: api.update_repo_settings(repository, private=True, repo_type="model"))
            is_private = _again(lambda: api.repo_info(repository, repo_type="model")).private
        except HubError as error:
            why = f": {error}"
        if not is_private:
            raise HubError(
                f"{repository} is public, and it could not be made private{why}",
                "make it private in its settings, or leave --private out; nothing was sent",
            )
    return is_private


def _check_writable(api: HfApi, repository: str) -> None:
    try:
        _again(lambda: api.auth_check(repository, repo_type="model", write=True))
    except HubError as error:
        if error.status in (401, 403):
            raise HubError(
                f"the token may not write to {repository}: {error}",
                f"give it write access to this repository at {TOKENS_PAGE}",
                error.status,
            ) from error
        if error.status is None or error.status >= 500:  # a Hub without this question will answer the commit itself
            raise


def _commit(
    api: HfApi,
    repository: str,
    uploads: Sequence[Upload],
    stale: Sequence[str],
    revision: str | None,
    message: str,
    progress: Progress,
) -> None:
    from huggingface_hub import CommitOperationAdd, CommitOperationDelete

    def once() -> None:
        # made anew for every try: the Hub is then asked again what it has, and a commit whose answer was lost is not
        # made twice
        operations: list[Any] = [
            CommitOperationAdd(u.path, u.source if isinstance(u.source, bytes) else str(u.source)) for u in uploads
        ]
        operations += [CommitOperationDelete(path) for path in stale]
        api.create_commit(repository, operations, commit_message=message, repo_type="model", revision=revision)

    _again(once, progress)


# -- tries and errors -----------------------------------------------------------------------------------------


def _again(call: Callable[[], T], progress: Progress | None = None) -> T:
    """`call()`, tried again after errors that may pass; HubError with the Hub's words for those that stay."""
    for tried in range(1, TRIES + 1):
        try:
            return call()
        except TwobitError:
            raise
        except Exception as error:
            known = explain(error)
            if not known.passing or tried == TRIES:
                raise known from error
            wait = known.wait if known.wait is not None else 2.0 ** (tried - 1)
            if wait > MAX_WAIT:
                known.hint = (
                    f"the Hub asks to wait {wait:.0f} s: run the same command again then, it goes on where it was"
                )
                raise known from error
            if progress is not None:
                progress.line(f"{known}; trying again in {wait:.0f} s ({tried} of {TRIES - 1})")
            time.sleep(wait)
    raise AssertionError("unreachable")


def explain(error: BaseException) -> HubError:
    """What went wrong, in the server's words where it said some. `passing`: whether trying again makes sense."""
    from huggingface_hub.errors import (
        GatedRepoError,
        HfHubHTTPError,
        LocalEntryNotFoundError,
        OfflineModeIsEnabled,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    chain = [error]
    while (after := chain[-1].__cause__ or chain[-1].__context__) is not None and len(chain) < 8:
        chain.append(after)
    http = next((e for e in chain if isinstance(e, HfHubHTTPError) and e.response is not None), None)
    if http is not None:
        status = http.response.status_code
        said = _first_line(http.server_message or "") or http.response.reason_phrase or _first_line(str(http))
        if isinstance(http, GatedRepoError):
            return HubError(f"access must be asked for first: {said}", "open its page on the Hub and accept", status)
        if isinstance(http, RevisionNotFoundError):
            return HubError(f"no such revision: {said}", "name a branch, tag or commit of the repository", status)
        if isinstance(http, RepositoryNotFoundError):
            hint = "check the name; for a private repository, `hf auth login` or set HF_TOKEN"
            return HubError(f"there is no such repository, or the token may not see it ({status})", hint, 404)
        found = HubError(f"the Hub answered {status}: {said}", None, status)
        found.passing = status in (408, 429) or status >= 500
        found.wait = _retry_after(http.response.headers)
        return found
    if any(isinstance(e, OfflineModeIsEnabled) for e in chain):
        return HubError(
            "HF_HUB_OFFLINE is set, and not everything is in the cache", "unset HF_HUB_OFFLINE once to download"
        )
    network = next((e for e in chain if any(k.__name__ == "TransportError" for k in type(e).__mro__)), None)
    if network is not None:
        found = HubError(
            f"the Hub cannot be reached: {_first_line(str(network)) or type(network).__name__}",
            "check the connection, and HF_ENDPOINT if it is set; a model that was downloaded before works offline",
        )
        found.passing = True
        return found
    if isinstance(error, LocalEntryNotFoundError):
        return HubError(_first_line(str(error)), "check the connection")
    why = [_first_line(str(e)) or type(e).__name__ for e in chain[:2]]  # what it was doing, and what failed
    return HubError(": ".join(dict.fromkeys(w.rstrip(".") for w in why)))


def _first_line(text: str) -> str:
    return next((line.strip()[:500] for line in text.splitlines() if line.strip()), "")


def _retry_after(headers: Mapping[str, str]) -> float | None:
    """Seconds to wait, from Retry-After (a number or a date)."""
    value = (headers.get("retry-after") or "").strip()
    if value.isdigit():
        return float(value)
    if value:
        from datetime import UTC, datetime
        from email.utils import parsedate_to_datetime

        try:
            return max(0.0, (parsedate_to_datetime(value) - datetime.now(UTC)).total_seconds())
        except (ValueError, TypeError):
            return None
    return None


class _Forward(logging.Handler):
    def __init__(self, progress: Progress) -> None:
        super().__init__(logging.WARNING)
        self._progress = progress

    def emit(self, record: logging.LogRecord) -> None:
        self._progress.line(_first_line(record.getMessage()))


@contextmanager
def _told(progress: Progress) -> Iterator[None]:
    """What huggingface_hub has to say (waits, retries) goes through `progress` instead of straight to stderr."""
    import huggingface_hub.utils.logging  # noqa: F401 - sets its handler

    logger = logging.getLogger("huggingface_hub")
    before, logger.handlers = logger.handlers, [_Forward(progress)]
    try:
        yield
    finally:
        logger.handlers = before


# -- download -----------------------------------------------------------------------------------------------


def download(
    repository: str, revision: str | None = None, *, draft_only: bool = False, progress: Progress | None = None
) -> Path:
    """The folder of a twobit model in the Hub's cache, downloaded where it is not there yet: first what is small, then
    the draft, then the residual (not with `draft_only`). What was downloaded is checked against the manifest.

    Raises HubError; FormatError where the model is damaged, or the repository holds none.
    """
    progress = progress or Progress()
    with _told(progress):
        folder = _snapshot(repository, revision, _SMALL)
        _refuse_others(folder, repository)
        kinds = {"draft": reader.shard_files(folder, "draft")}
        if not draft_only:
            kinds["residual"] = {f: names for f, names in reader.shard_files(folder).items() if f not in kinds["draft"]}
        for files in kinds.values():
            folder = _snapshot(repository, folder.name, list(files))
        _verify_once(folder, kinds, "draft" if draft_only else "all", progress)
    return folder


def checkpoint(repository: str, revision: str | None = None, *, progress: Progress | None = None) -> Path:
    """The folder of a full-precision checkpoint in the Hub's cache, downloaded where it is not there yet."""
    with _told(progress or Progress()):
        folder = _snapshot(repository, revision, ["config.json"])
        if _quant_method(folder) == "twobit":
            raise UsageError(f"{repository} is a twobit model already", f'run it: twobit run {repository} "..."')
        return _snapshot(repository, folder.name, [p for p in _CHECKPOINT if p not in ("*.bin", "*.gguf")])


def _snapshot(repository: str, revision: str | None, patterns: list[str]) -> Path:
    from huggingface_hub import snapshot_download

    def fetch() -> Path:
        return Path(
            snapshot_download(repository, revision=revision, allow_patterns=patterns, ignore_patterns=_ELSEWHERE)
        )

    try:
        return _again(fetch)
    except HubError as error:
        raise HubError(
            f"{repository} is no local folder, and it cannot be downloaded: {error}",
            error.hint or "check the name and the connection; a local folder works offline",
            error.status,
        ) from error


def _quant_method(folder: Path) -> str | None:
    config = (
        parse_json((folder / "config.json").read_bytes(), "config.json") if (folder / "config.json").exists() else {}
    )
    settings = config.get("quantization_config") if isinstance(config, dict) else None
    return str(settings.get("quant_method")) if isinstance(settings, dict) else None


def _refuse_others(folder: Path, repository: str) -> None:
    """Before anything large is downloaded: is this a twobit model?"""
    if not (folder / "config.json").exists():
        raise FormatError(f"{repository} has no config.json: it is not a model that twobit can run")
    method = _quant_method(folder)
    if method == "twobit":
        return
    name = repository.split("/")[-1]
    if method is not None:
        raise FormatError(
            f"{repository} is quantized by {method!r}, not by twobit", "quantize its full-precision original"
        )
    raise FormatError(
        f"{repository} is not quantized yet",
        f"twobit quantize {repository} -o {name}-2bit, then twobit run {name}-2bit",
    )


def _verify_once(folder: Path, kinds: Mapping[str, Mapping[str, list[str]]], parts: Any, progress: Progress) -> None:
    """Compares what was downloaded with the manifest's checksums, each file once: what was found right is noted beside
    twobit's other state, by the file's size and time."""
    notes = state_folder() / "verified.json"
    known = _json(notes)
    todo: dict[str, list[str]] = {}
    for file, names in (item for files in kinds.values() for item in files.items()):
        if known.get(str(folder / file)) != _stamp(folder / file):
            todo[file] = names
    if not todo:
        return
    model = reader.open_model(folder, parts=parts)
    names = [name for names in todo.values() for name in names]
    progress.stage("checking the download", sum(model.files[file] for file in todo))
    for file, names in todo.items():
        try:
            reader.verify_checksums(model, names, progress.advance)
        except FormatError as error:
            os.unlink(os.path.realpath(folder / file))
            os.unlink(folder / file)
            raise FormatError(f"{error}; {file} was removed from the cache", "run the same command again") from error
        known[str(folder / file)] = _stamp(folder / file)
    known = {path: stamp for path, stamp in known.items() if os.path.exists(path)}
    try:
        notes.parent.mkdir(parents=True, exist_ok=True)
        part = notes.with_name(f"{notes.name}.{os.getpid()}")
        part.write_text(json.dumps(known), encoding="utf-8")
        os.replace(part, notes)
    except OSError:  # checked again next time
        pass


def _stamp(file: Path) -> list[Any] | None:
    try:
        about = os.stat(file)
    except OSError:
        return None
    return [os.path.realpath(file), about.st_size, about.st_mtime_ns]


# -- from afar ------------------------------------------------------------------------------------------------


def describe(repository: str, revision: str | None = None) -> tuple[Manifest, dict[str, int]]:
    """Manifest and shard sizes in bytes of a model on the Hub. config.json and the index are downloaded, of the shards
    only the headers (HTTP range requests)."""
    folder = config_of(repository, revision)
    with _told(Progress()):
        _refuse_others(folder, repository)
        return reader.check_headers(folder, lambda file: _remote_header(repository, folder.name, file))


def config_of(repository: str, revision: str | None = None) -> Path:
    """A folder of the Hub's cache with the config.json and the index of any repository, and perhaps more."""
    with _told(Progress()):
        return _snapshot(repository, revision, ["config.json", INDEX_NAME])


def _remote_header(repository: str, commit: str, file: str) -> Header:
    from huggingface_hub import hf_hub_url
    from huggingface_hub.utils import build_hf_headers, hf_raise_for_status, http_stream_backoff

    url = hf_hub_url(repository, file, revision=commit)

    def fetch(start: int, end: int) -> tuple[bytes, int]:
        headers = {**build_hf_headers(), "Range": f"bytes={start}-{end - 1}", "Accept-Encoding": "identity"}
        with http_stream_backoff("GET", url, headers=headers, follow_redirects=True) as response:
            hf_raise_for_status(response)
            if response.status_code != 206:
                raise HubError(f"the Hub answers {response.status_code} to a range request of {file}")
            size = response.headers.get("Content-Range", "").rpartition("/")[2]
            if not size.isdecimal():
                raise HubError(f"the Hub does not say how large {file} is")
            data = b""
            for piece in response.iter_bytes():
                data += piece
                if len(data) >= end - start:
                    break
            return data[: end - start], int(size)

    head, size = _again(lambda: fetch(0, _HEAD))
    at = 0

    def read(n: int) -> bytes:
        nonlocal head, at
        if at + n > len(head) and len(head) < size and n <= MAX_HEADER:
            head += _again(lambda: fetch(len(head), min(at + n, size)))[0]
        piece = head[at : at + n]
        at += n
        return piece

    return header_from(Path(repository) / file, read, size)
