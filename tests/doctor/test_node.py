"""The facts of EFA nodes: the environment that bidirectional transfer was measured in, and less."""

from pathlib import Path

import pytest

from tests.doctor.bundles import Bundle, unknown

LEGS = ("prefill-0", "decode-0")
INSTALLED = "# EFA installer version: {}\n# Debug packages installed: no\n"


def fi_info(domains: list[str]) -> str:
    return "\n".join(
        f"provider: efa\n    fabric: efa\n    domain: {domain}-rdm\n    version: 206.0\n"
        "    type: FI_EP_RDM\n    protocol: FI_PROTO_EFA"
        for domain in domains
    )


def p5en(bundle: Bundle, leg: str, missing: int = 0, moved: bool = False) -> Bundle:
    """A p5en.48xlarge: 8 GPUs, two EFA interfaces on each one's PCIe switch.

    Args:
        missing: how many interfaces are not there.
        moved: whether the last GPU's interfaces are on another GPU's switch.
    """
    gpus, rails = [], []
    for number in range(8):
        bus = 0x10 + 0x10 * number
        switch = f"0000:{bus:02x}:01.0/0000:{bus + 1:02x}:00.0"
        gpu = f"0000:{bus + 3:02x}:00.0"
        gpus.append(
            f"lrwxrwxrwx 1 root root 0 Nov 30 12:00 {gpu} -> ../../../../devices/"
            f"pci0000:{bus:02x}/{switch}/0000:{bus + 2:02x}:00.0/{gpu}"
        )
        for rail in (0, 1):
            there = 0x10 if moved and number == 7 else bus
            on = f"0000:{there:02x}:01.0/0000:{there + 1:02x}:00.0"
            address = f"0000:{there + 4 + rail + (2 if moved and number == 7 else 0):02x}:00.0"
            name = f"rdmap{bus + rail}s0"
            rails.append(
                f"lrwxrwxrwx 1 root root 0 Nov 30 12:00 {name} -> ../../devices/pci0000:"
                f"{there:02x}/{on}/0000:{there + 2:02x}:{rail + 1:02x}.0/{address}"
                f"/infiniband/{name}"
            )
    rails = rails[: len(rails) - missing]
    names = [line.split(" -> ")[0].split()[-1] for line in rails]
    listing = "\n".join(
        f"{number}, NVIDIA H200, 580.126.16, 0000{line.split(' -> ')[0].split()[-1]}"
        for number, line in enumerate(gpus)
    )
    query = "nvidia-smi --query-gpu=index,name,driver_version,pci.bus_id --format=csv,noheader"
    return (
        bundle.commands(
            leg,
            "fi_info",
            {
                "fi_info --version": "fi_info: 2.6.0amzn1.0\nlibfabric: 2.6.0amzn1.0",
                "fi_info -p efa -t FI_EP_RDM": fi_info(names),
                "fi_info -p efa -t FI_EP_RDM -c FI_HMEM": fi_info(names),
            },
        )
        .commands(
            leg,
            "devices",
            {
                "ls -l /sys/class/infiniband": "total 0\n" + "\n".join(rails),
                "ls -l /sys/bus/pci/drivers/nvidia": "total 0\n" + "\n".join(gpus),
                "cat /sys/devices/virtual/dmi/id/product_name": "p5en.48xlarge",
            },
        )
        .commands(
            leg,
            "efa",
            {
                "cat /opt/amazon/efa_installed_packages": INSTALLED.format("1.50.0"),
                "cat /sys/module/efa/version": "3.3.0g",
            },
        )
        .commands(
            leg,
            "gpu",
            {query: listing, "nvidia-smi --version": "DRIVER version : 580.126.16\n"
             "CUDA Version : 13.0"},
        )
        .commands(
            leg,
            "process",
            {"cat /proc/77/limits": "Max locked memory         unlimited  unlimited  bytes"},
        )
    )  # fmt: skip


@pytest.fixture
def bundle(tmp_path: Path) -> Bundle:
    made = Bundle(tmp_path).spec("p5en-qwen3-32b.yaml")
    for leg in LEGS:
        p5en(made, leg)
    return made


def test_the_measured_environment_is_quiet(bundle: Bundle) -> None:
    assert bundle.codes() == []
    silent = {"PD1001", "PD1061", "PD1062", "PD1008", "PD1009", "PD6562"}
    assert silent <= set(bundle.doctor()["checks_run"])
    assert not silent & unknown(bundle.doctor())


def test_without_the_facts_the_answer_is_unknown_and_not_ok(tmp_path: Path) -> None:
    report = Bundle(tmp_path).spec("p5en-qwen3-32b.yaml").add("prefill-0/env.txt", "A=b\n").doctor()
    assert {"PD1061", "PD1062", "PD6562", "PD6503"} <= unknown(report)
    assert not {"PD1061", "PD1062", "PD6562"} & set(report["checks_run"])


def test_no_efa_provider(bundle: Bundle) -> None:
    none = {"fi_info -p efa -t FI_EP_RDM": "fi_getinfo: -61\n# exit 61"}
    bundle.commands("decode-0", "fi_info", none)
    finding = bundle.doctor()["findings"][0]
    assert (finding["code"], finding["leg"]) == ("PD1001", "decode-0")
    assert "fi_getinfo: -61" in finding["evidence"][0]["excerpt"]


def test_tcp_on_purpose_needs_no_efa(tmp_path: Path) -> None:
    bundle = Bundle(tmp_path).spec("p5en-qwen3-32b.yaml", fabric={"provider": "tcp"})
    for leg in LEGS:
        outputs = {"fi_info -p efa -t FI_EP_RDM": "fi_getinfo: -61\n# exit 61"}
        bundle.commands(leg, "fi_info", outputs)
        bundle.commands(leg, "devices", {"ls /dev/infiniband": "ls: cannot access '/dev/infiniband'"
                                         ": No such file or directory"})  # fmt: skip
    assert bundle.codes() == []


def test_an_interface_is_missing(bundle: Bundle) -> None:
    p5en(bundle, "decode-0", missing=1)
    assert bundle.codes() == ["PD1061"]
    assert "15 RDMA devices, the spec says 16" in bundle.doctor()["findings"][0]["cause"]


def test_rails_on_another_switch(bundle: Bundle) -> None:
    p5en(bundle, "decode-0", moved=True)
    assert bundle.codes() == ["PD1062"]
    assert "0000:83:00.0 has 0" in bundle.doctor()["findings"][0]["cause"]


@pytest.mark.parametrize(
    ("file", "command", "output", "said"),
    [
        ("efa", "cat /opt/amazon/efa_installed_packages", INSTALLED.format("1.43.2"), "1.43.2"),
        ("efa", "cat /sys/module/efa/version", "2.17.3g", "2.17.3g"),
        ("fi_info", "fi_info --version", "libfabric: 1.22.0amzn1.0", "1.22.0amzn1.0"),
        ("gpu", "nvidia-smi --version", "DRIVER version      : 570.133.20", "570.133.20"),
        ("gpu", "nvidia-smi --version", "CUDA Version        : 12.8", "CUDA driver API 12.8"),
    ],
)
def test_older_than_measured(
    bundle: Bundle, file: str, command: str, output: str, said: str
) -> None:
    path = bundle.folder / f"decode-0/commands/{file}.txt"
    kept = [part for part in path.read_text().split("$ ") if part and not part.startswith(command)]
    path.write_text("".join(f"$ {part}" for part in kept) + f"$ {command}\n{output}\n")
    findings = bundle.doctor()["findings"]
    assert {each["code"] for each in findings} == {"PD6562"}
    assert said in findings[0]["cause"]


def test_libfabric_too_old_explains_the_rest(bundle: Bundle) -> None:
    plugin = "/v/.nixl_cu13.mesonpy.libs/plugins/libplugin_LIBFABRIC.so"
    bundle.commands(
        "decode-0",
        "nixl",
        {
            f"ldd {plugin}": f"{plugin}: /lib/libfabric.so.1: version `FABRIC_1.7' not found "
            f"(required by {plugin})\n\tlibcuda.so.1 => not found"
        },
    )
    bundle.commands("decode-0", "fi_info", {"fi_info -p efa -t FI_EP_RDM": "fi_getinfo: -61"})
    findings = bundle.doctor()["findings"]
    assert findings[0]["code"] == "PD6503"
    assert {each["code"] for each in findings[0]["consequences"]} >= {"PD1001"}


def test_a_missing_library_of_the_plugin(bundle: Bundle) -> None:
    bundle.commands(
        "decode-0",
        "nixl",
        {"ldd /v/plugins/libplugin_LIBFABRIC.so": "\tlibhwloc.so.15 => not found"},
    )
    finding = bundle.doctor()["findings"][0]
    assert finding["code"] == "PD6502"
    assert "libhwloc15" in finding["fix"]


def test_libraries_of_another_backend_do_not_matter(tmp_path: Path) -> None:
    bundle = Bundle(tmp_path).spec("laptop.yaml")
    bundle.commands(
        "decode-0", "nixl", {"ldd /v/plugins/libplugin_LIBFABRIC.so": "\tlibcuda.so.1 => not found"}
    )
    assert bundle.codes() == []


def test_locked_memory(bundle: Bundle) -> None:
    limits = "Max locked memory         8388608              8388608              bytes"
    bundle.commands("decode-0", "process", {"cat /proc/77/limits": limits})
    assert bundle.codes() == ["PD1008"]


def test_no_gpudirect(bundle: Bundle) -> None:
    path = bundle.folder / "decode-0/commands/fi_info.txt"
    text = path.read_text().partition("$ fi_info -p efa -t FI_EP_RDM -c")[0]
    path.write_text(f"{text}$ fi_info -p efa -t FI_EP_RDM -c FI_HMEM\nfi_getinfo: -61\n")
    assert bundle.codes() == ["PD1009"]


def test_versions_that_differ(bundle: Bundle) -> None:
    bundle.add("prefill-0/versions.txt", "vllm==0.29.0\nnixl==1.4.1\n")
    bundle.add("decode-0/versions.txt", "vllm==0.28.0\nnixl==1.4.1\n")
    assert bundle.codes()[0] == "PD6509"


def test_a_gpu_node_as_it_is_without_the_efa_software(tmp_path: Path) -> None:
    """Outputs of a real H200 machine that has neither EFA nor its software."""
    bundle = Bundle(tmp_path).spec("p5en-qwen3-32b.yaml")
    query = "nvidia-smi --query-gpu=index,name,driver_version,pci.bus_id --format=csv,noheader"
    bundle.commands(
        "decode-0",
        "gpu",
        {
            query: "0, NVIDIA H200, 580.159.04, 00000000:00:06.0",
            "nvidia-smi --version": "NVIDIA-SMI version  : 580.159.04\nNVML version        : "
            "580.159\nDRIVER version      : 580.159.04\nCUDA Version        : 13.0",
        },
    )
    bundle.commands(
        "decode-0",
        "devices",
        {
            "ls -l /sys/class/infiniband": "total 0",
            "ls /dev/infiniband": "rdma_cm",
            "ls -l /sys/bus/pci/drivers/nvidia": "total 0\nlrwxrwxrwx 1 root root 0 Nov 30 01:08 "
            "0000:00:06.0 -> ../../../../devices/pci0000:00/0000:00:06.0",
        },
    )
    missing = "sh: 1: fi_info: not found\n# exit 127"
    bundle.commands(
        "decode-0",
        "fi_info",
        {"fi_info --version": missing, "fi_info -p efa -t FI_EP_RDM": missing},
    )
    assert bundle.codes() == ["PD1001"]
    assert "no RDMA device" in bundle.doctor()["findings"][0]["cause"]


def test_without_fi_info_the_provider_is_unknown(bundle: Bundle) -> None:
    missing = {"fi_info -p efa -t FI_EP_RDM": "sh: 1: fi_info: not found\n# exit 127"}
    bundle.commands("decode-0", "fi_info", missing)
    report = bundle.doctor()
    assert report["findings"] == []
    assert any("there is no fi_info" in each["missing"] for each in report["unknown"])
