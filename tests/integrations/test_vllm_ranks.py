"""Tensor parallelism: what ranks of one engine decide by themselves comes out alike.

Two ranks in two threads, each with the connector's sides and a store of its own or one in common.
Where one rank asks the other for the smallest and that one does not, the test fails.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager

import pytest

pytest.importorskip("torch")

import vllm_stand_ins
from vllm_stand_ins import BLOCK, LIMIT_S, Engine, Together, busy, install_vllm, request_of

from ptstore_mpi import Config
from ptstore_mpi.integrations.vllm.group import Alone, TorchGroup
from ptstore_mpi.integrations.vllm.store_thread import StoreThread
from ptstore_mpi.sim.cluster import Cluster

RANKS = 2


class Ranks:
    """Two ranks of an engine over one store."""

    def __init__(self, **options):
        config = Config(memory_bytes=8 << 20, segment_tokens=2 * BLOCK)
        cluster = Cluster(config, server_nodes=(0,), client_nodes=(0,) * RANKS)
        for client in cluster.clients[1:]:  # the cluster is no place for two threads at once
            cluster.transports[client]._turn = cluster.transports[cluster.clients[0]]._turn
        self._executor = ThreadPoolExecutor(RANKS)
        self.group = Together(RANKS)
        self.threads = [StoreThread() for _ in range(RANKS)]
        self.engines = [
            Engine(
                cluster.store(client),
                thread,
                group=self.group.member(number),
                number=number,
                **options,
            )
            for number, (client, thread) in enumerate(
                zip(cluster.clients, self.threads, strict=True)
            )
        ]

    def close(self):
        """End the threads."""
        for thread in self.threads:
            thread.close()
        self._executor.shutdown()

    def all(self, work):
        """Let every rank do something at the same time; return what each of them got."""

        def do(engine):
            vllm_stand_ins.rank.number = engine.number
            return work(engine)

        done = [self._executor.submit(do, engine) for engine in self.engines]
        return [each.result(LIMIT_S) for each in done]

    def alike(self, work):
        """Let every rank do something, which must come out alike; return that."""
        first, *others = self.all(work)
        assert all(other == first for other in others), [first, *others]
        return first

    def one(self, number, work):
        """Let one rank do something for which it needs no other."""
        vllm_stand_ins.rank.number = number
        return work(self.engines[number])

    def serve(self, tokens, name="r", have=0):
        """Serve a prompt on all ranks; return the tokens that they had."""
        return self.alike(lambda engine: engine.serve(request_of(tokens, name), have))

    def known(self, number, tokens):
        """Return how many tokens of a prompt the store has for one rank."""

        def ask(engine):
            namespace = engine.link.namespace_of(request_of(tokens))
            return engine.store_does(lambda: namespace.match(tokens).tokens)

        return self.one(number, ask)

    @contextmanager
    def busy(self, *numbers):
        """Keep the threads of some ranks' stores busy."""
        with ExitStack() as stack:
            for number in numbers:
                stack.enter_context(busy(self.threads[number]))
            yield


@pytest.fixture
def make(monkeypatch):
    install_vllm(monkeypatch)
    made = []

    def make(**options):
        made.append(Ranks(**options))
        return made[-1]

    yield make
    for ranks in made:
        ranks.close()


@pytest.fixture
def ranks(make):
    return make()


def reported(step):
    """Return what vLLM hears of a step."""
    return step.saved, step.loaded, step.errors


def stored(ranks, tokens=65):
    """Serve and end a prompt on all ranks, so that the store has all shards; return it."""
    ranks.serve(tokens, "first")
    ranks.all(lambda engine: engine.finish_saves())
    ranks.alike(lambda engine: engine.end(request_of(tokens, "first"))[0])
    ranks.all(lambda engine: engine.step(ended={"first"}))
    return request_of(tokens).prompt_token_ids


def test_shards_have_namespaces_of_their_own(ranks):
    stored(ranks)
    digests = ranks.all(lambda engine: engine.link.namespace_of(request_of(65)).digest)
    assert len(set(digests)) == RANKS
    assert [ranks.known(number, list(range(65))) for number in range(RANKS)] == [64, 64]


@pytest.mark.parametrize("load", ["async", "layered", "verified"])
def test_all_ranks_load_what_all_have(make, load):
    ranks = make(load=load)
    tokens = stored(ranks)
    assert ranks.serve(tokens, "again") == 64
    facts = ranks.all(lambda engine: engine.end(request_of(tokens, "again"))[1]["ptstore"])
    assert [each["owned_tokens"] for each in facts] == [64, 64]
    ranks.all(lambda engine: engine.check_counters())


@pytest.mark.parametrize("load", ["async", "layered", "verified"])
@pytest.mark.parametrize("kept", [0, 32])
def test_the_smallest_match_is_claimed_by_all(make, load, kept):
    ranks = make(load=load)
    tokens = stored(ranks)

    def lose(engine):
        namespace = engine.link.namespace_of(request_of(tokens))
        drop = namespace.clear if not kept else lambda: namespace.drop_tail(namespace.match(tokens))
        engine.store_does(drop)

    ranks.one(1, lose)
    assert ranks.serve(tokens, "again") == kept
    ranks.all(lambda engine: engine.finish_saves())
    assert [ranks.known(number, tokens) for number in range(RANKS)] == [64, 64]
    assert ranks.serve(tokens, "third") == 64
    ranks.all(lambda engine: engine.check_counters())


def test_nobody_claims_before_all_have_matched(make):
    ranks = make(match_wait_s=0.0)
    request = [request_of(65, "again") for _ in range(RANKS)]
    with ranks.busy(1):
        for _ in range(3):
            assert ranks.alike(lambda engine: engine.ask(request[engine.number])) == (None, False)
            ranks.one(0, lambda engine: engine.finish_all())
    ranks.one(1, lambda engine: engine.finish_all())
    assert ranks.alike(lambda engine: engine.ask(request[engine.number])) == (0, False)


def test_one_rank_for_which_a_load_is_slow_declines_for_all(make):
    ranks = make(fetch="cost")
    tokens = stored(ranks)
    for _ in range(8):
        ranks.engines[1].link.fetch.note_prefill(64, 0.01)
        ranks.engines[1].link.fetch.note_load({"owned": 64}, 1e3)
    assert ranks.serve(tokens, "again") == 0
    facts = ranks.all(lambda engine: engine.end(request_of(tokens, "again"))[1]["ptstore"])
    assert [each["reason"] for each in facts] == ["declined", "declined"]
    ranks.all(lambda engine: engine.check_counters())


def loading(ranks, tokens, name="again"):
    """Ask about a prompt, and give it its blocks on all ranks; return requests and blocks."""
    requests = [request_of(tokens, name) for _ in range(RANKS)]

    def give(engine):
        request = requests[engine.number]
        return engine.give(request, engine.matched(request)[0])

    return requests, ranks.alike(give)


def test_a_load_has_ended_when_it_has_on_all_ranks(ranks):
    tokens = stored(ranks)
    requests, ids = loading(ranks, tokens)
    with ranks.busy(1):
        assert ranks.alike(lambda engine: reported(engine.step())) == (set(), set(), set())
        ranks.one(0, lambda engine: engine.finish_loads())
        assert ranks.engines[0].link.loads["again"].task.is_done
        assert ranks.alike(lambda engine: reported(engine.step())) == (set(), set(), set())
    ranks.one(1, lambda engine: engine.finish_loads())
    step = ranks.alike(lambda engine: reported(engine.step()))
    assert step == (set(), {"again"}, set())
    ranks.all(lambda engine: engine.check(requests[engine.number], ids, 64))


@pytest.mark.parametrize("kept", [0, 32])
def test_what_one_rank_could_not_load_is_missing_for_all(ranks, kept):
    tokens = stored(ranks)
    requests, ids = loading(ranks, tokens)

    def lose(engine):
        namespace = engine.link.namespace_of(requests[0])
        drop = namespace.clear if not kept else lambda: namespace.drop_tail(namespace.match(tokens))
        engine.store_does(drop)

    ranks.one(1, lose)
    step = ranks.alike(lambda engine: reported(engine.load_all()))
    assert step == (set(), {"again"}, set(ids[kept // BLOCK : 4]))
    assert ranks.alike(lambda engine: engine.link.failed) == {"again": kept}
    again = ranks.alike(lambda engine: engine.ask(requests[engine.number]))
    assert again == (0, False)
    facts = ranks.all(lambda engine: engine.end(requests[engine.number])[1]["ptstore"])
    assert [each["owned_tokens"] for each in facts] == [64, kept]


def test_no_rank_saves_what_was_computed_upon_the_short_load_of_another(make):
    """Ranks add up what they compute: the KV of all is wrong behind it."""
    ranks = make(load="layered")
    tokens = stored(ranks)
    requests, ids = loading(ranks, [*tokens, *range(30)])

    def lose(engine):
        namespace = engine.link.namespace_of(requests[0])
        engine.store_does(lambda: namespace.drop_tail(namespace.match(tokens)))

    ranks.one(1, lose)

    def compute(engine):
        request = requests[engine.number]
        return engine.step({request: (64, 31)}, blocks={"again": (ids, True)})

    step = ranks.alike(lambda engine: reported(compute(engine)))
    assert step == (set(), set(), set(ids[2:4]))
    ranks.all(lambda engine: engine.finish_saves())
    known = [ranks.known(number, [*tokens, *range(30)]) for number in range(RANKS)]
    assert known == [64, 32]


@pytest.mark.parametrize("late", [0, 1])
def test_blocks_are_given_back_when_all_ranks_have_saved(ranks, late):
    """A rank that was quicker must not free what another still reads: pools would differ."""
    requests = [request_of(65) for _ in range(RANKS)]
    loading(ranks, requests[0].prompt_token_ids, "r")
    with ranks.busy(late):
        ranks.alike(lambda engine: reported(save(engine, requests[engine.number])))
        ranks.one(1 - late, lambda engine: engine.finish_saves())
        assert ranks.alike(lambda engine: engine.end(requests[engine.number])[0]) is True
        step = ranks.alike(lambda engine: reported(engine.step(ended={"r"})))
        assert step == (set(), set(), set())
    ranks.one(late, lambda engine: engine.finish_saves())
    assert ranks.alike(lambda engine: reported(engine.step())) == ({"r"}, set(), set())
    assert ranks.alike(lambda engine: (engine.link.delayed, engine.link.saves)) == (set(), {})


def save(engine, request):
    """Carry out the step after which a request is saved."""
    ids = engine.blocks[request.request_id]
    return engine.step({request: (0, 65)}, blocks={request.request_id: (ids, True)})


@pytest.mark.parametrize("late", [0, 1])
def test_all_ranks_save_or_none(make, late):
    """A shard without its others is of no use, and queues differ with the speed of stores."""
    ranks = make(save_queue_tokens=100)
    prompts = [[n] * 65 for n in range(2)]
    with ranks.busy(late):
        for n, prompt in enumerate(prompts):
            requests = [request_of(prompt, f"r{n}") for _ in range(RANKS)]
            ranks.all(lambda engine, requests=requests: ask_and_save(engine, requests))
            ranks.one(1 - late, lambda engine: engine.finish_saves())
    ranks.all(lambda engine: engine.finish_saves())
    kept = [[ranks.known(rank, prompt) for rank in range(RANKS)] for prompt in prompts]
    assert kept == [[64, 64], [0, 0]]
    assert ranks.alike(lambda engine: engine.link.counters["save_queue_full_count"]) == 1


def ask_and_save(engine, requests):
    """Save a request of which nothing can be known."""
    request = requests[engine.number]
    request.sampling_params = None  # takes nothing: no match that would wait for a busy thread
    engine.matched(request)
    engine.give(request, 0)
    return save(engine, request)


@pytest.mark.parametrize(
    "keeps",
    [
        True,
        False,
    ],
)
@pytest.mark.parametrize("late", [0, 1])
def test_orphans_are_told_alike(make, late, keeps):
    ranks = make(keeps_orphans=keeps)
    tokens = stored(ranks)
    requests, _ = loading(ranks, tokens, "orphan")
    with ranks.busy(late):
        ranks.alike(lambda engine: reported(engine.step()))
        ranks.one(1 - late, lambda engine: engine.finish_loads())
        assert ranks.alike(lambda engine: engine.end(requests[engine.number])[0]) is not keeps
        step = ranks.alike(lambda engine: reported(engine.step(ended={"orphan"})))
        assert step == (set(), set(), set())
    ranks.one(late, lambda engine: engine.finish_loads())
    saved, loaded, _ = ranks.alike(lambda engine: reported(engine.step()))
    assert (loaded if keeps else saved) == {"orphan"}


def test_requests_that_end_while_ranks_are_at_different_places(ranks):
    """Many at once, with one store slower than the other throughout."""
    requests = [[request_of([n] * 65, f"r{n}") for n in range(6)] for _ in range(RANKS)]
    for request in requests[0]:
        loading(ranks, request.prompt_token_ids, request.request_id)
    with ranks.busy(1):
        for n in range(6):
            ranks.alike(lambda engine, n=n: reported(save(engine, requests[engine.number][n])))
            if n % 2:
                ranks.one(0, lambda engine: engine.finish_saves())
            told = ranks.alike(lambda engine, n=n: engine.end(requests[engine.number][n])[0])
            assert told is True
            ranks.alike(lambda engine, n=n: reported(engine.step(ended={f"r{n}"})))
    ranks.all(lambda engine: engine.finish_saves())
    saved, _, _ = ranks.alike(lambda engine: reported(engine.step()))
    assert saved == {f"r{n}" for n in range(6)}
    assert self_consistent(ranks)


def self_consistent(ranks):
    """Whether all ranks asked each other the same number of times, for as many values."""
    first, *others = [[len(values) for values in calls] for calls in ranks.group.calls]
    return all(other == first for other in others)


def test_an_engine_of_one_rank_agrees_with_itself():
    assert Alone().smallest((3, -1)) == [3, -1]


def test_a_group_of_torch_finds_the_smallest(tmp_path):
    """One process is enough for the call itself; `tests/vllm` has two."""
    import torch.distributed as dist

    dist.init_process_group(
        "gloo", init_method=f"file://{tmp_path / 'group'}", rank=0, world_size=1
    )
    try:
        group = TorchGroup(dist.group.WORLD)
        assert group.smallest([5, -1, 2**40]) == [5, -1, 2**40]
        assert group.smallest([]) == []
    finally:
        dist.destroy_process_group()
