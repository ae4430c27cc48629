"""Links of GPUs, as an NVML of a made-up host tells of them."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from click.testing import CliRunner

from hiercoll.cli import main
from hiercoll.cuda.nvml import HostLinks, host_links
from hiercoll.errors import DeviceError

BUSES = [b"00000000:01:00.0", b"00000000:02:00.0", b"00000000:41:00.0", b"00000000:81:00.0"]


class NVMLError(Exception):
    """As nvidia-ml-py has it."""


def fake(switched: bool = False, driver: bool = True) -> SimpleNamespace:
    """Four GPUs: 0 and 1 have two NVLinks (or all six to switches); 2 is behind another switch
    of their socket, 3 on the other socket."""

    def init() -> None:
        if not driver:
            raise NVMLError("Driver Not Loaded")

    def state(device: int, link: int) -> int:
        if link >= (6 if switched else 2) or (not switched and device > 1):
            raise NVMLError("Not Supported")
        return 1

    def common(one: int, other: int) -> int:
        return 20 if max(one, other) < 2 else 30 if max(one, other) == 2 else 50

    return SimpleNamespace(
        NVMLError=NVMLError,
        NVML_TOPOLOGY_MULTIPLE=20,
        NVML_TOPOLOGY_SYSTEM=50,
        NVML_NVLINK_DEVICE_TYPE_SWITCH=1,
        nvmlInit=init,
        nvmlShutdown=lambda: None,
        nvmlDeviceGetCount=lambda: 4,
        nvmlDeviceGetHandleByIndex=lambda index: index,
        nvmlDeviceGetName=lambda device: "GPU of a test",
        nvmlDeviceGetPciInfo=lambda device: SimpleNamespace(busId=BUSES[device]),
        nvmlDeviceGetNvLinkState=state,
        nvmlDeviceGetNvLinkRemoteDeviceType=lambda device, link: int(switched),
        nvmlDeviceGetNvLinkRemotePciInfo=lambda device, link: SimpleNamespace(busId=BUSES[1 - device]),
        nvmlDeviceGetTopologyCommonAncestor=common,
    )


def tree(folder: Path) -> tuple[Path, Path]:
    """GPU 0 and an adapter behind one bridge; GPU 2 on the adapter's socket; another adapter far away."""
    root, pci, adapters = folder / "devices", folder / "pci", folder / "adapters"
    places = {
        "0000:01:00.0": "pci0000:00/0000:00:01.0/0000:01:00.0",
        "0000:02:00.0": "pci0000:00/0000:00:02.0/0000:02:00.0",
        "0000:41:00.0": "pci0000:40/0000:40:01.0/0000:41:00.0",
        "0000:81:00.0": "pci0000:80/0000:80:01.0/0000:81:00.0",
        "mlx5_0": "pci0000:00/0000:00:01.0/0000:03:00.0",
        "mlx5_1": "pci0000:80/0000:80:02.0/0000:82:00.0",
    }
    for name, place in places.items():
        (root / place).mkdir(parents=True)
        (root / place / "numa_node").write_text("1\n" if place.startswith("pci0000:80") else "0\n")
        link = adapters / name / "device" if name.startswith("mlx") else pci / name
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(root / place)
    return pci, adapters


def test_links_and_rails(tmp_path: Path) -> None:
    """Every class of link, and the matrix."""
    found = host_links(fake(), *tree(tmp_path))
    assert found.links == (
        ("-", "nvlink x2", "socket", "system"),
        ("nvlink x2", "-", "socket", "system"),
        ("socket", "socket", "-", "system"),
        ("system", "system", "system", "-"),
    )
    assert found.rails == (("switch", "system"), ("socket", "system"), ("socket", "system"), ("system", "socket"))
    assert str(found).splitlines()[1].split("  ")[0] == "GPU0" and "mlx5_1" in str(found)


def test_switches_reach_all(tmp_path: Path) -> None:
    found = host_links(fake(switched=True), tmp_path, tmp_path / "none")
    assert found.links[0] == ("-", "nvlink x6", "nvlink x6", "nvlink x6")
    assert found.adapters == () and found.rails == ((),) * 4


def test_what_is_missing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Typed errors; the command prints them."""
    with pytest.raises(DeviceError, match="a driver that NVML can ask, got Driver Not Loaded"):
        host_links(fake(driver=False))
    monkeypatch.setitem(sys.modules, "pynvml", None)
    result = CliRunner().invoke(main, ["gpus"])
    assert result.exit_code == 1 and "pip install nvidia-ml-py" in result.output
    monkeypatch.setattr("hiercoll.cuda.nvml.host_links", lambda: HostLinks(("A",), (), (("-",),), ((),)))
    result = CliRunner().invoke(main, ["gpus"])
    assert result.exit_code == 0 and "GPU0: A" in result.output
