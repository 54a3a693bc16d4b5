"""What three clouds' metadata servers say, spoken by a local server, becomes notices."""

import json
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, urlsplit

import pytest

from mmlab.messages import RunPaths
from mmlab.messages.notices import take_notices
from mmlab.train import spot

ACTION = "/latest/meta-data/spot/instance-action"
REBALANCE = "/latest/meta-data/events/recommendations/rebalance"
PREEMPTED = "/computeMetadata/v1/instance/preempted"
MAINTENANCE = "/computeMetadata/v1/instance/maintenance-event"
EVENTS = "/metadata/scheduledevents"


class Server(ThreadingHTTPServer):
    """Answers one cloud's requests as that cloud does; `items` is what it says, by path; `hold` seconds for which a
    request for a change is held without one; `late` first requests that it answers when one more has come."""

    daemon_threads = True
    hold = 0.1
    late = 0

    def __init__(self, cloud, items):
        super().__init__(("127.0.0.1", 0), Handler)
        self.cloud, self.items, self.tokens, self.asked = cloud, items, set(), []
        self.changed, self.held = threading.Condition(), threading.Event()
        threading.Thread(target=self.serve_forever, args=(0.02,), daemon=True).start()

    def say(self, path, value):
        with self.changed:
            self.items[path] = value
            self.changed.notify_all()

    def come(self, path):
        with self.changed:
            self.asked.append(path)
            self.changed.notify_all()
            if len(self.asked) <= self.late:
                self.changed.wait_for(lambda: len(self.asked) > self.late, 30)

    @property
    def address(self):
        return f"http://127.0.0.1:{self.server_port}"


class Handler(BaseHTTPRequestHandler):
    def log_message(self, *_):
        pass

    def answer(self, code, text="", **headers):
        self.send_response(code)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text.encode())

    def do_PUT(self):
        self.server.come(self.path)
        allowed = self.server.cloud == "aws" and self.path == "/latest/api/token"
        if not allowed or "X-aws-ec2-metadata-token-ttl-seconds" not in self.headers:
            return self.answer(400)
        token = f"token-{len(self.server.tokens)}"
        self.server.tokens.add(token)
        return self.answer(200, token)

    def do_GET(self):
        url = urlsplit(self.path)
        query = {key: values[0] for key, values in parse_qs(url.query).items()}
        self.server.come(url.path)
        return getattr(self, self.server.cloud)(url.path, query)

    def aws(self, path, query):
        if self.headers.get("X-aws-ec2-metadata-token") not in self.server.tokens:
            return self.answer(401)
        return self.item(path)

    def gcp(self, path, query):
        if self.headers.get("Metadata-Flavor") != "Google":
            return self.answer(403)
        items, etag = self.server.items, lambda: str(abs(hash(self.server.items.get(path))))
        if query.get("wait_for_change") == "true" and query.get("last_etag") == etag():
            with self.server.changed:
                self.server.held.set()
                self.server.changed.wait(min(float(query["timeout_sec"]), self.server.hold))
        if path not in items:
            return self.answer(404)
        return self.answer(200, items[path], ETag=etag(), Metadata_Flavor="Google")

    def azure(self, path, query):
        if self.headers.get("Metadata") != "true" or "api-version" not in query:
            return self.answer(400)
        return self.item(path)

    def item(self, path):
        text = self.server.items.get(path)
        return self.answer(404) if text is None else self.answer(200, text)


NORMAL = {
    "aws": {"/latest/meta-data/instance-life-cycle": "spot"},
    "gcp": {"/computeMetadata/v1/instance/id": "7", PREEMPTED: "FALSE", MAINTENANCE: "NONE",
            "/computeMetadata/v1/instance/scheduling/preemptible": "TRUE"},
    "azure": {"/metadata/instance/compute/name": "vm-3", "/metadata/instance/compute/priority": "Spot",
              EVENTS: json.dumps({"DocumentIncarnation": 1, "Events": []})},
}  # fmt: skip


@pytest.fixture
def serve(monkeypatch):
    servers = []

    def make(cloud):
        servers.append(Server(cloud, dict(NORMAL[cloud])))
        monkeypatch.setenv(spot.METADATA, servers[-1].address)
        monkeypatch.delenv(spot.EXPENDABLE, raising=False)
        monkeypatch.setattr(spot, "PROBE", 10.0)
        return servers[-1]

    yield make
    for server in servers:
        server.shutdown()
        server.server_close()


def look(server):
    cloud = spot.find_cloud(server.cloud)
    return lambda: list(cloud.look())


@pytest.mark.parametrize("cloud", ["aws", "gcp", "azure"])
def test_each_cloud_is_recognised_and_says_that_the_host_is_expendable(serve, cloud, monkeypatch):
    serve(cloud)
    assert spot.find_cloud("auto").name == cloud
    assert spot.expendable("auto")
    assert not spot.expendable("none")
    monkeypatch.setenv(spot.EXPENDABLE, "0")
    assert not spot.expendable("auto")


def test_no_cloud_answers(monkeypatch):
    monkeypatch.setenv(spot.METADATA, "http://127.0.0.1:9")
    assert spot.find_cloud("auto") is None
    assert not spot.expendable("auto")
    assert not spot.expendable("aws")
    monkeypatch.setenv(spot.EXPENDABLE, "1")
    assert spot.expendable("none")


def test_aws_interruption_once_also_with_a_token_that_has_expired(serve):
    server = serve("aws")
    now = look(server)
    assert now() == []
    server.tokens.clear()
    server.say(ACTION, '{"action": "terminate", "time": "2030-09-18T08:22:00Z"}')
    (notice,) = now()
    assert (notice.kind, notice.source, notice.pid) == ("leave", "aws", None)
    assert time.gmtime(notice.deadline)[:5] == (2030, 9, 18, 8, 22)
    assert now() == []
    server.say(REBALANCE, '{"noticeTime": "2030-09-18T08:00:00Z"}')
    (notice,) = now()
    assert notice.kind == "advice"


def test_gcp_preemption_wakes_the_request_that_waits(serve):
    server = serve("gcp")
    now = look(server)
    assert now() == []
    server.hold, began = 60.0, time.time()
    threading.Thread(target=lambda: server.held.wait(30) and server.say(PREEMPTED, "TRUE")).start()
    (notice,) = now()
    assert (notice.kind, notice.source) == ("leave", "gcp")
    assert began <= notice.deadline - 30 <= time.time()
    server.hold = 0.1
    assert now() == []
    server.say(MAINTENANCE, "MIGRATE_ON_HOST_MAINTENANCE")
    assert [notice.kind for notice in now()] == ["advice"]
    server.say(MAINTENANCE, "TERMINATE_ON_HOST_MAINTENANCE")
    assert [notice.kind for notice in now()] == ["leave"]


def test_azure_events_of_this_machine_alone(serve):
    server = serve("azure")
    now = look(server)
    event = {"EventId": "a", "EventType": "Preempt", "ResourceType": "VirtualMachine", "Resources": ["vm-4"],
             "EventStatus": "Scheduled", "NotBefore": "Mon, 19 Sep 2033 18:29:47 GMT"}  # fmt: skip
    server.say(EVENTS, json.dumps({"Events": [event]}))
    assert now() == []
    mine = [event | {"EventId": "b", "Resources": ["vm-3"]}, event | {"EventId": "c", "EventType": "Freeze",
            "Resources": ["vm-3"], "NotBefore": ""}]  # fmt: skip
    server.say(EVENTS, json.dumps({"Events": [event, *mine]}))
    found = now()
    assert [notice.kind for notice in found] == ["leave", "advice"]
    assert time.gmtime(found[0].deadline)[:4] == (2033, 9, 19, 18)
    assert now() == []


def test_a_thread_writes_them_down_and_outlives_nonsense(serve, tmp_path, monkeypatch):
    monkeypatch.setattr(spot, "EVERY", 0.05)
    server = serve("aws")
    monkeypatch.setattr(spot, "PROBE", 0.05)
    monkeypatch.setattr(spot, "PROBES", 12)
    server.late = 2  # whom it does not answer soon enough asks again
    paths = RunPaths(tmp_path)
    watch = spot.SpotWatch(paths, "auto")
    try:
        server.say(ACTION, "no json")
        end = time.monotonic() + 30
        while server.asked.count(ACTION) < 3:
            assert time.monotonic() < end
            time.sleep(0.02)
        server.say(ACTION, '{"action": "stop", "time": "2030-09-18T08:22:00Z"}')
        while not list(paths.notices.glob("*.json")):
            assert time.monotonic() < end
            time.sleep(0.02)
        ((_, notice),) = take_notices(paths)
        assert (notice.kind, notice.source) == ("leave", "aws")
        assert not list(take_notices(paths))
    finally:
        watch.close()
