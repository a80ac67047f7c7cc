"""The address that the page reads: ``GET /kyklos/helpers``. It answers with what :func:`sharing.status` tells, and opens nothing."""

from __future__ import annotations

import asyncio
from typing import Any

from . import sharing


def add_routes() -> None:
    """Adds the address to ComfyUI's server, if this process has one."""
    try:
        from aiohttp import web
        from server import PromptServer
    except ImportError:
        return
    server = getattr(PromptServer, "instance", None)
    if server is None:
        return

    @server.routes.get("/kyklos/helpers")
    async def helpers(_request: Any) -> Any:
        # Not in the loop of the server: the status may wait for a lock that a call holds.
        return web.json_response(await asyncio.to_thread(sharing.status))
