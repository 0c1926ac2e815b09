"""A hub on 127.0.0.1 with the part of the protocol that `from_pretrained` and `load_dataset` use."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from urllib.parse import unquote, urlsplit

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@dataclass
class Repository:
    """The files of one repository, and its faults."""

    files: dict[str, bytes] = field(default_factory=dict)
    refusal: tuple[int, str | None] | None = None
    """HTTP status and X-Error-Code of every answer."""
    breaks_at: dict[str, int] = field(default_factory=dict)
    """The connection closes after this many bytes of a file, and at once when the client asks for the rest."""


@dataclass
class Hub:
    url: str
    models: dict[str, Repository] = field(default_factory=dict)
    datasets: dict[str, Repository] = field(default_factory=dict)
    requests: list[tuple[str, str]] = field(default_factory=list)
    """Method and path of each, in order."""
    down: bool = False
    """Connections are closed without an answer."""

    def add_folder(self, name: str, folder: Path) -> Repository:
        """Serve a folder's files as a model repository."""
        files = {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}
        self.models[name] = Repository(files)
        return self.models[name]

    def downloads(self, name: str) -> list[str]:
        """Files of a repository that were fetched, one entry per request."""
        return [
            path.rsplit("/", 1)[1] for method, path in self.requests if method == "GET" and f"/{name}/resolve/" in path
        ]


@contextmanager
def running_hub() -> Iterator[Hub]:
    """A hub that listens until the block ends."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Answers)
    hub = Hub(f"http://127.0.0.1:{server.server_address[1]}")
    server.hub = hub  # type: ignore[attr-defined]
    thread = Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


class _Answers(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_HEAD(self) -> None:
        self._answer()

    def do_GET(self) -> None:
        self._answer()

    def do_POST(self) -> None:
        length = int(self.headers.get("Content-Length", 0))
        self.rfile.read(length)
        self._send(404, b"{}")

    def log_message(self, *args: object) -> None:
        """Keeps the terminal clean."""

    def _answer(self) -> None:
        hub: Hub = self.server.hub  # type: ignore[attr-defined]
        path = unquote(urlsplit(self.path).path)
        if hub.down:
            self.close_connection = True
            return None
        hub.requests.append((self.command, path))
        if path == "/":
            return self._send(200, b"hub")
        parts = path.strip("/").split("/")
        is_api, kind = parts[0] == "api", "models"
        if is_api:
            kind, parts = parts[1], parts[2:]
        elif parts[0] == "datasets":
            kind, parts = "datasets", parts[1:]
        repository = getattr(hub, kind, {}).get("/".join(parts[:2]))
        if repository is None:
            return self._send(404, b"{}", {"X-Error-Code": "RepoNotFound"})
        if repository.refusal:
            status, code = repository.refusal
            return self._send(status, b"{}", {"X-Error-Code": code} if code else {})
        if is_api:
            return self._describe(repository, "/".join(parts[:2]), parts[2:])
        return self._file(repository, "/".join(parts[4:]))

    def _describe(self, repository: Repository, name: str, rest: list[str]) -> None:
        if rest[:1] == ["tree"]:
            answer: object = [
                {"type": "file", "path": path, "size": len(content), "oid": _etag(content)}
                for path, content in repository.files.items()
            ]
        elif rest[:1] in ([], ["revision"]):
            siblings = [{"rfilename": path} for path in repository.files]
            answer = {"id": name, "sha": COMMIT, "siblings": siblings, "private": False, "gated": False, "tags": []}
        else:
            return self._send(404, b"{}", {"X-Error-Code": "EntryNotFound"})
        return self._send(200, json.dumps(answer).encode(), {"Content-Type": "application/json"})

    def _file(self, repository: Repository, name: str) -> None:
        content = repository.files.get(name)
        if content is None:
            self._send(404, b"", {"X-Error-Code": "EntryNotFound", "X-Repo-Commit": COMMIT})
            return
        headers = {"ETag": f'"{_etag(content)}"', "X-Repo-Commit": COMMIT, "Accept-Ranges": "bytes"}
        start = 0
        if wanted := self.headers.get("Range"):
            start = int(wanted.removeprefix("bytes=").split("-")[0])
            headers["Content-Range"] = f"bytes {start}-{len(content) - 1}/{len(content)}"
        breaks_at = repository.breaks_at.get(name)
        sent = content[start:] if breaks_at is None else content[start : max(start, breaks_at)]
        self._send(206 if wanted else 200, sent, headers, length=len(content) - start)
        if breaks_at is not None:
            self.close_connection = True

    def _send(self, status: int, body: bytes, headers: dict[str, str] | None = None, length: int | None = None) -> None:
        self.send_response(status)
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body) if length is None else length))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)


def _etag(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()
