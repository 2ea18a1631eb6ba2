"""Answers over HTTP: one model, typed requests and errors, and nothing of what people send is kept or logged."""

from __future__ import annotations

import json
import resource
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Any

import anyio
from anyio.to_thread import run_sync
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route

from fedmosaic import __version__
from fedmosaic.core.errors import FedmosaicError, RequestError, UnknownNameError
from fedmosaic.core.threads import thread_count
from fedmosaic.serving.answering import LONGEST, Answer, Listed, Question, answers
from fedmosaic.serving.recommender import FederatedRecommender

MOST_BYTES = 1 << 20  # of a request
MOST_QUESTIONS = 256  # of a batch
BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0)  # seconds


class Questions(BaseModel):
    """Several questions, answered in one pass."""

    model_config = ConfigDict(extra="forbid")
    questions: list[Question] = Field(min_length=1, max_length=MOST_QUESTIONS)


class Alike(BaseModel):
    """Which items are alike."""

    model_config = ConfigDict(extra="forbid")
    item: str | int
    k: int = Field(default=10, ge=1, le=LONGEST)


class NoAnswerError(Exception):
    """A request that is not answered: a status, a kind that programs can read, and words."""

    def __init__(self, status: int, kind: str, words: str) -> None:
        super().__init__(words)
        self.status, self.kind = status, kind

    def response(self) -> Response:
        """As JSON."""
        return JSONResponse({"error": {"kind": self.kind, "message": str(self)}}, self.status)


class Counts:
    """What /metrics tells, in Prometheus' words."""

    def __init__(self) -> None:
        self.requests: Counter[tuple[str, int]] = Counter()
        self.buckets: Counter[float] = Counter()
        self.seconds, self.answered = 0.0, 0

    def add(self, path: str, status: int, seconds: float) -> None:
        """Take a request in."""
        self.requests[path, status] += 1
        self.seconds += seconds
        self.answered += 1
        self.buckets.update(b for b in BUCKETS if seconds <= b)

    def text(self) -> str:
        """Everything, one line a number."""
        lines = ["# TYPE fedmosaic_requests_total counter"]
        lines += [
            f'fedmosaic_requests_total{{path="{path}",status="{status}"}} {n}'
            for (path, status), n in sorted(self.requests.items())
        ]
        lines.append("# TYPE fedmosaic_request_seconds histogram")
        lines += [f'fedmosaic_request_seconds_bucket{{le="{b:g}"}} {self.buckets[b]}' for b in BUCKETS]
        lines.append(f'fedmosaic_request_seconds_bucket{{le="+Inf"}} {self.answered}')
        lines += [
            f"fedmosaic_request_seconds_sum {self.seconds:.6f}",
            f"fedmosaic_request_seconds_count {self.answered}",
        ]
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        lines += ["# TYPE fedmosaic_peak_memory_bytes gauge", f"fedmosaic_peak_memory_bytes {peak << 10}"]
        return "\n".join(lines) + "\n"


def app(model: FederatedRecommender) -> Starlette:
    """The application that answers for a trained model.

    >>> shop = {"user": ["ann", "ann", "bob", "bob"], "item": ["tea", "cup", "tea", "pot"]}
    >>> [route.path for route in app(FederatedRecommender("itemknn").fit(shop)).routes][:3]
    ['/recommend', '/recommend/batch', '/similar']
    """
    counts, turns = Counts(), anyio.CapacityLimiter(max(thread_count(), 1))

    def told(work: Callable[[Request], Awaitable[Any]]) -> Callable[[Request], Awaitable[Response]]:
        async def handle(request: Request) -> Response:
            began = time.perf_counter()
            try:
                response: Response = JSONResponse(await work(request))
            except NoAnswerError as error:
                response = error.response()
            except UnknownNameError as error:
                response = NoAnswerError(
                    404, f"unknown_{error.kind}", f"unknown {error.kind} {error.name!r}"
                ).response()
            except RequestError as error:
                response = NoAnswerError(422, "cannot_answer", str(error)).response()
            except FedmosaicError as error:
                response = NoAnswerError(500, "failed", str(error)).response()
            counts.add(request.url.path, response.status_code, time.perf_counter() - began)
            return response

        return handle

    async def ask(questions: list[Question]) -> list[Any]:
        found = await run_sync(answers, model, questions, limiter=turns)
        return [one.model_dump() for one in found]

    async def one(request: Request) -> Any:
        return (await ask([await _body(request, Question)]))[0]

    async def batch(request: Request) -> Any:
        return {"answers": await ask((await _body(request, Questions)).questions)}

    async def similar(request: Request) -> Any:
        asked = await _body(request, Alike)
        found = await run_sync(model.similar_items, asked.item, asked.k, limiter=turns)
        return {"items": [{k: row.get(k) for k in Listed.model_fields} for row in found.to_dicts()]}

    async def health(request: Request) -> Response:
        about = {"method": model.method, "users": len(model.users_), "items": len(model.items_)}
        return JSONResponse({"status": "ok", "version": __version__, **about})

    async def metrics(request: Request) -> Response:
        return PlainTextResponse(counts.text(), media_type="text/plain; version=0.0.4")

    async def document(request: Request) -> Response:
        return JSONResponse(openapi())

    routes = [
        Route("/recommend", told(one), methods=["POST"]),
        Route("/recommend/batch", told(batch), methods=["POST"]),
        Route("/similar", told(similar), methods=["POST"]),
        Route("/health", health),
        Route("/metrics", metrics),
        Route("/openapi.json", document),
    ]
    return Starlette(routes=routes, exception_handlers={404: _nothing_there, 405: _wrong_way})


async def _nothing_there(request: Request, error: Exception) -> Response:
    return NoAnswerError(
        404, "no_such_path", "there are /recommend, /recommend/batch, /similar, /health, /metrics"
    ).response()


async def _wrong_way(request: Request, error: Exception) -> Response:
    return NoAnswerError(405, "wrong_method", "questions are asked by POST, with a JSON object").response()


async def _body(request: Request, kind: type[Any]) -> Any:
    """The request's JSON as a typed value; too much of it, or the wrong thing, is refused."""
    parts, size = [], 0
    async for part in request.stream():
        size += len(part)
        if size > MOST_BYTES:
            raise NoAnswerError(413, "too_large", f"a request has at most {MOST_BYTES:,} bytes")
        parts.append(part)
    try:
        return kind.model_validate(json.loads(b"".join(parts)))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise NoAnswerError(400, "not_json", f"the request is not JSON: {error}") from None
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"])) or "request"
        raise NoAnswerError(422, "invalid", f"{where}: {first['msg'].removeprefix('Value error, ')}") from None


def openapi() -> dict[str, Any]:
    """The OpenAPI document.

    >>> sorted(openapi()["paths"])
    ['/health', '/metrics', '/recommend', '/recommend/batch', '/similar']
    """
    kinds: dict[str, type[BaseModel]] = {"Question": Question, "Answer": Answer, "Questions": Questions, "Alike": Alike}
    schemas: dict[str, Any] = {}
    for name, kind in kinds.items():
        schema = kind.model_json_schema(ref_template="#/components/schemas/{model}")
        schemas |= schema.pop("$defs", {})
        schemas[name] = schema
    words = {"type": "object", "properties": {"kind": {"type": "string"}, "message": {"type": "string"}}}
    schemas["Error"] = {"type": "object", "properties": {"error": words}}
    lists = {"type": "object", "properties": {"items": {"type": "array", "items": _ref("Listed")}}}
    many = {"type": "object", "properties": {"answers": {"type": "array", "items": _ref("Answer")}}}

    def post(title: str, asked: str, found: dict[str, Any]) -> dict[str, Any]:
        told = {"200": {"description": "the answer", "content": {"application/json": {"schema": found}}}}
        refused = {"description": "a refusal", "content": {"application/json": {"schema": _ref("Error")}}}
        told |= {str(status): refused for status in (400, 404, 413, 422)}
        body = {"required": True, "content": {"application/json": {"schema": _ref(asked)}}}
        return {"post": {"summary": title, "requestBody": body, "responses": told}}

    def get(title: str) -> dict[str, Any]:
        return {"get": {"summary": title, "responses": {"200": {"description": "now"}}}}

    return {
        "openapi": "3.1.0",
        "info": {"title": "fedmosaic", "version": __version__},
        "paths": {
            "/recommend": post("A list for a user, or from a history", "Question", _ref("Answer")),
            "/recommend/batch": post(f"Lists for up to {MOST_QUESTIONS} questions", "Questions", many),
            "/similar": post("Items that are alike", "Alike", lists),
            "/health": get("Whether it answers, and for which model"),
            "/metrics": get("Counts and times, for Prometheus"),
        },
        "components": {"schemas": schemas},
    }


def _ref(name: str) -> dict[str, Any]:
    return {"$ref": f"#/components/schemas/{name}"}
