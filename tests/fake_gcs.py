"""A Google Cloud Storage server on localhost: the part of its JSON API that checkpoints use.

It serves the same three clients as the real one: gcsfs (through etils.epath), TensorStore, and
google-cloud-storage. Objects are in a dict. A test can inspect and change them, and can have
requests refused or delayed. Unknown requests get status 501 and are recorded.

https://cloud.google.com/storage/docs/json_api/v1
"""

import base64
import dataclasses
import datetime
import email
import hashlib
import http.server
import itertools
import json
import re
import sys
import threading
import time
import urllib.parse
from collections.abc import Callable

PAGE = 10  # names per page of a listing; the real server's 1000 would never be reached


@dataclasses.dataclass(frozen=True)
class Request:
    """One request: its method, the bucket and object it is for ("" where none), its parameters."""

    method: str
    bucket: str
    name: str
    query: dict[str, str]
    upload: bool


class Hold:
    """A fault that blocks uploads to this object, as if the network hung."""

    def __init__(self, name: str):
        self._name = name
        self.reached = threading.Event()
        self.go_on = threading.Event()

    def __call__(self, request: Request) -> int | None:
        if request.method == "POST" and request.name == self._name:
            self.reached.set()
            self.go_on.wait()
            return 503  # the client has been killed in the meantime
        return None


def refuse(method: str, pattern: str, status: int = 403, times: float = float("inf")):
    """A fault: this many requests of this method, for objects of this name, get this status."""
    seen: list[Request] = []

    def fault(request: Request) -> int | None:
        if re.fullmatch(method, request.method) and re.search(pattern, request.name):
            seen.append(request)
            return status if len(seen) <= times else None
        return None

    fault.seen = seen  # type: ignore[attr-defined]
    return fault


class FakeGcs:
    """The server, from `with` on.

    buckets: bucket -> object's name -> (content, generation).
    updated: (bucket, object's name) -> when it was written, in seconds of `clock`.
    clock: this server's clock, which dates its responses.
    fault: called before each request; an HTTP status refuses the request. It may block.
    """

    def __init__(self) -> None:
        self.buckets: dict[str, dict[str, tuple[bytes, int]]] = {}
        self.updated: dict[tuple[str, str], float] = {}
        self.clock: Callable[[], float] = time.time
        self.fault: Callable[[Request], int | None] = lambda request: None
        self.unknown: list[str] = []
        self.lock = threading.RLock()
        self._generations = itertools.count(1)
        self._sessions: dict[str, tuple[str, str, str, bytearray]] = {}
        self._http = _Server(("127.0.0.1", 0), _Handler)
        self._http.gcs = self  # type: ignore[attr-defined]

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._http.server_address[1]}"

    @property
    def environment(self) -> dict[str, str]:
        """Environment that directs the clients here and keeps them from looking for credentials."""
        return {
            "STORAGE_EMULATOR_HOST": self.url,  # gcsfs and google-cloud-storage
            "TENSORSTORE_GCS_HTTP_URL": self.url,
            "FSSPEC_GCS_TOKEN": "anon",
            "GOOGLE_AUTH_TOKEN_FOR_TESTING": "none",
            "GOOGLE_CLOUD_PROJECT": "test",
            # Otherwise gcsfs queries the bucket's type by gRPC, which this server does not support.
            # For an ordinary bucket, reads and writes are the same.
            "GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT": "false",
        }

    def __enter__(self) -> "FakeGcs":
        threading.Thread(target=self._http.serve_forever, args=(0.05,), daemon=True).start()
        return self

    def __exit__(self, *_) -> None:
        self._http.shutdown()
        self._http.server_close()

    def names(self, bucket: str, prefix: str = "") -> list[str]:
        with self.lock:
            return sorted(name for name in self.buckets[bucket] if name.startswith(prefix))

    def content(self, bucket: str, name: str) -> bytes:
        return self.buckets[bucket][name][0]

    def put(self, bucket: str, name: str, content: bytes) -> None:
        with self.lock:
            self.buckets[bucket][name] = (bytes(content), next(self._generations))
            self.updated[bucket, name] = self.clock()

    def resource(self, bucket: str, name: str) -> dict:
        content, generation = self.buckets[bucket][name]
        seconds = self.updated.get((bucket, name), 0.0)
        updated = f"{datetime.datetime.fromtimestamp(seconds, datetime.UTC):%Y-%m-%dT%H:%M:%S.%fZ}"
        return {
            "kind": "storage#object",
            "id": f"{bucket}/{name}/{generation}",
            "name": name,
            "bucket": bucket,
            "size": str(len(content)),
            "generation": str(generation),
            "metageneration": "1",
            "md5Hash": base64.b64encode(hashlib.md5(content).digest()).decode(),
            "timeCreated": updated,
            "updated": updated,
        }

    def listed(self, bucket: str, query: dict[str, str]) -> dict:
        """A page of names in order; with a delimiter, names below one are listed as one prefix."""
        prefix, delimiter = query.get("prefix", ""), query.get("delimiter", "")
        page = min(PAGE, int(query.get("maxResults", PAGE)))
        entries: dict[str, str] = {}  # what is in the page -> the last name that it covers
        for name in self.names(bucket, prefix):
            rest = name[len(prefix) :]
            cut = rest.find(delimiter) + len(delimiter) if delimiter and delimiter in rest else None
            end = query.get("endOffset")
            if query.get("startOffset", "") <= name and (end is None or name < end):
                entries[prefix + rest[:cut]] = name
        left = [e for e, last in entries.items() if last > query.get("pageToken", "")]
        answer: dict = {"kind": "storage#objects"}
        items = [e for e in left[:page] if e == entries[e]]
        answer["items"] = [self.resource(bucket, name) for name in items]
        answer["prefixes"] = [e for e in left[:page] if e != entries[e]]
        if left[page:]:
            answer["nextPageToken"] = entries[left[page - 1]]
        return answer

    def open_session(self, bucket: str, name: str, match: str) -> str:
        session = str(next(self._generations))
        self._sessions[session] = (bucket, name, match, bytearray())
        return session

    def session(self, key: str) -> tuple[str, str, str, bytearray]:
        return self._sessions[key]


class _Server(http.server.ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 100

    def handle_error(self, request, client_address) -> None:
        if not isinstance(sys.exception(), ConnectionError):  # a client that was killed
            super().handle_error(request, client_address)


class _Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # else each answer waits 40 ms for the other side's ACK
    wbufsize = -1

    @property
    def gcs(self) -> FakeGcs:
        return self.server.gcs  # type: ignore[attr-defined]

    def date_time_string(self, timestamp: float | None = None) -> str:
        return super().date_time_string(self.gcs.clock() if timestamp is None else timestamp)

    def log_message(self, *_) -> None:
        pass

    def do_GET(self) -> None:
        self._serve()

    do_POST = do_PUT = do_DELETE = do_GET

    def _serve(self) -> None:
        body = self._body()
        url = urllib.parse.urlsplit(self.path)
        query = dict(urllib.parse.parse_qsl(url.query, keep_blank_values=True))
        parts = [urllib.parse.unquote(part) for part in url.path.strip("/").split("/")]
        upload = parts[0] == "upload"
        if parts[0] in ("upload", "download"):
            parts = parts[1:]
        bucket, name = (parts[i] if len(parts) > i else "" for i in (3, 5))
        if upload:
            name = query.get("name") or name
            if query.get("uploadType") == "multipart":
                meta, body = _multipart(self.headers["Content-Type"], body)
                name = meta["name"]
        request = Request(self.command, bucket, name, query, upload)
        status = self.gcs.fault(request)
        if status:
            return self._answer(status, {"error": {"code": status, "message": "told to refuse"}})
        if parts[:3] != ["storage", "v1", "b"] or not bucket:
            return self._unknown()
        if bucket not in self.gcs.buckets:
            return self._missing(f"The specified bucket does not exist: {bucket}")
        with self.gcs.lock:
            if upload:
                self._upload(request, body)
            elif len(parts) > 6 and self.command == "POST":
                self._copy(request, parts[6:])
            elif name:
                self._object(request)
            elif self.command == "GET" and len(parts) == 5:
                self._answer(200, self.gcs.listed(bucket, query))
            elif self.command == "GET" and len(parts) == 4:
                self._answer(200, {"kind": "storage#bucket", "name": bucket})
            else:
                self._unknown()

    def _object(self, request: Request) -> None:
        found = self.gcs.buckets[request.bucket].get(request.name)
        generation = found[1] if found else 0
        if not self._matches(request, generation):
            return
        if found is None or request.query.get("generation", str(generation)) != str(generation):
            self._missing(f"No such object: {request.bucket}/{request.name}")
        elif request.method == "DELETE":
            del self.gcs.buckets[request.bucket][request.name]
            self._answer(204, b"")
        elif request.method == "GET" and request.query.get("alt") == "media":
            self._media(*found)
        elif request.method == "GET":
            self._answer(200, self.gcs.resource(request.bucket, request.name))
        else:
            self._unknown()

    def _media(self, content: bytes, generation: int) -> None:
        headers = {"x-goog-generation": str(generation)}
        asked = self.headers.get("Range")
        if not asked:
            return self._answer(200, content, headers)
        first, last = asked.removeprefix("bytes=").split("-")
        start = int(first) if first else max(0, len(content) - int(last))
        stop = min(int(last) + 1, len(content)) if first and last else len(content)
        if start >= len(content):
            return self._answer(416, {"error": {"code": 416, "message": "range"}})
        headers["Content-Range"] = f"bytes {start}-{stop - 1}/{len(content)}"
        self._answer(206, content[start:stop], headers)

    def _upload(self, request: Request, body: bytes) -> None:
        match = request.query.get("ifGenerationMatch", "")
        kind = request.query.get("uploadType")
        if "upload_id" in request.query:
            bucket, name, match, so_far = self.gcs.session(request.query["upload_id"])
            so_far += body
            span, total = self.headers["Content-Range"].removeprefix("bytes ").split("/")
            if total == "*" or (span != "*" and len(so_far) < int(total)):
                return self._answer(308, b"", {"Range": f"bytes=0-{len(so_far) - 1}"})
            request, body = dataclasses.replace(request, bucket=bucket, name=name), bytes(so_far)
        elif kind == "resumable":
            name = request.name or json.loads(body)["name"]
            session = self.gcs.open_session(request.bucket, name, match)
            path = f"/upload/storage/v1/b/{request.bucket}/o?uploadType=resumable"
            where = {"Location": f"{self.gcs.url}{path}&upload_id={session}"}
            return self._answer(200, b"", where)
        elif kind not in ("media", "multipart"):
            return self._unknown()
        old = self.gcs.buckets[request.bucket].get(request.name)
        if match and int(match) != (old[1] if old else 0):
            return self._answer(412, {"error": {"code": 412, "message": "conditionNotMet"}})
        self.gcs.put(request.bucket, request.name, body)
        self._answer(200, self.gcs.resource(request.bucket, request.name))

    def _copy(self, request: Request, to: list[str]) -> None:
        """rewriteTo/b/BUCKET/o/OBJECT, and moveTo/o/OBJECT inside the bucket."""
        bucket = request.bucket if to[0] == "moveTo" else to[2]
        if to[0] not in ("moveTo", "rewriteTo"):
            return self._unknown()
        found = self.gcs.buckets[request.bucket].get(request.name)
        if found is None:
            return self._missing(f"No such object: {request.bucket}/{request.name}")
        self.gcs.put(bucket, to[-1], found[0])
        resource = self.gcs.resource(bucket, to[-1])
        if to[0] == "moveTo":
            del self.gcs.buckets[request.bucket][request.name]
            return self._answer(200, resource)
        self._answer(200, {"kind": "storage#rewriteResponse", "done": True, "resource": resource})

    def _matches(self, request: Request, generation: int) -> bool:
        """Sends the response itself if a condition of the request does not hold."""
        if request.query.get("ifGenerationMatch", str(generation)) != str(generation):
            self._answer(412, {"error": {"code": 412, "message": "conditionNotMet"}})
        elif request.query.get("ifGenerationNotMatch") == str(generation):
            self._answer(304, b"")
        else:
            return True
        return False

    def _body(self) -> bytes:
        if self.headers.get("Transfer-Encoding", "") == "chunked":
            chunks = []
            while size := int(self.rfile.readline().split(b";")[0], 16):
                chunks.append(self.rfile.read(size))
                self.rfile.readline()
            self.rfile.readline()
            return b"".join(chunks)
        return self.rfile.read(int(self.headers.get("Content-Length", 0)))

    def _missing(self, message: str) -> None:
        self._answer(404, {"error": {"code": 404, "message": message}})

    def _unknown(self) -> None:
        self.gcs.unknown.append(f"{self.command} {self.path}")
        self._answer(501, {"error": {"code": 501, "message": "not taught"}})

    def _answer(self, status: int, content: dict | bytes, headers: dict | None = None) -> None:
        data = json.dumps(content).encode() if isinstance(content, dict) else content
        kind = "application/json; charset=UTF-8" if isinstance(content, dict) else "text/plain"
        self.send_response(status)
        for key, value in {"Content-Type": kind, **(headers or {})}.items():
            self.send_header(key, value)
        if status not in (204, 304):
            self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        if status not in (204, 304):
            self.wfile.write(data)


def _multipart(kind: str, body: bytes) -> tuple[dict, bytes]:
    """(metadata, content) of a multipart/related body."""
    boundary = email.message_from_string(f"Content-Type: {kind}\n\n").get_boundary()
    assert boundary
    _, first, second, _ = body.split(f"--{boundary}".encode())
    blank = [b"\r\n\r\n" if b"\r\n\r\n" in part else b"\n\n" for part in (first, second)]
    meta, content = first.split(blank[0], 1)[1], second.split(blank[1], 1)[1]
    ending = b"\r\n" if blank[1] == b"\r\n\r\n" else b"\n"
    return json.loads(meta), content.removesuffix(ending)
