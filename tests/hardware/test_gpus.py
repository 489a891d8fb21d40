"""The GPUs of a driver that is a fake."""

from __future__ import annotations

import pynvml
import pytest

from duo_ray.hardware.gpus import gpu_loads
from duo_ray.hardware.machine import detect_machine


class FakeNvml:
    """A driver with three GPUs, the second of which answers nothing but its name."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        for name in (
            "nvmlInit",
            "nvmlShutdown",
            "nvmlSystemGetDriverVersion",
            "nvmlDeviceGetCount",
            "nvmlDeviceGetHandleByIndex",
            "nvmlDeviceGetHandleByUUID",
            "nvmlDeviceGetName",
            "nvmlDeviceGetMemoryInfo",
            "nvmlDeviceGetUtilizationRates",
        ):
            monkeypatch.setattr(pynvml, name, getattr(self, name))
        self.not_found = pynvml.NVMLError(pynvml.NVML_ERROR_NOT_FOUND)

    def nvmlInit(self) -> None: ...  # noqa: N802

    def nvmlShutdown(self) -> None: ...  # noqa: N802

    def nvmlSystemGetDriverVersion(self) -> str:  # noqa: N802
        return "570.1"

    def nvmlDeviceGetCount(self) -> int:  # noqa: N802
        return 3

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:  # noqa: N802
        if index > 2:
            raise self.not_found
        return index

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> int:  # noqa: N802
        if not uuid.startswith("GPU-"):
            raise self.not_found
        return int(uuid[4:])

    def nvmlDeviceGetName(self, handle: int) -> str:  # noqa: N802
        return f"GPU {handle}"

    def nvmlDeviceGetMemoryInfo(self, handle: int) -> object:  # noqa: N802
        if handle == 1:
            raise self.not_found

        class Info:
            used, total = 10, 100

        return Info()

    def nvmlDeviceGetUtilizationRates(self, handle: int) -> object:  # noqa: N802
        if handle == 1:
            raise self.not_found

        class Rates:
            gpu = 50

        return Rates()


def test_no_driver_means_no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent() -> None:
        raise pynvml.NVMLError(pynvml.NVML_ERROR_LIBRARY_NOT_FOUND)

    monkeypatch.setattr(pynvml, "nvmlInit", absent)
    assert detect_machine().gpus == ()


@pytest.mark.parametrize(
    ("visible", "names"),
    [
        (None, ["GPU 0", "GPU 1", "GPU 2"]),
        ("2,0", ["GPU 2", "GPU 0"]),
        ("GPU-1", ["GPU 1"]),
        ("0,7,1", ["GPU 0"]),
        ("", []),
    ],
)
def test_visible_gpus_come_in_cudas_order(
    monkeypatch: pytest.MonkeyPatch, visible: str | None, names: list[str]
) -> None:
    FakeNvml(monkeypatch)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert [gpu.name for gpu in detect_machine().gpus] == names


def test_a_gpu_that_answers_nothing_is_listed_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    FakeNvml(monkeypatch)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    loads = gpu_loads()
    assert [(load.utilisation, load.memory_total) for load in loads] == [(0.5, 100), (0.0, 0), (0.5, 100)]
