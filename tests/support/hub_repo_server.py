"""A hub on loopback that repositories are created in and committed to, as huggingface_hub does it without xet.

`answers` and `stall_at` make it fail: it counts each request, so that a test sees what was sent twice.
"""

import base64
import hashlib
import json
import threading
from contextlib import contextmanager
from dataclasses import dataclass, field
from urllib.parse import urlsplit

from loopback import Answers as Handler
from loopback import Server, running

TOKEN = "hf_write_token_of_the_test"


@dataclass
class Repository:
    """A repository of the double."""

    private: bool
    files: dict[str, bytes] = field(default_factory=dict)
    tags: list[str] = field(default_factory=list)
    commits: list[str] = field(default_factory=list)


class Hub(Server):
    """`repositories` by id; `objects`: LFS contents by sha256; `puts`: sha256 of each upload that was received completely."""

    def __init__(self):
        super().__init__(Answers)
        self.repositories: dict[str, Repository] = {}
        self.objects: dict[str, bytes] = {}
        self.puts: list[str] = []
        self.requests: list[tuple[str, str]] = []
        self.answers: list[int] = []  # status codes of the next uploads, 0 for a good one
        self.stall_put = threading.Event()  # while set, an upload is read and not answered
        self.user = "me"


class Answers(Handler):
    server: Hub

    def do_GET(self):
        path = self._begin()
        if path == "/api/whoami-v2":
            self._json({"name": self.server.user, "type": "user", "orgs": [], "auth": {"type": "access_token"}})
        elif path.startswith("/api/models/"):
            name = "/".join(path.split("/")[3:5])
            repo = self.server.repositories.get(name)
            if repo is None:
                self._json({"error": "Repository not found"}, 404, {"X-Error-Code": "RepoNotFound"})
                return
            self._json(
                {
                    "id": name,
                    "private": repo.private,
                    "tags": repo.tags,
                    "siblings": [{"rfilename": one} for one in repo.files],
                    "sha": "0" * 40,
                }
            )
        else:
            self._json({"error": "not found"}, 404)

    def do_HEAD(self):
        self._begin()
        self._json({}, 404)

    def do_POST(self):
        path, body = self._begin(), self._body()
        if self.headers.get("authorization") != f"Bearer {TOKEN}" and "/verify" not in path:
            self._json({"error": "Invalid username or password."}, 401)
        elif path == "/api/repos/create":
            self._create(json.loads(body))
        elif path.endswith("/preupload/main"):
            files = json.loads(body)["files"]
            large = (".safetensors", ".png", ".jpg")
            modes = [
                {
                    "path": f["path"],
                    "uploadMode": "lfs" if f["path"].endswith(large) else "regular",
                    "shouldIgnore": False,
                }
                for f in files
            ]
            self._json({"files": modes})
        elif path.endswith("/info/lfs/objects/batch"):
            self._batch(json.loads(body))
        elif path.startswith("/verify/"):
            self._json({})
        elif path == "/api/validate-yaml":
            assert json.loads(body)["content"].startswith("---")
            self._json({"errors": [], "warnings": []})
        elif path.endswith("/commit/main"):
            self._commit("/".join(path.split("/")[3:5]), body)
        else:
            self._json({"error": "not found"}, 404)

    def do_PUT(self):
        path, body = self._begin(), self._body()
        status = self.server.answers.pop(0) if self.server.answers else 0
        while self.server.stall_put.is_set():
            threading.Event().wait(0.05)
        if status:
            self._json({"error": "broken"}, status)
            return
        name = path.rsplit("/", 1)[1]
        if hashlib.sha256(body).hexdigest() != name:
            self._json({"error": "another content"}, 400)
            return
        self.server.objects[name] = body
        self.server.puts.append(name)
        self._json({})

    def _create(self, wanted):
        name = f"{wanted.get('organization') or self.server.user}/{wanted['name']}"
        url = f"{self.server.url}/{name}"
        if name in self.server.repositories:
            self._json({"error": "You already created this model repo", "url": url}, 409)
        elif not name.startswith(f"{self.server.user}/"):
            self._json({"error": "You don't have the rights"}, 403)
        else:
            private = wanted.get("private", False) or wanted.get("visibility") == "private"
            self.server.repositories[name] = Repository(private)
            self._json({"url": url, "name": name})

    def _batch(self, wanted):
        objects = []
        for one in wanted["objects"]:
            entry = {"oid": one["oid"], "size": one["size"]}
            if one["oid"] not in self.server.objects:
                entry["actions"] = {
                    "upload": {"href": f"{self.server.url}/upload/{one['oid']}"},
                    "verify": {"href": f"{self.server.url}/verify/{one['oid']}"},
                }
            objects.append(entry)
        self._json({"transfer": "basic", "objects": objects}, kind="application/vnd.git-lfs+json")

    def _commit(self, name, body):
        repo = self.server.repositories[name]
        lines = [json.loads(line) for line in body.splitlines()]
        for line in lines:
            value = line["value"]
            if line["key"] == "file":
                repo.files[value["path"]] = base64.b64decode(value["content"])
            elif line["key"] == "lfsFile":
                repo.files[value["path"]] = self.server.objects[value["oid"]]
            elif line["key"] == "header":
                repo.commits.append(value["summary"])
        if b"- hangproof" in repo.files.get("README.md", b""):
            repo.tags = ["hangproof"]
        url = f"{self.server.url}/{name}/commit/{'c' * 40}"
        self._json({"success": True, "commitOid": "c" * 40, "commitUrl": url, "hookOutput": "", "pullRequestUrl": None})

    def _begin(self):
        path = urlsplit(self.path).path
        self.server.requests.append((self.command, self.path))
        return path

    def _body(self):
        if self.headers.get("transfer-encoding", "") == "chunked":
            found = b""
            while size := int(self.rfile.readline(), 16):
                found += self.rfile.read(size)
                self.rfile.readline()
            self.rfile.readline()
            return found
        return self.rfile.read(int(self.headers.get("content-length") or 0))

    def _json(self, value, status=200, headers=(), kind="application/json"):
        data = json.dumps(value).encode()
        self.send_response(status)
        for key, text in dict(headers).items():
            self.send_header(key, text)
        self.send_header("content-type", kind)
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)


@contextmanager
def serving_hub():
    """A running hub."""
    with running(Hub()) as hub:
        try:
            yield hub
        finally:
            hub.stall_put.clear()
