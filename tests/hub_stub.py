"""A Hub on loopback: the endpoints that huggingface_hub calls for uploads and downloads, over real HTTP.

It keeps repositories in memory, records every request, and does what a test asks of it: refuse, ask to wait, cut a
connection. Point HF_ENDPOINT at `Hub.url`, with HF_HUB_DISABLE_XET=1: files then go by the Git LFS protocol.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
import socket
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote, urlsplit

USER = "someone"
LFS_SUFFIXES = (".safetensors", ".bin", "tokenizer.json")  # what the Hub's default .gitattributes sends to LFS


@dataclass(frozen=True)
class Request:
    """One request as it came; `path` without the query, names of headers in lower case."""

    method: str
    path: str
    headers: Mapping[str, str]
    body: bytes

    @property
    def call(self) -> str:
        return f"{self.method} {self.path}"


@dataclass(frozen=True)
class Reply:
    """What a test wants answered instead. cut: close the connection after that share of the request's body; done: do
    what was asked all the same."""

    status: int = 200
    body: Any = None
    headers: Mapping[str, str] = field(default_factory=dict)
    cut: float | None = None
    done: bool = False


@dataclass
class Repo:
    """A repository: its files by path, and a commit per change as (message, paths added, paths deleted)."""

    private: bool = False
    files: dict[str, bytes] = field(default_factory=dict)
    lfs: dict[str, str] = field(default_factory=dict)
    commits: list[tuple[str, list[str], list[str]]] = field(default_factory=list)

    @property
    def sha(self) -> str:
        return hashlib.sha1(repr((self.commits, sorted(self.files))).encode()).hexdigest()


Rule = Callable[[Request], "Reply | None"]


class Hub:
    """The state behind the server. tokens: token -> role as whoami tells it ("write", "read", "fineGrained")."""

    def __init__(self) -> None:
        self.repos: dict[str, Repo] = {}
        self.objects: dict[str, bytes] = {}
        self.tokens = {"hf_good": "write", "hf_readonly": "read", "hf_narrow": "fineGrained"}
        self.requests: list[Request] = []
        self.rules: list[Rule] = []
        self.url = ""
        self.lock = threading.Lock()

    def calls(self, pattern: str) -> list[Request]:
        """The requests so far whose "METHOD /path" matches."""
        return [request for request in self.requests if re.search(pattern, request.call)]

    def answer(self, pattern: str, reply: Reply, times: int = 1 << 30) -> None:
        """The next `times` requests that match get `reply`."""
        left = [times]

        def rule(request: Request) -> Reply | None:
            if left[0] and re.search(pattern, request.call):
                left[0] -= 1
                return reply
            return None

        self.rules.append(rule)


def git_blob(data: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hub: Hub

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def _handle(self) -> None:
        hub, path = self.hub, unquote(urlsplit(self.path).path)
        if path == "/api/agent-harnesses":  # huggingface_hub asks what may be running it; no business of a repository
            return self._send(Reply(200, {}))
        length = int(self.headers.get("Content-Length") or 0)
        early = Request(self.command, path, {k.lower(): v for k, v in self.headers.items()}, b"")
        reply = next((r for rule in hub.rules if (r := rule(early)) is not None), None)
        if reply is not None and reply.cut is not None:
            self.rfile.read(int(length * reply.cut))
            with hub.lock:
                hub.requests.append(early)
            self.close_connection = True
            self.connection.shutdown(socket.SHUT_RDWR)
            return
        request = Request(self.command, path, {k.lower(): v for k, v in self.headers.items()}, self._body(length))
        with hub.lock:
            hub.requests.append(request)
            if reply is None or reply.done:
                routed = self._route(request)
                reply = reply or routed
        self._send(reply)

    do_GET = do_HEAD = do_POST = do_PUT = _handle

    def _body(self, length: int) -> bytes:
        if self.headers.get("Transfer-Encoding", "").lower() != "chunked":
            return self.rfile.read(length)
        chunks = []
        while size := int(self.rfile.readline().split(b";")[0], 16):
            chunks.append(self.rfile.read(size))
            self.rfile.readline()
        self.rfile.readline()
        return b"".join(chunks)

    def _send(self, reply: Reply) -> None:
        body = reply.body if isinstance(reply.body, bytes) else json.dumps(reply.body).encode()
        self.send_response(reply.status)
        for name, value in reply.headers.items():
            self.send_header(name, value)
        if reply.status not in (204, 304):
            self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD" and reply.status not in (204, 304):
            self.wfile.write(body)

    # -- the API --

    def _role(self) -> str | None:
        token = self.headers.get("Authorization", "").removeprefix("Bearer ")
        return self.hub.tokens.get(token)

    def _route(self, request: Request) -> Reply:
        path, method, role = request.path, request.method, self._role()
        if self.headers.get("Authorization") and role is None:
            return Reply(401, {"error": "Invalid credentials in Authorization header"})
        if path == "/api/whoami-v2":
            if role is None:
                return Reply(401, {"error": "Unauthorized"})
            return Reply(200, {"name": USER, "type": "user", "auth": {"accessToken": {"role": role}}})
        if path == "/api/validate-yaml":
            return _validate_yaml(json.loads(request.body)["content"])
        if path == "/api/repos/create":
            return self._create(json.loads(request.body), role)
        if match := re.fullmatch(r"/lfs/([0-9a-f]{64})", path):
            if hashlib.sha256(request.body).hexdigest() != match[1]:
                return Reply(400, {"error": "wrong checksum"})
            self.hub.objects[match[1]] = request.body
            return Reply(200, b"")
        if match := re.fullmatch(r"/api/models/([^/]+/[^/]+)(?:/(.+))?", path):
            return self._model(match[1], match[2] or "", method, request, role)
        if match := re.fullmatch(r"/([^/]+/[^/]+)\.git/info/lfs/objects/batch", path):
            return self._lfs_batch(json.loads(request.body), role)
        if match := re.fullmatch(r"/([^/]+/[^/]+)/resolve/([^/]+)/(.+)", path):
            return self._resolve(match[1], match[3], role)
        return Reply(404, {"error": f"the stub has no {request.call}"})

    def _repo(self, name: str, role: str | None) -> Repo | None:
        repo = self.hub.repos.get(name)
        return None if repo is None or (repo.private and role is None) else repo

    def _create(self, asked: dict[str, Any], role: str | None) -> Reply:
        name = f"{asked.get('organization') or USER}/{asked['name']}"
        if role != "write":
            return Reply(403, {"error": "You don't have the rights to create a model under this namespace"})
        if name in self.hub.repos:
            return Reply(409, {"error": "You already created this model repo"})
        private = asked.get("visibility") == "private" or bool(asked.get("private"))
        self.hub.repos[name] = Repo(private)
        return Reply(200, {"url": f"{self.hub.url}/{name}", "name": name})

    def _model(self, name: str, rest: str, method: str, request: Request, role: str | None) -> Reply:
        repo = self._repo(name, role)
        if repo is None:
            missing = {"X-Error-Code": "RepoNotFound", "X-Error-Message": "Repository not found"}
            return Reply(404 if role else 401, {"error": "Repository not found"}, missing)
        if not rest or rest.startswith("revision/"):
            if rest not in ("", "revision/main", f"revision/{repo.sha}"):
                return Reply(404, {"error": "Invalid rev id"}, {"X-Error-Code": "RevisionNotFound"})
            siblings = [{"rfilename": file} for file in sorted(repo.files)]
            return Reply(
                200, {"id": name, "modelId": name, "sha": repo.sha, "private": repo.private, "siblings": siblings}
            )
        writes = role in ("write", "fineGrained")
        if rest.startswith("auth-check"):
            return Reply(200, {}) if writes or not rest.endswith("write") else Reply(403, {"error": "Forbidden"})
        if rest.startswith("tree/"):
            return Reply(200, [self._entry(repo, file) for file in sorted(repo.files)])
        if not writes:
            return Reply(403, {"error": "Your token cannot write here"})
        if rest == "settings" and method == "PUT":
            repo.private = json.loads(request.body).get("visibility") == "private"
            return Reply(200, {"private": repo.private})
        if rest.startswith("preupload/"):
            files = [
                {
                    "path": file["path"],
                    "uploadMode": "lfs" if file["path"].endswith(LFS_SUFFIXES) else "regular",
                    "shouldIgnore": False,
                    "oid": self._oid(repo, file["path"]),
                }
                for file in json.loads(request.body)["files"]
            ]
            return Reply(200, {"files": files})
        if rest.startswith("commit/"):
            return self._commit(name, repo, request.body)
        return Reply(404, {"error": f"the stub has no {request.call}"})

    def _oid(self, repo: Repo, path: str) -> str | None:
        return repo.lfs.get(path, git_blob(repo.files[path])) if path in repo.files else None

    def _entry(self, repo: Repo, path: str) -> dict[str, Any]:
        data = repo.files[path]
        entry: dict[str, Any] = {"type": "file", "path": path, "size": len(data), "oid": git_blob(data)}
        if path in repo.lfs:
            entry["lfs"] = {"oid": repo.lfs[path], "size": len(data), "pointerSize": 130}
        return entry

    def _lfs_batch(self, asked: dict[str, Any], role: str | None) -> Reply:
        if role not in ("write", "fineGrained"):
            return Reply(403, {"error": "Your token cannot write here"})
        objects = []
        for item in asked["objects"]:
            answer = {"oid": item["oid"], "size": item["size"]}
            if item["oid"] not in self.hub.objects:
                answer["actions"] = {"upload": {"href": f"{self.hub.url}/lfs/{item['oid']}"}}
            objects.append(answer)
        return Reply(200, {"transfer": "basic", "objects": objects}, {"Content-Type": "application/vnd.git-lfs+json"})

    def _commit(self, name: str, repo: Repo, body: bytes) -> Reply:
        lines = [json.loads(line) for line in body.splitlines()]
        added: dict[str, bytes] = {}
        pointers: dict[str, str] = {}
        deleted: list[str] = []
        for line in lines[1:]:
            value = line["value"]
            if line["key"] == "file":
                added[value["path"]] = base64.b64decode(value["content"])
            elif line["key"] == "lfsFile":
                if value["oid"] not in self.hub.objects:
                    return Reply(400, {"error": f"no LFS object for {value['path']}"})
                added[value["path"]] = self.hub.objects[value["oid"]]
                pointers[value["path"]] = value["oid"]
            elif line["key"] == "deletedFile":
                deleted.append(value["path"])
        for path in deleted:
            repo.files.pop(path)
            repo.lfs.pop(path, None)
        repo.files |= added
        repo.lfs |= pointers
        repo.commits.append((lines[0]["value"]["summary"], list(added), deleted))
        url = f"{self.hub.url}/{name}/commit/{repo.sha}"
        return Reply(200, {"success": True, "commitOid": repo.sha, "commitUrl": url})

    def _resolve(self, name: str, path: str, role: str | None) -> Reply:
        repo = self._repo(name, role)
        if repo is None:
            return Reply(401, {"error": "Repository not found"}, {"X-Error-Code": "RepoNotFound"})
        if path not in repo.files:
            return Reply(404, {"error": "Entry not found"}, {"X-Error-Code": "EntryNotFound"})
        data, etag = repo.files[path], self._oid(repo, path)
        headers = {"X-Repo-Commit": repo.sha, "ETag": f'"{etag}"', "Accept-Ranges": "bytes"}
        if path in repo.lfs:
            headers |= {"X-Linked-ETag": f'"{etag}"', "X-Linked-Size": str(len(data))}
        match = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))
        if match is None:
            return Reply(200, data, headers)
        start, end = int(match[1]), min(int(match[2] or len(data) - 1), len(data) - 1)
        headers["Content-Range"] = f"bytes {start}-{end}/{len(data)}"
        return Reply(206, data[start : end + 1], headers)


def _validate_yaml(content: str) -> Reply:
    import yaml

    match = re.match(r"---\n(.*?\n)---\n", content, re.DOTALL)
    try:
        data = yaml.safe_load(match[1]) if match else {}
        problem = None if isinstance(data, dict) else "metadata is no object"
    except yaml.YAMLError as error:
        problem = f"bad YAML: {error}"
    if problem is None and isinstance(data.get("license"), list) and None in data["license"]:
        problem = '"license" must be a string'
    return Reply(400, {"errors": [{"message": problem}], "warnings": []}) if problem else Reply(200, {"warnings": []})


@contextmanager
def serve() -> Iterator[Hub]:
    """A running stub."""
    hub = Hub()
    handler = type("Handler", (_Handler,), {"hub": hub})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    server.daemon_threads = True
    hub.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
