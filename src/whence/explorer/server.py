"""The explorer's server: one page and what it asks, on the loopback address, under a path that only its reader knows.

Everything stands below ``/TOKEN/``: without the token nothing is found, whoever asks. Requests must name this machine
(so that no other site's name can be pointed here), what changes something must be JSON (which other sites' pages cannot
send unasked), and the page may load nothing but what it brought (`whence.report.document`).
"""

from __future__ import annotations

import contextlib
import json
import secrets
import socket
from collections.abc import Callable, Iterator
from typing import Any

from whence.errors import OptionError, StorageError, WhenceError
from whence.explorer.answering import Answering
from whence.explorer.completing import MOST
from whence.libraries import load_library
from whence.report.document import explorer_document
from whence.report.untrusted import visible

__all__ = ["application", "serve"]

_HOST = "127.0.0.1"
_LARGEST = 1_000_000  # bytes of a request
_HEADERS = {
    "Cache-Control": "no-store",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}


def application(answering: Answering, token: str) -> Any:
    """The explorer as an ASGI application."""
    load_library("starlette", "serve", "to answer in a browser")
    from starlette.applications import Starlette
    from starlette.concurrency import iterate_in_threadpool, run_in_threadpool
    from starlette.exceptions import HTTPException
    from starlette.middleware import Middleware
    from starlette.middleware.trustedhost import TrustedHostMiddleware
    from starlette.requests import Request
    from starlette.responses import HTMLResponse, JSONResponse, PlainTextResponse, Response, StreamingResponse
    from starlette.routing import Mount, Route

    page, policy = explorer_document(
        texts=answering.reads_text,
        queries=len(answering.queries),
        examples=len(answering.train),
        longest=MOST,
    )

    async def body(request: Request) -> Any:
        if request.headers.get("content-type", "").partition(";")[0].strip() != "application/json":
            raise HTTPException(415, "send JSON")
        sent = bytearray()
        async for piece in request.stream():
            sent += piece
            if len(sent) > _LARGEST:
                raise HTTPException(413, f"a request may have {_LARGEST:,} bytes")
        try:
            return json.loads(bytes(sent))
        except (ValueError, RecursionError) as error:
            raise HTTPException(400, "this is no JSON") from error

    def lines(made: Callable[[], Iterator[dict[str, Any]]]) -> Response:
        """What is found, a line of JSON each; an error is the last one."""

        def told() -> Iterator[bytes]:
            try:
                for line in made():
                    yield json.dumps(line).encode() + b"\n"
            except WhenceError as error:
                yield json.dumps({"error": visible(str(error))}).encode() + b"\n"

        return StreamingResponse(iterate_in_threadpool(told()), media_type="application/x-ndjson")

    async def front(request: Request) -> Response:
        return HTMLResponse(page, headers={"Content-Security-Policy": policy})

    async def complete(request: Request) -> Response:
        said = await body(request)
        prompt, limit = (said.get("prompt"), said.get("limit", 40)) if isinstance(said, dict) else (None, 0)
        if not isinstance(prompt, str) or type(limit) is not int or not 1 <= limit <= MOST:
            raise HTTPException(400, f"give a prompt, and a limit from 1 to {MOST}")
        return lines(lambda: ({"text": piece} for piece in answering.complete(prompt, limit)))

    async def ask(request: Request) -> Response:
        question = answering.question(await body(request))
        return lines(lambda: (answer.about() for answer in answering.ask(question)))

    async def answers(request: Request) -> Response:
        return JSONResponse(answering.kept.about())

    async def answer(request: Request) -> Response:
        kept, form = answering.kept.of(request.path_params["number"]), request.path_params["form"]
        if form == "page.html":
            return HTMLResponse(await run_in_threadpool(kept.page))
        made = {
            "scores.csv": (kept.table, "text/csv"),
            "viewer.jsonl": (kept.viewer_lines, "application/jsonl"),
        }
        if form not in made:
            raise HTTPException(404)
        make, kind = made[form]
        name = f"attachment; filename=answer-{kept.number}-{form}"
        return PlainTextResponse(
            await run_in_threadpool(make), media_type=kind, headers={"Content-Disposition": name}
        )

    async def example(request: Request) -> Response:
        number = request.path_params["number"]
        if number >= len(answering.train):
            raise HTTPException(404)
        return JSONResponse(answering.kept.of_example(number))

    async def refused(request: Request, error: Exception) -> Response:
        return JSONResponse({"error": visible(str(error))}, status_code=400)

    async def failed(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        return JSONResponse({"error": visible(str(error.detail))}, status_code=error.status_code)

    routes = [
        Route("/", front),
        Route("/complete", complete, methods=["POST"]),
        Route("/ask", ask, methods=["POST"]),
        Route("/answers", answers),
        Route("/answers/{number:int}/{form}", answer),
        Route("/examples/{number:int}", example),
    ]
    return _WithHeaders(
        Starlette(
            routes=[Mount(f"/{token}", routes=routes)],
            middleware=[Middleware(TrustedHostMiddleware, allowed_hosts=[_HOST, "localhost"])],
            exception_handlers={WhenceError: refused, HTTPException: failed},
        )
    )


class _WithHeaders:
    """An application whose every answer carries the headers that keep others out."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        async def send_with_headers(message: Any) -> None:
            if message["type"] == "http.response.start":
                own = [(name.lower().encode(), value.encode()) for name, value in _HEADERS.items()]
                message = {**message, "headers": [*message.get("headers", ()), *own]}
            await send(message)

        await self._inner(scope, receive, send_with_headers)


def serve(answering: Answering, *, port: int, told: Callable[[str], None]) -> None:
    """Answer on this machine until interrupted.

    Args:
        answering: what is asked.
        port: 0 for any that is free.
        told: is called with the address, token included, once the port is taken.

    Raises:
        StorageError: the port is taken.
        OptionError: the libraries for it are not installed.
    """
    uvicorn = load_library("uvicorn", "serve", "to answer in a browser")
    token = secrets.token_urlsafe(24)
    app = application(answering, token)
    if not 0 <= port < 65536:
        raise OptionError(f"port is {port}; give one from 1024 to 65535, or 0 for any that is free")
    with socket.socket() as listening:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listening.bind((_HOST, port))
        except OSError as error:
            raise StorageError(
                f"port {port} of this machine cannot be had ({error}); give another one"
            ) from error
        told(f"http://{_HOST}:{listening.getsockname()[1]}/{token}/")
        config = uvicorn.Config(app, log_level="warning", access_log=False, server_header=False)
        with contextlib.suppress(KeyboardInterrupt):  # the way to end it
            uvicorn.Server(config).run(sockets=[listening])
