"""The trace replay at toy size: over `sim`, over real MPI, reported, drawn, by its front door."""

from __future__ import annotations

import json
from pathlib import Path

import h5py
import pytest

from experiments import exp_trace_replay, report, report_trace_replay
from experiments.common.options import UsageError
from experiments.trace_replay.options import parse_options
from plots import plot_trace_replay
from ptstore_mpi import cli
from ptstore_mpi.testing.launching import find_mpiexec, run_ranks

TOY = ["--trace", "generated", "--requests", "60", "--seed", "2", "--nodes", "3"]
KEYS = {
    "trace", "transport", "nodes_count", "clients_count", "placement", "policy", "routing",
    "model", "bytes_per_token", "block_tokens", "segment_tokens", "memory_tokens_per_node",
    "memory_bytes_per_node", "requests", "hit_ratio", "ceiling", "tokens", "bytes", "stores",
    "owner_load_max_over_mean", "owner_load_max_bytes", "seconds", "admission",
    "replica_max_share", "replica_min_share", "ssd_tokens_per_node",
}  # fmt: skip


@pytest.fixture
def replay(tmp_path, capsys):
    """Return a function that runs the driver in this process and returns its line of JSON."""

    def run(*arguments):
        assert exp_trace_replay.main([*arguments, "--json", "--output", str(tmp_path)]) == 0
        (line,) = capsys.readouterr().out.splitlines()
        return json.loads(line)

    return run


def samples(folder, name):
    with report.open_results(report.find_file(folder)) as file:
        return file[f"samples/replay/{name}"][:].tolist()


@pytest.mark.parametrize("placement", ["local", "random", "least_loaded"])
def test_with_room_for_everything_the_store_finds_what_there_is(replay, tmp_path, placement):
    summary = replay(*TOY, "--placement", placement, "--memory-tokens", "1000000")
    assert set(summary) == KEYS
    assert summary["hit_ratio"] == summary["ceiling"]["infinite"] == summary["ceiling"]["belady"]
    assert summary["hit_ratio"]["usable_prefix"] > 0.7
    tokens = summary["tokens"]
    near = tokens["owned"] + tokens["replica"]
    assert tokens["asked"] == tokens["recomputed"] + near + tokens["remote"]
    per_token = summary["bytes_per_token"]
    assert summary["bytes"] == {
        "loaded_on_node": near * per_token,
        "loaded_from_other_nodes": tokens["remote"] * per_token,
        "stored": tokens["stored"] * per_token,
    }
    assert summary["stores"] == {"stored": 60}
    assert summary["seconds"] is None
    with h5py.File(report.find_file(tmp_path)) as file:
        assert file["owners/sent_bytes"][:].sum() == tokens["remote"] * per_token
        assert file["servers/owned_bytes"][:].sum() == tokens["stored"] * per_token
        assert bool(file.attrs["complete"]) is True


@pytest.mark.parametrize("policy", ["none", "lru"])
def test_a_full_store_stays_below_the_ceiling(replay, tmp_path, policy):
    summary = replay(*TOY, "--memory-tokens", "2000", "--policy", policy)
    found, ceiling = summary["hit_ratio"], summary["ceiling"]
    for kind in ("block", "usable_prefix"):
        assert 0 < found[kind] < ceiling["belady"][kind] < ceiling["infinite"][kind]
    assert (summary["stores"]["full"] > 10) == (policy == "none")
    assert sum(summary["stores"].values()) == 60
    with h5py.File(report.find_file(tmp_path)) as file:
        capacity, owned = file["servers/capacity_bytes"][:], file["servers/owned_bytes"][:]
        assert (owned <= capacity).all()
        assert (file["servers/evicted_count"][:].sum() > 0) == (policy == "lru")
        assert set(capacity) == {2000 * 131_072}


def test_an_increment_larger_than_an_arena_is_a_refusal_of_its_own(replay):
    summary = replay(*TOY, "--memory-tokens", "400")
    assert summary["stores"]["too_large"] > 0


def test_routing_deals_requests_to_clients(replay, tmp_path):
    clients, sessions = {}, {}
    for routing in ("random", "round_robin", "affinity"):
        replay(*TOY, "--routing", routing, "--clients-per-node", "2")
        clients[routing] = samples(tmp_path, "client")
        sessions[routing] = samples(tmp_path, "session")
    assert clients["round_robin"] == [number % 6 for number in range(60)]
    assert sorted(clients["random"]) == sorted(clients["round_robin"]) != clients["random"]
    pairs = set(zip(sessions["affinity"], clients["affinity"], strict=True))
    assert len(pairs) == len(set(sessions["affinity"])) > 6
    nodes = samples(tmp_path, "node")
    assert nodes == [client // 2 for client in clients["affinity"]]


def test_the_same_seed_gives_the_same_replay(replay, tmp_path):
    both = []
    for _ in range(2):
        replay(*TOY, "--memory-tokens", "2000", "--placement", "random")
        columns = ("client", "matched_blocks", "owned_tokens", "remote_tokens", "stored_tokens")
        both.append([samples(tmp_path, name) for name in columns])
    assert both[0] == both[1]


def test_blocks_and_bytes_can_be_chosen(replay):
    sizes = ["--block-tokens", "64", "--segment-tokens", "128", "--bytes-per-token", "100"]
    summary = replay(*TOY, *sizes, "--memory-bytes", "1GiB")
    assert (summary["block_tokens"], summary["segment_tokens"]) == (64, 128)
    assert (summary["model"], summary["memory_tokens_per_node"]) == ("none", (1 << 30) // 100)
    assert summary["hit_ratio"] == summary["ceiling"]["infinite"]
    assert parse_options(["--model", "deepseek-v3"]).memory_bytes == 2_000_000 * 70_272


def test_a_small_memory_over_an_ssd_finds_what_a_large_one_does(replay):
    """Memory of eleven segments: everything owned stays findable and comes back whole."""
    asked = [*TOY, "--bytes-per-token", "4096", "--placement", "random"]
    whole = replay(*asked, "--memory-tokens", "400000")
    spilled = replay(*asked, "--memory-tokens", "6000", "--ssd-tokens", "400000")
    assert spilled["hit_ratio"] == whole["hit_ratio"]
    assert spilled["tokens"]["disk"] > 0
    assert spilled["stores"] == {"stored": 60}


def test_replicas_and_tiers_become_settings_and_are_recorded(replay, tmp_path):
    asked = ["--admission", "always", "--replica-share", "62.5", "--replica-floor", "5"]
    summary = replay(*TOY, *asked, "--ssd-tokens", "100000", "--bytes-per-token", "100")
    assert summary["admission"] == "always"
    assert (summary["replica_min_share"], summary["replica_max_share"]) == (0.05, 0.625)
    assert summary["ssd_tokens_per_node"] == 100_000
    with h5py.File(report.find_file(tmp_path)) as file:
        store = json.loads(file.attrs["config"])["store"]
        assert file.attrs["admission"] == "always"
    assert (store["replica_admission"], store["replica_max_share"]) == ("always", 0.625)
    assert (store["replica_min_share"], store["ssd_bytes"], store["ssd_dir"]) == (
        0.05, 10_000_000, "sim",
    )  # fmt: skip
    plain = exp_trace_replay.settings_of(exp_trace_replay.fitted(*_made(["--requests", "1"])))
    assert plain.replica_admission == "second_hit"
    assert (plain.replica_min_share, plain.replica_max_share) == (0.0, 0.5)
    assert (plain.ssd_dir, plain.ssd_bytes) == ("", 0)
    over_mpi = ["--transport", "mpi", "--ssd-tokens", "5", "--ssd-dir", str(tmp_path)]
    assert parse_options(over_mpi).ssd_dir == str(tmp_path)


def _made(arguments):
    options = parse_options(arguments)
    return options, exp_trace_replay.read_trace(options)


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--admission", "sometimes"], "invalid choice: 'sometimes'"),
        (["--replica-share", "101"], "expected a share of 0 to 100 percent, given '101'"),
        (["--replica-share", "nan"], "expected a share of 0 to 100 percent"),
        (["--replica-share", "10", "--replica-floor", "11"], r"at most --replica-share \(10\)"),
        (["--ssd-dir", "/tmp"], "--ssd-dir is for --transport mpi only"),
        (["--transport", "mpi", "--ssd-tokens", "5"], "go together, given 5 and None"),
        (["--transport", "mpi", "--ssd-dir", "/tmp"], "go together, given 0 and '/tmp'"),
        (["--ssd-tokens", "999999999999"], "--ssd-tokens: expected at most"),
    ],
)
def test_replicas_and_tiers_that_cannot_be_are_refused_by_name(arguments, complaint):
    with pytest.raises(UsageError, match=complaint):
        parse_options(arguments)


def test_a_file_from_before_replicas_is_still_reported(replay, tmp_path, capsys):
    replay(*TOY)
    path = report.find_file(tmp_path)
    with h5py.File(path, "r+") as file:
        for name in report_trace_replay.REPLICAS_AND_TIERS:
            del file.attrs[name]
    assert report.main([str(path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["admission"] is None
    assert report.main([str(path)]) == 0
    assert "replicas:" not in capsys.readouterr().out


def test_runs_that_differ_in_replicas_are_not_joined(replay, tmp_path, monkeypatch):
    labels = []
    replay(*TOY)
    replay(*TOY, "--admission", "never")
    label = plot_trace_replay._label
    monkeypatch.setattr(
        plot_trace_replay, "_label", lambda *given: labels.append(label(*given)) or labels[-1]
    )
    assert plot_trace_replay.main([str(tmp_path), "-o", str(tmp_path / "figure.png")]) == 0
    assert [text.rpartition(", ")[2] for text in labels] == [
        "replicas second_hit",
        "replicas never",
    ]


def test_it_is_reported_and_drawn(replay, tmp_path, capsys):
    other = tmp_path / "other"
    assert exp_trace_replay.main([*TOY, "--seed", "3", "--output", str(other)]) == 0
    assert "usable_prefix" in capsys.readouterr().out
    assert report.main([str(other), "--json"]) == 0
    assert set(json.loads(capsys.readouterr().out)) == KEYS
    found = {
        f"{3 * tokens:,}": replay(*TOY, "--memory-tokens", str(tokens))["hit_ratio"]
        for tokens in (8000, 2000)
    }
    figure = tmp_path / "figure.png"
    assert plot_trace_replay.main([str(tmp_path), "-o", str(figure)]) == 0
    shown = capsys.readouterr()
    for tokens, ratio in found.items():
        assert f"{tokens} tokens: {ratio['usable_prefix']:.4f}" in shown.out
    assert figure.read_bytes().startswith(b"\x89PNG")
    assert shown.err.count("another trace or block size") == 1


def test_a_run_that_was_killed_is_reported_as_far_as_it_came(replay, tmp_path, capsys):
    whole = replay(*TOY)
    path = report.find_file(tmp_path)
    with h5py.File(path, "r+") as file:
        for name in ("owners", "servers", "ceilings"):
            del file[name]
        file.attrs["complete"] = False
    assert report.main([str(path), "--json"]) == 0
    part = json.loads(capsys.readouterr().out)
    assert part["hit_ratio"] == whole["hit_ratio"]
    assert part["ceiling"] == {"infinite": None, "belady": None}
    assert part["owner_load_max_bytes"] is None
    assert report.main([str(path)]) == 0
    assert "incomplete" in capsys.readouterr().out
    assert plot_trace_replay.main([str(path), "-o", str(tmp_path / "figure.png")]) == 0


def test_the_command_is_its_front_door(tmp_path, monkeypatch, capsys):
    arguments = ["replay", *TOY, "--json", "--output", str(tmp_path)]
    assert cli.main(arguments) == 0
    assert set(json.loads(capsys.readouterr().out)) == KEYS
    monkeypatch.setattr(cli, "_EXPERIMENT", Path("experiments") / "nowhere.py")
    assert cli.main(arguments) == 2
    assert "a part of the repository, not of the installed package" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        cli.main(["doctor", "--trace", "generated"])
    assert "unrecognized arguments: --trace generated" in capsys.readouterr().err


@pytest.mark.parametrize(("ranks", "nodes"), [(4, 2), (1, 1)])
def test_over_mpi_bytes_are_moved_and_checked(repository, tmp_path, monkeypatch, ranks, nodes):
    if find_mpiexec() is None:
        pytest.skip("no mpiexec beside this Python or on the PATH")
    monkeypatch.chdir(repository)
    program = ["-m", "experiments.exp_trace_replay", "--transport", "mpi", "--requests", "60"]
    sizes = ["--bytes-per-token", "64", "--memory-tokens", "500000"]
    done = run_ranks([*program, *sizes, "--output", str(tmp_path)], ranks=ranks, nodes=nodes)
    assert done.returncode == 0, done.stdout + done.stderr
    with report.open_results(report.find_file(tmp_path)) as file:
        summary = report_trace_replay.summarise(file)
        assert file.attrs["servers_count"] == nodes
        assert file["samples/replay/request"][:].tolist() == list(range(60))
    tokens = summary["tokens"]
    assert summary["seconds"]["match"] > 0
    assert (tokens["remote"] > 0) == (nodes == 2)
    # Clients go on by themselves: one may ask before the other has stored.
    assert summary["hit_ratio"]["usable_prefix"] > 0.5
