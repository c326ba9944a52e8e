"""Settings: where they come from, and what is refused by name."""

from __future__ import annotations

import msgspec
import pytest

from ptstore_mpi import Config, ConfigError, parse_bytes

NOTHING: dict[str, str] = {}


def write(folder, text):
    path = folder / "ptstore.toml"
    path.write_text(text)
    return path


def test_precedence_is_default_file_environment_keyword(tmp_path):
    path = write(tmp_path, 'placement = "random"\nsegment_tokens = 64\nmemory_bytes = "1GiB"\n')
    environment = {"PTSTORE_SEGMENT_TOKENS": "128", "PTSTORE_MEMORY_BYTES": "2 GB", "OTHER": "1"}
    config = Config.load(path, environment=environment, memory_bytes="3MiB")
    assert config.placement == "random"
    assert config.segment_tokens == 128
    assert config.memory_bytes == 3 << 20
    assert config.verify == Config().verify


def test_file_named_by_the_environment(tmp_path):
    path = write(tmp_path, "segment_tokens = 48\n")
    assert Config.load(environment={"PTSTORE_CONFIG": str(path)}).segment_tokens == 48
    other = Config.load(environment={"PTSTORE_DATA": "/data", "PTSTORE_CACHE": "/cache"})
    assert other == Config()


def test_types_of_variables():
    environment = {
        "PTSTORE_MATCH_TIMEOUT_S": "0.25",
        "PTSTORE_SERVERS_PER_NODE": "2",
        "PTSTORE_VERIFY": "always",
        "PTSTORE_VERIFY_PUBLISH": "true",
        "PTSTORE_STAGING_BYTES": "64KiB",
        "PTSTORE_TRANSPORT": "p2p",
        "PTSTORE_VIRTUAL_NODE_COUNT": "2",
    }
    config = Config.load(environment=environment)
    assert config.match_timeout_s == 0.25
    assert config.servers_per_node == 2
    assert config.verify == "always"
    assert config.verify_publish is True
    assert config.staging_bytes == 64 << 10
    assert config.transport == "p2p"
    assert config.virtual_node_count == 2
    assert Config().virtual_node_count == 0


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("4096", 4096),
        (4096, 4096),
        ("512MiB", 512 << 20),
        ("2 GB", 2 * 10**9),
        ("1.5kib", 1536),
        (" 7 B ", 7),
        ("1TiB", 1 << 40),
    ],
)
def test_parse_bytes(text, expected):
    assert parse_bytes(text) == expected


@pytest.mark.parametrize("text", ["", "GiB", "-1", "1 GiBs", "1,5GB", "0x10", "1e9"])
def test_parse_bytes_refuses(text):
    with pytest.raises(ConfigError, match="512MiB"):
        parse_bytes(text)


@pytest.mark.parametrize(
    ("source", "settings"),
    [
        ("file", {}),
        ("environment", {"environment": {"PTSTORE_MEMORY_BITES": "1"}}),
        ("keyword", {"memory_bites": 1}),
    ],
)
def test_unknown_names_are_refused_with_their_source(tmp_path, source, settings):
    path = write(tmp_path, "memory_bites = 1\n") if source == "file" else None
    with pytest.raises(ConfigError, match=f"memory_bites.*{source}.*memory_bytes"):
        Config.load(path, **{"environment": NOTHING, **settings})


IMPOSSIBLE = [
    ("memory_bytes", 0),
    ("memory_bytes", -4096),
    ("memory_bytes", 4095),
    ("memory_bytes", "lots"),
    ("memory_bytes", 1.5),
    ("memory_bytes", [1]),
    ("servers_per_node", 0),
    ("servers_per_node", "two"),
    ("segment_tokens", -16),
    ("segment_tokens", 1.5),
    ("placement", "nearest"),
    ("verify", "sometimes"),
    ("idle", "sleepy"),
    ("match_timeout_s", 0),
    ("load_timeout_s", -1.0),
    ("store_timeout_s", float("nan")),
    ("copy_threads", -1),
    ("virtual_node_count", -1),
    ("transport", "rma"),
    ("probe_timeout_s", 0),
    ("probe_fault", "crash"),
    ("unconfirmed_count", 0),
    ("gets_in_flight_count", 0),
    ("hash_seed", "12"),
    ("hash_seed", "z" * 32),
    ("verify_publish", "perhaps"),
]


@pytest.mark.parametrize(("name", "value"), IMPOSSIBLE)
def test_impossible_values_are_refused_by_name(name, value):
    with pytest.raises(ConfigError, match=name):
        Config.load(environment=NOTHING, **{name: value})


@pytest.mark.parametrize(("name", "value"), IMPOSSIBLE)
def test_the_constructor_refuses_them_too(name, value):
    with pytest.raises(ConfigError, match=name):
        Config(**{name: value})


def test_a_wrong_variable_is_named_with_what_it_may_be():
    expected = (
        r"\(environment variable PTSTORE_TRANSPORT\): expected one of auto, mpi, p2p, got 'rma'"
    )
    with pytest.raises(ConfigError, match=expected):
        Config.load(environment={"PTSTORE_TRANSPORT": "rma"})
    with pytest.raises(ConfigError, match="expected one of auto, mpi, p2p, got 'rma'"):
        Config(transport="rma")


def test_naps_that_contradict_each_other():
    with pytest.raises(ConfigError, match=r"nap_first_s.*nap_cap_s"):
        Config(nap_first_s=1.0, nap_cap_s=0.5)


def test_memory_is_shared_by_the_servers_of_a_node_in_whole_pages():
    config = Config(memory_bytes=100_000, servers_per_node=3)
    assert config.arena_bytes == 8 * 4096
    with pytest.raises(ConfigError, match="memory_bytes"):
        Config(memory_bytes=8191, servers_per_node=2)


def test_files_that_are_no_configuration(tmp_path):
    with pytest.raises(ConfigError, match="No such file"):
        Config.load(tmp_path / "none.toml", environment=NOTHING)
    with pytest.raises(ConfigError, match="not TOML"):
        Config.load(write(tmp_path, "memory_bytes = \n"), environment=NOTHING)


def test_frozen_and_equal_by_value():
    config = Config(segment_tokens=32)
    with pytest.raises(AttributeError):
        config.segment_tokens = 64
    assert config == Config(segment_tokens=32) != Config()
    assert msgspec.json.decode(msgspec.json.encode(config), type=Config) == config
    assert config.seed == bytes.fromhex(config.hash_seed)
    assert len(config.seed) == 16
