"""What tests of the connector's sides do again and again, and look at in the store."""

from __future__ import annotations

from vllm_stand_ins import busy, request_of


def stored(engine, tokens=65):
    """Serve and end a request, so that the store has its prompt; return its tokens."""
    request = request_of(tokens, "first")
    engine.serve(request)
    engine.finish_saves()
    engine.end(request)
    return request.prompt_token_ids


def forget(engine, request):
    """Let the store forget the namespace of a request."""
    engine.store_does(engine.link.namespace_of(request).clear)


def drop_tail(engine, request):
    """Let the store drop the last segment that it has of a request."""
    namespace = engine.link.namespace_of(request)
    assert engine.store_does(lambda: namespace.drop_tail(namespace.match(request.all_token_ids)))


def known(engine, tokens):
    """Return how many tokens of a prompt the store has."""
    namespace = engine.link.namespace_of(request_of(tokens))
    return engine.store_does(lambda: namespace.match(tokens).tokens)


def reasons(engine):
    """Return requests and reasons of the saves that have ended."""
    engine.finish_saves()
    return [(report.request_id, report.reason) for report in engine.link.reports]


def saving(engine, request):
    """Serve a request up to its save, which is queued; yield that while it waits."""
    engine.matched(request)
    ids = engine.give(request, 0)
    with busy(engine.link.thread):
        engine.step({request: (0, 65)}, blocks={request.request_id: (ids, True)})
        yield engine.link.saves[request.request_id].tasks[0]
