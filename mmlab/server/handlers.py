"""The routes below `/mmlab`. All ask for the usual authentication; changes also for XSRF and `allow_control`.

GET  overview                 {"allow_control", "root", "labs", "runs", "problem"}
GET  runs/KEY                 a run with ranks and curve; ?command=ID adds "ack"
POST runs/KEY/VERB            pause, resume, step {"n"}, checkpoint {"name"}, stop, abort; {"verb", "id"}
POST labs                     {"engines": n}: starts a lab; its status
POST labs/ID/grow             {"engines": n}: more engines, n in all; its status
POST labs/ID/close            ends a lab and all its processes; {"id", "state", "how"}
POST notebook                 copies the notebooks to the server's folder; {"path"} of the quickstart one
"""

from __future__ import annotations

import errno
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from jupyter_server.auth.decorator import authorized
from jupyter_server.base.handlers import APIHandler
from jupyter_server.extension.handler import ExtensionHandlerMixin
from tornado import web

from mmlab.errors import MmlabError
from mmlab.server.folders import OutsideError

if TYPE_CHECKING:
    from mmlab.server.app import MmlabServer

READ = 15.0
"""Seconds in which files are read."""
ACT = 90.0
"""Seconds in which a lab is started or closed, or a command written."""
MOST = 1 << 16
"""Bytes of a request's body."""
REFUSED = "steering is switched off on this server (MmlabServer.allow_control is False)"


class Handler(ExtensionHandlerMixin, APIHandler):
    """What all routes share."""

    auth_resource = "mmlab"

    @property
    def app(self) -> MmlabServer:
        """The extension."""
        return cast("MmlabServer", self.extensionapp)

    async def look(self, work: Any, *args: Any) -> Any:
        """Have files read by another thread."""
        return await self._do(self.app.readers, READ, work, *args)

    async def act(self, work: Any, *args: Any) -> None:
        """Change something by another thread and answer with what comes of it."""
        self.finish(await self._do(self.app.actors, ACT, work, *args))

    async def _do(self, crew: Any, timeout: float, work: Any, *args: Any) -> Any:
        try:
            return await crew.do(timeout, work, *args)
        except OutsideError as error:
            raise web.HTTPError(404, _plain(error)) from None
        except MmlabError as error:
            raise web.HTTPError(409, _plain(error)) from None
        except OSError as error:
            if error.errno == errno.ENAMETOOLONG:  # a key that no folder can have
                raise web.HTTPError(404, _plain(error)) from None
            raise web.HTTPError(500, _plain(error)) from None

    def body(self) -> dict[str, Any]:
        """The request's JSON object; HTTP errors 403 where nothing may be changed, and 400 for anything else."""
        if not self.app.allow_control:
            raise web.HTTPError(403, REFUSED)
        if len(self.request.body) > MOST:
            raise web.HTTPError(413, f"a request has at most {MOST} bytes")
        try:
            found = json.loads(self.request.body or b"{}")
        except (ValueError, RecursionError):
            found = None
        if not isinstance(found, dict):
            raise web.HTTPError(400, "the request's body is not a JSON object")
        return found


def _plain(error: Exception) -> str:
    """An error's text as a log message that takes no arguments."""
    return str(error).replace("%", "%%")


class Look(Handler):
    """Routes that pages ask again and again: they do not count as activity, or no idle server would ever be culled."""

    _track_activity = False


class Overview(Look):
    """Labs and runs."""

    @web.authenticated
    @authorized
    async def get(self) -> None:
        """All of them."""
        app = self.app
        found = await self.look(app.desk.overview)
        self.finish({"allow_control": app.allow_control, "root": str(app.desk.folders.root), **found})


class OneRun(Look):
    """One run."""

    @web.authenticated
    @authorized
    async def get(self, key: str) -> None:
        """State, ranks, curve."""
        self.finish(await self.look(self.app.desk.run, key, self.get_query_argument("command", "")))


class Command(Handler):
    """A verb of a run."""

    @web.authenticated
    @authorized
    async def post(self, key: str, verb: str) -> None:
        """Leave it in the run's inbox."""
        await self.act(self.app.desk.command, key, verb, self.body())


class Labs(Handler):
    """Starting a lab."""

    @web.authenticated
    @authorized
    async def post(self) -> None:
        """Start it; its engines come up meanwhile."""
        await self.act(self.app.desk.start_lab, self.body().get("engines", 3))


class GrowLab(Handler):
    """More engines for a lab."""

    @web.authenticated
    @authorized
    async def post(self, lab_id: str) -> None:
        """Have it start them; they come up meanwhile."""
        await self.act(self.app.desk.grow_lab, lab_id, self.body().get("engines"))


class CloseLab(Handler):
    """Ending a lab."""

    @web.authenticated
    @authorized
    async def post(self, lab_id: str) -> None:
        """End it with all its processes."""
        self.body()
        await self.act(self.app.desk.close_lab, lab_id)


class Notebook(Handler):
    """The quickstart notebook."""

    @web.authenticated
    @authorized
    async def post(self) -> None:
        """Copy it to where the server's files are, unless it is there."""
        self.body()
        desk, folder = self.app.desk, Path(self.serverapp.root_dir)
        await self.act(lambda: {"path": desk.place_notebook(folder)})


ROUTES = [
    (r"/mmlab/overview", Overview),
    (r"/mmlab/runs/(.+)/(pause|resume|step|checkpoint|stop|abort)", Command),
    (r"/mmlab/runs/(.+)", OneRun),
    (r"/mmlab/labs", Labs),
    (r"/mmlab/labs/([0-9a-f]+)/grow", GrowLab),
    (r"/mmlab/labs/([0-9a-f]+)/close", CloseLab),
    (r"/mmlab/notebook", Notebook),
]
"""Pattern and handler; the server puts its base URL before."""
