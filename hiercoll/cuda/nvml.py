"""How the GPUs of this host are linked with each other and with network adapters.

From NVML (NVIDIA Management Library, through nvidia-ml-py) and, for adapters, from the
places of the devices in the kernel's tree of PCI bridges. Nearest first: NVLink (with the
number of links), the same PCI switch, the same socket, across sockets.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from hiercoll.errors import DeviceError

SELF, SWITCH, SOCKET, SYSTEM = "-", "switch", "socket", "system"
PCI = Path("/sys/bus/pci/devices")
ADAPTERS = Path("/sys/class/infiniband")
MOST_NVLINKS = 18  # NVML_NVLINK_MAX_LINKS


@dataclass(frozen=True)
class HostLinks:
    """``links[i][j]`` is the class of the link from GPU i to GPU j, ``rails[i][k]`` to adapter k."""

    gpus: tuple[str, ...]
    adapters: tuple[str, ...]
    links: tuple[tuple[str, ...], ...]
    rails: tuple[tuple[str, ...], ...]

    def __str__(self) -> str:
        """A matrix: a row for each GPU, a column for each GPU and adapter."""
        names = [*(f"GPU{i}" for i in range(len(self.gpus))), *self.adapters]
        rows = [("", *names), *((f"GPU{i}", *self.links[i], *self.rails[i]) for i in range(len(self.gpus)))]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        return "\n".join("  ".join(map(str.ljust, row, widths)).rstrip() for row in rows)


def host_links(nvml: Any = None, pci: Path = PCI, adapters: Path = ADAPTERS) -> HostLinks:
    """Those of this host. ``nvml`` is the module of nvidia-ml-py, if it is not to be imported.

    Raises DeviceError without nvidia-ml-py or a driver.
    """
    try:
        nvml = nvml or import_module("pynvml")
    except ImportError as error:
        raise DeviceError("GPU links", "nvidia-ml-py (pip install nvidia-ml-py)", str(error)) from None
    try:
        nvml.nvmlInit()
    except nvml.NVMLError as error:
        raise DeviceError("GPU links", "a driver that NVML can ask", str(error)) from None
    try:
        devices = [nvml.nvmlDeviceGetHandleByIndex(index) for index in range(nvml.nvmlDeviceGetCount())]
        addresses = [_address(nvml.nvmlDeviceGetPciInfo(device).busId) for device in devices]
        links = [[_link(nvml, devices, addresses, i, j) for j in range(len(devices))] for i in range(len(devices))]
        names = tuple(_text(nvml.nvmlDeviceGetName(device)) for device in devices)
    except nvml.NVMLError as error:
        raise DeviceError("GPU links", "GPUs that NVML can ask", str(error)) from None
    finally:
        nvml.nvmlShutdown()
    found = sorted(adapters.iterdir()) if adapters.exists() else []
    rails = [[_rail(pci / address, adapter / "device") for adapter in found] for address in addresses]
    return HostLinks(names, tuple(each.name for each in found), tuple(map(tuple, links)), tuple(map(tuple, rails)))


def _text(value: Any) -> str:
    return value.decode() if isinstance(value, bytes) else str(value)


def _address(bus: Any) -> str:
    """A PCI address as the kernel writes it: NVML has eight digits for the domain."""
    domain, _, rest = _text(bus).lower().partition(":")
    return f"{int(domain, 16):04x}:{rest}"


def _link(nvml: Any, devices: Sequence[Any], addresses: Sequence[str], one: int, other: int) -> str:
    if one == other:
        return SELF
    lanes = _nvlinks(nvml, devices[one], addresses[other])
    if lanes:
        return f"nvlink x{lanes}"
    try:
        level = nvml.nvmlDeviceGetTopologyCommonAncestor(devices[one], devices[other])
    except nvml.NVMLError:  # virtual machines may not tell
        return SYSTEM
    if level <= nvml.NVML_TOPOLOGY_MULTIPLE:
        return SWITCH
    return SOCKET if level < nvml.NVML_TOPOLOGY_SYSTEM else SYSTEM


def _nvlinks(nvml: Any, device: Any, target: str) -> int:
    """NVLinks of ``device`` that end at the GPU at ``target``, or at a switch, which reaches all."""
    count = 0
    for number in range(MOST_NVLINKS):
        try:
            if not nvml.nvmlDeviceGetNvLinkState(device, number):
                continue
            if nvml.nvmlDeviceGetNvLinkRemoteDeviceType(device, number) == nvml.NVML_NVLINK_DEVICE_TYPE_SWITCH:
                count += 1
            else:
                count += _address(nvml.nvmlDeviceGetNvLinkRemotePciInfo(device, number).busId) == target
        except (nvml.NVMLError, ValueError):  # no such link, or nobody knows where it ends
            continue
    return count


def _rail(gpu: Path, adapter: Path) -> str:
    """By the PCI bridges that are above both, and the NUMA node."""
    one, other = gpu.resolve().parts[:-1], adapter.resolve().parts[:-1]
    common = [a for a, b in zip(one, other, strict=False) if a == b]
    bridges = [name for name in common if name.count(":") == 2]
    if bridges:
        return SWITCH
    nodes = {path: (path / "numa_node").read_text().strip() for path in (gpu, adapter) if (path / "numa_node").exists()}
    return SOCKET if len(nodes) == 2 and len(set(nodes.values())) == 1 else SYSTEM
