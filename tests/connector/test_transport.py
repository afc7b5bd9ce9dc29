"""What moves the blocks, told from what NIXL and the process show."""

from pathlib import Path

from pd_connector.transport import libfabric_rails, rdma_devices, transport_facts


def field(name: bytes, value: bytes) -> bytes:
    return name + len(value).to_bytes(8, "little") + value + b"|"


def metadata(*rails: bytes) -> bytes:
    """What an agent with the LIBFABRIC backend publishes (NIXL 1.4.1)."""
    eps = b"".join(field(b"dest_data_ep_%d" % n, rail) for n, rail in enumerate(rails))
    inner = b"nixlSerDes|" + field(b"num_rails", b"%d" % len(rails)) + eps
    return b"nixlSerDes|" + field(b"Agent", b"x") + field(b"t", b"LIBFABRIC") + field(b"c", inner)


TCP = b"\x02\x00\x95\x2b\xc0\x00\x02\x02".ljust(56, b"\0")
EFA = b"\xfe\x80" + bytes(range(30)) + bytes(24)


def test_libfabric_over_tcp_is_told() -> None:
    facts = transport_facts(["LIBFABRIC"], metadata(TCP))
    assert (facts["provider"], facts["rails"]) == ("tcp", 1)


def test_libfabric_over_efa_is_told_with_its_rails() -> None:
    facts = transport_facts(["LIBFABRIC"], metadata(*[EFA] * 16))
    assert (facts["provider"], facts["rails"]) == ("efa", 16)


def test_what_is_not_understood_is_no_provider() -> None:
    for data in (
        b"",
        metadata(),
        b"dest_data_ep_0\xff\xff\xff\xff\xff\xff\xff\xff",
        metadata(b"??"),
    ):
        assert transport_facts(["LIBFABRIC"], data)["provider"] is None
    assert transport_facts(["OTHER"], metadata(TCP))["provider"] is None


def test_a_rail_whose_name_stands_in_anothers_address_does_no_harm() -> None:
    assert libfabric_rails(metadata(TCP, EFA)) == [TCP, EFA]


def test_rdma_devices_are_the_open_ones(tmp_path: Path) -> None:
    (tmp_path / "fd").mkdir()
    (tmp_path / "fd/3").symlink_to("/dev/infiniband/uverbs7")
    (tmp_path / "fd/4").symlink_to("/dev/infiniband/uverbs7")
    (tmp_path / "fd/5").symlink_to("/dev/null")
    assert rdma_devices(tmp_path) == ["uverbs7"]
    assert rdma_devices(tmp_path / "gone") == []


def test_ucx_without_rdma_uses_sockets() -> None:
    assert transport_facts(["UCX"], b"")["provider"] == "sockets"
