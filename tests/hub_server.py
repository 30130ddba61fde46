"""
A Hugging Face Hub on this machine, enough for model repositories: create, push (regular and LFS files), branches, pull
requests, private ones, download, also of a part of a file, and faults on request.

Not covered: xet, multipart LFS, datasets and spaces. Clients read the environment when they
import `huggingface_hub`, so run them in a subprocess with [`HubServer.environment`].
"""

import base64
import hashlib
import json
import os
import re
import tempfile
import threading
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit


TOKEN = "hf_local"
# What the Hub's default .gitattributes sends through LFS, as far as this project writes it.
LFS_SUFFIXES = (".safetensors", ".bin", ".model")


@dataclass
class Repo:
    """
    Newest commit of a branch of a repository. `files`: path -> sha256 of its content; `lfs`: paths that came through
    LFS; `commits`: the names of the files after each commit; `branches`: the others, by name.
    """

    sha: str
    files: dict = field(default_factory=dict)
    lfs: set = field(default_factory=set)
    commits: list = field(default_factory=list)
    private: bool = False
    branches: dict = field(default_factory=dict)


@dataclass
class Fault:
    """
    What goes wrong with the requests whose method and path match a pattern.

    Args:
        pattern (`str`): Regular expression, searched in `"GET /user/name/resolve/main/file"`.
        what (`int` or `str`): A status, `"drop"` (the connection ends without an answer), `"cut"` (it ends within the
            content) or `"flip"` (one byte of the content is another).
        times (`int`, *optional*): For how many requests; by default for all.
    """

    pattern: str
    what: int | str
    times: int = -1


class HubServer:
    """
    Context manager that serves a Hub on a free port of the loopback interface.

    Attributes:
        url (`str`): Endpoint.
        repos (`dict[str, Repo]`): What was pushed, by `"user/name"`.
        faults (`list[Fault]`): What goes wrong.
        requests (`list[str]`): Method and path of every request.
    """

    def __enter__(self):
        self.repos, self.faults, self.requests = {}, [], []
        self.folder = tempfile.TemporaryDirectory()
        self._http = ThreadingHTTPServer(("127.0.0.1", 0), _Handler)
        self._http.hub = self
        self.url = f"http://127.0.0.1:{self._http.server_port}"
        self._thread = threading.Thread(target=self._http.serve_forever, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_):
        self._http.shutdown()
        self._thread.join()
        self._http.server_close()
        self.folder.cleanup()

    def environment(self, hf_home):
        """The caller's environment variables with this Hub as the endpoint and `hf_home` as the (new) cache."""
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("HF_", "HUGGING"))}
        return kept | {
            "HF_ENDPOINT": self.url,
            "HF_HOME": str(hf_home),
            "HF_TOKEN": TOKEN,
            "HF_HUB_DISABLE_XET": "1",
            "HF_HUB_DISABLE_TELEMETRY": "1",
            "NO_PROXY": "127.0.0.1",
        }

    def blob(self, oid):
        return Path(self.folder.name, oid)

    def read(self, repo, path):
        """Content of a file on the main branch."""
        return self.blob(self.repos[repo].files[path]).read_bytes()

    def fault(self, request):
        """What goes wrong with this request, or `None`."""
        for fault in self.faults:
            if fault.times and re.search(fault.pattern, request):
                fault.times -= 1
                return fault.what
        return None


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # or every answer waits 40 ms for the client to confirm its head
    wrong: str | int | None = None  # the fault of a request

    def log_message(self, *_):
        pass

    def do_GET(self):
        self._dispatch()

    do_HEAD = do_POST = do_PUT = do_GET

    def _dispatch(self):
        # Read the body in any case: what is left of it would be taken for the next request on this connection.
        body = self._body()
        if self.headers.get("Authorization") not in (None, f"Bearer {TOKEN}") or (
            self.command == "POST" and "Authorization" not in self.headers
        ):
            return self._error(401, "Invalid credentials in Authorization header")
        path = unquote(urlsplit(self.path).path)
        self.server.hub.requests.append(f"{self.command} {path}")
        self.wrong = self.server.hub.fault(f"{self.command} {path}")
        if isinstance(self.wrong, int):
            return self._error(self.wrong, "made to fail")
        if self.wrong == "drop":
            self.close_connection = True
            return None
        method = "GET" if self.command == "HEAD" else self.command
        for route_method, pattern, handler in _ROUTES:
            if route_method == method and (match := re.fullmatch(pattern, path)):
                groups = match.groupdict()
                if "repo" not in groups:
                    return handler(self, body, **groups)
                repo = self.server.hub.repos.get(groups["repo"])
                if repo is None or (repo.private and "Authorization" not in self.headers):
                    return self._error(401 if repo else 404, "Repository not found", "RepoNotFound")
                revision = groups.pop("revision", None) or "main"
                branches = {"main": repo, repo.sha: repo} | repo.branches
                branches |= {branch.sha: branch for branch in repo.branches.values()}
                if revision not in branches:
                    return self._error(404, "Invalid rev id", "RevisionNotFound")
                self.revision = revision
                return handler(self, body, **(groups | {"repo": branches[revision], "name": groups["repo"]}))
        return self._error(404, f"No route for {self.command} {path}")

    def _body(self):
        if self.headers.get("Transfer-Encoding") != "chunked":
            return self.rfile.read(int(self.headers.get("Content-Length", 0)))
        chunks = []
        while size := int(self.rfile.readline(), 16):
            chunks.append(self.rfile.read(size))
            self.rfile.readline()
        self.rfile.readline()
        return b"".join(chunks)

    def _send(self, status, content, headers):
        self.send_response(status)
        for name, value in ({"Content-Length": str(len(content))} | headers).items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "HEAD":
            return
        if self.wrong == "cut":
            self.close_connection = True
            content = content[: len(content) // 2]
        elif self.wrong == "flip":
            content = content[:-1] + bytes([content[-1] ^ 1])
        self.wfile.write(content)

    def _json(self, value, status=200, headers=None):
        self._send(status, json.dumps(value).encode(), {"Content-Type": "application/json"} | (headers or {}))

    def _error(self, status, message, code=None):
        headers = {"X-Error-Message": message} | ({"X-Error-Code": code} if code else {})
        self._json({"error": message}, status, headers)

    def _create(self, body):
        fields = json.loads(body)
        name = f"{fields.get('organization') or 'user'}/{fields['name']}"
        url = f"{self.server.hub.url}/{name}"
        if name in self.server.hub.repos:
            return self._json({"error": "You already created this model repo", "url": url}, 409)
        sha = hashlib.sha1(name.encode()).hexdigest()
        self.server.hub.repos[name] = Repo(
            sha, private=bool(fields.get("private") or fields.get("visibility") == "private")
        )
        self._json({"url": url, "name": name})

    def _validate_card(self, body):
        self._json({"errors": [], "warnings": []})

    def _branch(self, body, repo, name, branch):
        if branch in repo.branches:
            return self._error(409, "Reference already exists")
        repo.branches[branch] = Repo(repo.sha, dict(repo.files), set(repo.lfs))
        self._json({})

    def _preupload(self, body, repo, name):
        paths = [file["path"] for file in json.loads(body)["files"]]
        modes = {path: "lfs" if path.endswith(LFS_SUFFIXES) else "regular" for path in paths}
        self._json({"files": [{"path": p, "uploadMode": m, "shouldIgnore": False} for p, m in modes.items()]})

    def _lfs_batch(self, body, repo, name):
        hub = self.server.hub
        objects = [{"oid": item["oid"], "size": item["size"]} for item in json.loads(body)["objects"]]
        for item in objects:
            if not hub.blob(item["oid"]).exists():
                item["actions"] = {"upload": {"href": f"{hub.url}/lfs/{item['oid']}"}}
        self._json({"transfer": "basic", "objects": objects})

    def _lfs_put(self, body, oid):
        if hashlib.sha256(body).hexdigest() != oid:
            return self._error(400, "Content does not match its sha256")
        self.server.hub.blob(oid).write_bytes(body)
        self._json({})

    def _commit(self, body, repo, name):
        hub = self.server.hub
        files, lfs = dict(repo.files), set(repo.lfs)
        for line in body.splitlines():
            operation = json.loads(line)
            value = operation["value"]
            if operation["key"] == "header":
                continue
            path = value["path"]
            lfs.discard(path)
            if operation["key"] == "file":
                content = base64.b64decode(value["content"])
                files[path] = hashlib.sha256(content).hexdigest()
                hub.blob(files[path]).write_bytes(content)
            elif operation["key"] == "lfsFile" and hub.blob(value["oid"]).exists():
                files[path] = value["oid"]
                lfs.add(path)
            elif operation["key"] == "deletedFile":
                files.pop(path, None)
            else:
                return self._error(400, f"Cannot commit {operation['key']} {path}")
        sha = hashlib.sha1((repo.sha + json.dumps(files, sort_keys=True)).encode()).hexdigest()
        answer = {"success": True, "commitOid": sha, "commitUrl": f"{hub.url}/{name}/commit/{sha}"}
        main, commits = hub.repos[name], [*repo.commits, set(files)]
        if "create_pr=1" in self.path:
            number = 1 + sum(branch.startswith("refs/pr/") for branch in main.branches)
            main.branches[f"refs/pr/{number}"] = Repo(sha, files, lfs, commits)
            answer["pullRequestUrl"] = f"{hub.url}/{name}/discussions/{number}"
        elif self.revision == "main":
            hub.repos[name] = Repo(sha, files, lfs, commits, main.private, main.branches)
        else:
            main.branches[self.revision] = Repo(sha, files, lfs, commits)
        self._json(answer)

    def _info(self, body, repo, name):
        siblings = [{"rfilename": path} for path in sorted(repo.files)]
        self._json(
            {
                "id": name,
                "sha": repo.sha,
                "private": self.server.hub.repos[name].private,
                "tags": [],
                "siblings": siblings,
            }
        )

    def _tree(self, body, repo, name):
        entries = []
        for path, oid in sorted(repo.files.items()):
            content = self.server.hub.blob(oid).read_bytes()
            size = len(content)
            git_oid = hashlib.sha1(b"blob %d\0" % size + content).hexdigest()
            entry = {"type": "file", "path": path, "size": size, "oid": git_oid}
            if path in repo.lfs:
                entry["lfs"] = {"oid": oid, "size": size, "pointerSize": 130}
            entries.append(entry)
        self._json(entries)

    def _resolve(self, body, repo, name, path):
        if path not in repo.files:
            return self._error(404, "Entry not found", "EntryNotFound")
        oid = repo.files[path]
        content = self.server.hub.blob(oid).read_bytes()
        headers = {"ETag": f'"{oid}"', "X-Repo-Commit": repo.sha}
        if path in repo.lfs:
            headers |= {"X-Linked-Etag": f'"{oid}"', "X-Linked-Size": str(len(content))}
        if self.command == "GET" and (part := re.fullmatch(r"bytes=(\d+)-", self.headers.get("Range", ""))):
            start = int(part[1])
            headers["Content-Range"] = f"bytes {start}-{len(content) - 1}/{len(content)}"
            return self._send(206, content[start:], headers)
        self._send(200, content, headers)


_REPO = r"(?P<repo>[^/]+/[^/]+)"
_REVISION = r"(?P<revision>refs/pr/\d+|[^/]+)"
_ROUTES = (
    ("POST", "/api/repos/create", _Handler._create),
    ("POST", "/api/validate-yaml", _Handler._validate_card),
    ("POST", f"/api/models/{_REPO}/branch/(?P<branch>.+)", _Handler._branch),
    ("POST", f"/api/models/{_REPO}/preupload/{_REVISION}", _Handler._preupload),
    ("POST", rf"/{_REPO}\.git/info/lfs/objects/batch", _Handler._lfs_batch),
    ("PUT", "/lfs/(?P<oid>[0-9a-f]{64})", _Handler._lfs_put),
    ("POST", f"/api/models/{_REPO}/commit/{_REVISION}", _Handler._commit),
    ("GET", f"/api/models/{_REPO}(?:/revision/{_REVISION})?", _Handler._info),
    ("GET", f"/api/models/{_REPO}/tree/{_REVISION}/?", _Handler._tree),
    ("GET", f"/{_REPO}/resolve/{_REVISION}/(?P<path>.+)", _Handler._resolve),
)
